"""Display of progress: in the last line of a terminal, elsewhere as a plain line every few seconds."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from penstock.cli import output

PLAIN_SECONDS = 5.0


class Line(Protocol):
    """A display of progress."""

    def update(self, text: str, done: float | None) -> None:
        """Show the newest text and, if it is known, the finished share."""

    def close(self) -> None:
        """End the display."""


class PlainLine:
    """Plain line every few seconds, for logs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next = clock() + PLAIN_SECONDS

    def update(self, text: str, done: float | None) -> None:
        if self._clock() >= self._next:
            self._next = self._clock() + PLAIN_SECONDS
            output.say(f"  {text}")

    def close(self) -> None:
        """Do nothing: printed lines stay."""


class LiveLine:
    """Last line of a terminal, with a bar if the total is known."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        columns = (SpinnerColumn(), BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        self._progress = Progress(*columns, console=output.terminal(), transient=True, refresh_per_second=8)
        self._task = self._progress.add_task("", total=None)

    def update(self, text: str, done: float | None) -> None:
        if not self._progress.live.is_started:
            self._progress.start()
        total = None if done is None else 1.0
        self._progress.update(self._task, description=text, total=total, completed=done or 0.0)

    def close(self) -> None:
        if self._progress.live.is_started:
            self._progress.stop()


def line() -> Line:
    """Return the display for stderr."""
    return LiveLine() if output.terminal().is_terminal else PlainLine(time.monotonic)


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show ``text`` until the block ends; the block may report its progress."""
    with contextlib.closing(line()) as shown:
        shown.update(text, None)
        yield lambda progress: shown.update(f"{text}: {progress}", None)
