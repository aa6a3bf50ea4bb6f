"""Work with the jobs of a service: submit and watch them, read their logs, download their files, end them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.declarations import Group, Job, Name, Namespace, Output, Server, command
from penstock.cli.output import Format

if TYPE_CHECKING:
    from penstock.client import Place

app = typer.Typer()


@command(app, Group.JOBS, "penstock submit job.yaml --watch")
def submit(
    job: Job,
    server: Server = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the job, also by the service if there is one.")
    ] = False,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Watch the job until it has ended.")] = False,
    form: Output = Format.TEXT,
) -> None:
    """Submit a job to a service."""
    from penstock.cli.manifests import read_for_service
    from penstock.cli.remote import checked, connected, show_jobs, watch_job

    pipeline_job = read_for_service(job, output.warn)
    if dry_run:
        current = checked(pipeline_job, server)
        outcome = "the service accepts it" if current else "no service has checked it, because none is configured"
        output.say(f"{job} is a valid PipelineJob; {outcome}")
        if current and form is not Format.TEXT:
            show_jobs([current], form)
        return
    with connected(server) as client:
        made = client.submit(pipeline_job)
        if follow:
            raise typer.Exit(watch_job(client, place(made.name, made.namespace)))
        show_jobs([made], form)


@command(app, Group.JOBS, "penstock status my-job")
def status(
    name: Annotated[str | None, typer.Argument(help="Name of the job; without it, all jobs are listed.")] = None,
    server: Server = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Only jobs of this namespace.")] = None,
    form: Output = Format.TEXT,
) -> None:
    """Show the status of a job, or list all jobs."""
    from penstock.cli.remote import connected, last_words_of, show_job, show_jobs

    with connected(server) as client:
        if name is None:
            show_jobs(list(client.jobs(namespace=namespace)), form)
        else:
            current = client.get(place(name, namespace or "default"))
            show_job(current, form, last_words_of(client, current))


@command(app, Group.JOBS, "penstock watch my-job")
def watch(name: Name, server: Server = None, namespace: Namespace = "default") -> None:
    """Show phases and steps of a job until it has ended or is suspended."""
    from penstock.cli.remote import connected, watch_job

    with connected(server) as client:
        raise typer.Exit(watch_job(client, place(name, namespace)))


@command(app, Group.JOBS, "penstock suspend my-job")
def suspend(name: Name, server: Server = None, namespace: Namespace = "default", form: Output = Format.TEXT) -> None:
    """Suspend a job: save a checkpoint after the current step, and release its devices."""
    from penstock.cli.remote import connected, show_jobs

    with connected(server) as client:
        show_jobs([client.suspend(place(name, namespace))], form)


@command(app, Group.JOBS, "penstock delete my-job --namespace research")
def delete(name: Name, server: Server = None, namespace: Namespace = "default", form: Output = Format.TEXT) -> None:
    """Delete a job: it ends, and its name is free; its records stay readable by its uid."""
    from penstock.cli.remote import connected, show_jobs

    with connected(server) as client:
        deleted = client.delete(place(name, namespace))
    if form is not Format.TEXT:
        show_jobs([deleted], form)
    else:
        output.say(
            f"deleted {deleted.namespace}/{deleted.name}: it ends, and its name is free; its uid is {deleted.uid}"
        )


@command(app, Group.JOBS, "penstock ui --print")
def ui(
    server: Server = None,
    only_print: Annotated[bool, typer.Option("--print", help="Only print the link.")] = False,
) -> None:
    """Open the service's pages in the browser, signed in by a link for one use within a minute."""
    from penstock.cli.remote import connected, open_browser

    with connected(server) as client:
        link = client.login_link()
    if only_print:
        output.write(link.url)
    else:
        open_browser(link)


@command(app, Group.JOBS, "penstock logs my-job --follow --rank 0")
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


@command(app, Group.JOBS, "penstock top --namespace research")
def top(
    server: Server = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Only jobs of this namespace.")] = None,
) -> None:
    """Show all jobs and their changes until Ctrl-C."""
    from penstock.cli.remote import connected
    from penstock.cli.top import show_board

    with connected(server) as client:
        show_board(client, namespace)


@command(app, Group.JOBS, "penstock download my-job report.html --to results")
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


@command(app, Group.JOBS, "penstock retry my-job --as my-job-again")
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


def place(name: str, namespace: str) -> Place:
    """Return the place of a job."""
    from penstock.client import Place

    return Place(name=name, namespace=namespace)
