"""Starts the ranks of a run on this host, watches them, and reports which one failed, and where.

torchrun starts them, a fixed number without restarts (`penstock.trainer.worker_agent`). Each rank writes its logs to
files, and its place in the Program to a status file. This module reads these files, and needs no connection to a rank.

If a run has ranks on several hosts, each host launches its own, with its place among the hosts (`Nodes`).
"""

from __future__ import annotations

import contextlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.agent.memory_limit import UNLIMITED, Enforcement, MemoryLimit, enforced, raise_oom_score
from penstock.core.errors import UserError
from penstock.core.host.interfaces import LOOPBACK_INTERFACE, interface_towards
from penstock.core.host.ports import ANY_PORT, EVERYWHERE, LOOPBACK, listen_error
from penstock.core.job import Device
from penstock.core.run.rank_status import RankStatus, State, read_status, status_path

GRACE_SECONDS = 5.0
"""Time for the other ranks to notice a failure; they almost always end by themselves, at the next message."""

RESULT_SECONDS = 45.0
"""Longest wait, after the ranks here have succeeded, for the first rank's result to appear on shared storage."""

_POLL_SECONDS = 0.05
_TORCHRUN_LOG = "torchrun.log"

MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
}
"""glibc (mallopt(3)): one heap that keeps its memory, and thresholds that do not adapt, so that a step's peak memory
is the same every time and freed temporaries cost no page faults. 32 MiB is the largest mmap threshold that glibc takes.
"""


RANKS_FILE = "ranks.json"
"""File in a launch's log folder with the ranks of its processes, in order. Without it the ranks are 0, 1, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """A host's place: number ``node_rank`` of ``num_nodes`` hosts, which launch the same number of processes each. The
    processes connect at ``port`` of the first host, whose address is ``master``.
    """

    node_rank: int
    num_nodes: int
    master: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSpec:
    """A launch of ``python -m module arguments...`` in ``num_ranks`` processes that compute on ``device``.

    CPU ranks are forked from a process that has imported ``preloaded``; CUDA ranks start as new Pythons, because CUDA
    does not survive a fork.

    Logs go below ``log_folder``, which no other launch uses. Status files go to ``status_folder``, which the module has
    to get from its ``arguments`` (`penstock.trainer.worker.run_worker`). The ranks connect at ``port``, by default one
    that is free at that time. ``devices`` are the CUDA devices that they may use, by default all that this process may
    use. Ranks that exceed ``memory`` are ended. When the machine runs out of memory, the kernel ends ``expendable``
    ranks first. Ranks that have succeeded count as running until the file ``result`` is visible here, if one is named,
    for `RESULT_SECONDS` at most. With ``nodes``, ``num_ranks`` processes start on each host, and ``names`` are the
    ranks on this one.
    """

    module: str
    arguments: tuple[str, ...]
    device: Device = Device.CPU
    preloaded: str = ""
    num_ranks: int
    threads_per_rank: int
    log_folder: Path
    status_folder: Path
    port: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    memory: MemoryLimit | None = None
    expendable: bool = False
    result: Path | None = None
    nodes: Nodes | None = None
    names: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run on this host."""
        return self.names or tuple(range(self.num_ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The first rank that failed: at which step and action (empty outside of steps), and why, in a sentence.

    ``refused`` says that the cause is a mistake of the user's. ``rank`` is none if none had
    started, or if all together exceeded the memory limit.
    """

    rank: int | None
    step: int
    action: str
    message: str
    refused: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """End of the ranks; without a ``failure`` they succeeded."""

    exit_code: int
    failure: Failure | None


class Ranks:
    """The running ranks of one launch. Not thread-safe; the thread that launched them must outlive them, since its end
    ends them.
    """

    def __init__(self, spec: LaunchSpec, process: subprocess.Popen[bytes], memory: Enforcement = UNLIMITED) -> None:
        self._spec, self._process, self._memory = spec, process, memory
        self._failure: Failure | None = None
        self._last_healthy_at = time.monotonic()
        self._succeeded_at: float | None = None

    @property
    def pid(self) -> int:
        """The process that watches the ranks, leader of their process group."""
        return self._process.pid

    def statuses(self) -> list[RankStatus | None]:
        """The status that every rank here wrote; none for one that has not started."""
        return [read_status(status_path(self._spec.status_folder, rank)) for rank in self._spec.ranks]

    def all_started(self) -> bool:
        """Whether every rank here is past its start."""
        return all(status is not None and status.state is not State.STARTING for status in self.statuses())

    def log_path(self, rank: int, stream: str = "stderr") -> Path | None:
        """The file of a rank's ``stdout`` or ``stderr``, once it exists."""
        local = self._spec.ranks.index(rank) if rank in self._spec.ranks else rank
        return next(iter(self._spec.log_folder.glob(f"*/attempt_0/{local}/{stream}.log")), None)

    def poll(self) -> Outcome | None:
        """The outcome, or none while ranks run; ends ranks that use too much memory, or outlast a failure for long.

        The first failure is determined once all ranks have ended or have to be ended: a dying process closes its
        connections, so its peers may fail before it is known to be dead.
        """
        exit_code = self._process.poll()
        if exit_code is None:
            self._end_over_memory()
            self._kill_after_grace_period()
            return None
        if exit_code == 0 and self._awaits_result():
            return None
        if exit_code and self._failure is None:
            self._failure = (
                self._over_memory()
                or self._find_failure(ended=True)
                or Failure(rank=None, step=-1, action="", message=self._not_started_message(exit_code))
            )
        self._memory.close()
        return Outcome(exit_code=exit_code, failure=self._failure if exit_code else None)

    def wait(self, timeout_seconds: float | None = None) -> Outcome | None:
        """The outcome, or none if the ranks still run after ``timeout_seconds``."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while (outcome := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                return None
            time.sleep(_POLL_SECONDS)
        return outcome

    def stop(self) -> None:
        """Request that all ranks stop together after the current step."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all ranks at once, and wait for no result."""
        self._succeeded_at = -math.inf
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        for status in self.statuses():
            if status is not None and status.state in (State.STARTING, State.RUNNING):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(status.pid, number)

    def _awaits_result(self) -> bool:
        if self._spec.result is None or self._spec.result.exists():
            return False
        if self._succeeded_at is None:
            self._succeeded_at = time.monotonic()
        return time.monotonic() < self._succeeded_at + RESULT_SECONDS

    def _end_over_memory(self) -> None:
        if self._failure is None:
            self._failure = self._over_memory()
            if self._failure is not None:
                self.kill()

    def _over_memory(self) -> Failure | None:
        mistake = self._memory.mistake()
        if mistake is None:
            return None
        return Failure(rank=None, step=-1, action="", message=str(mistake), refused=True)

    def _kill_after_grace_period(self) -> None:
        if self._failure is not None:
            return
        failure, now = self._find_failure(ended=False), time.monotonic()
        if failure is None:
            self._last_healthy_at = now
        elif now - self._last_healthy_at > GRACE_SECONDS:
            self._failure = failure
            self.kill()

    def _find_failure(self, *, ended: bool) -> Failure | None:
        """The failure of a rank that vanished, which makes its peers fail; else that of the rank that failed first."""
        gone = [ended or (status is not None and _is_gone(status.pid)) for status in self.statuses()]
        # Read the statuses again: a rank that is gone now may have written its last one since the first read.
        ranks = zip(self._spec.ranks, self.statuses(), gone, strict=True)
        reported = [(rank, status, is_gone) for rank, status, is_gone in ranks if status is not None]
        for rank, status, is_gone in reported:
            if is_gone and status.state in (State.STARTING, State.RUNNING):
                return _failure(rank, status, _killed_message(rank, status))
        failures = [(status.ended_ns, rank, status) for rank, status, _ in reported if status.state > State.DONE]
        if not failures:
            return None
        _, rank, status = min(failures, key=lambda failure: failure[:2])
        return _failure(rank, status, status.error)

    def _not_started_message(self, exit_code: int) -> str:
        logs = [self._spec.log_folder / _TORCHRUN_LOG, *map(self.log_path, self._spec.ranks)]
        written = [log for log in logs if log is not None and log.exists()]
        lines = [line for log in written for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return f"the ranks did not start (exit code {exit_code}): {lines[-1] if lines else 'nothing was logged'}"


def _failure(rank: int, status: RankStatus, message: str) -> Failure:
    refused = status.state is State.REFUSED
    return Failure(rank=rank, step=status.step, action=status.action, message=message, refused=refused)


def _killed_message(rank: int, status: RankStatus) -> str:
    place = f"in step {status.step} at {status.action}" if status.action else "outside of a step"
    return f"rank {rank} (process {status.pid}) was killed {place}"


def _is_gone(pid: int) -> bool:
    """Whether the process ended, reaped or not."""
    try:
        _, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except (FileNotFoundError, ProcessLookupError):
        return True
    return fields.split()[0] in ("Z", "X")


def launch(spec: LaunchSpec) -> Ranks:
    """Start the ranks; raises `UserError` if the given port is taken, or no semaphore can be made.

    They end with this process, however it ends: torchrun then gets SIGTERM and stops them, and the end of torchrun
    kills each of them.
    """
    nodes = spec.nodes or _alone(spec)
    _require_semaphores()
    spec.status_folder.mkdir(parents=True, exist_ok=True)
    for rank in spec.ranks:
        status_path(spec.status_folder, rank).unlink(missing_ok=True)
    spec.log_folder.mkdir(parents=True, exist_ok=True)
    if spec.names:
        (spec.log_folder / RANKS_FILE).write_text(json.dumps(spec.names))
    with (spec.log_folder / _TORCHRUN_LOG).open("ab") as log:
        process = subprocess.Popen(
            _command(spec, nodes),
            env={**os.environ, **_environment(spec), **spec.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    if spec.expendable:
        raise_oom_score(process.pid)
    return Ranks(spec, process, enforced(spec.memory, process.pid))


def _alone(spec: LaunchSpec) -> Nodes:
    port = ANY_PORT if spec.port is None else _checked(spec.port)
    return Nodes(node_rank=0, num_nodes=1, master=LOOPBACK, port=port)


def _command(spec: LaunchSpec, nodes: Nodes) -> list[str]:
    parent_death = [sys.executable, "-m", "penstock.trainer.parent_death", str(os.getpid())]
    method = "fork" if spec.device is Device.CPU else "spawn"
    agent = [sys.executable, "-m", "penstock.trainer.worker_agent", spec.preloaded, f"--start-method={method}"]
    place = [f"--nproc-per-node={spec.num_ranks}", f"--nnodes={nodes.num_nodes}", f"--node-rank={nodes.node_rank}"]
    meeting = [f"--master-addr={nodes.master}", f"--master-port={nodes.port}", "--max-restarts=0"]
    logs = [f"--log-dir={spec.log_folder}", "--redirects=3"]
    return [*parent_death, *agent, *place, *meeting, *logs, "-m", spec.module, *spec.arguments]


def _environment(spec: LaunchSpec) -> dict[str, str]:
    threads = str(spec.threads_per_rank)
    interface = interface_towards(spec.nodes.master) if spec.nodes else LOOPBACK_INTERFACE
    return {
        **MALLOC,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        # With fewer, a transfer's kernel may be queued behind the compute that waits for the transfer.
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        # A transfer that is ready goes before compute that was launched earlier: its peer waits for it.
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        # The warning does not apply to channels: each has its own group, so no other message is queued behind its own.
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
        "PYTHONUNBUFFERED": "1",
        **visible_devices_environment(spec.devices),
    }


def visible_devices_environment(devices: tuple[str, ...]) -> dict[str, str]:
    """Environment variables that limit PyTorch in a process to these CUDA devices, numbered from 0."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}


def _require_semaphores() -> None:
    """Raise `UserError` if the queues between torch's agent and its ranks cannot be made (sem_overview(7))."""
    try:
        multiprocessing.get_context("fork").Lock()  # its name is unlinked immediately
    except OSError as error:
        raise UserError(
            what=f"cannot be used: {error.strerror}",
            where="/dev/shm",
            remedy="free it or make it larger (docker run --shm-size 1g; in a pod, an emptyDir with medium: Memory)",
        ) from None


def _checked(port: int) -> int:
    if problem := listen_error(port, EVERYWHERE):  # where torch's store listens
        raise UserError(what=f"{port} cannot be used: {problem}", where="port", remedy="name another, or leave it out")
    return port
