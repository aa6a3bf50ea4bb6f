"""The groups of `penstock --help`, and commands with an example in their help."""

from __future__ import annotations

import enum
from collections.abc import Callable

import typer

EXAMPLE = "Example: "


class Group(enum.StrEnum):
    """Tasks by which the help lists commands, in the order of the list."""

    START = "Get started"
    PLAN = "Plan before training"
    TRAIN = "Train on this machine"
    RESULTS = "Use the results of a run"
    JOBS = "Work with the jobs of a service"
    SERVICE = "Run a service"


def add(app: typer.Typer, group: Group, command: Callable[..., None], example: str, name: str | None = None) -> None:
    """Add the command to the group, with an example below its help."""
    app.command(name, rich_help_panel=group.value, epilog=f"{EXAMPLE}{example}")(command)


def add_family(app: typer.Typer, group: Group, name: str, text: str, example: str) -> typer.Typer:
    """Add commands that share their first word to the group; return the application to which they are added."""
    family = typer.Typer(no_args_is_help=True, help=text, epilog=f"{EXAMPLE}{example}")
    app.add_typer(family, name=name, rich_help_panel=group.value)
    return family
