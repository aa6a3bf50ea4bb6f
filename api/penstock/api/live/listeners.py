"""Listeners of a feed, and their queues.

A client that reads too slowly is disconnected once its queue is full. It may reconnect and continue after the last
event that it read, and it does not delay other clients.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.api.live.messages import JobUpdate
from penstock.api.store.changes import Signature
from penstock.api.store.jobs import StoredJob

MOST_WAITING, MOST_WAITING_BYTES = 64, 2**18
REPORT_SECONDS = 1.0
"""Minimum interval of a job's progress reports; its events are sent at once."""


class Outgoing:
    """Messages that wait to be sent, oldest first."""

    def __init__(self, most_waiting: int = MOST_WAITING) -> None:
        self._most_waiting = most_waiting
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0
        self._news = asyncio.Event()
        self.dropped = asyncio.Event()
        self._closed = False

    def put(self, message: bytes) -> None:
        """Queue the message; disconnect the client if its queue is full."""
        full = len(self._waiting) >= self._most_waiting or self._num_bytes + len(message) > MOST_WAITING_BYTES
        if self._waiting and full:
            self.dropped.set()
            self.close()
        if not self._closed:
            self._waiting.append(message)
            self._num_bytes += len(message)
            self._news.set()

    def close(self) -> None:
        """End the queue after its current messages."""
        self._closed = True
        self._news.set()

    async def take(self, seconds: float) -> bytes | None:
        """Return all queued messages, joined; empty if none came within ``seconds``, none at the end."""
        if not self._waiting and not self._closed:
            try:
                async with asyncio.timeout(seconds):  # until Python 3.12, `wait_for` may lose a cancellation
                    await self._news.wait()
            except TimeoutError:
                return b""
        self._news.clear()
        if not self._waiting:
            return None
        message = b"".join(self._waiting)
        self._waiting.clear()
        self._num_bytes = 0
        return message


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Owner of a stream: its token, and its namespaces (none: all). Both have a limited share of all streams."""

    token: str = ""
    namespaces: tuple[str, ...] | None = None


@dataclass(eq=False, kw_only=True, slots=True)
class JobListener:
    """Receives everything about the job ``uid`` after its event number ``last_event``."""

    uid: str
    last_event: int
    share: Share = Share()
    outgoing: Outgoing = field(default_factory=Outgoing)
    _sent_signature: Signature | None = None
    _sent_at: float = 0.0

    def offer(self, update: JobUpdate, now: float) -> bool:
        """Queue the update; return false for a report too soon after the last one, which has to be offered again."""
        for number, message in update.events:
            if number > self.last_event:
                self.outgoing.put(message)
                self.last_event = number
        if update.signature == self._sent_signature:
            return True
        only_reported = self._sent_signature is not None and self._sent_signature[0] == update.signature[0]
        if only_reported and now < self._sent_at + REPORT_SECONDS:
            return False
        self.outgoing.put(update.job_message)
        self._sent_signature, self._sent_at = update.signature, now
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Filter:
    """Jobs of these namespaces (none: all) that have the labels, and ``name`` in their name."""

    namespaces: tuple[str, ...] | None = None
    labels: tuple[tuple[str, str], ...] = ()
    name: str = ""

    @classmethod
    def of(cls, namespaces: tuple[str, ...] | None, labels: Mapping[str, str], name: str) -> Filter:
        """Return an equal filter for equal labels in any order."""
        return cls(namespaces=namespaces, labels=tuple(sorted(labels.items())), name=name)

    def matches(self, job: StoredJob) -> bool:
        """Whether the job passes the filter."""
        if self.namespaces is not None and job.namespace not in self.namespaces:
            return False
        return self.name in job.name and (not self.labels or dict(self.labels).items() <= job.labels.items())


@dataclass(eq=False, kw_only=True, slots=True)
class ListListener:
    """Receives every job that the filter matches, each at most once a second."""

    filter: Filter
    share: Share = Share()
    outgoing: Outgoing = field(default_factory=Outgoing)


Listener = JobListener | ListListener
