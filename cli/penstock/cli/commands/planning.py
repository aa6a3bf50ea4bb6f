"""Commands before training: measure this machine or describe hardware, plan, and show plans and schedules."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.declarations import (
    Cluster,
    Costs,
    Group,
    Job,
    MeasuredProfile,
    Output,
    RunDirectory,
    add_family,
    command,
)
from penstock.cli.output import Format

if TYPE_CHECKING:
    from penstock.core.plan import Cost, Plan, RunTime

app = typer.Typer()
schedules = add_family(
    app, Group.PLAN, "schedule", "Show schedules: orders of work as data.", "penstock schedule show zb --ranks 4"
)
clusters = add_family(
    app, Group.PLAN, "cluster", "Describe hardware to plan for.", "penstock cluster init cluster.yaml --nodes 4"
)


@command(app, Group.PLAN, "penstock profile job.yaml")
def profile(job: Job, run_dir: RunDirectory = None, form: Output = Format.TEXT) -> None:
    """Measure this machine for a job: layers, links, reductions and memory.

    The result is cached for later runs and, with --run-dir, written there.
    """
    from penstock.cli.local.job_files import read_job
    from penstock.cli.local.measuring import measure, profile_lines

    measured = measure(read_job(job, output.warn), run_dir)
    output.present(form, lambda: profile_lines(measured), measured.to_manifest)


@command(app, Group.PLAN, "penstock plan job.yaml --cluster cluster.yaml --what-if")
def plan(
    job: Job,
    cluster: Cluster = None,
    costs: Costs = None,
    profile: MeasuredProfile = None,
    run_dir: RunDirectory = None,
    server: Annotated[str | None, typer.Option("--server", help="Plan on this service.")] = None,
    what_if: Annotated[
        bool,
        typer.Option("--what-if", help="Also plan with more memory, other nodes and so on, and show the gains."),
    ] = False,
    frontier: Annotated[
        bool,
        typer.Option("--frontier", help="Also plan on fewer devices, and show the best plans by time and money."),
    ] = False,
    trial: Annotated[
        int | None,
        typer.Option(
            "--trial", metavar="N", min=2, max=20, help="Run the N best plans on this machine for some steps."
        ),
    ] = None,
    form: Output = Format.TEXT,
) -> None:
    """Plan how to run a job, with the reasons.

    Without --cluster and --profile the newest profile of this machine is used, or with --server the service's.
    --costs names a CSV file of unit, pass, tokens, pairs and seconds, which replace the cluster's device. --what-if
    needs a further search for each of six changes. --frontier needs a price and at most 13 further searches. --trial
    keeps the plan with the fastest measured step.
    """
    from penstock.cli.local.planning_commands import plan_data, plan_lines

    if server is not None:
        from penstock.cli.whatif import plan_at

        local = {"--profile": profile, "--run-dir": run_dir, "--trial": trial}
        made, run_time, cost = plan_at(
            server, job, cluster=cluster, costs=costs, local=local, what_if=what_if, frontier=frontier
        )
    else:
        made, run_time, cost = _plan_here(
            job, cluster, costs, profile, run_dir, what_if=what_if, frontier=frontier, trial=trial
        )
    output.present(form, lambda: plan_lines(made, cost, run_time), lambda: plan_data(made, cost, run_time))


def _plan_here(
    job: Path,
    cluster: Path | None,
    costs: Path | None,
    profile: Path | None,
    run_dir: Path | None,
    *,
    what_if: bool,
    frontier: bool,
    trial: int | None,
) -> tuple[Plan, RunTime | None, Cost | None]:
    from penstock.cli.local.job_files import read_job
    from penstock.cli.local.planning_commands import hardware_for, make_plan, store_plan, try_plans
    from penstock.core.cluster import ClusterSpec
    from penstock.planner.pricing import cost_of, run_time_of

    pipeline_job = read_job(job, output.warn)
    hardware = hardware_for(pipeline_job.spec, cluster=cluster, profile=profile, run_dir=run_dir, costs=costs)
    if trial is not None:
        made = try_plans(pipeline_job, hardware, trial, run_dir, what_if=what_if, frontier=frontier)
    else:
        made = make_plan(pipeline_job.spec, hardware, what_if=what_if, frontier=frontier)
    if run_dir is not None:
        store_plan(run_dir, pipeline_job, made, hardware)
    described = hardware if isinstance(hardware, ClusterSpec) else None
    spec = pipeline_job.spec
    return made, run_time_of(made, spec, described), cost_of(made, spec, described)


@command(app, Group.PLAN, "penstock simulate runs/my-job/1")
def simulate(
    target: Annotated[Path, typer.Argument(help="A job, a run directory or a plan.json.")],
    cluster: Cluster = None,
    profile: MeasuredProfile = None,
    form: Output = Format.TEXT,
) -> None:
    """Show one predicted step of a plan: when each rank computes, waits and sends."""
    from penstock.cli.local.planning_commands import simulate_plan, target_of
    from penstock.cli.simulation import timeline_lines

    plan, hardware = target_of(target, cluster=cluster, profile=profile)
    timeline = simulate_plan(plan, hardware)
    output.present(form, lambda: timeline_lines(plan, timeline), timeline.to_manifest)


class ScheduleFormat(enum.StrEnum):
    """Format of a printed schedule."""

    TEXT = "text"
    CSV = "csv"
    JSON = "json"
    YAML = "yaml"


@command(schedules, Group.PLAN, "penstock schedule show 1f1b --ranks 4 --microbatches 8", "show")
def show_schedule(
    name: Annotated[str, typer.Argument(help="1f1b, zb, zbv, another built-in or installed one, or a CSV file.")],
    ranks: Annotated[int, typer.Option(help="Pipeline ranks.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Micro-batches.")] = 4,
    slices: Annotated[int, typer.Option(help="Slices of each micro-batch.")] = 1,
    form: Annotated[ScheduleFormat, typer.Option("--output", "-o", help="Grid, CSV or data.")] = ScheduleFormat.TEXT,
) -> None:
    """Show a schedule as a grid, or as CSV that can be edited and pinned."""
    from penstock.cli.local.schedules import make_schedule, schedule_lines

    schedule = make_schedule(name, ranks, microbatches, slices, output.warn)
    if form is ScheduleFormat.TEXT:
        output.show(*schedule_lines(schedule))
    elif form is ScheduleFormat.CSV:
        output.write(schedule.to_csv())
    else:
        output.write_data([[str(action) for action in rank] for rank in schedule.ranks], Format(form.value))


@command(clusters, Group.PLAN, "penstock cluster init cluster.yaml --device h100 --nodes 4", "init")
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


@command(clusters, Group.PLAN, "penstock cluster list", "list")
def list_kinds(form: Output = Format.TEXT) -> None:
    """List the kinds of device that `penstock cluster init` can describe."""
    from penstock.cli.cluster_template import kinds_data, kinds_lines

    output.present(form, kinds_lines, kinds_data)
