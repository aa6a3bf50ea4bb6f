"""Logs, status and files of a service's jobs: `logs`, `top`, `download`, and `retry`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.options import Output
from penstock.cli.commands.remote import Name, Namespace, Server, place
from penstock.cli.output import Format


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (logs, top, download, retry):
        app.command()(command)


def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    rank: Annotated[int | None, typer.Option(min=-1, help="Only this rank; -1: the supervisor.")] = None,
    tail: Annotated[int | None, typer.Option(min=1, max=2000, help="Only this many last lines.")] = None,
    server: Server = None,
    namespace: Namespace = "default",
) -> None:
    """Print what a job's ranks print."""
    from penstock.cli.fetching import show_logs
    from penstock.cli.remote import connected

    with connected(server) as client:
        show_logs(client, place(name, namespace), rank=rank, tail=tail, follow=follow)


def top(
    server: Server = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Only jobs of this namespace.")] = None,
) -> None:
    """Show all jobs as they change; Ctrl-C ends."""
    from penstock.cli.remote import connected
    from penstock.cli.top import show_board

    with connected(server) as client:
        show_board(client, namespace)


def download(
    name: Name,
    files: Annotated[list[str] | None, typer.Argument(help="Files or patterns; listed if left out.")] = None,
    to: Annotated[Path | None, typer.Option("--to", help="The folder to write; else one of the job's name.")] = None,
    export: Annotated[bool, typer.Option("--export", help="The newest checkpoint, for other programs.")] = False,
    server: Server = None,
    namespace: Namespace = "default",
    form: Output = Format.TEXT,
) -> None:
    """Download files of a job, or list them."""
    from penstock.cli.fetching import download as fetch
    from penstock.cli.fetching import export_newest, show_artifacts
    from penstock.cli.remote import connected

    with connected(server) as client:
        job, patterns = place(name, namespace), list(files or ())
        if export:
            patterns.append(export_newest(client, job))
        if not patterns:
            show_artifacts(client.artifacts(job), form)
            return
        for path in fetch(client, job, patterns, to or Path(name)):
            output.write(str(path))


def retry(
    name: Name,
    called: Annotated[
        str | None, typer.Option("--as", help="The new job's name; else the old one's, numbered.")
    ] = None,
    server: Server = None,
    namespace: Namespace = "default",
    form: Output = Format.TEXT,
) -> None:
    """Make a new job of one that has ended; it goes on from the newest checkpoint."""
    from penstock.cli.remote import connected, show_jobs

    with connected(server) as client:
        show_jobs([client.retry(place(name, namespace), called)], form)
