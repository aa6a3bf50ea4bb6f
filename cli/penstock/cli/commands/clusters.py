"""Described hardware: `cluster init` writes a description to edit, `cluster list` shows the kinds of device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.listed import Group, add, add_family
from penstock.cli.commands.options import Output
from penstock.cli.output import Format


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    clusters = add_family(
        app, Group.PLAN, "cluster", "Describe hardware to plan for.", "penstock cluster init cluster.yaml --nodes 4"
    )
    add(clusters, Group.PLAN, init, "penstock cluster init cluster.yaml --device h100 --nodes 4", "init")
    add(clusters, Group.PLAN, list_kinds, "penstock cluster list", "list")


def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("cluster.yaml"),
    device: Annotated[str, typer.Option(help="Kind of device; `penstock cluster list` shows all.")] = "h100",
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes, of the kind's usual size.")] = 1,
    name: Annotated[str, typer.Option(help="Name of the cluster, for reports.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented description of a cluster, for `penstock plan JOB --cluster PATH`."""
    from penstock.cli.cluster_template import write_description

    write_description(path, device, nodes, name, overwrite=force)
    output.say(f"wrote {path}; next: penstock plan JOB --cluster {path}")


def list_kinds(form: Output = Format.TEXT) -> None:
    """List the kinds of device that `penstock cluster init` can describe."""
    from penstock.cli.cluster_template import kinds_data, kinds_table

    if form is Format.TEXT:
        output.show(kinds_table())
    else:
        output.write_data(kinds_data(), form)
