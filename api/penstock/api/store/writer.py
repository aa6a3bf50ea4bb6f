"""The one writer: changes that are requested at about the same time share a transaction, and so a sync of the disk.

A change is a function of a connection, and its future is resolved only after the commit. One that fails takes nothing
else with it: the transaction is done again, with a savepoint around each change. A change may therefore run more than
once (also when the database gives up a transaction in a conflict with another service), and must depend on nothing but
what it reads from the connection.

Changes of which there are many a second are joint: one function makes all of a transaction's, with as many statements
as one of them needs. If it fails, each is made alone, so that only the one at fault fails.

Changes of one transaction run in the order of their keys: two services that change the same jobs lock them in the same
order, and so seldom wait in a circle.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

I = TypeVar("I")  # noqa: E741, the input of a joint change
T = TypeVar("T")
Change = Callable[[Connection], T]
Joint = Callable[[Connection, Sequence[I]], Sequence[T | Exception]]
"""Makes several changes; the outcome of each, in their order."""

MOST_CHANGES_PER_COMMIT = 128
MOST_ATTEMPTS = 8
CONFLICTS = frozenset({"40001", "40P01"})
"""SQLSTATE of a serialization failure and of a deadlock: try again."""


class WriterClosedError(RuntimeError):
    """A change was requested while the service was ending."""


@dataclass(frozen=True, slots=True)
class _Queued:
    key: str
    joint: Joint[Any, Any]
    item: Any
    future: Future[Any]


class Writer:
    """Commits changes in one thread, which calls ``committed`` with the keys of all changes of a transaction."""

    def __init__(self, engine: Engine, committed: Callable[[Sequence[str]], None] = lambda keys: None) -> None:
        self._engine, self._committed = engine, committed
        self._queued: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="penstock-writer", daemon=True)
        self._thread.start()

    def submit(self, key: str, change: Change[T]) -> Future[T]:
        """Queue a change of ``key`` (a job's uid, or a table); the future ends after the commit."""
        return self.submit_joint(key, lambda connection, items: [change(connection)], None)

    def submit_joint(self, key: str, joint: Joint[I, T], item: I) -> Future[T]:
        """The same, of a change that ``joint`` makes together with others that it is to make at the time."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise WriterClosedError("the service is ending")
            self._queued.put(_Queued(key, joint, item, future))
        return future

    def write(self, key: str, change: Change[T]) -> T:
        """The same, waited for."""
        return self.submit(key, change).result()

    def close(self) -> None:
        """Commit queued changes, and end."""
        with self._lock:
            already, self._closed = self._closed, True
        if not already:
            self._queued.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self._queued.get()) is not None:
            batch, ended = self._gathered(first)
            self._commit(sorted(batch, key=lambda write: write.key))
            if ended:
                return

    def _gathered(self, first: _Queued) -> tuple[list[_Queued], bool]:
        """The queued changes, and whether the end follows them."""
        batch = [first]
        while len(batch) < MOST_CHANGES_PER_COMMIT:
            try:
                following = self._queued.get_nowait()
            except queue.Empty:
                break
            if following is None:
                return batch, True
            batch.append(following)
        return batch, False

    def _commit(self, batch: list[_Queued]) -> None:
        running = [write for write in batch if write.future.set_running_or_notify_cancel()]
        try:
            outcomes = self._transaction(running)
        except Exception as error:  # of any kind: the waiting callers need it
            for write in running:
                write.future.set_exception(error)
            return
        for write, outcome in zip(running, outcomes, strict=True):
            if isinstance(outcome, Exception):
                write.future.set_exception(outcome)
            else:
                write.future.set_result(outcome)
        self._committed([write.key for write in running])

    def _transaction(self, batch: list[_Queued]) -> list[Any]:
        """Every change's result, or the exception it alone failed with."""
        make, conflicts = _make_at_once, 0
        while True:
            try:
                with self._engine.connect().execution_options(writes=True) as connection, connection.begin():
                    return _outcomes(connection, batch, make)
            except Exception as error:
                if isinstance(error, DBAPIError) and is_conflict(error):
                    conflicts += 1
                    if conflicts == MOST_ATTEMPTS:
                        raise
                elif make is _make_apart or len(batch) == 1:
                    raise
                else:
                    make = _make_apart


Make = Callable[[Connection, Joint[Any, Any], Sequence[Any]], Sequence[Any]]


def _outcomes(connection: Connection, batch: list[_Queued], make: Make) -> list[Any]:
    members: dict[Joint[Any, Any], list[int]] = {}
    for number, write in enumerate(batch):
        members.setdefault(write.joint, []).append(number)
    outcomes: dict[int, Any] = {}
    for joint, numbers in members.items():
        made = make(connection, joint, [batch[number].item for number in numbers])
        outcomes.update(zip(numbers, made, strict=True))
    return [outcomes[number] for number in range(len(batch))]


def _make_at_once(connection: Connection, joint: Joint[Any, Any], items: Sequence[Any]) -> Sequence[Any]:
    try:
        return joint(connection, items)
    except DBAPIError as error:
        raise _cause(connection, error) from error


def _make_apart(connection: Connection, joint: Joint[Any, Any], items: Sequence[Any]) -> Sequence[Any]:
    return [_make_alone(connection, joint, item) for item in items]


def _make_alone(connection: Connection, joint: Joint[Any, Any], item: Any) -> Any:
    """Raise errors of the whole transaction: conflicts, lost connections, a rollback."""
    try:
        with connection.begin_nested():
            return joint(connection, [item])[0]
    except DBAPIError as error:
        if is_conflict(error) or error.connection_invalidated or _given_up(connection):
            raise _cause(connection, error) from error
        return error
    except Exception as error:
        return error


def _given_up(connection: Connection) -> bool:
    """Whether SQLite has rolled back the whole transaction by itself, as it may on a full disk. The only sign is the
    end of the savepoint, which fails, because there is none any more; and a commit would seem to succeed.
    """
    return getattr(connection.connection.dbapi_connection, "in_transaction", True) is False


def _cause(connection: Connection, error: DBAPIError) -> DBAPIError:
    """The first error, if a savepoint's end only failed because of it."""
    cause, before = error, error.__context__
    while _given_up(connection) and before is not None:
        cause, before = before if isinstance(before, DBAPIError) else cause, before.__context__
    return cause


def is_conflict(error: DBAPIError) -> bool:
    """Whether another transaction was in the way, so that a new try may well succeed."""
    return getattr(error.orig, "sqlstate", None) in CONFLICTS
