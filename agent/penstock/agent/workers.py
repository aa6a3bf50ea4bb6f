"""Interface to the trainer's processes, for a supervisor or the command's executor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from penstock.agent.launch import Failure, LaunchSpec, Outcome, Ranks, launch
from penstock.agent.memory_limit import MemoryLimit
from penstock.core.errors import RunError, UserError
from penstock.core.host.members import require_trainer
from penstock.core.host.stopping import StopRequests
from penstock.core.job import PipelineJob
from penstock.core.preparing import Reporter
from penstock.core.run.folder import RunDir

MODULE = "penstock.trainer"
TRAINING = "penstock.trainer.worker_train"
LOADED = {"profile": TRAINING, "train": TRAINING, "rehearse": "penstock.trainer.worker_rehearse"}
"""Module with the slowest import of each trainer command: CPU ranks are forked from a process that imported it."""

KILL_SECONDS = 10.0
POLL_SECONDS = 0.1


class Workers(Protocol):
    """Starts the trainer's commands. Their input and output are files of the run directory."""

    def prepare(self, job: PipelineJob, run: RunDir, reporter: Reporter) -> None:
        """Tokenise the job's data; raises `UserError` if the data does not fit the job, or no trainer is installed."""

    def profile(self, job: PipelineJob, run: RunDir, attempt: int) -> Ranks:
        """Measure this machine. Writes profile.json."""

    def train(self, job: PipelineJob, run: RunDir, attempt: int, num_ranks: int, metrics_port: int | None) -> Ranks:
        """Train by plan.json, from the newest checkpoint. Appends to metrics.jsonl and writes result.json."""

    def rehearse(self, job: PipelineJob, run: RunDir, num_ranks: int) -> Ranks:
        """Rehearse plan.json: send real messages, and wait instead of computing. Writes timeline-rehearsed.json."""


class LocalWorkers:
    """Processes on this machine, started by torchrun. They use the CUDA devices ``devices``, or all if it is empty.

    The job's memory limit is enforced for measurements and training. It does not apply to a rehearsal, which does not
    have the job's ranks.
    """

    def __init__(self, devices: tuple[str, ...] = ()) -> None:
        self._devices = devices

    def prepare(self, job: PipelineJob, run: RunDir, reporter: Reporter) -> None:
        """Prepare as in `Workers`. Checks first that the trainer is installed, and raises `UserError` if not."""
        require_trainer()
        from penstock.trainer.prepare import prepare_data

        prepare_data(job, run, reporter)

    def profile(self, job: PipelineJob, run: RunDir, attempt: int) -> Ranks:
        return self._limited(job, run, f"a{attempt}-profile", job.spec.resources.ranks, "profile")

    def train(self, job: PipelineJob, run: RunDir, attempt: int, num_ranks: int, metrics_port: int | None) -> Ranks:
        port = () if metrics_port is None else ("--metrics-port", str(metrics_port))
        return self._limited(job, run, f"a{attempt}", num_ranks, "train", "--attempt", str(attempt), *port)

    def rehearse(self, job: PipelineJob, run: RunDir, num_ranks: int) -> Ranks:
        return self._launch(launch_spec(job, run, "rehearse", num_ranks, "rehearse"))

    def _limited(self, job: PipelineJob, run: RunDir, log: str, num_ranks: int, command: str, *arguments: str) -> Ranks:
        spec = launch_spec(job, run, log, num_ranks, command, *arguments)
        return self._launch(dataclasses.replace(spec, memory=MemoryLimit.of(job.spec.resources, num_ranks)))

    def _launch(self, spec: LaunchSpec) -> Ranks:
        return launch(dataclasses.replace(spec, devices=self._devices, expendable=True))


def launch_spec(job: PipelineJob, run: RunDir, log: str, num_ranks: int, command: str, *arguments: str) -> LaunchSpec:
    """Return the launch of a trainer command in ``num_ranks`` processes; ``log`` is the name of their log folder."""
    return LaunchSpec(
        module=MODULE,
        arguments=(command, *_folders(run), *arguments),
        device=job.spec.resources.device,
        preloaded=LOADED[command],
        num_ranks=num_ranks,
        threads_per_rank=job.spec.resources.threads_per_rank,
        log_folder=run.logs / log,
        status_folder=run.status,
    )


def _folders(run: RunDir) -> tuple[str, ...]:
    named = (("--run-dir", run.root), ("--host-dir", run.host), ("--local-dir", run.local))
    return tuple(part for option, folder in named if folder is not None for part in (option, str(folder)))


def end(ranks: Ranks) -> None:
    """Kill ranks that still run, and wait until they have ended, for `KILL_SECONDS` at most."""
    if ranks.poll() is None:
        ranks.kill()
        ranks.wait(KILL_SECONDS)


def finish(ranks: Ranks, requests: StopRequests, watch: Callable[[], None] = lambda: None) -> None:
    """Wait until the ranks succeed, and call ``watch`` at each poll. No rank is left, even if this raises.

    Raises:
        StopRequestedError: a stop was requested.
        UserError: a rank found a mistake of the user.
        RunError: a rank failed.
    """
    try:
        while (outcome := ranks.wait(POLL_SECONDS)) is None:
            requests.check()
            watch()
    finally:
        end(ranks)
    require_success(outcome)


def require_success(outcome: Outcome) -> None:
    """Raise `UserError` if a rank found a mistake of the user, and `RunError` if it failed for another reason."""
    if outcome.failure is not None:
        raise refusal(outcome.failure) if outcome.failure.refused else RunError(outcome.failure.message)


def refusal(failure: Failure) -> UserError:
    """Convert the failure of a rank, caused by the user's mistake, to a `UserError` with the rank's message."""
    return UserError.reported(failure.message)
