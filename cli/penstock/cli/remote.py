"""Display of a service's jobs on the command line."""

from __future__ import annotations

import os
import re
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import output
from penstock.cli.lines import line
from penstock.cli.output import Format, Lines
from penstock.client import Client, Job, LoginLink, Past, Place, Progress, ServiceError, Status, target
from penstock.client.config import configuration_file, configured_server
from penstock.core.errors import REMEDY, UserError
from penstock.core.failure import LAST_OUTPUT, read_failure
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import LOSSES, Phase
from penstock.core.serialization.files import write_secret
from penstock.core.speed import speed_columns
from penstock.core.units import format_age, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

COLORS = {Phase.SUCCEEDED: "green", Phase.FAILED: "red", Phase.RUNNING: "cyan", Phase.SUSPENDED: "yellow"}
FAILED = 1
_ROUTE = re.compile(r"(GET|POST) /v1/[\w/]*")
_COMMANDS = {"GET /v1/jobs": "penstock status", "GET /v1/tokens": "penstock token list"}


@contextmanager
def connected(server: str | None) -> Iterator[Client]:
    """Yield a client of the chosen service; its refusals are raised as mistakes of the user.

    Raises:
        UserError: no service or token is configured, or the service refused.
    """
    with Client(target(server, os.environ, Path.home())) as client:
        try:
            yield client
        except ServiceError as error:
            raise UserError(what=error.detail, where=error.where, remedy=as_commands(error.remedy)) from None


def as_commands(remedy: str) -> str:
    """``remedy`` with the service's routes replaced by the commands that call them."""
    return _ROUTE.sub(lambda route: _COMMANDS.get(route.group(), route.group()), remedy)


def checked(job: PipelineJob, server: str | None) -> Job | None:
    """Return the job that the service would create; none if no service is configured. Raises as `connected` does."""
    if configured_server(server, os.environ, Path.home()) is None:
        return None
    with connected(server) as client:
        return client.submit(job, dry_run=True)


def show_jobs(jobs: Sequence[Job], form: Format) -> None:
    """Print a line for each job, or all jobs as data."""
    if form is Format.TEXT and not jobs:
        output.say("no jobs; next: penstock submit JOB")
    else:
        output.present(form, lambda: [job_table(jobs)], lambda: [as_data(job) for job in jobs])


def show_job(job: Job, form: Format, last_words: Sequence[str] = ()) -> None:
    """Print one job, as text or as data; ``last_words`` are the last lines of the rank at fault."""
    output.present(form, lambda: job_lines(job, last_words), lambda: as_data(job))


def job_lines(job: Job, last_words: Sequence[str]) -> Lines:
    """Return the job as a table, and below it why it is in its phase."""
    if not job.status.message:
        return [job_table([job])]
    cause = failure_lines(job, last_words) if job.status.reason in LOSSES else [job.status.message]
    return [job_table([job]), *cause]


def failure_lines(job: Job, last_words: Sequence[str]) -> list[str]:
    """Return the failure, the log line that shows it, and at least one remedy."""
    diagnosis = read_failure(job.status.message, last_words)
    place = f"{job.name} --namespace {job.namespace}" if job.namespace != "default" else job.name
    rank = "" if diagnosis.rank is None else f" --rank {diagnosis.rank}"
    continuation = f"penstock retry {place} continues" if job.status.phase is Phase.FAILED else "the job continues"
    default = f"read penstock logs {place}{rank}; {continuation} from the last checkpoint"
    return [
        diagnosis.what,
        *(f"  {output.printable(line)}" for line in (diagnosis.evidence, *diagnosis.more) if line),
        *(f"  {REMEDY}{line}" for line in diagnosis.remedies or (default,)),
    ]


def last_words_of(client: Client, job: Job) -> tuple[str, ...]:
    """The last lines of the rank at fault, for a job that failed or is about to be restarted."""
    if job.status.reason not in LOSSES:
        return ()
    lines: tuple[str, ...] = ()
    after = 0
    while events := client.events(Past(uid=job.uid), after):
        after = events[-1].number
        for event in events:
            if event.kind == "phase":
                lines = tuple(event.body.get(LAST_OUTPUT, ()))
    return lines


def as_data(job: Job) -> dict[str, Any]:
    """The job with its status, as plain data."""
    return {**job.manifest, "status": job.status.to_manifest()}


def job_table(jobs: Sequence[Job]) -> Table:
    """Return a table of jobs, with namespaces if one is not the default. Names fold in a narrow terminal."""
    from rich.table import Column

    latest = [job.status.progress for job in jobs]
    speeds = speed_columns([None if progress is None else progress.speed for progress in latest], missing="–")
    fast = [header.replace(" per ", "\nper ") for header in speeds.headers]
    has_namespaces = any(job.namespace != "default" for job in jobs)
    names = [Column(header, overflow="fold") for header in (["namespace", "name"] if has_namespaces else ["name"])]
    numbers = ("phase", "step", "loss", "per\nstep", *fast, "attempt", "age")
    table = output.table(*names, *(Column(header, no_wrap=True) for header in numbers), pad_edge=False)
    for job, speed in zip(jobs, speeds.rows, strict=True):
        phase = job.status.phase
        table.add_row(
            *([job.namespace] if has_namespaces else []),
            job.name,
            output.text((phase.value, COLORS.get(phase, ""))),
            *_progress(job.status),
            *speed,
            str(job.status.attempt),
            format_age(output.age_seconds(job.created_at)),
        )
    return table


def _progress(status: Status) -> tuple[str, str, str]:
    progress = status.progress
    if progress is None:
        return "–", "–", "–"
    return (
        f"{progress.step}/{progress.num_steps}",
        "–" if progress.loss is None else f"{progress.loss:.3f}",
        "–" if progress.step_seconds is None else format_seconds(progress.step_seconds),
    )


def open_browser(link: LoginLink) -> None:
    """Open the link through a file that only this user can read: every user can read a browser's command line."""
    page = configuration_file(os.environ, Path.home()).with_name("login.html")
    write_secret(page, f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(link.url)}">\n')
    output.say(f"opening {link.url}")
    if not webbrowser.open(page.as_uri()):
        output.say("no browser was found: open the link in one, within a minute")


def watch_job(client: Client, place: Place) -> int:
    """Report every change until the job has ended or is suspended, and the cause of a failure; return the exit code."""
    status = follow_job(client, place).status
    if status.phase is Phase.FAILED:
        output.say_failure(status.message)
        return FAILED
    return 0


def follow_job(client: Client, place: Place) -> Job:
    """Report every change until the job has ended or is suspended; return the job as it is then."""
    phase: Phase | None = None
    text = ""
    with closing(line()) as shown:
        for job in client.follow(place):
            progress = job.status.progress
            if job.status.phase is not phase:
                shown.close()
                if text:
                    output.say(f"  {text}")
                phase, text = job.status.phase, ""
                because = f"  {job.status.reason}" if job.status.reason else ""
                output.say(f"{place}  {phase}{because}", style=COLORS.get(phase))
                if not job.resting:
                    shown.update(f"{phase} ...", None)
            elif progress is not None:
                text = _under_way(progress)
                shown.update(text, progress.step / progress.num_steps)
    return job


def _under_way(progress: Progress) -> str:
    parts = [f"step {progress.step}/{progress.num_steps}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.step_seconds is not None:
        parts.append(f"{format_seconds(progress.step_seconds)} per step")
        parts += [progress.speed.text] if progress.speed is not None else []
        if left := progress.num_steps - progress.step:
            parts.append(f"{format_seconds(left * progress.step_seconds)} left")
    return "  ".join(parts)
