"""Runs of kopf's operator in one process: a run that ends without a signal is followed by the next.

kopf retries a call that fails, but some answers of a cluster end the whole operator: a 404, an error event inside a
watch, a truncated list of the kinds (docs/adr/0057). Every run has an event loop of its own, because kopf cancels all
tasks of its loop when it ends. What has to outlive a run is therefore kept on another loop.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 5.0
"""The liveness probe is not answered between two runs, so a backoff is far shorter than the probe's patience."""

STEADY_SECONDS = 60.0
"""After a run of this length, the backoff begins at `FIRST_WAIT_SECONDS` again."""

Operate = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""Runs kopf until a signal comes, until it fails, or until the stop flag is set."""


class KopfRuns:
    """The runs of one process, in its main thread. A signal ends the current run, and no other follows."""

    def __init__(self, operate: Operate) -> None:
        self._operate = operate
        self._signalled = threading.Event()
        self._lock = threading.Lock()
        self._current: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._is_restarting = False

    def restart(self) -> None:
        """End the current run; the next one follows at once. May be called from any thread."""
        with self._lock:
            if self._current is not None:
                loop, stop_flag = self._current
                self._is_restarting = True
                loop.call_soon_threadsafe(stop_flag.set)

    def run(self) -> None:
        """Run until a signal comes."""
        wait = FIRST_WAIT_SECONDS
        while not self._signalled.is_set():
            began = time.monotonic()
            try:
                if not asyncio.run(self._once()):
                    return
            except Exception as error:  # of any kind: without kopf no change of a job would be noticed at once
                wait = FIRST_WAIT_SECONDS if time.monotonic() - began >= STEADY_SECONDS else wait
                log.warning("kopf ended: %s; starting it again in %.1f s", _cause(error), wait)
                self._pause(wait)
                wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    async def _once(self) -> bool:
        """One run; return whether it ended because `restart` was called."""
        stop_flag = asyncio.Event()
        with self._lock:
            self._current, self._is_restarting = (asyncio.get_running_loop(), stop_flag), False
        try:
            await self._operate(stop_flag)
        finally:
            with self._lock:
                self._current = None
        return self._is_restarting

    def _pause(self, seconds: float) -> None:
        """Wait. kopf handles signals only while it runs."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._signalled.set())
        self._signalled.wait(seconds)


def _cause(error: BaseException) -> str:
    """The first error in the chain, with its type: kopf raises errors of its own about errors of a cluster."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
