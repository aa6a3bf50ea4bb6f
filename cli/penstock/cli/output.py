"""Output of the command: only data on stdout, messages on stderr.

rich is loaded with the first printed line, so that completion stays quick.
"""

from __future__ import annotations

import enum
import functools
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock.core.errors import UserError, mistakes_in

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Column, Table
    from rich.text import Text

Lines = list["RenderableType"]
"""A result for people: lines, tables and pictures."""

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


def show(*renderables: RenderableType, style: str | None = None) -> None:
    """Print a result on stdout, colored on a terminal; square brackets are literal."""
    console = stdout()
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    for renderable in renderables:
        console.print(renderable, style=style, markup=False, soft_wrap=isinstance(renderable, str))


@functools.cache
def stdout() -> Console:
    """Return the console on stdout."""
    from rich.console import Console

    return Console(highlight=False)


def present(form: Format, lines: Callable[[], Sequence[RenderableType]], data: Callable[[], Any]) -> None:
    """Print a result on stdout: the ``lines`` for people, or the ``data`` for programs."""
    if form is Format.TEXT:
        show(*lines())
    else:
        write_data(data(), form)


def table(*columns: str | Column, **options: Any) -> Table:
    """Return a table without borders."""
    from rich.table import Table

    return Table(*columns, box=None, **options)


def text(*parts: str | tuple[str, str]) -> Text:
    """Join parts, each a plain string or one with its style."""
    from rich.text import Text

    return Text.assemble(*parts)


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
    for mistake in mistakes_in(error):
        place = f"{mistake.where}: " if mistake.where else ""
        say(text(("error ", "bold red"), (place, "bold"), mistake.what))
        if mistake.remedy:
            say(text(("remedy ", "bold green"), mistake.remedy))


def say_failure(message: str, hint: str = "") -> None:
    """Print the failure of a run that is no mistake of the user."""
    say(text(("failed ", "bold red"), message))
    if hint:
        say(text(("next ", "bold green"), hint))
