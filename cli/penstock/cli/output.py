"""Output of the command: only data on stdout, messages on stderr.

rich is loaded with the first printed line, so that completion stays quick.
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
    """Format of data on stdout."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


@functools.cache
def terminal() -> Console:
    """Return the console on stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(line: RenderableType = "", style: str | None = None) -> None:
    """Print one line on stderr; square brackets are literal."""
    terminal().print(line, style=style, markup=False, soft_wrap=True)


def show(*renderables: RenderableType) -> None:
    """Print a result on stdout."""
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
    """Return the console on stdout."""
    from rich.console import Console

    return Console(highlight=False)


def age_seconds(instant: str) -> float:
    """Return the seconds since a time in ISO 8601."""
    return (datetime.now(UTC) - datetime.fromisoformat(instant)).total_seconds()


def write(text: str) -> None:
    """Write text to stdout, unchanged and with one line break at the end."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    sys.stdout.flush()


def write_data(manifest: Any, form: Format) -> None:
    """Write plain data to stdout as JSON or YAML."""
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
    """Show ``text`` until the block ends; the block may report its progress.

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
    """Return the number of columns for pictures on stdout."""
    return shutil.get_terminal_size((PIPED_COLUMNS, 24)).columns


def printable(text: str) -> str:
    """Return ``text`` without terminal control characters."""
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
    """Print the failure of a run that is no mistake of the user."""
    from rich.text import Text

    say(Text.assemble(("failed ", "bold red"), message))
    if hint:
        say(Text.assemble(("next ", "bold green"), hint))
