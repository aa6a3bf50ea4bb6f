"""Work queue of keys: at most one call is in flight for each key, and one more follows if it was added meanwhile.

The pattern is client-go's workqueue, here on asyncio, with three levels and two groups of workers. A key that an event
added leaves the queue before all keys of a resync: it waits for a worker and not for them. Keys that are ``first`` have
workers of their own, so the two groups do not delay each other.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 0.2, 60.0

Handle = Callable[[str], Awaitable[float | None]]
"""Handles a key; returns the seconds until its next call, if there is to be one."""


class Level(enum.IntEnum):
    """Reason why a key waits for a worker, the most urgent first."""

    FIRST = 0
    EVENT = 1
    RESYNC = 2


@dataclass(slots=True)
class _Entry:
    in_flight: bool = False
    requeue_level: Level | None = None
    ready: Level | None = None
    failures: int = 0
    timer: asyncio.TimerHandle | None = None


class WorkQueue:
    """Queue and workers; all methods belong to the thread of ``loop``.

    ``failed`` is called with an error and the number of failures in a row. At most ``num_first`` calls are in flight
    for keys that are ``is_first`` when they are added, and ``num_workers`` for all others.
    """

    def __init__(
        self,
        handle: Handle,
        failed: Callable[[str, Exception, int], None],
        *,
        num_workers: int = 6,
        num_first: int = 32,
        is_first: Callable[[str], bool] = lambda key: False,
    ) -> None:
        self._handle, self._failed, self._is_first = handle, failed, is_first
        self._num_workers, self._num_first = num_workers, num_first
        self._entries: dict[str, _Entry] = {}
        self._ready: dict[Level, OrderedDict[str, None]] = {level: OrderedDict() for level in Level}
        self._tasks: dict[asyncio.Task[None], Level] = {}

    @property
    def num_in_flight(self) -> int:
        """Keys that are worked on."""
        return len(self._tasks)

    @property
    def num_waiting(self) -> int:
        """Keys that wait for a worker, for their call in flight, or for the end of a backoff."""
        entries = list(self._entries.values())
        return sum(1 for entry in entries if _waits(entry))

    def add(self, key: str, level: Level = Level.EVENT) -> None:
        """Work on the key as soon as a worker is free and no key of a more urgent level waits. A backoff stays in
        force.
        """
        entry = self._entries.setdefault(key, _Entry())
        if entry.in_flight:
            entry.requeue_level = level if entry.requeue_level is None else min(entry.requeue_level, level)
        elif entry.timer is None or not entry.failures:
            self._enqueue(key, entry, level)

    def add_after(self, key: str, seconds: float) -> None:
        """Add the key after ``seconds``, or earlier if it is due earlier."""
        entry = self._entries.setdefault(key, _Entry())
        if entry.in_flight or entry.ready is not None:
            return  # its result will be newer
        loop = asyncio.get_running_loop()
        due = loop.time() + seconds
        if entry.timer is not None:
            if entry.timer.when() <= due:
                return
            entry.timer.cancel()
        entry.timer = loop.call_at(due, self._due, key, entry)

    async def close(self) -> None:
        """Start no more keys, and wait for those in flight."""
        for entry in self._entries.values():
            if entry.timer is not None:
                entry.timer.cancel()
            entry.requeue_level = None
        for keys in self._ready.values():
            keys.clear()
        self._handle = _nothing
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _due(self, key: str, entry: _Entry) -> None:
        entry.timer = None
        self._enqueue(key, entry, Level.EVENT)

    def _enqueue(self, key: str, entry: _Entry, level: Level) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None
        if level is Level.EVENT and self._is_first(key):
            level = Level.FIRST
        if entry.ready is not None:
            if entry.ready <= level:
                return
            del self._ready[entry.ready][key]
        entry.ready = level
        self._ready[level][key] = None
        self._dispatch()

    def _dispatch(self) -> None:
        """Start calls for as long as there are keys and workers."""
        while (level := self._next()) is not None:
            key, _ = self._ready[level].popitem(last=False)
            entry = self._entries[key]
            entry.in_flight, entry.requeue_level, entry.ready = True, None, None
            task = asyncio.get_running_loop().create_task(self._work(key, entry))
            self._tasks[task] = level
            task.add_done_callback(self._done)

    def _next(self) -> Level | None:
        num_first = sum(1 for level in self._tasks.values() if level is Level.FIRST)
        if self._ready[Level.FIRST] and num_first < self._num_first:
            return Level.FIRST
        if len(self._tasks) - num_first >= self._num_workers:
            return None
        return next((level for level in (Level.EVENT, Level.RESYNC) if self._ready[level]), None)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._dispatch()

    async def _work(self, key: str, entry: _Entry) -> None:
        try:
            wait = await self._handle(key)
            entry.failures = 0
        except Exception as error:  # of any kind: the key is retried, and the others go on
            entry.failures += 1
            self._failed(key, error, entry.failures)
            wait = backoff_seconds(entry.failures)
        entry.in_flight = False
        if entry.requeue_level is not None and not entry.failures:
            self._enqueue(key, entry, entry.requeue_level)
        elif wait is not None:
            self.add_after(key, wait)
        else:
            del self._entries[key]


def _waits(entry: _Entry) -> bool:
    in_queue = entry.ready is not None or entry.requeue_level is not None
    return in_queue or (entry.failures > 0 and not entry.in_flight)


async def _nothing(key: str) -> None:
    """The remaining keys once the queue is closed."""


def backoff_seconds(failures: int) -> float:
    """Backoff after that many failures in a row, in seconds: 0.2, 0.4, 0.8, ... up to a minute."""
    return float(min(FIRST_WAIT_SECONDS * 2 ** min(failures - 1, 20), LONGEST_WAIT_SECONDS))
