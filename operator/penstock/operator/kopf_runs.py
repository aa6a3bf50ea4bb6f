"""Runs of kopf's operator in one process: a run that ends without a signal is started again.

kopf retries a call that fails, but some answers of a cluster end the whole operator: a 404, an error event inside a
watch, a truncated answer of API discovery (docs/adr/0057). Every run has an event loop of its own, because kopf cancels
all tasks of its loop when it ends. What has to outlive a run is therefore kept on another loop (`background_loop`).

kopf handles signals only until its run begins to end, and a loop that closes removes its handlers. The kernel ignores
signals to process 1 of a container without a handler. So this module sets handlers once, for all runs, and the loops
set none.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVarTuple

log = logging.getLogger(__name__)

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.5, 5.0
"""Backoff between two runs of kopf. Meanwhile changes of jobs are noticed only by lists."""

POLL_SECONDS = 0.05
STEADY_SECONDS = 60.0
"""After a run of this length, the backoff begins at `FIRST_WAIT_SECONDS` again."""

Arguments = TypeVarTuple("Arguments")
Operate = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
"""Runs kopf until it fails, or until the stop flag is set."""


@contextmanager
def background_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread of its own during the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="controller", daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class _Loop(asyncio.SelectorEventLoop):
    """Leaves signals to `KopfRuns`; kopf would set handlers of its own."""

    def add_signal_handler(self, sig: int, callback: Callable[[*Arguments], object], *args: *Arguments) -> None:
        """Keep the handler that the process has."""


class KopfRuns:
    """The runs of one process, in its main thread. A signal ends the current run, and no other follows."""

    def __init__(self, operate: Operate) -> None:
        self._operate = operate
        self._is_signalled = False  # no threading.Event: its lock may be held when a signal comes
        self._lock = threading.RLock()  # a signal may come while the main thread holds it
        self._current: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self._is_restarting = False

    def restart(self) -> None:
        """End the current run; the next one follows at once. May be called from any thread."""
        with self._lock:
            self._is_restarting = self._current is not None
            self._stop()

    def end(self) -> None:
        """End the current run; no other follows. May be called from any thread, and by a handler of a signal."""
        self._is_signalled = True
        self._stop()

    def run(self) -> None:
        """Run until a signal comes."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.end())
        wait = FIRST_WAIT_SECONDS
        while not self._has_to_end():
            began = time.monotonic()
            try:
                with asyncio.Runner(loop_factory=_Loop) as runner:
                    if not runner.run(self._once()):
                        return
            except Exception as error:  # of any kind: without kopf no change of a job would be noticed at once
                if self._has_to_end():
                    log.warning("kopf ended after a signal: %s", _cause(error))
                    return
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
            if not self._has_to_end():
                await self._operate(stop_flag)
        finally:
            with self._lock:
                self._current = None
        return self._is_restarting

    def _has_to_end(self) -> bool:
        return self._is_signalled

    def _pause(self, seconds: float) -> None:
        """Wait, but not after a signal."""
        deadline = time.monotonic() + seconds
        while not self._has_to_end() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _stop(self) -> None:
        with self._lock:
            if self._current is not None:
                loop, stop_flag = self._current
                loop.call_soon_threadsafe(stop_flag.set)


def _cause(error: BaseException) -> str:
    """The first error in the chain, with its type: kopf raises errors of its own about errors of a cluster."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
