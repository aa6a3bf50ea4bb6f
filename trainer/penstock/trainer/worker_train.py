"""One rank of an attempt to train: from a run directory's plan to its result, with a sample of what was learned.

The sample comes from the stages that are there: every rank runs its part of a forward pass on training's own memory
(`penstock.trainer.runtime.Runtime.continue_from`). No rank ever holds the whole model.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from penstock.trainer.data.prepared import Prepared
from penstock.trainer.data.tokenizer import Tokenizer
from penstock.trainer.data.unigram import unigram_cross_entropy
from penstock.trainer.generate import choose
from penstock.trainer.loop import Outcome, train
from penstock.trainer.metrics_writer import Announcer, Silent
from penstock.trainer.prepare import open_data
from penstock.trainer.session import Session
from penstock.trainer.worker import Worker

PROMPT_TOKENS = 16
SAMPLE_TOKENS = 120
SAMPLE_SECONDS = 20.0
"""A sample is cut off then: ranks that take no step for a minute count as stalled."""
SAMPLE_TEMPERATURE = 0.8


def train_run(run: RunDir, attempt: int, metrics_port: int | None, worker: Worker) -> None:
    """Train by plan.json; rank 0 leaves result.json, and serves metrics at the port if one is given."""
    session = Session(run, worker)
    print(f"rank {worker.rank} of {worker.num_ranks} is ready on {worker.device}")  # noqa: T201, its log is a file
    if worker.rank != 0:
        _finish(session, train(session, attempt, Silent()))
        return
    with Announcer(run, session.job, session.plan, attempt, metrics_port) as announcer:
        outcome = train(session, attempt, announcer)
    write_json(run.result, _finish(session, outcome))


def _finish(session: Session, outcome: Outcome) -> dict[str, object]:
    """How it ended, for the first rank to write; a finished model also shows what it learned.

    All ranks work on it together and leave it together: it ends with an exchange on the host, so that no rank waits for
    the first one inside of a device's collective.
    """
    if outcome.stopped:
        return {"outcome": "stopped", "step": outcome.step}
    prepared = open_data(session.run)
    result: dict[str, object] = {
        "outcome": "succeeded",
        "step": outcome.step,
        "validation_loss": outcome.validation_loss,
        **_sample(session, prepared, outcome.step),
    }
    if session.worker.rank == 0:
        result["unigram_loss"] = unigram_cross_entropy(prepared.train, prepared.validation)
    result["peak_bytes"] = session.life_peaks()
    return result


def _sample(session: Session, prepared: Prepared, step: int) -> dict[str, object]:
    """A prompt and its continuation; nothing where the data came without a tokenizer.

    Of a prompt that takes more than half of a sequence only the end is read.
    """
    tokenizer, limit = prepared.tokenizer, session.plan.sequence_length
    if tokenizer is None:
        return {}
    prompt = _asked_prompt(session.run, tokenizer)[-(limit // 2) :]
    prompt = prompt or session.held_out_start(min(PROMPT_TOKENS, limit // 2)) or [tokenizer.separator]
    length = min(len(prompt) + SAMPLE_TOKENS, limit)
    ids = session.runtime.continue_from(step, prompt, length, _chooser())
    return {"prompt": tokenizer.decode(prompt), "sample": tokenizer.decode(ids)}


def _asked_prompt(run: RunDir, tokenizer: Tokenizer) -> list[int]:
    """The tokens of ``penstock run --prompt``; none without it."""
    if not run.prompt.exists():
        return []
    return [int(token) for token in next(tokenizer.encode([run.prompt.read_text()]))]


def _chooser() -> Callable[[Tensor], int | None]:
    chance, deadline = torch.Generator().manual_seed(0), time.monotonic() + SAMPLE_SECONDS

    def chosen(logits: Tensor) -> int | None:
        return choose(logits, SAMPLE_TEMPERATURE, chance) if time.monotonic() < deadline else None

    return chosen
