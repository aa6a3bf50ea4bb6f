"""Requests to stop: SIGINT and SIGTERM are counted, and cut short only what says that it may be."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequestedError(BaseException):
    """Raised out of work that may be cut short anywhere; neither an Exception nor a KeyboardInterrupt, of which
    libraries make something of their own.

    ``signal`` is the number of the one that asked.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


class StopRequests:
    """Who asked to stop, in order; installed for the main thread by `listening`."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._cutting = False

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        """A signal arrived."""
        self.received.append(number)
        if self._cutting:
            self._cutting = False
            raise StopRequestedError(number)

    def check(self) -> None:
        """Raise `StopRequestedError` if anybody asked."""
        if self.received:
            raise StopRequestedError(self.received[0])

    @contextlib.contextmanager
    def cutting(self) -> Iterator[None]:
        """A signal ends the block by `StopRequestedError`, also one that came just before."""
        self._cutting = not self.received
        try:
            self.check()
            yield
        finally:
            self._cutting = False


@contextlib.contextmanager
def listening() -> Iterator[StopRequests]:
    """SIGINT and SIGTERM go to the requests until the block ends."""
    requests = StopRequests()
    before = {number: signal.signal(number, requests) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
