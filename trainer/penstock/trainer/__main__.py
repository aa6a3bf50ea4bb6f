"""What every rank runs: ``python -m penstock.trainer profile|train|rehearse --run-dir DIR``, started by torchrun.

Everything comes from the run directory, and everything goes there. Exit codes: 0 done, 1 failed, 2 the user's mistake.
A rehearsal loads only what it needs: what writes checkpoints takes as long to load as torch itself.
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
from penstock.trainer.rundir import RunDir, write_json
from penstock.trainer.seating import VISIBLE, seated
from penstock.trainer.worker import Worker, run_worker

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
    import penstock.trainer.worker_train  # noqa: F401, training loads it, and memory is measured as training has it
    from penstock.trainer.profiling.profile import measure

    def report(done: int, total: int) -> None:
        write_json(run.profile_progress, {"done": done, "total": total})

    profile = measure(run.read_job().spec, worker, time.time(), report)
    if profile is not None:
        write_json(run.profile, profile.to_manifest())


def _rehearse(run: RunDir, options: argparse.Namespace, worker: Worker) -> None:
    from penstock.trainer.worker_rehearse import rehearse_run

    rehearse_run(run, worker)


def _train(run: RunDir, options: argparse.Namespace, worker: Worker) -> None:
    from penstock.trainer.worker_train import train_run

    train_run(run, options.attempt, options.metrics_port, worker)


if __name__ == "__main__":
    sys.exit(main())
