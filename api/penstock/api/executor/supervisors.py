"""Supervisors as the executor sees them: started, found again, asked, ended. Everything lies in their files."""

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
from penstock.core.run.attempt_folder import AttemptFolder, shipping_lock
from penstock.core.run.claims import NOBODY, is_alive, is_locked, take
from penstock.core.serialization.files import make_folder
from penstock.core.serialization.manifest_files import read, write
from penstock.core.supervision import AttemptReport, Binding, Claim, Order, Wish

COMMAND = (sys.executable, "-m", "penstock.agent", "supervise")
END_SECONDS = 20.0
KILL_SECONDS = 5.0
TELLING_SECONDS = 30.0
_POLL_SECONDS = 0.05


class Supervisors(Protocol):
    """What the executor asks of them; see `ProcessSupervisors`."""

    def start(self, folder: AttemptFolder, order: Order) -> None:
        """Have the attempt supervised, unless it is or was."""
        ...

    def alive(self, folder: AttemptFolder) -> bool:
        """Whether anything of the attempt runs, or it still has to tell something."""
        ...

    def claimed(self, folder: AttemptFolder) -> bool:
        """Whether a supervisor ever took the attempt."""
        ...

    def report(self, folder: AttemptFolder) -> AttemptReport | None:
        """What the supervisor said last."""
        ...

    def wished(self, folder: AttemptFolder, wish: Wish) -> bool:
        """Whether it was asked for."""
        ...

    def ask(self, folder: AttemptFolder, wish: Wish) -> None:
        """Ask for it, once."""
        ...

    def bind(self, folder: AttemptFolder, binding: Binding) -> None:
        """Have the attempt train by a plan."""
        ...

    def end(self, folder: AttemptFolder) -> None:
        """End whatever is left of the attempt; nothing is when this returns, and nothing of it starts any more."""
        ...


class ProcessSupervisors:
    """Processes on this machine, each leader of a session of its own: they outlive the service."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._started: dict[AttemptFolder, subprocess.Popen[bytes]] = {}
        self._telling_since: dict[AttemptFolder, float] = {}

    def start(self, folder: AttemptFolder, order: Order) -> None:
        """See `Supervisors`. A second one for an attempt finds the claim of the first, and ends."""
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

    def alive(self, folder: AttemptFolder) -> bool:
        """See `Supervisors`. What an attempt recorded is refused once another has followed, so its shipper is waited
        for, though not for ever.
        """
        if self._supervised(folder):
            return True
        if not is_locked(shipping_lock(folder.root)):
            self._telling_since.pop(folder, None)
            return False
        return time.monotonic() < self._telling_since.setdefault(folder, time.monotonic()) + TELLING_SECONDS

    def _supervised(self, folder: AttemptFolder) -> bool:
        if self._starting(folder):
            return True
        found = read(folder.claim, Claim)
        return found is not None and is_alive(found)

    def claimed(self, folder: AttemptFolder) -> bool:
        """See `Supervisors`."""
        return folder.claim.exists()

    def report(self, folder: AttemptFolder) -> AttemptReport | None:
        """See `Supervisors`. One that ended before it reported anything left only its last words."""
        process = self._started.get(folder)
        ended = not self._supervised(folder)  # before its report: it may write it and end in between
        found = read(folder.report, AttemptReport)
        if found is None and ended and process is not None:
            return AttemptReport(state=AttemptState.FAILED, message=_last_words(folder.log, process.returncode))
        return found

    def wished(self, folder: AttemptFolder, wish: Wish) -> bool:
        """See `Supervisors`."""
        return folder.wish(wish).exists()

    def ask(self, folder: AttemptFolder, wish: Wish) -> None:
        """See `Supervisors`."""
        folder.wish(wish).touch()

    def bind(self, folder: AttemptFolder, binding: Binding) -> None:
        """See `Supervisors`."""
        if not folder.binding.exists():
            write(folder.binding, binding)

    def end(self, folder: AttemptFolder) -> None:
        """See `Supervisors`. Asked first, because a supervisor ends its ranks faster than they notice by themselves."""
        take(folder, NOBODY)  # one that is still starting up finds the attempt claimed, and ends
        for number, seconds in ((signal.SIGTERM, END_SECONDS), (signal.SIGKILL, KILL_SECONDS)):
            self._signal(folder, number)
            if self._gone(folder, seconds):
                return
        raise TimeoutError(f"the supervisor of {folder.path} outlived SIGKILL")

    def _signal(self, folder: AttemptFolder, number: signal.Signals) -> None:
        found, process = read(folder.claim, Claim), self._started.get(folder)
        pids = {process.pid} if process is not None and process.poll() is None else set()
        if found is not None and is_alive(found):
            pids.add(found.pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _gone(self, folder: AttemptFolder, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self._supervised(folder):
            if time.monotonic() > end:
                return False
            time.sleep(_POLL_SECONDS)
        return True


def _last_words(log: Path, code: int) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return f"the supervisor did not start (exit code {code}): {said}"
