"""Process that uploads a run's records alongside an attempt, with restarts after failures.

The process runs `penstock.agent.shipping`. The service collects records that remain after the supervisor's end
(`penstock.api.executor.collecting`).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.agent.console import say
from penstock.core.supervision import Order

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0
"""Backoff before a restart. It doubles with each restart, and is reset once a shipper has run for the longest pause."""


class ShipperProcess:
    """Keeps a shipper of the run directory ``root`` running, if the order names an address file of a service."""

    def __init__(self, root: Path, order: Order, seconds: Callable[[], float] = time.monotonic) -> None:
        self._command = [sys.executable, "-m", "penstock.agent", "ship", str(root)]
        self._command += ["--address-file", order.address_file, "--token-file", order.token_file]
        self._seconds = seconds
        self._pause = FIRST_PAUSE_SECONDS
        self._started_at = 0.0
        self._next_start_at: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if order.address_file:
            self._start()

    @property
    def pids(self) -> frozenset[int]:
        """Process id of the shipper, if there is one."""
        return frozenset() if self._process is None else frozenset({self._process.pid})

    def ensure_running(self) -> None:
        """Restart the shipper if it has been dead for the backoff."""
        if self._process is None or self._process.poll() is None:
            return
        now = self._seconds()
        if self._next_start_at is None:
            if now - self._started_at >= LONGEST_PAUSE_SECONDS:
                self._pause = FIRST_PAUSE_SECONDS
            self._next_start_at = now + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        if now >= self._next_start_at:
            self._start()

    def close(self) -> None:
        """Close the shipper's stdin, so that it drains the records and exits. A dead one is restarted first."""
        if self._process is None:
            return
        if self._process.poll() is not None:
            self._start()
        self._close_stdin()

    def _start(self) -> None:
        """Start a shipper, which runs until its stdin is closed, by `close` or by the death of this process."""
        if self._process is not None:
            self._close_stdin()
        self._started_at, self._next_start_at = self._seconds(), None
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, start_new_session=True)
        except OSError as error:  # training goes on, and the service collects the rest
            say(f"cannot start the process that uploads records: {error}; the service collects them after the attempt")

    def _close_stdin(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()


@contextlib.contextmanager
def shipping(root: Path, order: Order) -> Iterator[ShipperProcess]:
    """Run a process that uploads the run's records during the block, and after it until all are acknowledged."""
    with contextlib.closing(ShipperProcess(root, order)) as process:
        yield process
