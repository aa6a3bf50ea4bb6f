"""What the command prints: data alone on stdout, everything for people beside it on stderr.

rich is loaded with the first line that is printed, so that `--help` and completion stay quick.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import shutil
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from penstock.core.errors import UserError, mistakes_in

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


PIPED_COLUMNS = 120
"""How wide tables and pictures are where no terminal says."""


class Format(enum.StrEnum):
    """How data is printed."""

    TEXT = "text"
    JSON = "json"
    YAML = "yaml"


@functools.cache
def terminal() -> Console:
    """Where people look: stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(line: RenderableType = "", style: str | None = None) -> None:
    """One line for people; square brackets in it mean themselves."""
    terminal().print(line, style=style, markup=False, soft_wrap=True)


def show(*renderables: RenderableType) -> None:
    """A result for people on stdout."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    for each in renderables:
        console.print(each, markup=False, soft_wrap=isinstance(each, str))


def show_line(line: str, style: str | None = None) -> None:
    """One line of a result, colored where somebody watches; square brackets in it mean themselves."""
    stdout().print(line, style=style, markup=False, soft_wrap=True)


@functools.cache
def stdout() -> Console:
    """Where results go."""
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
    from penstock.planner import yamltext

    write(yamltext.dump(manifest))


def warn(line: str) -> None:
    """Something that people should know, on stderr."""
    say(line, style="yellow")


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Show that ``text`` is under way until the block ends, where somebody watches."""
    with terminal().status(text) if terminal().is_terminal else contextlib.nullcontext():
        yield


def terminal_width() -> int:
    """Columns for pictures on stdout."""
    return shutil.get_terminal_size((PIPED_COLUMNS, 24)).columns


def printable(text: str) -> str:
    """``text`` without what would command a terminal."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def say_error(error: UserError) -> None:
    """The user's mistakes: of each where, what, and what to do about it."""
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
