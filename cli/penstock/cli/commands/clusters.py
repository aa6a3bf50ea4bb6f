"""Described hardware: `cluster init` writes a description to start from, `cluster list` shows the kinds of device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.options import Output
from penstock.cli.output import Format


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    clusters = typer.Typer(no_args_is_help=True, help="Descriptions of hardware to plan for.")
    clusters.command("init")(init)
    clusters.command("list")(list_kinds)
    app.add_typer(clusters, name="cluster")


def init(
    path: Annotated[Path, typer.Argument(help="The description to write.")] = Path("cluster.yaml"),
    device: Annotated[str, typer.Option(help="The kind of device; `penstock cluster list` shows all.")] = "h100",
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes of the kind's usual size.")] = 1,
    name: Annotated[str, typer.Option(help="The cluster's name, for people.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented description of a cluster, to plan for with `penstock plan JOB --cluster PATH`."""
    from penstock.cli.cluster_template import write_description

    write_description(path, device, nodes, name, overwrite=force)
    output.say(f"wrote {path}; next: penstock plan JOB --cluster {path}")


def list_kinds(form: Output = Format.TEXT) -> None:
    """List the kinds of device that `cluster init` can describe."""
    from penstock.cli.cluster_template import kinds_data, kinds_table

    if form is Format.TEXT:
        output.show(kinds_table())
    else:
        output.write_data(kinds_data(), form)
