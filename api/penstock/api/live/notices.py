"""Notifications by PostgreSQL's LISTEN and NOTIFY: a commit of one service wakes the others on the same database at
once.

A notification may be lost with its connection, so every service also polls every second.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection
from typing import Any

from sqlalchemy import Engine

Connection = Any
"""Connection of the driver, which is loaded only where it is used."""

log = logging.getLogger(__name__)

CHANNEL = "penstock"
GATHER_SECONDS = 0.05
"""Commits within this time are sent together."""
RECONNECT_SECONDS = 5.0
"""Seconds before a lost connection is opened again."""
POLL_SECONDS = 1.0
"""Interval of checks for the service's end while no notification arrives."""
MOST_UIDS = 200
"""Uids in one notification, which PostgreSQL limits to 8,000 bytes."""


class Notices:
    """Notifies other services of the uids of jobs that changed here, and calls ``on_notice`` with theirs."""

    def __init__(self, engine: Engine, on_notice: Callable[[Collection[str]], None]) -> None:
        self._engine, self._on_notice = engine, on_notice
        self._me = uuid.uuid4().hex
        self._lock = threading.Lock()
        self._uids: set[str] = set()
        self._due, self._ending = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=f"penstock-notices-{name}", daemon=True)
            for name, work in (("out", self._send), ("in", self._listen))
        ]
        for thread in self._threads:
            thread.start()

    def notify(self, uids: Collection[str]) -> None:
        """Queue a notification about these keys, which a commit has changed; does not block."""
        with self._lock:
            self._uids.update(uids)
        self._due.set()

    def close(self) -> None:
        """Send queued notifications, and end."""
        self._ending.set()
        self._due.set()
        for thread in self._threads:
            thread.join()

    def _run(self, work: Callable[[Connection], None]) -> None:
        while not self._ending.is_set():
            try:
                with self._connect() as connection:
                    work(connection)
            except self._engine.dialect.loaded_dbapi.Error as error:
                log.warning(
                    "notifications between services are interrupted, so changes arrive up to a second late: %s; "
                    "reconnecting in %.0f s",
                    error,
                    RECONNECT_SECONDS,
                )
                self._ending.wait(RECONNECT_SECONDS)

    def _connect(self) -> Connection:
        """Open a connection outside of the pool, by the driver itself, which can wait for notifications."""
        dialect = self._engine.dialect
        arguments, options = dialect.create_connect_args(self._engine.url)
        return dialect.connect(*arguments, **options, autocommit=True)

    def _send(self, connection: Connection) -> None:
        while not self._ending.is_set():
            self._due.wait()
            self._ending.wait(GATHER_SECONDS)
            self._due.clear()
            with self._lock:
                uids, self._uids = sorted(self._uids), set()
            for start in range(0, len(uids), MOST_UIDS):
                part = uids[start : start + MOST_UIDS]
                connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, " ".join([self._me, *part])))
        connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, self._me))  # wakes the other thread, so that it ends

    def _listen(self, connection: Connection) -> None:
        connection.execute(f"LISTEN {CHANNEL}")
        while not self._ending.is_set():
            for notice in connection.notifies(timeout=POLL_SECONDS, stop_after=1):
                sender, *uids = notice.payload.split(" ")
                if sender != self._me:
                    self._on_notice(uids)
