"""Logs, status and files of a service's jobs: `logs`, `top`, `download` and `retry`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.listed import Group, add
from penstock.cli.commands.options import Output
from penstock.cli.commands.remote import Name, Namespace, Server, place
from penstock.cli.output import Format


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    add(app, Group.JOBS, logs, "penstock logs my-job --follow --rank 0")
    add(app, Group.JOBS, top, "penstock top --namespace research")
    add(app, Group.JOBS, download, "penstock download my-job report.html --to results")
    add(app, Group.JOBS, retry, "penstock retry my-job --as my-job-again")


def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
    rank: Annotated[int | None, typer.Option(min=-1, help="Only this rank; -1: the supervisor.")] = None,
    tail: Annotated[int | None, typer.Option(min=1, max=2000, help="Only the last N lines.")] = None,
    server: Server = None,
    namespace: Namespace = "default",
) -> None:
    """Print the output of a job's ranks."""
    from penstock.cli.fetching import show_logs
    from penstock.cli.remote import connected

    with connected(server) as client:
        show_logs(client, place(name, namespace), rank=rank, tail=tail, follow=follow)


def top(
    server: Server = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Only jobs of this namespace.")] = None,
) -> None:
    """Show all jobs and their changes until Ctrl-C."""
    from penstock.cli.remote import connected
    from penstock.cli.top import show_board

    with connected(server) as client:
        show_board(client, namespace)


def download(
    name: Name,
    files: Annotated[
        list[str] | None, typer.Argument(help="Files or patterns; without any, all files are listed.")
    ] = None,
    to: Annotated[Path | None, typer.Option("--to", help="Folder to write; by default the job's name.")] = None,
    export: Annotated[bool, typer.Option("--export", help="Export the newest checkpoint for other programs.")] = False,
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
        str | None, typer.Option("--as", help="Name of the new job; by default the old one with a number.")
    ] = None,
    server: Server = None,
    namespace: Namespace = "default",
    form: Output = Format.TEXT,
) -> None:
    """Create a new job from one that has ended; it continues from the newest checkpoint."""
    from penstock.cli.remote import connected, show_jobs

    with connected(server) as client:
        show_jobs([client.retry(place(name, namespace), called)], form)
