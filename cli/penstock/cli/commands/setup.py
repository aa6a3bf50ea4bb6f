"""Getting started: `init` writes a manifest, `doctor` checks this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.options import Output
from penstock.cli.output import Format
from penstock.core.job import Device


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(init)
    app.command()(doctor)


def init(
    path: Annotated[Path, typer.Argument(help="The manifest to write.")] = Path("job.yaml"),
    name: Annotated[str, typer.Option(help="The job's name.")] = "my-job",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented manifest to start from."""
    from penstock.cli.template import write_template

    write_template(path, name, overwrite=force)
    output.say(f"wrote {path}; next: penstock run {path}")


def doctor(
    device: Annotated[Device | None, typer.Option(help="Try ranks on this device alone; all that are here.")] = None,
    form: Output = Format.TEXT,
) -> None:
    """Check this machine for training: list its resources, problems and their remedies; try ranks out."""
    from penstock.cli.local.doctor import examine, rendered

    findings = examine(Path.cwd(), device)
    if form is Format.TEXT:
        output.show(*rendered(findings))
    else:
        output.write_data([finding.to_manifest() for finding in findings], form)
    if not all(finding.fine for finding in findings):
        raise typer.Exit(2)
