"""What the parts that follow a cluster ask of the service: its store, and the time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from sqlalchemy import Connection

T = TypeVar("T")


class Keeper(Protocol):
    """See `penstock.api.service.Service`, which is one."""

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds since the epoch."""
        ...

    def read(self, question: Callable[[Connection], T]) -> T:
        """What ``question`` finds, of one state of the database."""
        ...

    def write(self, key: str, change: Callable[[Connection], T]) -> T:
        """Change what ``key`` names, and wait for the commit."""
        ...

    def submit(self, key: str, change: Callable[[Connection], T]) -> Future[T]:
        """The same, for those who wait otherwise."""
        ...
