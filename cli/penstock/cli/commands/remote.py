"""Working with a service: `submit`, `status`, `watch`, `suspend`, `delete`, `ui`. `resume` and others named alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.options import Job as Manifest
from penstock.cli.commands.options import Output
from penstock.cli.output import Format

if TYPE_CHECKING:
    from penstock.client import Place

Server = Annotated[str | None, typer.Option("--server", help="The service's URL; else the one last set up here.")]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="The job's namespace.")]
Name = Annotated[str, typer.Argument(help="The job's name.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (submit, status, watch, suspend, delete, ui):
        app.command()(command)


def submit(
    job: Manifest,
    server: Server = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check it, also by the service if there is one.")
    ] = False,
    follow: Annotated[bool, typer.Option("--watch", "-w", help="Watch it until it has ended.")] = False,
    form: Output = Format.TEXT,
) -> None:
    """Submit a job to a service."""
    from penstock.cli.manifests import read_for_service
    from penstock.cli.remote import checked, connected, show_jobs, watch_job

    wanted = read_for_service(job, output.warn)
    if dry_run:
        current = checked(wanted, server)
        outcome = "the service accepts it" if current else "not checked by a service: none is configured"
        output.say(f"{job} is a valid PipelineJob; {outcome}")
        if current and form is not Format.TEXT:
            show_jobs([current], form)
        return
    with connected(server) as client:
        made = client.submit(wanted)
        if follow:
            raise typer.Exit(watch_job(client, place(made.name, made.namespace)))
        show_jobs([made], form)


def status(
    name: Annotated[str | None, typer.Argument(help="The job's name; all jobs if left out.")] = None,
    server: Server = None,
    namespace: Annotated[str | None, typer.Option("--namespace", "-n", help="Only jobs of this namespace.")] = None,
    form: Output = Format.TEXT,
) -> None:
    """Show a job's status, or list all jobs."""
    from penstock.cli.remote import connected, last_words_of, show_job, show_jobs

    with connected(server) as client:
        if name is None:
            show_jobs(list(client.jobs(namespace=namespace)), form)
        else:
            current = client.get(place(name, namespace or "default"))
            show_job(current, form, last_words_of(client, current))


def watch(name: Name, server: Server = None, namespace: Namespace = "default") -> None:
    """Show a job's phases and steps until it has ended or is suspended."""
    from penstock.cli.remote import connected, watch_job

    with connected(server) as client:
        raise typer.Exit(watch_job(client, place(name, namespace)))


def suspend(name: Name, server: Server = None, namespace: Namespace = "default", form: Output = Format.TEXT) -> None:
    """Checkpoint a job after its current step, and free its devices."""
    from penstock.cli.remote import connected, show_jobs

    with connected(server) as client:
        show_jobs([client.suspend(place(name, namespace))], form)


def delete(name: Name, server: Server = None, namespace: Namespace = "default", form: Output = Format.TEXT) -> None:
    """End a job and free its name; its records stay readable by its uid."""
    from penstock.cli.remote import connected, show_jobs

    with connected(server) as client:
        deleted = client.delete(place(name, namespace))
    if form is not Format.TEXT:
        show_jobs([deleted], form)
    else:
        output.say(
            f"deleted {deleted.namespace}/{deleted.name}: it ends, and its name is free; its uid is {deleted.uid}"
        )


def ui(
    server: Server = None,
    only_print: Annotated[bool, typer.Option("--print", help="Only print the link.")] = False,
) -> None:
    """Open the service's pages in the browser, signed in; the link holds once, for a minute."""
    from penstock.cli.remote import connected, open_browser

    with connected(server) as client:
        link = client.login_link()
    if only_print:
        output.write(link.url)
    else:
        open_browser(link)


def place(name: str, namespace: str) -> Place:
    """A job's place."""
    from penstock.client import Place

    return Place(name=name, namespace=namespace)
