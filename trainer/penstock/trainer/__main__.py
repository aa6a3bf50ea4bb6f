"""The command of every rank: ``python -m penstock.trainer profile|train|rehearse --run-dir DIR``, started by torchrun.

Input and output are files of the run directory. Exit codes: 0 success, 1 failure, 2 user error. Each command imports
its modules when it runs: a rehearsal does not need the modules that write checkpoints, which take as long to import as
torch itself.
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

from penstock.core.device_mapping import VISIBLE, ranks_of_devices, visible_devices
from penstock.core.errors import UserError
from penstock.core.job import Device
from penstock.core.plan import Plan
from penstock.core.profile_matching import require_device_memory
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from penstock.trainer.worker import Worker, run_worker

Command = Callable[[RunDir, argparse.Namespace, Worker], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank of one command."""
    options = _parser().parse_args(arguments)
    run = RunDir(options.run_dir, options.host_dir, options.local_dir)
    command: Command = options.command
    try:
        device = run.read_job().spec.resources.device
        if command is _train and options.over_hosts:
            plan = run.read_plan()
            rank = _take_rank(plan)
            if rank >= plan.num_ranks:
                return _wait_as_idle_rank(run, rank)
        elif command is _train and device is Device.CUDA:
            _set_visible_devices(run.read_plan())
    except UserError as mistake:
        sys.stderr.write(f"{mistake}\n")
        return 2
    with torch.no_grad():  # gradients are written out by hand in the units
        return run_worker(functools.partial(_run, command, run, options), device=device.value, status_folder=run.status)


def _run(command: Command, run: RunDir, options: argparse.Namespace, worker: Worker) -> None:
    """Run ``command`` after checking that the device has the memory that the job may use. A pod checks it only here."""
    if worker.device.type == "cuda":
        total = torch.cuda.get_device_properties(worker.device).total_memory
        require_device_memory(run.read_job().spec.resources.memory_per_rank, total)
    command(run, options, worker)


def _set_visible_devices(plan: Plan) -> None:
    """Set the visible devices before the first CUDA call, which is the only time that CUDA reads them."""
    if plan.placement:
        os.environ[VISIBLE] = visible_devices(plan.devices, os.environ.get(VISIBLE))


def _take_rank(plan: Plan) -> int:
    """Set this process's rank to that of the plan; torchrun numbers ranks by device."""
    rank = ranks_of_devices(plan.devices, int(os.environ["WORLD_SIZE"]))[int(os.environ["RANK"])]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(plan.num_ranks))
    return rank


def _wait_as_idle_rank(run: RunDir, rank: int) -> int:
    from penstock.trainer.idle_rank import wait_for_result

    return wait_for_result(run, rank)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock.trainer", description="one rank of a run")
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train")
    training.add_argument("--attempt", type=int, required=True)
    training.add_argument("--metrics-port", type=int)
    training.add_argument("--over-hosts", action="store_true", help="ranks are where the plan's placement says")
    for command, function in (
        (commands.add_parser("profile"), _profile),
        (training, _train),
        (commands.add_parser("rehearse"), _rehearse),
    ):
        command.add_argument("--run-dir", required=True, type=Path)
        command.add_argument("--host-dir", type=Path)
        command.add_argument("--local-dir", type=Path)
        command.set_defaults(command=function)
    return parser


def _profile(run: RunDir, options: argparse.Namespace, worker: Worker) -> None:
    import penstock.trainer.worker_train  # noqa: F401, training loads it, and memory is measured as training has it
    from penstock.trainer.profiling.profile import measure

    def report(done: int, total: int) -> None:
        write_json(run.profile_progress, {"done": done, "total": total}, durable=False)

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
