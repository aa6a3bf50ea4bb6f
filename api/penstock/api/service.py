"""Wiring of one service: settings, store and clock, and the readers and the writer for routes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from anyio import CapacityLimiter
from sqlalchemy import Connection, Engine

from penstock.api.auth.known_tokens import KnownTokens
from penstock.api.cluster.membership import Membership
from penstock.api.files.exporting import Exports
from penstock.api.live.feed import Feed
from penstock.api.live.notices import Notices
from penstock.api.metrics.instruments import Instruments, make_instruments
from penstock.api.metrics.jobs import JobsCollector
from penstock.api.settings import Settings
from penstock.api.store.engine import STATEMENT_SECONDS, is_sqlite, make_engine, parse_url
from penstock.api.store.migrate import require_current
from penstock.api.store.writer import Joint, Writer

I = TypeVar("I")  # noqa: E741
T = TypeVar("T")

MOST_BODIES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """The service, for every route. ``clock`` returns seconds since the epoch; ``cluster`` is none on a single machine.

    ``bodies`` limits the number of large bodies that are read concurrently: each may take a few hundred megabytes
    before it is refused. ``requested`` is set once a client's change is committed, so that the executor handles it
    soon.
    """

    settings: Settings
    engine: Engine
    writer: Writer
    feed: Feed
    instruments: Instruments
    clock: Callable[[], float] = time.time
    known_tokens: KnownTokens = field(default_factory=KnownTokens)
    exports: Exports = field(default_factory=Exports)
    notices: Notices | None = None
    cluster: Membership | None = None
    bodies: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MOST_BODIES))
    requested: threading.Event = field(default_factory=threading.Event)

    def read(self, question: Callable[[Connection], T]) -> T:
        """Return the result of ``question``, on one snapshot of the database."""
        with self.engine.connect() as connection:
            return question(connection)

    def write(self, key: str, change: Callable[[Connection], T]) -> T:
        """Make a change of ``key`` (a job's uid, or a table), and wait for the commit."""
        return self.writer.write(key, change)

    def submit(self, key: str, change: Callable[[Connection], T]) -> Future[T]:
        """Like `write`, but return a future."""
        return self.writer.submit(key, change)

    def submit_joint(self, key: str, joint: Joint[I, T], item: I) -> Future[T]:
        """Submit a change that ``joint`` makes together with others."""
        return self.writer.submit_joint(key, joint, item)

    def close(self) -> None:
        """Commit queued changes, stop other work, and close the database."""
        self.exports.close()
        self.writer.close()
        if self.notices is not None:
            self.notices.close()
        self.engine.dispose()


def open_service(
    settings: Settings,
    clock: Callable[[], float] = time.time,
    statement_seconds: float | None = STATEMENT_SECONDS,
) -> Service:
    """Open a service on its database, with a time limit for statements; raises `UserError` unless the schema is
    current.
    """
    engine = make_engine(parse_url(settings.database_url), statement_seconds)
    try:
        require_current(engine)
    except BaseException:
        engine.dispose()
        raise
    feed = Feed(engine, clock)
    instruments = make_instruments(feed, JobsCollector(engine, clock))

    notices = None if is_sqlite(engine.url) else Notices(engine, feed.touched)

    def committed(keys: Sequence[str]) -> None:
        instruments.committed(keys)
        feed.touched(keys)
        if notices is not None:
            notices.notify(keys)

    return Service(
        settings=settings,
        engine=engine,
        writer=Writer(engine, committed),
        feed=feed,
        instruments=instruments,
        clock=clock,
        notices=notices,
    )
