"""How commands are declared: groups of `penstock --help`, an example in the help, and options that commands share."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from penstock.cli.output import Format

EXAMPLE = "Example: "
Command = TypeVar("Command", bound=Callable[..., None])

Job = Annotated[Path, typer.Argument(help="Manifest of the job.")]
RunDirectory = Annotated[Path | None, typer.Option("--run-dir", help="Directory of the run.")]
ExistingRun = Annotated[Path, typer.Argument(help="Directory of a run.")]
Cluster = Annotated[Path | None, typer.Option("--cluster", help="Description of the hardware to plan for.")]
Costs = Annotated[
    Path | None, typer.Option("--costs", help="CSV file with seconds of units that were measured elsewhere.")
]
MeasuredProfile = Annotated[Path | None, typer.Option("--profile", help="Profile to plan with.")]
MetricsPort = Annotated[
    int | None, typer.Option("--metrics-port", min=1, max=65_535, help="Port to serve Prometheus metrics.")
]
Output = Annotated[Format, typer.Option("--output", "-o", help="Format of the data on stdout.")]
Server = Annotated[str | None, typer.Option("--server", help="URL of the service; by default the configured one.")]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the job.")]
Name = Annotated[str, typer.Argument(help="Name of the job.")]


class Group(enum.StrEnum):
    """Tasks by which the help lists commands, in the order of the list."""

    START = "Get started"
    PLAN = "Plan before training"
    TRAIN = "Train on this machine"
    RESULTS = "Use the results of a run"
    JOBS = "Work with the jobs of a service"
    SERVICE = "Run a service"


def command(app: typer.Typer, group: Group, example: str, name: str | None = None) -> Callable[[Command], Command]:
    """Decorator that adds a command to the group, with an example below its help."""
    return app.command(name, rich_help_panel=group.value, epilog=f"{EXAMPLE}{example}")


def add_family(app: typer.Typer, group: Group, name: str, text: str, example: str) -> typer.Typer:
    """Add commands that share their first word to the group; return the application to which they are added."""
    family = typer.Typer(no_args_is_help=True, help=text, epilog=f"{EXAMPLE}{example}")
    app.add_typer(family, name=name, rich_help_panel=group.value)
    return family
