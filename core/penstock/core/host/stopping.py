"""Requests to stop: SIGINT and SIGTERM are recorded, and interrupt only code that allows it."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequestedError(BaseException):
    """Interrupts code that may be cut off anywhere. It is neither an Exception nor a KeyboardInterrupt, which libraries
    handle in their own ways.

    ``signal`` is the number of the requesting signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


class StopRequests:
    """The signals received, in order; installed for the main thread by `listening`."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._cutting = False

    def __call__(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal."""
        self.received.append(number)
        if self._cutting:
            self._cutting = False
            raise StopRequestedError(number)

    def check(self) -> None:
        """Raise `StopRequestedError` if a signal was received."""
        if self.received:
            raise StopRequestedError(self.received[0])

    @contextlib.contextmanager
    def cutting(self) -> Iterator[None]:
        """Let a signal end the block by `StopRequestedError`, also one that came just before."""
        self._cutting = not self.received
        try:
            self.check()
            yield
        finally:
            self._cutting = False


@contextlib.contextmanager
def listening() -> Iterator[StopRequests]:
    """Record SIGINT and SIGTERM until the block ends."""
    requests = StopRequests()
    before = {number: signal.signal(number, requests) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
