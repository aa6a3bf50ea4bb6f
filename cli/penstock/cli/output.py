"""Output of the command: only data on stdout, everything for people on stderr.

rich is loaded with the first line that is printed, so that `--help` and completion stay quick.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock.core.errors import UserError, mistakes_in

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


REPORT_SECONDS = 10.0
"""Interval of progress reports without a terminal."""

PIPED_COLUMNS = 120
"""Width of tables and pictures without a terminal."""


class Format(enum.StrEnum):
    """How data is printed."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


@functools.cache
def terminal() -> Console:
    """The console for people: stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(line: RenderableType = "", style: str | None = None) -> None:
    """Print one line for people; square brackets are literal."""
    terminal().print(line, style=style, markup=False, soft_wrap=True)


def show(*renderables: RenderableType) -> None:
    """A result for people on stdout."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    for renderable in renderables:
        console.print(renderable, markup=False, soft_wrap=isinstance(renderable, str))


def show_line(line: str, style: str | None = None) -> None:
    """Print one line of a result, colored on a terminal; square brackets are literal."""
    stdout().print(line, style=style, markup=False, soft_wrap=True)


@functools.cache
def stdout() -> Console:
    """The console for results: stdout."""
    from rich.console import Console

    return Console(highlight=False)


def age_seconds(instant: str) -> float:
    """How long ago it was, of a time in ISO 8601."""
    return (datetime.now(UTC) - datetime.fromisoformat(instant)).total_seconds()


def write(text: str) -> None:
    """Text on stdout, unchanged and ended by one line break."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    sys.stdout.flush()


def write_data(manifest: Any, form: Format) -> None:
    """Plain data on stdout as JSON or YAML."""
    if form is Format.JSON:
        write(json.dumps(manifest, indent=1))
        return
    from penstock.core.serialization import yamltext

    write(yamltext.dump(manifest))


def warn(line: str) -> None:
    """Print a warning on stderr."""
    say(line, style="yellow")


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show that ``text`` is under way until the block ends; the block may report how far it is.

    A terminal shows the newest report in place. Elsewhere a report becomes a line, at most every `REPORT_SECONDS`.
    """
    if terminal().is_terminal:
        with terminal().status(text) as status:
            yield lambda progress: status.update(f"{text}: {progress}")
        return
    due_at = time.monotonic() + REPORT_SECONDS

    def report(progress: str) -> None:
        nonlocal due_at
        if time.monotonic() >= due_at:
            due_at = time.monotonic() + REPORT_SECONDS
            say(f"{text}: {progress}")

    yield report


def terminal_width() -> int:
    """Columns for pictures on stdout."""
    return shutil.get_terminal_size((PIPED_COLUMNS, 24)).columns


def printable(text: str) -> str:
    """``text`` without terminal control characters."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def say_error(error: UserError) -> None:
    """Print the user's mistakes: for each the place, the problem and the remedy."""
    from rich.text import Text

    for mistake in mistakes_in(error):
        place = f"{mistake.where}: " if mistake.where else ""
        say(Text.assemble(("error ", "bold red"), (place, "bold"), mistake.what))
        if mistake.remedy:
            say(Text.assemble(("remedy ", "bold green"), mistake.remedy))


def say_failure(message: str, hint: str = "") -> None:
    """A run that failed through no mistake of the user."""
    from rich.text import Text

    say(Text.assemble(("failed ", "bold red"), message))
    if hint:
        say(Text.assemble(("next ", "bold green"), hint))
