"""What every rank runs: ``python -m penstock.trainer profile|train|rehearse --run-dir DIR``, started by torchrun.

Everything comes from the run directory, and everything goes there. Exit codes: 0 done, 1 failed, 2 the user's mistake.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from penstock.core.errors import UserError
from penstock.core.job import Device
from penstock.core.plan import Plan
from penstock.trainer.checkpoint import find_checkpoints, read_weights
from penstock.trainer.data.tokenizer import Tokenizer
from penstock.trainer.data.unigram import unigram_cross_entropy
from penstock.trainer.generate import Generator
from penstock.trainer.loop import Outcome, train
from penstock.trainer.prepare import open_data
from penstock.trainer.profiling.profile import measure
from penstock.trainer.rundir import RunDir, write_json
from penstock.trainer.seating import VISIBLE, seated
from penstock.trainer.session import Session
from penstock.trainer.teller import Announcer, Silent
from penstock.trainer.worker import Worker, run_worker
from penstock.trainer.worker_rehearse import rehearse_run

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 120
SAMPLE_TEMPERATURE = 0.8

Command = Callable[[RunDir, argparse.Namespace, Worker], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank of one command."""
    options = _parser().parse_args(arguments)
    run = RunDir(Path(options.run_dir))
    command: Command = options.command
    try:
        device = run.read_job().spec.resources.device
        if device is Device.CUDA and command is _train:
            _take_seats(run.read_plan())
    except UserError as mistake:
        sys.stderr.write(f"{mistake}\n")
        return 2
    with torch.no_grad():  # gradients are written out by hand in the units
        return run_worker(functools.partial(command, run, options), device=device.value, status_folder=run.status)


def _take_seats(plan: Plan) -> None:
    """Before CUDA is first asked, which looks only then."""
    if plan.placement:
        os.environ[VISIBLE] = seated(plan.placement, os.environ.get(VISIBLE))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock.trainer", description="one rank of a run")
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train")
    training.add_argument("--attempt", type=int, required=True)
    training.add_argument("--metrics-port", type=int)
    for command, function in (
        (commands.add_parser("profile"), _profile),
        (training, _train),
        (commands.add_parser("rehearse"), _rehearse),
    ):
        command.add_argument("--run-dir", required=True)
        command.set_defaults(command=function)
    return parser


def _profile(run: RunDir, options: argparse.Namespace, worker: Worker) -> None:
    def report(done: int, total: int) -> None:
        write_json(run.profile_progress, {"done": done, "total": total})

    profile = measure(run.read_job().spec, worker, time.time(), report)
    if profile is not None:
        write_json(run.profile, profile.to_manifest())


def _rehearse(run: RunDir, options: argparse.Namespace, worker: Worker) -> None:
    rehearse_run(run, worker)


def _train(run: RunDir, options: argparse.Namespace, worker: Worker) -> None:
    session = Session(run, worker)
    print(f"rank {worker.rank} of {worker.num_ranks} is ready on {worker.device}")  # noqa: T201, its log is a file
    if worker.rank != 0:
        train(session, options.attempt, Silent())
        return
    with Announcer(run, session.job, session.plan, options.attempt, options.metrics_port) as announcer:
        outcome = train(session, options.attempt, announcer)
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


if __name__ == "__main__":
    sys.exit(main())
