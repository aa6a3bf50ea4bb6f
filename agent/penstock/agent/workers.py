"""Interface to the trainer's processes, for a supervisor or the command's executor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from penstock.agent.launch import Failure, LaunchSpec, Outcome, launch
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
"""The slowest import of each of its commands."""

KILL_SECONDS = 10.0
POLL_SECONDS = 0.1


class Ranks(Protocol):
    """Processes that were started together; `penstock.agent.launch.Ranks` are such."""

    def poll(self) -> Outcome | None:
        """How they ended; none while any of them lives."""
        ...

    def wait(self, timeout_seconds: float | None = None) -> Outcome | None:
        """How they ended; none if they still live after that long."""
        ...

    def stop(self) -> None:
        """Request that they checkpoint after the current step and end."""
        ...

    def kill(self) -> None:
        """End them now."""
        ...

    def all_started(self) -> bool:
        """Whether all that run here are past their start."""
        ...

    def log_path(self, rank: int) -> Path | None:
        """The file of a rank's output, once it exists."""
        ...


class Workers(Protocol):
    """Starts the trainer's entry points; everything else goes through the run directory."""

    def prepare(self, job: PipelineJob, run: RunDir, reporter: Reporter) -> None:
        """Have the job's data tokenised; raises `UserError` if it does not suit the job, or nothing can train here."""
        ...

    def profile(self, job: PipelineJob, run: RunDir, attempt: int) -> Ranks:
        """Measure this machine; leaves profile.json."""
        ...

    def train(self, job: PipelineJob, run: RunDir, attempt: int, num_ranks: int, metrics_port: int | None) -> Ranks:
        """Train by plan.json, from the newest checkpoint; appends metrics.jsonl and leaves result.json."""
        ...

    def rehearse(self, job: PipelineJob, run: RunDir, num_ranks: int) -> Ranks:
        """Run plan.json with messages and waiting; leaves timeline-rehearsed.json."""
        ...


class LocalWorkers:
    """Processes on this machine, started by torchrun; of its CUDA devices they use ``devices``, or all.

    Those that measure or train are held to the job's memory. A rehearsal has other ranks than the job.
    """

    def __init__(self, devices: tuple[str, ...] = ()) -> None:
        self._devices = devices

    def prepare(self, job: PipelineJob, run: RunDir, reporter: Reporter) -> None:
        """Prepare as in `Workers`. Runs first: if the trainer is missing, it is the user's mistake, not a failure."""
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
    """One of the trainer's commands in so many processes; ``log`` names the folder of their output."""
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
    """Kill them and wait until they are gone."""
    if ranks.poll() is None:
        ranks.kill()
        ranks.wait(KILL_SECONDS)


def finish(ranks: Ranks, requests: StopRequests, watch: Callable[[], None] = lambda: None) -> None:
    """Wait until they end well, calling ``watch`` now and then; none is left in any case.

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
    if outcome.failure is not None:
        raise refusal(outcome.failure) if outcome.failure.refused else RunError(outcome.failure.message)


def refusal(failure: Failure) -> UserError:
    """A mistake of the user that a rank found, in the rank's words."""
    return UserError.reported(failure.message)
