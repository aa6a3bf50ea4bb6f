"""Single writer of a service: concurrent changes share a transaction, and so one sync of the disk (group commit).

Problem. SQLite allows one write transaction at a time, and a durable commit waits for the disk: 4 to 10 ms on common
disks, so 100 to 250 transactions a second. A thousand jobs that report every 5 s are 200 batches of records a second,
in addition to requests of users. Each of them needs an answer only after its data is durable, and a mistake in one must
not affect the others.

Idea. A change is a function of a connection, and `Writer.submit` queues it with a future. One thread takes all queued
changes, up to `MOST_CHANGES_PER_COMMIT`, runs them in one transaction, and resolves their futures after the commit. The
longer a commit takes, the more changes gather meanwhile, so the rate of commits is bounded by the disk and the rate of
changes is not.

Example with commits of 5 ms and 400 changes a second: the first change commits alone in 5 ms; 2 changes gather in that
time and share the second commit, and so on: 200 commits of 2 changes. At 4,000 changes a second a commit has 20
changes, and still no caller waits longer than two commits, 10 ms.

Errors. The fast path makes all changes without savepoints. If one fails, the transaction is rolled back and repeated
with a savepoint around each change, so only the wrong one fails (`_make_apart`). A conflict with another service
(SQLSTATE 40001 or 40P01 on PostgreSQL) repeats the whole transaction, up to `MOST_ATTEMPTS` times. A change may
therefore run more than once: it must depend only on what it reads from the connection, and must have no effect outside
of it.

Frequent changes are joint (`submit_joint`): one function makes all changes of its kind in a transaction, with as many
statements as a single one needs. Twenty batches of records are then about ten statements instead of 200. If the
function fails, each change is made alone, as above.

Changes of one transaction run in the order of their keys. Two services on one database that change the same jobs lock
the rows in the same order, so deadlocks are rare.

Complexity. A transaction of n changes costs n functions and one commit; after a mistake, 2 n functions, n savepoints
and one commit. The queue holds at most the changes of the requests in progress, and the audit entries of ended ones.

Rejected designs:

- A connection for each request: on SQLite they would queue for the lock with busy timeouts, in no order, and each
  commit would sync alone.
- Savepoints always: two more statements for each change, which is more than a report's own work.
- Answers before the commit (``synchronous = OFF``): a power failure would lose acknowledged records.
- A delay to gather more changes: the time of a commit gathers them already, and an idle service answers at once.
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
"""Makes several changes; returns the outcome of each, in their order."""

MOST_CHANGES_PER_COMMIT = 128
MOST_ATTEMPTS = 8
CONFLICTS = frozenset({"40001", "40P01"})
"""SQLSTATE of a serialization failure and of a deadlock, after which a transaction is repeated."""


class WriterClosedError(RuntimeError):
    """A change was submitted during the shutdown of the service."""


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
        """Queue a change that ``joint`` makes together with others of the same transaction."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise WriterClosedError("the service is shutting down")
            self._queued.put(_Queued(key, joint, item, future))
        return future

    def write(self, key: str, change: Change[T]) -> T:
        """Queue a change, and wait for its commit."""
        return self.submit(key, change).result()

    def close(self) -> None:
        """Commit queued changes, and stop."""
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
        """Return the queued changes, and whether the shutdown follows them."""
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
        """Return the result of every change, or its exception."""
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
        raise _first_error(connection, error) from error


def _make_apart(connection: Connection, joint: Joint[Any, Any], items: Sequence[Any]) -> Sequence[Any]:
    return [_make_alone(connection, joint, item) for item in items]


def _make_alone(connection: Connection, joint: Joint[Any, Any], item: Any) -> Any:
    """Make one change; raise only errors of the whole transaction: conflicts, lost connections, a rollback."""
    try:
        with connection.begin_nested():
            return joint(connection, [item])[0]
    except DBAPIError as error:
        if is_conflict(error) or error.connection_invalidated or _is_rolled_back(connection):
            raise _first_error(connection, error) from error
        return error
    except Exception as error:
        return error


def _is_rolled_back(connection: Connection) -> bool:
    """Whether SQLite has rolled back the whole transaction by itself, as on a full disk.

    The only sign is the failing end of the savepoint, which no longer exists. A commit would seem to succeed.
    """
    return getattr(connection.connection.dbapi_connection, "in_transaction", True) is False


def _first_error(connection: Connection, error: DBAPIError) -> DBAPIError:
    """Return the first error, if the end of a savepoint failed only because of it."""
    cause, before = error, error.__context__
    while _is_rolled_back(connection) and before is not None:
        cause, before = before if isinstance(before, DBAPIError) else cause, before.__context__
    return cause


def is_conflict(error: DBAPIError) -> bool:
    """Whether another transaction was the cause, so that a repetition may succeed."""
    return getattr(error.orig, "sqlstate", None) in CONFLICTS
