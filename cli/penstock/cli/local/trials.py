"""Trials: the best plans by prediction run on this machine for a few steps each, and the fastest one is kept.

A prediction is off by a few per cent, and the best plans differ by less. Their predicted order is therefore uncertain,
and measurements decide (Pipette, arXiv 2405.18093, runs its ten best). The trainer runs each plan as `penstock run`
does, in a separate directory that is deleted afterwards. Ranks are stopped as soon as enough steps were measured, so
nothing is validated, sampled or saved.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.agent.local_launch import holding
from penstock.agent.metrics import MetricsFollower
from penstock.agent.workers import LocalWorkers, Workers, end, require_success
from penstock.cli.lines import working
from penstock.cli.output import say
from penstock.core.errors import RunError, UserError
from penstock.core.explanation import Explanation, Trial
from penstock.core.host.stopping import StopRequests, listening
from penstock.core.job import CheckpointSpec, PipelineJob, RunPolicySpec
from penstock.core.plan import Alternative, Plan
from penstock.core.preparing import Reporter
from penstock.core.records import WARM_UP_STEPS
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from penstock.core.speed import step_text
from penstock.core.units import format_bytes, format_seconds
from penstock.planner.replay import candidate_of

FEWEST_STEPS, MOST_STEPS = 5, 100
LEAST_SECONDS = 2.0
"""Steps after the trainer's warm-up whose median is the result: five, and more where they are short."""

POLL_SECONDS = 0.1
ENDLESS = 2**20
"""Number of steps in the job of a trial, which is stopped before."""


def fastest(job: PipelineJob, plans: tuple[Plan, ...], workers: Workers | None = None) -> Plan:
    """Return the plan with the fastest measured step, with all trials and the reason for the choice.

    Raises:
        UserError: the job's data does not match it, or this machine cannot train or is in use.
        RunError: no plan took enough steps.
        StopRequestedError: a stop was requested; no rank is left.
    """
    trials: list[Trial] = []
    with holding(job.spec, "penstock plan --trial") as devices, listening() as requests:
        workers = workers or LocalWorkers(devices)
        for number, plan in enumerate(plans, 1):
            with working(f"trying plan {number} of {len(plans)}") as report:
                trial = tried(job, plan, workers, requests, report)
            say(f"  {_line(trial)}")
            trials.append(trial)
    measured = [(trial.measured_seconds, i) for i, trial in enumerate(trials) if trial.measured_seconds is not None]
    if not measured:
        raise RunError(f"none of {len(plans)} plans could be measured: {trials[0].failure}")
    _, best = min(measured)
    trials[best] = dataclasses.replace(trials[best], chosen=True)
    return _kept(plans[best], tuple(trials), best)


def tried(
    job: PipelineJob, plan: Plan, workers: Workers, requests: StopRequests, report: Callable[[str], None]
) -> Trial:
    """Run the plan's trial; if its ranks fail, the trial has the cause, since other plans may run."""
    assert plan.prediction is not None, "plans that were searched for are predicted"
    trial = Trial(
        plan=candidate_of(plan).label,
        predicted_seconds=plan.prediction.step_seconds,
        predicted_speed=plan.speed(),
    )
    with tempfile.TemporaryDirectory(prefix="penstock-trial-") as folder:
        run = RunDir(Path(folder))
        short = _laid_out(run, job, plan)
        with requests.cutting():
            workers.prepare(short, run, _Preparing(report))
        try:
            seconds = list(_steps(short, run, plan, workers, requests, report))
        except (RunError, UserError) as error:
            return dataclasses.replace(trial, failure=str(error).splitlines()[0])
    median = statistics.median(seconds)
    lower, _, upper = statistics.quantiles(seconds, n=4)
    spread = (upper - lower) / median if median else 0.0
    speed = plan.speed(median)
    return dataclasses.replace(trial, measured_seconds=median, measured_speed=speed, spread=spread, steps=len(seconds))


def _laid_out(run: RunDir, job: PipelineJob, plan: Plan) -> PipelineJob:
    """Write the input of the ranks, which start with new parameters and neither save nor validate."""
    short = job.with_spec(
        training=dataclasses.replace(job.spec.training, steps=ENDLESS, validate_every=0),
        checkpoint=CheckpointSpec(every_steps=ENDLESS),
        run_policy=RunPolicySpec(),
    )
    run.create()
    run.write_job(short)
    write_json(run.plan, plan.to_manifest())
    return short


def _steps(
    job: PipelineJob,
    run: RunDir,
    plan: Plan,
    workers: Workers,
    requests: StopRequests,
    report: Callable[[str], None],
) -> Iterator[float]:
    """Return the seconds of the steps after warm-up; no rank is left in any case."""
    metrics, measured = MetricsFollower(run.metrics), 0.0
    report("starting")
    ranks = workers.train(job, run, 1, plan.num_ranks, None)
    try:
        while True:
            outcome = ranks.wait(POLL_SECONDS)
            requests.check()
            for entry in metrics.new():
                report(f"step {entry.step + 1}, {step_text(entry.step_seconds, plan.speed(entry.step_seconds))}")
                count = entry.step + 1 - WARM_UP_STEPS
                if count > 0:
                    measured += entry.step_seconds
                    yield entry.step_seconds
                if count >= MOST_STEPS or (count >= FEWEST_STEPS and measured >= LEAST_SECONDS):
                    return
            if outcome is not None:
                require_success(outcome)
                raise RunError(f"the ranks ended with code {outcome.exit_code}")
    finally:
        end(ranks)


def _line(trial: Trial) -> str:
    predicted = step_text(trial.predicted_seconds, trial.predicted_speed)
    if trial.measured_seconds is None:
        return f"{trial.plan}: predicted {predicted}, failed: {trial.failure}"
    measured = step_text(trial.measured_seconds, trial.measured_speed)
    return f"{trial.plan}: predicted {predicted}, measured {measured}, spread {trial.spread:.0%}"


def _kept(plan: Plan, trials: tuple[Trial, ...], best: int) -> Plan:
    assert plan.prediction is not None, "plans that were searched for are predicted"
    explanation = dataclasses.replace(plan.prediction.explanation or Explanation(), trials=trials)
    prediction = dataclasses.replace(plan.prediction, explanation=explanation)
    return dataclasses.replace(
        plan,
        prediction=prediction,
        reasons=(*plan.reasons, _reason(trials, best)),
        alternatives=tuple(_measured(alternative, trials, best) for alternative in plan.alternatives),
    )


def _measured(alternative: Alternative, trials: tuple[Trial, ...], best: int) -> Alternative:
    """Return the alternative; if it was run, its measurement is the reason why it was rejected."""
    kept = trials[best].measured_seconds
    trial = next((trial for trial in trials if trial.plan == alternative.label), None)
    if trial is None or kept is None:
        return alternative
    if trial.measured_seconds is None:
        outcome = "it failed when it was run"
    else:
        slower = 100 * (trial.measured_seconds / kept - 1)
        outcome = f"measured {step_text(trial.measured_seconds, trial.measured_speed)}, {slower:.1f} % slower"
    return dataclasses.replace(alternative, reason=f"{outcome}, predicted {alternative.reason}")


def _reason(trials: tuple[Trial, ...], best: int) -> str:
    kept, first = trials[best], trials[0]
    measured = sum(trial.measured_seconds is not None for trial in trials)
    assert kept.measured_seconds is not None, "the fastest was measured"
    fast = "" if kept.measured_speed is None else f", {kept.measured_speed.text}"
    step = f"{format_seconds(kept.measured_seconds)} per step{fast}"
    sentence = f"the fastest of {measured} plans that were run here: {step}"
    doubt = _doubt(kept, [trial for i, trial in enumerate(trials) if i != best])
    if best == 0:
        return f"{sentence}, also the best by prediction{doubt}"
    if first.measured_seconds is None:
        return f"{sentence}, while the best by prediction failed{doubt}"
    gain = 100 * (1 - kept.measured_seconds / first.measured_seconds)
    return f"{sentence}, {gain:.1f} % faster than the best by prediction{doubt}"


def _doubt(kept: Trial, others: list[Trial]) -> str:
    """Note for a result whose distance to the next plan is below the spread of steps."""
    seconds = [(trial.measured_seconds, trial.spread) for trial in others if trial.measured_seconds is not None]
    if not seconds or kept.measured_seconds is None:
        return ""
    following, spread = min(seconds)
    slower, spread = following / kept.measured_seconds - 1, max(spread, kept.spread)
    if slower >= spread:
        return ""
    return f", which may be chance: the next is {slower:.1%} slower, and steps of a plan spread by {spread:.1%}"


class _Preparing(Reporter):
    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        self._report(f"{stage} {format_bytes(done_bytes)} of {format_bytes(total_bytes)}")
