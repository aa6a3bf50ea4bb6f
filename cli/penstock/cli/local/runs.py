"""Start and resumption of runs: their directory, the checks before the start, and the call of the executor."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.agent.executor import Executor
from penstock.agent.local_launch import holding
from penstock.agent.plans import LocalDecider
from penstock.agent.probe import Identity, identify
from penstock.agent.profiles import Profiles
from penstock.agent.progress_files import newest_checkpoint_step
from penstock.agent.run_state import RunState, read_state
from penstock.agent.workers import LocalWorkers, Workers
from penstock.cli.lines import line
from penstock.cli.local.progress import RunDisplay
from penstock.cli.output import say, warn
from penstock.cli.ports import check_port
from penstock.core.errors import UserError
from penstock.core.host.stopping import listening
from penstock.core.job import Device, JobSpec, PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.run.folder import RunDir
from penstock.core.run.lock import locked
from penstock.core.serialization.files import write_atomically
from penstock.core.units import format_bytes
from penstock.planner.worker.process import ProcessPlanner

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """End of an execution of a run; ``signal`` is the first signal that stopped it, if there was one."""

    run: RunDir
    state: RunState
    signal: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalMachine:
    """Resources of the machine: processes on the CUDA devices of a run, PyTorch's description of them, seconds since
    the epoch, memory.
    """

    workers: Callable[[tuple[str, ...]], Workers] = LocalWorkers
    identify: Callable[[JobSpec, tuple[str, ...]], Identity] = identify
    clock: Callable[[], float] = time.time
    memory_bytes: int = field(default_factory=lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def start(
    job: PipelineJob,
    root: Path | None,
    metrics_port: int | None,
    machine: LocalMachine = LocalMachine(),
    prompt: str = "",
) -> Ended:
    """Run ``job`` in the directory ``root``, or in the next free one below ``runs/``.

    The sample at the end begins with ``prompt``, or with held-out text if that is empty.

    Raises:
        UserError: the user has to fix something.
    """
    run = RunDir((root or next_folder(job.metadata.name)).absolute())
    _check_machine(job, metrics_port, machine)
    missing = [folder for folder in (run.root, *run.root.parents) if not folder.exists()]
    run.create()
    with locked(run.root), _left_only_if_begun(run.root, missing):
        require_unused(run)
        run.write_job(job)
        if prompt:
            write_atomically(run.prompt, prompt)
        return _execute(job, run, RunState(), metrics_port, machine)


@contextlib.contextmanager
def _left_only_if_begun(root: Path, made: Sequence[Path]) -> Iterator[None]:
    """Remove the run directory again if the run is refused before it has a plan.

    Its measurements are kept for other runs (`penstock.agent.profiles`). ``made`` has the folders that were created for
    it, the run directory first. Its parents are removed only if they are empty.
    """
    try:
        yield
    except UserError:
        if made and not RunDir(root).plan.exists():
            shutil.rmtree(root, ignore_errors=True)
            with contextlib.suppress(OSError):
                for folder in made[1:]:
                    folder.rmdir()
        raise


def _check_machine(job: PipelineJob, metrics_port: int | None, machine: LocalMachine) -> None:
    """Raise `UserError` for missing requirements of this machine, before data is prepared or anything is written.

    It is no mistake if CPU ranks may take more memory together than there is, since few plans take all they may.
    """
    check_local(job)
    check_port(metrics_port)
    resources = job.spec.resources
    host_bytes = resources.host_memory_bytes(resources.ranks)
    if resources.device is Device.CUDA:
        machine.identify(job.spec, ())  # takes seconds, since it loads PyTorch; CPU ranks do not need it
    elif host_bytes is not None and host_bytes > machine.memory_bytes:
        most = format_bytes(machine.memory_bytes // resources.ranks)
        warn(
            f"spec.resources.memoryPerRank: {resources.ranks} ranks may take {format_bytes(resources.memory_per_rank)} "
            f"each, and this machine has {format_bytes(machine.memory_bytes)}; to plan for it, write at most {most}"
        )


def resume(root: Path, metrics_port: int | None, machine: LocalMachine = LocalMachine()) -> Ended:
    """Continue the run in ``root`` with a new attempt, by the same plan, from its newest checkpoint.

    Raises:
        UserError: there is no run, it is finished, or the user has to fix something else.
    """
    run = RunDir(root.absolute())
    job = run.read_job()
    _check_machine(job, metrics_port, machine)
    run.create()
    with locked(run.root):
        state = read_state(run.root)
        _require_unfinished(job, run, state)
        return _execute(job, run, state.restarted(), metrics_port, machine)


def _execute(job: PipelineJob, run: RunDir, state: RunState, metrics_port: int | None, machine: LocalMachine) -> Ended:
    with holding(job.spec, f"run directory {run.root}") as devices, listening() as requests:
        say(f"{job.metadata.name} in {run.root}")
        executor = Executor(
            job,
            run,
            state,
            workers=machine.workers(devices),
            decider=LocalDecider(
                job, run, Profiles(), identify=lambda spec: machine.identify(spec, devices), clock=machine.clock
            ),
            show=RunDisplay(job.spec.training.steps, line()),
            requests=requests,
            metrics_port=metrics_port,
            planner=ProcessPlanner(level=logging.DEBUG),
        )
        ended = executor.run()
        return Ended(run=run, state=ended, signal=requests.received[0] if requests.received else None)


def next_folder(name: str) -> Path:
    """Return ``runs/NAME/N`` with the next free number."""
    taken = (path.name for path in (RUNS / name).glob("*"))
    return RUNS / name / str(1 + max(map(int, filter(str.isdecimal, taken)), default=0))


def require_unused(run: RunDir) -> None:
    """Raise `UserError` if the directory holds a run that has begun to train."""
    if newest_checkpoint_step(run) is not None or (run.metrics.exists() and run.metrics.stat().st_size):
        raise UserError(
            what="holds a run that has begun",
            where=f"run directory {run.root}",
            remedy=f"go on with it: penstock resume {run.root}, or choose another with --run-dir",
        )


def _require_unfinished(job: PipelineJob, run: RunDir, state: RunState) -> None:
    """Raise `UserError` if the run is finished. A run that took its last step without success is not: the work after
    that step is missing, or its last checkpoint is corrupt.
    """
    newest = newest_checkpoint_step(run)
    if state.phase is Phase.SUCCEEDED and newest is not None and newest >= job.spec.training.steps:
        raise UserError(
            what=f"is finished: its newest checkpoint is of step {newest} of {job.spec.training.steps}",
            where=f"run directory {run.root}",
            remedy=f"to train longer, raise spec.training.steps in {run.job}",
        )


def check_local(job: PipelineJob) -> None:
    """Raise `UserError` for URIs that only a service or a cluster can resolve, or for a missing checkpoint."""
    spec = job.spec
    for where, value in (
        ("spec.data.source", spec.data.source),
        ("spec.data.tokenizer.file", spec.data.tokenizer.file),
        ("spec.checkpoint.resumeFrom", spec.checkpoint.resume_from),
    ):
        if value is not None and "://" in value:
            raise UserError(
                what=f"{value} has a meaning only where a service or a cluster maps it",
                where=where,
                remedy="write a path of this machine",
            )
    begin = spec.checkpoint.resume_from
    if begin is not None and not (Path(begin) / "manifest.json").is_file():
        raise UserError(
            what=f"{begin} is not a complete checkpoint",
            where="spec.checkpoint.resumeFrom",
            remedy="name a folder such as RUN_DIR/checkpoints/a1/step-50",
        )
