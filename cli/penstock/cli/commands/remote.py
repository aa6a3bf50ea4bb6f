"""Working with a service's jobs: `submit`, `status`, `watch`, `suspend`, `delete` and `ui`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.listed import Group, add
from penstock.cli.commands.options import Job as Manifest
from penstock.cli.commands.options import Output
from penstock.cli.output import Format

if TYPE_CHECKING:
    from penstock.client import Place

Server = Annotated[str | None, typer.Option("--server", help="URL of the service; by default the configured one.")]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the job.")]
Name = Annotated[str, typer.Argument(help="Name of the job.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    add(app, Group.JOBS, submit, "penstock submit job.yaml --watch")
    add(app, Group.JOBS, status, "penstock status my-job")
    add(app, Group.JOBS, watch, "penstock watch my-job")
    add(app, Group.JOBS, suspend, "penstock suspend my-job")
    add(app, Group.JOBS, delete, "penstock delete my-job --namespace research")
    add(app, Group.JOBS, ui, "penstock ui --print")


def submit(
    job: Manifest,
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


def watch(name: Name, server: Server = None, namespace: Namespace = "default") -> None:
    """Show phases and steps of a job until it has ended or is suspended."""
    from penstock.cli.remote import connected, watch_job

    with connected(server) as client:
        raise typer.Exit(watch_job(client, place(name, namespace)))


def suspend(name: Name, server: Server = None, namespace: Namespace = "default", form: Output = Format.TEXT) -> None:
    """Suspend a job: save a checkpoint after the current step, and release its devices."""
    from penstock.cli.remote import connected, show_jobs

    with connected(server) as client:
        show_jobs([client.suspend(place(name, namespace))], form)


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


def place(name: str, namespace: str) -> Place:
    """Return the place of a job."""
    from penstock.client import Place

    return Place(name=name, namespace=namespace)
