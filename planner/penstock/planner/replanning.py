"""Plans for a running job whose devices are no longer as they were measured (`penstock.core.replanning`)."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from penstock.core.errors import UserError
from penstock.core.job import JobSpec, Objective
from penstock.core.plan import Plan
from penstock.core.plan_change import restart_reasons
from penstock.core.profile import Profile
from penstock.core.replanning import EQUAL_RATIO, PlanOption, Replanning, corrected, device_factors
from penstock.core.timeline import Timeline
from penstock.core.units import to_seconds
from penstock.planner.compile import schedule_of
from penstock.planner.decide import decide
from penstock.planner.judge import Reporter
from penstock.planner.measured import problem_from_profile
from penstock.planner.problem import Problem
from penstock.planner.replay import simulated

MOST_ROUNDS, CLOSE = 8, 1e-3
"""The rounds in which factors are corrected, and the correction at which they end."""

NewReporter = Callable[[str], Reporter | None]


def replan(
    spec: JobSpec, profile: Profile, plan: Plan, measured: Sequence[Timeline], new_reporter: NewReporter
) -> Replanning:
    """The profile corrected by measured steps of ``plan``, and the best plans for it: of all, and of those that the
    running ranks can take. ``new_reporter`` makes the reporter of a search from its name.

    Raises:
        UserError: the plan is too large to be simulated action by action, or nothing fits.
    """
    factors = factors_of(profile, plan, measured)
    now = corrected(profile, factors)
    return Replanning(
        profile=now,
        factors=factors,
        step_seconds=to_seconds(simulated(plan, now).timeline.step_ns),
        options=tuple(_options(spec, now, plan, new_reporter)),
    )


def factors_of(profile: Profile, plan: Plan, measured: Sequence[Timeline]) -> tuple[float, ...]:
    """The factors with which a simulated step has the measured compute times.

    Ranks that share a machine slow each other down while they compute. A slower rank computes for longer, next to more
    work of the others, so one ratio of times is no factor yet: it is corrected by the simulation that it leads to.

    The simulated time of a pipeline rank is that of its slowest device, among all replicas and shards. Each device is
    compared with its own part of that time.
    """
    factors = np.ones(profile.num_ranks)
    devices = np.array(plan.devices or range(plan.num_ranks)).reshape(plan.dp, plan.pp, plan.tp)
    for _ in range(MOST_ROUNDS):
        now = corrected(profile, factors.tolist())
        slowness = np.array(now.slowness or (1.0,) * profile.num_ranks)[devices]
        rest = np.array(device_factors(plan, simulated(plan, now).timeline, measured, profile.num_ranks))
        rest[devices] *= slowness.max(axis=(0, 2), keepdims=True) / slowness
        factors *= rest
        if np.abs(rest - 1).max() < CLOSE:
            break
    is_changed = (factors > EQUAL_RATIO) | (factors < 1 / EQUAL_RATIO)
    return tuple(np.where(is_changed, factors, 1.0).tolist())


def _options(spec: JobSpec, profile: Profile, plan: Plan, new_reporter: NewReporter) -> Iterator[PlanOption]:
    best = _option(spec, profile, plan, new_reporter("of any plan"))
    yield best
    if best.restart_reasons and plan.blocks is not None:
        with contextlib.suppress(UserError):  # the best plan of all remains an option
            option = _option(_with_layout(spec, plan), profile, plan, new_reporter("of the same stages"))
            if not option.restart_reasons:
                yield option


def _option(spec: JobSpec, profile: Profile, plan: Plan, reporter: Reporter | None) -> PlanOption:
    best = decide(_problem(spec, profile, plan), reporter=reporter).plan
    ranks, other_ranks = schedule_of(plan).stage_ranks, schedule_of(best).stage_ranks
    return PlanOption(plan=best, restart_reasons=restart_reasons(plan, ranks, best, other_ranks))


def _problem(spec: JobSpec, profile: Profile, plan: Plan) -> Problem:
    """The planning problem; for a job with a budget, or for cost, of as many devices as ``plan`` uses.

    On equally many devices a shorter step is also a cheaper one, so the comparison of steps suffices.
    """
    problem = problem_from_profile(spec, profile)
    if spec.budget is None and spec.objective is not Objective.COST:
        return problem
    return dataclasses.replace(problem, min_devices=plan.num_ranks, most_devices=plan.num_ranks, _divided={})


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
