"""Control of supervisors by the executor: start one, read its state, send requests, end it.

All state is in the supervisors' files, so a restarted service continues with them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

from penstock.core.lifecycle import AttemptState
from penstock.core.processes import ProcessState
from penstock.core.run.attempt_folder import AttemptFolder, shipping_lock
from penstock.core.run.claims import NOBODY, is_alive, is_locked, take
from penstock.core.serialization.files import make_folder
from penstock.core.serialization.manifest_files import read, write
from penstock.core.supervision import AttemptReport, Binding, Claim, Order, SupervisorRequest

COMMAND = (sys.executable, "-m", "penstock.agent", "supervise")
END_SECONDS = 20.0
KILL_SECONDS = 5.0
MOST_SHIPPING_SECONDS = 30.0
_POLL_SECONDS = 0.05


class Supervisors(Protocol):
    """The executor's interface to supervisors, which `ProcessSupervisors` implements."""

    def start(self, folder: AttemptFolder, order: Order) -> None:
        """Start a supervisor of the attempt, unless it has or had one."""

    def observe(self, folder: AttemptFolder) -> ProcessState:
        """Observe the attempt by its files, without its plan."""

    def request(self, folder: AttemptFolder, request: SupervisorRequest) -> None:
        """Make a request of this kind, once."""

    def bind(self, folder: AttemptFolder, binding: Binding) -> None:
        """Let the attempt train with a plan."""

    def end(self, folder: AttemptFolder) -> None:
        """End the attempt's remaining processes; none is left when this returns, and none can start later."""


class ProcessSupervisors:
    """Supervisors as processes on this machine, each the leader of a session: they outlive the service."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._started: dict[AttemptFolder, subprocess.Popen[bytes]] = {}
        self._shipping_since: dict[AttemptFolder, float] = {}

    def start(self, folder: AttemptFolder, order: Order) -> None:
        """Start a supervisor. A second one for the same attempt exits, because the first one has claimed it."""
        if self.claimed(folder) or self._starting(folder):
            return
        make_folder(folder.path)
        write(folder.order, order)
        with folder.log.open("ab") as log:
            self._started[folder] = subprocess.Popen(
                [*self._command, str(folder.root), str(folder.attempt)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _starting(self, folder: AttemptFolder) -> bool:
        process = self._started.get(folder)
        return process is not None and process.poll() is None

    def observe(self, folder: AttemptFolder) -> ProcessState:
        """Observe the attempt by its files. The order of the reads matters: an attempt that is claimed, or ends,
        between two of them must not count as lost.
        """
        claimed = self.claimed(folder)
        alive = self.alive(folder)
        is_stopped = folder.request(SupervisorRequest.STOP).exists()
        return ProcessState(claimed=claimed, alive=alive, stop_requested=is_stopped, report=self.report(folder))

    def alive(self, folder: AttemptFolder) -> bool:
        """Whether the supervisor runs, or a shipper still uploads the attempt's records.

        The shipper counts for `MOST_SHIPPING_SECONDS` at most, so that it does not delay the next attempt indefinitely.
        """
        if self._supervised(folder):
            return True
        if not is_locked(shipping_lock(folder.root)):
            self._shipping_since.pop(folder, None)
            return False
        return time.monotonic() < self._shipping_since.setdefault(folder, time.monotonic()) + MOST_SHIPPING_SECONDS

    def _supervised(self, folder: AttemptFolder) -> bool:
        if self._starting(folder):
            return True
        claim = read(folder.claim, Claim)
        return claim is not None and is_alive(claim)

    def claimed(self, folder: AttemptFolder) -> bool:
        """Whether any supervisor has claimed the attempt."""
        return folder.claim.exists()

    def report(self, folder: AttemptFolder) -> AttemptReport | None:
        """Return the last report. If the supervisor exited before its first one, make a report from its log."""
        process = self._started.get(folder)
        ended = not self._supervised(folder)  # before the read: it may write a report and exit in between
        attempt_report = read(folder.report, AttemptReport)
        if attempt_report is None and ended and process is not None:
            return AttemptReport(state=AttemptState.FAILED, message=_start_failure(folder.log, process.returncode))
        return attempt_report

    def request(self, folder: AttemptFolder, request: SupervisorRequest) -> None:
        folder.request(request).touch()

    def bind(self, folder: AttemptFolder, binding: Binding) -> None:
        if not folder.binding.exists():
            write(folder.binding, binding)

    def end(self, folder: AttemptFolder) -> None:
        """End the attempt, first by SIGTERM: a supervisor ends its ranks faster than they detect its death."""
        take(folder, NOBODY)  # a supervisor that is still starting then fails to claim the attempt, and exits
        for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            self._signal(folder, number)
            if self._has_ended(folder, seconds):
                return
        raise TimeoutError(
            f"the supervisor of {folder.path} did not end after SIGKILL; it is probably blocked in uninterruptible "
            "I/O, check its storage"
        )

    def _signal(self, folder: AttemptFolder, number: signal.Signals) -> None:
        claim, process = read(folder.claim, Claim), self._started.get(folder)
        pids = {process.pid} if process is not None and process.poll() is None else set()
        if claim is not None and is_alive(claim):
            pids.add(claim.pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _has_ended(self, folder: AttemptFolder, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self._supervised(folder):
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)
        return True


def _start_failure(log: Path, code: int) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    last_line = next((line for line in reversed(lines) if line.strip()), f"{log} is empty")
    return f"the supervisor did not start (exit code {code}): {last_line}"
