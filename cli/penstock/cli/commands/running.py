"""Training: `run` starts a job, `resume` continues one, `demo` runs one by a service, `rehearse` plays a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.declarations import (
    Cluster,
    Group,
    Job,
    MeasuredProfile,
    MetricsPort,
    Namespace,
    Output,
    RunDirectory,
    Server,
    command,
)
from penstock.cli.output import Format

if TYPE_CHECKING:
    from penstock.cli.local.runs import Ended

app = typer.Typer()


@command(app, Group.TRAIN, "penstock run job.yaml")
def run(
    job: Job,
    run_dir: RunDirectory = None,
    metrics_port: MetricsPort = None,
    prompt: Annotated[str, typer.Option(help="Beginning of the sample at the end; by default held-out text.")] = "",
    form: Output = Format.TEXT,
) -> None:
    """Train a job on this machine: measure, plan, run, and recover from failures.

    Ctrl-C stops after a checkpoint; a second Ctrl-C stops at once.
    """
    from penstock.cli.local.job_files import read_job
    from penstock.cli.local.runs import start

    _conclude(start(read_job(job, output.warn), run_dir, metrics_port, prompt=prompt), form)


@command(app, Group.TRAIN, "penstock resume runs/my-job/1")
def resume(
    target: Annotated[str, typer.Argument(help="Directory of a run, or name of a service's job.")],
    metrics_port: MetricsPort = None,
    server: Server = None,
    namespace: Namespace = "default",
    form: Output = Format.TEXT,
) -> None:
    """Continue a run that failed or was stopped, from its last checkpoint.

    A name means a job of the service, as in penstock suspend, unless a directory has that name; ./NAME always means a
    directory.
    """
    is_name = "/" not in target and not Path(target).exists()
    if server is not None or is_name:
        from penstock.cli.remote import connected, show_jobs
        from penstock.client import Place

        with connected(server) as client:
            show_jobs([client.resume(Place(name=target, namespace=namespace))], form)
        return
    from penstock.cli.local.runs import resume as resume_run

    _conclude(resume_run(Path(target), metrics_port), form)


def _conclude(ended: Ended, form: Format) -> None:
    """Print the run's summary, or the reason why there is none; exit with a code other than 0 if the run failed or was
    stopped by a signal.
    """
    from penstock.cli.local.reporting import write_report
    from penstock.cli.summary import rendered, summarise
    from penstock.core.lifecycle import Phase

    phase, root = ended.state.phase, ended.run.root
    if phase is Phase.SUCCEEDED:
        write_report(ended.run)
    summary = summarise(ended.run, phase.value, ended.state.attempt)
    if form is not Format.TEXT or phase is Phase.SUCCEEDED:
        output.present(form, lambda: rendered(summary), summary.to_manifest)
    if phase is Phase.FAILED:
        output.say_failure(ended.state.message, f"penstock resume {root}")
        raise typer.Exit(1)
    if phase is Phase.SUSPENDED and ended.signal is None:
        output.say(f"not started: {ended.run.job} sets suspend: true; change that, then: penstock resume {root}")
    elif phase is Phase.SUSPENDED:
        output.say(f"stopped after {summary.steps} steps; continue with: penstock resume {root}")
        raise typer.Exit(128 + (ended.signal or 0))


@command(app, Group.START, "penstock demo job.yaml --folder runs/demo")
def demo(
    job: Job,
    folder: Annotated[Path, typer.Option("--folder", help="Folder of the service's database and runs.")] = Path(
        "runs/demo"
    ),
    data: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER: the job may read it as data://NAME/...")] = None,
    form: Output = Format.TEXT,
) -> None:
    """Train a job by a service of its own, which ends with it: serve, submit and watch in one command.

    Ctrl-C ends the job and the service.
    """
    from penstock.cli.local.demonstration import demonstrate
    from penstock.cli.manifests import read_for_service
    from penstock.cli.summary import rendered
    from penstock.core.lifecycle import Phase

    summary = demonstrate(read_for_service(job, output.warn), folder.absolute(), data or ())
    if form is not Format.TEXT or summary.phase == Phase.SUCCEEDED:
        output.present(form, lambda: rendered(summary), summary.to_manifest)
    if summary.phase != Phase.SUCCEEDED:
        raise typer.Exit(1)


@command(app, Group.PLAN, "penstock rehearse runs/my-job/1")
def rehearse(
    target: Annotated[Path, typer.Argument(help="Job, run directory or plan.json.")],
    cluster: Cluster = None,
    profile: MeasuredProfile = None,
    form: Output = Format.TEXT,
) -> None:
    """Play one step of a plan with real ranks and messages, which wait instead of computing."""
    from penstock.cli.local.planning_commands import target_of
    from penstock.cli.local.rehearsing import rehearsed
    from penstock.cli.simulation import timeline_lines

    plan, hardware = target_of(target, cluster=cluster, profile=profile)
    timeline = rehearsed(plan, hardware)
    output.present(form, lambda: timeline_lines(plan, timeline), timeline.to_manifest)
