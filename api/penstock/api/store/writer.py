"""The one writer: changes asked for at about the same time share a transaction, and so a sync of the disk.

A change is a function of a connection. It runs inside a savepoint, so one that fails takes nothing else with it, and
its future is resolved only after the commit. It may run more than once (when the database gives up a transaction in a
conflict with another service), and must therefore depend on nothing but what it reads from the connection.

Changes of one transaction run in the order of their keys: two services that change the same jobs lock them in the same
order, and so seldom wait in a circle.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

T = TypeVar("T")
Change = Callable[[Connection], T]

MOST_CHANGES_PER_COMMIT = 128
MOST_ATTEMPTS = 8
CONFLICTS = frozenset({"40001", "40P01"})
"""SQLSTATE of a serialization failure and of a deadlock: try again."""


class WriterClosedError(RuntimeError):
    """A change was asked for while the service was ending."""


@dataclass(frozen=True, slots=True)
class _Asked:
    key: str
    change: Change[Any]
    future: Future[Any]


class Writer:
    """Commits changes from one thread; ``committed`` is told the keys of each transaction, from that thread."""

    def __init__(self, engine: Engine, committed: Callable[[frozenset[str]], None] = lambda keys: None) -> None:
        self._engine, self._committed = engine, committed
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="penstock-writer", daemon=True)
        self._thread.start()

    def submit(self, key: str, change: Change[T]) -> Future[T]:
        """Ask for a change of what ``key`` names (a job's uid, or a table); the future ends after the commit."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise WriterClosedError("the service is ending")
            self._asked.put(_Asked(key, change, future))
        return future

    def write(self, key: str, change: Change[T]) -> T:
        """The same, waited for."""
        return self.submit(key, change).result()

    def close(self) -> None:
        """Commit what was asked for, and end."""
        with self._lock:
            already, self._closed = self._closed, True
        if not already:
            self._asked.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self._asked.get()) is not None:
            batch, ended = self._gathered(first)
            self._commit(sorted(batch, key=lambda asked: asked.key))
            if ended:
                return

    def _gathered(self, first: _Asked) -> tuple[list[_Asked], bool]:
        """What waits already, and whether the end waits behind it."""
        batch = [first]
        while len(batch) < MOST_CHANGES_PER_COMMIT:
            try:
                following = self._asked.get_nowait()
            except queue.Empty:
                break
            if following is None:
                return batch, True
            batch.append(following)
        return batch, False

    def _commit(self, batch: list[_Asked]) -> None:
        running = [asked for asked in batch if asked.future.set_running_or_notify_cancel()]
        try:
            outcomes = self._transaction(running)
        except Exception as error:  # whatever it is, those who wait have to hear of it
            for asked in running:
                asked.future.set_exception(error)
            return
        for asked, outcome in zip(running, outcomes, strict=True):
            if isinstance(outcome, Exception):
                asked.future.set_exception(outcome)
            else:
                asked.future.set_result(outcome)
        self._committed(frozenset(asked.key for asked in running))

    def _transaction(self, batch: list[_Asked]) -> list[Any]:
        """Every change's result, or the exception it alone failed with."""
        for attempt in range(1, MOST_ATTEMPTS + 1):
            try:
                with self._engine.connect().execution_options(writes=True) as connection, connection.begin():
                    return [_outcome(connection, asked.change) for asked in batch]
            except DBAPIError as error:
                if attempt == MOST_ATTEMPTS or not is_conflict(error):
                    raise
        raise AssertionError("the last attempt returns or raises")


def _outcome(connection: Connection, change: Change[Any]) -> Any:
    """Conflicts and lost connections concern the whole transaction and are raised."""
    try:
        with connection.begin_nested():
            return change(connection)
    except DBAPIError as error:
        if is_conflict(error) or error.connection_invalidated:
            raise
        return error
    except Exception as error:
        return error


def is_conflict(error: DBAPIError) -> bool:
    """Whether another transaction was in the way, so that a new try may well succeed."""
    return getattr(error.orig, "sqlstate", None) in CONFLICTS
