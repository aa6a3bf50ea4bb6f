"""Plans for a running job whose devices are no longer as they were measured (`penstock.core.replanning`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from penstock.core.job import JobSpec
from penstock.core.plan import Plan
from penstock.core.plan_change import restart_reasons
from penstock.core.profile import Profile
from penstock.core.replanning import PlanOption, Replanning, corrected, device_factors
from penstock.core.timeline import Timeline
from penstock.core.units import to_seconds
from penstock.planner.compile import schedule_of
from penstock.planner.decide import decide
from penstock.planner.judge import Reporter
from penstock.planner.measured import problem_from_profile
from penstock.planner.replay import simulated

NewReporter = Callable[[str], Reporter | None]


def replan(
    spec: JobSpec, profile: Profile, plan: Plan, measured: Sequence[Timeline], new_reporter: NewReporter
) -> Replanning:
    """The profile corrected by measured steps of ``plan``, and the best plans for it: of all, and of those that the
    running ranks can take. ``new_reporter`` makes the reporter of a search from its name.

    Raises:
        UserError: the plan is too large to be simulated action by action, or nothing fits.
    """
    factors = device_factors(plan, simulated(plan, profile).timeline, measured, profile.num_ranks)
    now = corrected(profile, factors)
    return Replanning(
        profile=now,
        factors=factors,
        step_seconds=to_seconds(simulated(plan, now).timeline.step_ns),
        options=tuple(_options(spec, now, plan, new_reporter)),
    )


def _options(spec: JobSpec, profile: Profile, plan: Plan, new_reporter: NewReporter) -> Iterator[PlanOption]:
    best = _option(spec, profile, plan, new_reporter("of any plan"))
    yield best
    if best.restart_reasons and plan.blocks is not None:
        option = _option(_with_layout(spec, plan), profile, plan, new_reporter("of the same stages"))
        if not option.restart_reasons:
            yield option


def _option(spec: JobSpec, profile: Profile, plan: Plan, reporter: Reporter | None) -> PlanOption:
    best = decide(problem_from_profile(spec, profile), reporter=reporter).plan
    ranks, other_ranks = schedule_of(plan).stage_ranks, schedule_of(best).stage_ranks
    return PlanOption(plan=best, restart_reasons=restart_reasons(plan, ranks, best, other_ranks))


def _with_layout(spec: JobSpec, plan: Plan) -> JobSpec:
    """The job with all pins on which the state of running ranks depends."""
    pinned = dataclasses.replace(
        spec.parallelism,
        dp=plan.dp,
        tp=plan.tp,
        pp=plan.pp,
        head_parts=plan.head_parts,
        zero=plan.zero,
        stages=plan.blocks,
    )
    return dataclasses.replace(spec, parallelism=pinned)
