"""Single reader for all live streams: it reads each changed job once, and notifies all its listeners.

Commits of this service wake it, and on PostgreSQL those of other services. It also polls every second for commits that
were not notified, by times of their writers. Such a commit of a service whose clock is more than `OVERLAP_SECONDS`
behind is shown with the next one of the same job. It runs while there are listeners. Events of a job are sent at once;
its progress, and each row of a list, at most once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from penstock.api.live.listeners import Filter, JobListener, Listener, ListListener, Share
from penstock.api.live.messages import JobUpdate
from penstock.api.store import changes
from penstock.api.store.changes import Signature

T = TypeVar("T")
log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
FLUSH_SECONDS = 0.25
"""Minimum interval of messages to lists."""
ROW_SECONDS = 1.0
"""Minimum interval of messages about one row of a list."""
MESSAGES_PER_TURN = 5
"""Messages after which the event loop serves other requests."""
GATHER_SECONDS = 0.05
"""Changes that are committed within this time are read together."""
OVERLAP_SECONDS = 5.0
"""Overlap of successive polls: a write may be committed, or visible, later than its timestamp."""


class Feed:
    """Feeds listeners from the store; ``clock`` gives seconds since the epoch.

    `touched` may be called from any thread, everything else from one event loop.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float]) -> None:
        self._engine, self._clock = engine, clock
        self._of_jobs: dict[str, list[JobListener]] = {}
        self._of_lists: list[ListListener] = []
        self._work: asyncio.Task[None] | None = None
        self._wakener = _Wakener()
        self._known: dict[str, Signature] = {}
        self._late: set[str] = set()
        self._rows: dict[str, JobUpdate] = {}
        self._row_sent_at: dict[str, float] = {}
        self._closed = False
        self._of_tokens: Counter[str] = Counter()
        self._of_namespaces: Counter[tuple[str, ...] | None] = Counter()
        self.num_dropped = 0

    def touched(self, uids: Collection[str]) -> None:
        """Report keys that a commit has changed; keys other than job uids are ignored."""
        self._wakener.add(uids)

    def add(self, listener: Listener) -> None:
        """Add a listener; one of a job first gets the events that it missed, and the job's state."""
        self._of_tokens[listener.share.token] += 1
        self._of_namespaces[listener.share.namespaces] += 1
        if isinstance(listener, JobListener):
            self._of_jobs.setdefault(listener.uid, []).append(listener)
        else:
            self._of_lists.append(listener)
        if self._work is None or self._work.done():
            self._wakener = _Wakener(asyncio.get_running_loop())
            self._work = asyncio.create_task(self._run(self._wakener), name="penstock-feed")
        if isinstance(listener, JobListener):
            self._wakener.add({listener.uid})
        if self._closed:
            listener.outgoing.close()

    def remove(self, listener: Listener) -> None:
        """Remove a listener."""
        self._of_tokens -= Counter((listener.share.token,))
        self._of_namespaces -= Counter((listener.share.namespaces,))
        self.num_dropped += listener.outgoing.dropped.is_set()
        if isinstance(listener, ListListener):
            self._of_lists.remove(listener)
            return
        others = [other for other in self._of_jobs[listener.uid] if other is not listener]
        if others:
            self._of_jobs[listener.uid] = others
        else:
            del self._of_jobs[listener.uid]

    def open(self) -> None:
        """Accept streams again after `close`."""
        self._closed = False

    def close(self) -> None:
        """End every stream, and refuse new ones."""
        self._closed = True
        for jobs_own in self._of_jobs.values():
            for follower in jobs_own:
                follower.outgoing.close()
        for listener in self._of_lists:
            listener.outgoing.close()

    @property
    def num_listeners(self) -> int:
        """Number of listeners."""
        return len(self._of_lists) + sum(map(len, self._of_jobs.values()))

    def num_of(self, share: Share) -> tuple[int, int]:
        """Return the number of streams of the token, and of the same namespaces."""
        return self._of_tokens[share.token], self._of_namespaces[share.namespaces]

    async def _run(self, wakener: _Wakener) -> None:
        loop = asyncio.get_running_loop()
        polled_at, next_tick, next_flush = self._clock(), loop.time(), loop.time()
        while self.num_listeners:
            due = min(next_tick, next_flush) if self._rows else next_tick
            await wakener.wait(due - loop.time())
            touched, tick = wakener.take(), loop.time() >= next_tick
            try:
                if tick:
                    next_tick, began = loop.time() + TICK_SECONDS, self._clock()
                    touched |= self._late | await self._changed_elsewhere(polled_at - OVERLAP_SECONDS)
                    polled_at, self._late = began, set()
                await self._send_to_listeners(touched, loop.time())
            except SQLAlchemyError as error:
                log.warning(
                    "live streams are paused, because the database does not answer: %s; retrying at the next poll",
                    error,
                )
                wakener.add(touched)
                await asyncio.sleep(TICK_SECONDS)
            if loop.time() >= next_flush:
                next_flush = loop.time() + FLUSH_SECONDS
                await self._send_to_lists(loop.time())
            await asyncio.sleep(GATHER_SECONDS)
        self._known, self._late, self._rows, self._row_sent_at = {}, set(), {}, {}

    async def _changed_elsewhere(self, since: float) -> set[str]:
        """Return jobs that other services changed; signatures outside of the overlap are dropped."""
        signatures = await asyncio.to_thread(self._read, lambda connection: changes.changed_since(connection, since))
        new = {uid for uid, signature in signatures.items() if self._known.get(uid) != signature}
        self._known = {uid: signature for uid, signature in self._known.items() if uid in signatures}
        self._row_sent_at = {uid: at for uid, at in self._row_sent_at.items() if uid in signatures}
        return new

    async def _send_to_listeners(self, uids: Collection[str], now: float) -> None:
        """Read these jobs, and notify their listeners, then the lists."""
        relevant = uids if self._of_lists else [uid for uid in uids if uid in self._of_jobs]
        if not relevant:
            return
        after = {
            uid: min(listener.last_event for listener in some) for uid, some in self._of_jobs.items() if uid in relevant
        }
        read = await asyncio.to_thread(self._read, lambda connection: changes.read_changes(connection, relevant, after))
        for number, change in enumerate(read):
            if number % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)
            update = JobUpdate(change)
            uid = update.job.uid
            if self._known.get(uid) != update.signature:
                self._known[uid] = update.signature
                self._rows[uid] = update
            delivered = [listener.offer(update, now) for listener in self._of_jobs.get(uid, ())]
            if not all(delivered):
                self._late.add(uid)

    def _read(self, question: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            return question(connection)

    async def _send_to_lists(self, now: float) -> None:
        ready = [uid for uid in self._rows if now >= self._row_sent_at.get(uid, -ROW_SECONDS) + ROW_SECONDS]
        update = [self._rows.pop(uid) for uid in ready]
        self._row_sent_at.update(dict.fromkeys(ready, now))
        texts: dict[Filter, bytes] = {}
        for number, listener in enumerate(list(self._of_lists)):
            if number % MESSAGES_PER_TURN == 0:
                await asyncio.sleep(0)
            if listener.filter not in texts:
                texts[listener.filter] = b"".join(_rows(update, listener.filter))
            if texts[listener.filter]:
                listener.outgoing.put(texts[listener.filter])


def _rows(update: Iterable[JobUpdate], job_filter: Filter) -> Iterable[bytes]:
    return (news_item.job_message for news_item in update if job_filter.matches(news_item.job))


class _Wakener:
    """Gathers uids from any thread, and wakes the loop at the first."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._uids: set[str] = set()
        self._woken = asyncio.Event()

    def add(self, uids: Collection[str]) -> None:
        """Add uids and wake the reader; without a loop there is none."""
        if self._loop is None:
            return
        with self._lock:
            first = not self._uids
            self._uids.update(uids)
        if first:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._woken.set)

    def take(self) -> set[str]:
        """Remove and return all uids."""
        with self._lock:
            uids, self._uids = self._uids, set()
        return uids

    async def wait(self, seconds: float) -> None:
        """Wait until there are uids, or the time has passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0)):
                await self._woken.wait()
        self._woken.clear()
