"""First steps: `init` writes a manifest, `doctor` checks this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.declarations import Group, Output, command
from penstock.cli.output import Format
from penstock.core.job import Device

app = typer.Typer()


@command(app, Group.START, "penstock init job.yaml --name my-job")
def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("job.yaml"),
    name: Annotated[str, typer.Option(help="Name of the job.")] = "my-job",
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write a commented manifest to edit."""
    from penstock.cli.template import write_template

    write_template(path, name, overwrite=force)
    output.say(f"wrote {path}; next: penstock run {path}")


@command(app, Group.START, "penstock doctor --device cpu")
def doctor(
    device: Annotated[
        Device | None, typer.Option(help="Test ranks only on this device; by default on all devices of this machine.")
    ] = None,
    form: Output = Format.TEXT,
) -> None:
    """Check this machine for training: list resources, problems and remedies, and test ranks."""
    from penstock.cli.local.doctor import examine, rendered

    findings = examine(Path.cwd(), device)
    output.present(form, lambda: rendered(findings), lambda: [finding.to_manifest() for finding in findings])
    if not all(finding.fine for finding in findings):
        raise typer.Exit(2)
