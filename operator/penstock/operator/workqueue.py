"""A queue of keys: for each one call is in flight, and one more follows if it is told again meanwhile.

The pattern is that of client-go's workqueue; here on asyncio.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.2, 60.0

Handle = Callable[[str], Awaitable[float | None]]
"""Does what there is to do about a key; says after how many seconds it wants to be called again, if at all."""


@dataclass(slots=True)
class _Entry:
    in_flight: bool = False
    again: bool = False
    failures: int = 0
    timer: asyncio.TimerHandle | None = None


class WorkQueue:
    """All methods belong to the thread of ``loop``. ``failed`` is told what went wrong, and how often in a row."""

    def __init__(self, handle: Handle, failed: Callable[[str, Exception, int], None]) -> None:
        self._handle, self._failed = handle, failed
        self._entries: dict[str, _Entry] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_in_flight(self) -> int:
        """Keys that are worked on."""
        return len(self._tasks)

    @property
    def num_waiting(self) -> int:
        """Keys that are to be worked on again as soon as a call ends, or as a wait after failures is over."""
        entries = list(self._entries.values())
        return sum(1 for entry in entries if entry.again or (entry.failures and not entry.in_flight))

    def add(self, key: str) -> None:
        """See to the key now, or as soon as the call in flight ends; a wait after failures is kept."""
        entry = self._entries.setdefault(key, _Entry())
        if entry.in_flight:
            entry.again = True
        elif entry.timer is None or not entry.failures:
            self._start(key, entry)

    def add_after(self, key: str, seconds: float) -> None:
        """See to the key at the latest in so many seconds."""
        entry = self._entries.setdefault(key, _Entry())
        if entry.in_flight:
            return  # what it says when it ends is newer
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        if entry.timer is not None:
            if entry.timer.when() <= due:
                return
            entry.timer.cancel()
        entry.timer = loop.call_at(due, self._start, key, entry)

    async def close(self) -> None:
        """Start nothing more, and wait for what is in flight."""
        for entry in self._entries.values():
            if entry.timer is not None:
                entry.timer.cancel()
            entry.again = False
        self._handle = _nothing
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, key: str, entry: _Entry) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        entry.in_flight, entry.again = True, False
        task = asyncio.get_running_loop().create_task(self._work(key, entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, key: str, entry: _Entry) -> None:
        try:
            wait = await self._handle(key)
            entry.failures = 0
        except Exception as error:  # whatever it is, the key is tried again, and the others go on
            entry.failures += 1
            self._failed(key, error, entry.failures)
            wait = backoff_seconds(entry.failures)
        entry.in_flight = False
        if entry.again and not entry.failures:
            self._start(key, entry)
        elif wait is not None:
            self.add_after(key, wait)
        else:
            del self._entries[key]


async def _nothing(key: str) -> None:
    """What is handled once the queue is closed."""


def backoff_seconds(failures: int) -> float:
    """How long a key waits that failed so often in a row: 0.2, 0.4, 0.8, ... up to a minute."""
    return float(min(FIRST_WAIT_SECONDS * 2 ** min(failures - 1, 20), LONGEST_WAIT_SECONDS))
