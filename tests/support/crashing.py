"""The end of a process at any moment that matters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


class CrashError(BaseException):
    """The service is killed; nothing catches this."""


@dataclass
class Crash:
    """Kills the service at the ``at``-th moment before or after it changes anything outside of itself."""

    at: int
    moments: int = 0

    def around(self, do: Callable[[], T]) -> T:
        """Two moments: the change is not made, or made and not heard of."""
        self.moment()
        done = do()
        self.moment()
        return done

    def moment(self) -> None:
        """A moment at which the service may be killed."""
        self.moments += 1
        if self.moments == self.at:
            raise CrashError

    @property
    def came(self) -> bool:
        """Whether it was."""
        return self.moments >= self.at
