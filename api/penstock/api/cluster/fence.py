"""The store for modules that follow a cluster, and fencing: writes are refused once another service has the Lease."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from sqlalchemy import Connection

from penstock.api.store import epochs

T = TypeVar("T")


class StoreAccess(Protocol):
    """The store and the clock; `penstock.api.service.Service` has this interface."""

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds since the epoch."""

    def read(self, question: Callable[[Connection], T]) -> T:
        """Return the result of ``question``, on one snapshot of the database."""

    def write(self, key: str, change: Callable[[Connection], T]) -> T:
        """Make a change of ``key``, and wait for the commit."""

    def submit(self, key: str, change: Callable[[Connection], T]) -> Future[T]:
        """Like `write`, but return a future."""


class Fence:
    """Forwards calls to ``store``. After `begin`, each write belongs to the epoch that `begin` started.

    A service that loses the Lease keeps its old epoch. So late writes of its watcher are refused as soon as another
    service has begun the next epoch. Requests to the API write to ``store`` directly: they do not need the Lease.
    """

    def __init__(self, store: StoreAccess) -> None:
        self._store = store
        self._epoch: int | None = None
        self._lost = False

    @property
    def valid(self) -> bool:
        """False once a write was refused because another service had begun a newer epoch."""
        return not self._lost

    def begin(self) -> None:
        """Begin a new epoch, after the Lease was taken."""
        self._epoch = self._store.write("epochs", epochs.begin)
        self._lost = False

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds since the Unix epoch."""
        return self._store.clock

    def read(self, question: Callable[[Connection], T]) -> T:
        """Return the result of ``question``, on one snapshot of the database."""
        return self._store.read(question)

    def write(self, key: str, change: Callable[[Connection], T]) -> T:
        """Make a change of ``key``, and wait for the commit; raises `LostLeaseError`."""
        return self.submit(key, change).result()

    def submit(self, key: str, change: Callable[[Connection], T]) -> Future[T]:
        """Like `write`, but return a future."""
        epoch = self._epoch
        if epoch is None:
            return self._store.submit(key, change)

        def fenced(connection: Connection) -> T:
            try:
                epochs.require(connection, epoch)
            except epochs.LostLeaseError:
                self._lost = epoch == self._epoch
                raise
            return change(connection)

        return self._store.submit(key, fenced)
