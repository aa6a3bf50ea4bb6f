"""One rank of an attempt to train: from a run directory's plan to its result, with a sample of what was learned."""

from __future__ import annotations

from penstock.trainer.checkpoint import find_checkpoints, read_weights
from penstock.trainer.data.tokenizer import Tokenizer
from penstock.trainer.data.unigram import unigram_cross_entropy
from penstock.trainer.generate import Generator
from penstock.trainer.loop import Outcome, train
from penstock.trainer.prepare import open_data
from penstock.trainer.rundir import RunDir, write_json
from penstock.trainer.session import Session
from penstock.trainer.teller import Announcer, Silent
from penstock.trainer.worker import Worker

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 120
SAMPLE_TEMPERATURE = 0.8


def train_run(run: RunDir, attempt: int, metrics_port: int | None, worker: Worker) -> None:
    """Train by plan.json; rank 0 leaves result.json, and serves metrics at the port if one is given."""
    session = Session(run, worker)
    print(f"rank {worker.rank} of {worker.num_ranks} is ready on {worker.device}")  # noqa: T201, its log is a file
    if worker.rank != 0:
        train(session, attempt, Silent())
        return
    with Announcer(run, session.job, session.plan, attempt, metrics_port) as announcer:
        outcome = train(session, attempt, announcer)
    write_json(run.result, _result(run, outcome))


def _result(run: RunDir, outcome: Outcome) -> dict[str, object]:
    """How it ended; a finished model also shows what it learned."""
    if outcome.stopped:
        return {"outcome": "stopped", "step": outcome.step}
    prepared = open_data(run)
    result: dict[str, object] = {
        "outcome": "succeeded",
        "step": outcome.step,
        "validation_loss": outcome.validation_loss,
        "unigram_loss": unigram_cross_entropy(prepared.train, prepared.validation),
    }
    if prepared.tokenizer is not None:
        result |= {"prompt": SAMPLE_PROMPT, "sample": _sample(run, prepared.tokenizer)}
    return result


def _sample(run: RunDir, tokenizer: Tokenizer) -> str:
    spec = run.read_job().spec
    prompt = [int(each) for each in next(tokenizer.encode([SAMPLE_PROMPT]))] or [tokenizer.separator]
    weights = read_weights(find_checkpoints(run.checkpoints)[0].folder)
    length = min(len(prompt) + SAMPLE_TOKENS, spec.data.sequence_length)
    ids = Generator(spec.model, weights, length).continue_from(prompt, temperature=SAMPLE_TEMPERATURE, seed=0)
    return tokenizer.decode([*prompt, *ids])
