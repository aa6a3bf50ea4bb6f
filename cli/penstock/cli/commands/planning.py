"""Commands before training: `profile` measures, `plan` decides, `simulate` and `schedule show` show."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import output
from penstock.cli.commands.listed import Group, add, add_family
from penstock.cli.commands.options import Cluster, Costs, Job, MeasuredProfile, Output, RunDirectory
from penstock.cli.output import Format

if TYPE_CHECKING:
    from penstock.core.plan import Cost, Plan, RunTime


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    add(app, Group.PLAN, profile, "penstock profile job.yaml")
    add(app, Group.PLAN, plan, "penstock plan job.yaml --cluster cluster.yaml --what-if")
    add(app, Group.PLAN, simulate, "penstock simulate runs/my-job/1")
    schedules = add_family(
        app, Group.PLAN, "schedule", "Show schedules: orders of work as data.", "penstock schedule show zb --ranks 4"
    )
    add(schedules, Group.PLAN, show_schedule, "penstock schedule show 1f1b --ranks 4 --microbatches 8", "show")


def profile(job: Job, run_dir: RunDirectory = None, form: Output = Format.TEXT) -> None:
    """Measure this machine for a job: layers, links, reductions and memory.

    The result is cached for later runs and, with --run-dir, written there.
    """
    from penstock.cli.local.job_files import read_job
    from penstock.cli.local.measuring import measure, profile_lines

    measured = measure(read_job(job, output.warn), run_dir)
    if form is Format.TEXT:
        output.show(*profile_lines(measured))
    else:
        output.write_data(measured.to_manifest(), form)


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
    if form is Format.TEXT:
        output.show(*plan_lines(made, cost, run_time))
    else:
        output.write_data(plan_data(made, cost, run_time), form)


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


def simulate(
    target: Annotated[Path, typer.Argument(help="A job, a run directory or a plan.json.")],
    cluster: Cluster = None,
    profile: MeasuredProfile = None,
    form: Output = Format.TEXT,
) -> None:
    """Show one predicted step of a plan: when each rank computes, waits and sends."""
    from penstock.cli.local.planning_commands import simulate_plan, target_of
    from penstock.cli.simulation import timeline_lines

    planned = target_of(target, cluster=cluster, profile=profile)
    timeline = simulate_plan(planned.plan, planned.hardware)
    if form is Format.TEXT:
        output.show(*timeline_lines(planned.plan, timeline))
    else:
        output.write_data(timeline.to_manifest(), form)


class ScheduleFormat(enum.StrEnum):
    """Format of a printed schedule."""

    TEXT = "text"
    CSV = "csv"
    JSON = "json"
    YAML = "yaml"


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
