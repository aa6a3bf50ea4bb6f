"""Interface of the service for the modules that follow a cluster: store and clock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from sqlalchemy import Connection

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
