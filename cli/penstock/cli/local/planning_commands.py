"""Plans outside of a run: the hardware, the plan with its reasons, and the target of a command."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.agent.probe import identify
from penstock.agent.profiles import Profiles, require_fit
from penstock.cli import output
from penstock.cli.lines import working
from penstock.cli.local.job_files import read_job
from penstock.cli.local.runs import check_local, require_unused
from penstock.cli.local.trials import fastest
from penstock.cli.manifests import read_cluster, require_cluster
from penstock.cli.output import Lines, warn
from penstock.cli.summary import plan_line, search_text
from penstock.core.cluster import ClusterSpec
from penstock.core.comparison import prediction_error
from penstock.core.errors import UserError
from penstock.core.explanation import Explanation, Frontier, Trial, Variation
from penstock.core.job import JobSpec, PipelineJob
from penstock.core.plan import Alternative, Cost, Plan, Prediction, RunTime
from penstock.core.profile import Profile
from penstock.core.run.documents import COST, RUN_TIME, read_plan, read_profile
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from penstock.core.speed import Speed, speed_columns
from penstock.core.timeline import Timeline
from penstock.core.units import format_amount, format_bytes, format_seconds
from penstock.planner.replay import spec_of
from penstock.planner.worker.protocol import Progress
from penstock.planner.worker.searching import answer_of, best_plans_for, plan_for, planning_request
from penstock.view.frontier import COLUMNS, cells_of

Hardware = Profile | ClusterSpec


def hardware_for(
    spec: JobSpec, *, cluster: Path | None, profile: Path | None, run_dir: Path | None, costs: Path | None = None
) -> Hardware:
    """The hardware to plan for: the named one, else this machine as it was measured.

    Raises:
        UserError: both are named, or costs without a cluster; the profile is of another machine or model; or this
            machine was not measured.
    """
    require_cluster(costs, cluster)
    if cluster is not None and profile is not None:
        remedy = "use --cluster for described hardware, or --profile for a measured machine"
        raise UserError(what="--cluster and --profile cannot be combined", remedy=remedy)
    if cluster is not None:
        return read_cluster(cluster, costs)
    if profile is not None:
        named = read_profile(profile)
        require_fit(named, profile, spec, identify(spec), time.time())
        return named
    places = [RunDir(run_dir).profile] if run_dir is not None else []
    hardware = Profiles().find(spec, identify(spec), places, time.time())
    if hardware is None:
        raise UserError(
            what="this machine has not been measured for this job in the last days",
            where="profile",
            remedy="measure it with penstock profile JOB, or plan for described hardware with --cluster",
        )
    return hardware


def make_plan(spec: JobSpec, hardware: Hardware, *, what_if: bool = False, frontier: bool = False) -> Plan:
    """The best plan, with progress on the terminal; ``what_if`` adds the best plans for changed jobs and hardware,
    ``frontier`` those on fewer devices.

    Raises:
        UserError: nothing fits, the pinned fields cannot run, or the search is too large.
    """
    with working("planning") as report:
        return plan_for(
            spec, hardware, lambda progress: report(progress_text(progress)), what_if=what_if, frontier=frontier
        )


def try_plans(
    job: PipelineJob, hardware: Hardware, count: int, run_dir: Path | None, *, what_if: bool, frontier: bool = False
) -> Plan:
    """The fastest of the best ``count`` plans, which are run here for a few steps each.

    Raises:
        UserError: the hardware is described, the run directory holds a run, or planning or the trials found a mistake.
        RunError: no plan ran.
    """
    if isinstance(hardware, ClusterSpec):
        raise UserError(
            what="--trial runs plans on this machine, and --cluster plans for described hardware",
            where="--trial",
            remedy="leave out --cluster: measure this machine with penstock profile JOB, and plan for that",
        )
    for is_given, option, reason in (
        (what_if, "--what-if", "changed hardware is not here"),
        (frontier, "--frontier", "plans on other numbers of devices are not tried"),
    ):
        if is_given:
            what = f"--trial and {option} cannot be combined: {reason}"
            raise UserError(what=what, where=option, remedy=f"try plans first, then plan once more with {option}")
    check_local(job)
    if run_dir is not None:
        require_unused(RunDir(run_dir))
    with working("planning") as report:
        plans = best_plans_for(job.spec, hardware, lambda progress: report(progress_text(progress)), count)
    if len(plans) == 1:
        warn("there is one plan to try: no other mesh, number of slices or schedule that fits was simulated")
    return fastest(job, plans)


def progress_text(progress: Progress) -> str:
    """Return the progress of a search, in a line."""
    return search_text(progress.candidates, progress.best_step_seconds, progress.best_speed, progress.change)


def simulate_plan(plan: Plan, hardware: Hardware) -> Timeline:
    """One step of ``plan`` on ``hardware``; raises `UserError` for a plan too large to draw."""
    request = dataclasses.replace(planning_request(spec_of(plan), hardware), plan=plan)
    with working("simulating"):
        answer = answer_of(request, lambda progress: None)
    assert answer.timeline is not None, "an answer without a timeline says why"
    return answer.timeline


def store_plan(root: Path, job: PipelineJob, plan: Plan, hardware: Hardware) -> None:
    """Write a run directory with a plan that `penstock run` uses."""
    run = RunDir(root)
    run.create()
    require_unused(run)
    run.write_job(job)
    write_json(run.plan, plan.to_manifest())
    if isinstance(hardware, Profile):
        write_json(run.profile, hardware.to_manifest())


def target_of(path: Path, *, cluster: Path | None, profile: Path | None) -> tuple[Plan, Hardware]:
    """The plan and hardware at ``path``: of a run directory, a plan, or a job, which is planned then."""
    if path.is_dir():
        return RunDir(path).read_plan(), _hardware_of_plan(path, cluster, profile)
    if path.suffix == ".json":
        return read_plan(path), _hardware_of_plan(path.parent, cluster, profile)
    job = read_job(path, warn)
    hardware = hardware_for(job.spec, cluster=cluster, profile=profile, run_dir=None)
    return make_plan(job.spec, hardware), hardware


def _hardware_of_plan(folder: Path, cluster: Path | None, profile: Path | None) -> Hardware:
    """The named hardware, else the profile next to the plan."""
    if cluster is not None:
        return read_cluster(cluster)
    chosen = profile or folder / "profile.json"
    if not chosen.exists():
        raise UserError(
            what="there is no profile next to the plan",
            where=str(folder),
            remedy="name the hardware with --profile or --cluster",
        )
    return read_profile(chosen)


def plan_data(plan: Plan, cost: Cost | None, run_time: RunTime | None = None) -> dict[str, Any]:
    """Return the plan as data, with the time and the ``cost`` of all steps if there is a price."""
    if cost is None:
        return plan.to_manifest()
    documents = {RUN_TIME: run_time, COST: cost}
    return plan.to_manifest() | {name: value.to_manifest() for name, value in documents.items() if value is not None}


def plan_lines(plan: Plan, cost: Cost | None = None, run_time: RunTime | None = None) -> Lines:
    """Return the plan for a terminal: its decisions, reasons, duration, cost and alternatives."""
    lines: Lines = [
        output.text((plan_line(plan), "bold")),
        f"units per stage: {stages_text(plan)}",
        "",
        *plan.reasons,
    ]
    if plan.prediction is not None:
        lines += ["", *_prediction_lines(plan, plan.prediction)]
    if run_time is not None:
        lines.append(_run_line(run_time))
    if cost is not None:
        lines.append(_cost_line(cost))
    if plan.prediction is not None and plan.prediction.explanation is not None:
        lines += _explanation_lines(plan.prediction.explanation)
    rows = [_alternative_row(alternative) for alternative in plan.alternatives]
    return lines + _speed_table(("considered", "step"), ("memory", "why not"), rows)


Row = tuple[list[str], Speed | None, list[str]]
"""A row of a table: the cells before the columns for speeds, the speed, and the cells after them."""


def _speed_table(before: Sequence[str], after: Sequence[str], rows: Sequence[Row]) -> Lines:
    """An empty line and a table, with columns for the speeds that are known; nothing without a row."""
    if not rows:
        return []
    speeds = speed_columns([speed for _, speed, _ in rows], missing="–")
    table = output.table(*before, *speeds.headers, *after, padding=(0, 2))
    for (first, _, last), speed in zip(rows, speeds.rows, strict=True):
        table.add_row(*first, *speed, *last)
    return ["", table]


def _alternative_row(alternative: Alternative) -> Row:
    step = "–" if alternative.step_seconds is None else format_seconds(alternative.step_seconds)
    peak = "–" if alternative.peak_bytes is None else format_bytes(alternative.peak_bytes)
    return [alternative.label, step], alternative.speed, [peak, alternative.reason]


def stages_text(plan: Plan) -> str:
    """Return the units of every stage, with equal neighbours counted: ``11, 3 x 12, 10``."""
    runs = [(units, len(list(run))) for units, run in itertools.groupby(stop - first for first, stop in plan.stages)]
    return ", ".join(f"{count} x {units}" if count > 1 else str(units) for units, count in runs)


def _explanation_lines(explanation: Explanation) -> Lines:
    """Trials and what-if variations, as tables, without repeating the reasons."""
    frontier: Lines = ["", *_frontier_lines(explanation.frontier)] if explanation.frontier is not None else []
    trials = [trial_row(trial) for trial in explanation.trials]
    variations = [_variation_row(variation) for variation in explanation.variations]
    return [
        *frontier,
        *_speed_table(("tried", "predicted", "measured"), ("spread", "error", ""), trials),
        *_speed_table(("what if", "step"), ("gain", "how"), variations),
    ]


def _frontier_lines(frontier: Frontier) -> Lines:
    """The frontier as a table, and its meaning."""
    table = output.table("frontier", *COLUMNS, padding=(0, 2))
    for point in frontier.points:
        table.add_row(*cells_of(point))
    return [table, frontier.meaning]


def trial_row(trial: Trial) -> Row:
    """A trial for a terminal: plan, predicted and measured step, speed, spread, error, and a mark."""
    predicted = format_seconds(trial.predicted_seconds)
    if trial.measured_seconds is None:
        return [trial.plan, predicted, "–"], trial.measured_speed, ["–", "–", trial.failure]
    error = f"{100 * prediction_error(trial.predicted_seconds, trial.measured_seconds):+.1f} %"
    measured, mark = format_seconds(trial.measured_seconds), "kept" if trial.chosen else ""
    return [trial.plan, predicted, measured], trial.measured_speed, [f"{trial.spread:.0%}", error, mark]


def _variation_row(variation: Variation) -> Row:
    step = "–" if variation.step_seconds is None else format_seconds(variation.step_seconds)
    gain = "–" if variation.gain is None else f"{100 * variation.gain:+.1f} %"
    return [variation.change, step], variation.speed, [gain, variation.refusal or variation.how]


def _prediction_lines(plan: Plan, prediction: Prediction) -> list[str]:
    seconds_by_part = {
        "compute": prediction.compute_seconds,
        "waiting": prediction.bubble_seconds,
        "communication": prediction.communication_seconds,
        "reductions": prediction.reduction_seconds,
        "optimizer": prediction.optimizer_seconds,
    }
    parts_text = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in seconds_by_part.items() if seconds)
    bubble = "" if prediction.bubble is None else f"; bubble {prediction.bubble.text}"
    return [
        f"predicted step {format_seconds(prediction.step_seconds)}{_interval(prediction)}: "
        f"on the busiest rank {parts_text}",
        *_speed_lines(plan, prediction),
        f"predicted waiting for other ranks {prediction.waiting_text}{bubble}",
        f"predicted memory {format_bytes(max(prediction.peak_bytes, default=0))} on the fullest rank",
        *(f"warning: {warning}" for warning in prediction.warnings),
    ]


def _speed_lines(plan: Plan, prediction: Prediction) -> list[str]:
    speed = plan.speed()
    if speed is None:
        return []
    if prediction.peak_flops is None:
        return [f"predicted speed {speed.text}"]
    peak = f"{prediction.peak_flops / 1e12:,.4g} TFLOP/s per device"
    return [f"predicted speed {speed.text} (the model's FLOPs over causal pairs, of {peak})"]


def _interval(prediction: Prediction) -> str:
    if prediction.low_seconds is None or prediction.high_seconds is None:
        return ""
    return f" ({format_seconds(prediction.low_seconds)} to {format_seconds(prediction.high_seconds)})"


def _run_line(run_time: RunTime) -> str:
    text = f"predicted time of all steps {format_seconds(run_time.seconds)}"
    if not run_time.interruptions:
        return text
    number = f"{run_time.interruptions:.3g}"
    return f"{text}, including {format_seconds(run_time.interruption_seconds)} for {number} expected interruptions"


def _cost_line(cost: Cost) -> str:
    hour, tokens, job = map(format_amount, (cost.per_hour, cost.per_million_tokens, cost.whole_job))
    return f"predicted cost {hour} an hour, {tokens} per million tokens, {job} for all steps"
