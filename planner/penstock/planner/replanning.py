"""Plans for a running job whose hardware is no longer as fast as when it was measured (`penstock.core.replanning`)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from penstock.core.errors import UserError
from penstock.core.job import JobSpec, Objective
from penstock.core.plan import Plan
from penstock.core.plan_change import restart_reasons
from penstock.core.profile import Profile
from penstock.core.replanning import (
    EQUAL_RATIO,
    Drift,
    PlanOption,
    Replanning,
    as_equal,
    busy_ns_of_ranks,
    corrected,
    device_factors,
)
from penstock.core.timeline import Timeline
from penstock.core.units import to_seconds
from penstock.planner.compile import schedule_of
from penstock.planner.decide import decide
from penstock.planner.judge import Reporter
from penstock.planner.measured import problem_from_profile
from penstock.planner.problem import Problem
from penstock.planner.replay import simulated

MOST_ROUNDS, CLOSE = 8, 1e-3
"""Largest number of corrections of a factor, and the relative correction below which they end."""
MOST_DOUBLINGS, NUM_HALVINGS = 6, 8
"""The factor of communication is at most this power of two, and at least its inverse; bisection of its logarithm ends
after this number of steps.
"""

NewReporter = Callable[[str], Reporter | None]


def replan(
    spec: JobSpec, profile: Profile, plan: Plan, measured: Sequence[Timeline], new_reporter: NewReporter
) -> Replanning:
    """Correct the profile by measured steps of ``plan``, and search for plans on it: the best of all plans, and the
    best of those that the running ranks can change to. ``new_reporter`` makes the reporter of a search from its name.

    Raises:
        UserError: the plan is too large to be simulated action by action, or nothing fits.
    """
    drift = drift_of(profile, plan, measured)
    now = corrected(profile, drift)
    return Replanning(
        profile=now,
        drift=drift,
        step_seconds=to_seconds(simulated(plan, now).timeline.step_ns),
        options=tuple(_options(spec, now, plan, new_reporter)),
    )


def drift_of(profile: Profile, plan: Plan, measured: Sequence[Timeline]) -> Drift:
    """What has become slower, by measured steps of ``plan``: devices by their compute times, or, if none of them is
    slower, communication. What is left of the difference between simulated and measured step is a factor of everything.
    """
    step_ns = statistics.median(timeline.step_ns for timeline in measured)
    drift = Drift(devices=factors_of(profile, plan, measured))
    if max(drift.devices) < EQUAL_RATIO:
        now = corrected(profile, drift)
        drift = dataclasses.replace(drift, communication=communication_factor_of(now, plan, step_ns))
    for _ in range(MOST_ROUNDS):
        rest = step_ns / simulated(plan, corrected(profile, drift)).timeline.step_ns
        drift = dataclasses.replace(drift, rest=drift.rest * rest)
        if abs(rest - 1) < CLOSE:
            break
    return drift


def factors_of(profile: Profile, plan: Plan, measured: Sequence[Timeline]) -> tuple[float, ...]:
    """The factors of devices for which the simulated compute times equal the measured ones.

    A slower rank also overlaps more work of the other ranks of its machine, and ranks of one machine slow each other
    down, so the ratio of measured to simulated time is not yet its factor. The step is simulated again with the new
    factors, until both times agree.

    The simulated time of a pipeline rank is that of its slowest device, among all replicas and shards. Each device is
    compared with its own part of that time. A device that the plan leaves unused counts as unchanged, or, if all others
    are slower or all are faster, as the one that has changed least.
    """
    factors, busy_ns = np.ones(profile.num_ranks), busy_ns_of_ranks(measured)
    devices = np.array(plan.devices or range(plan.num_ranks)).reshape(plan.dp, plan.pp, plan.tp)
    for _ in range(MOST_ROUNDS):
        now = corrected(profile, Drift(devices=tuple(factors.tolist())))
        slowness = np.array(now.slowness or (1.0,) * profile.num_ranks)[devices]
        rest = np.array(device_factors(plan, simulated(plan, now).timeline, busy_ns, profile.num_ranks))
        rest[devices] *= slowness.max(axis=(0, 2), keepdims=True) / slowness
        factors *= rest
        if np.abs(rest - 1).max() < CLOSE:
            break
    used = as_equal(factors[devices.ravel()].tolist())
    factors[:] = min(max(1.0, min(used)), max(used))
    factors[devices.ravel()] = used
    return tuple(factors.tolist())


def communication_factor_of(profile: Profile, plan: Plan, step_ns: float) -> float:
    """The factor of the times of links and collectives for which the simulated step takes ``step_ns``.

    It is 1 if no factor explains the difference, as where ranks exchange nothing.
    """

    def missing_ns(logarithm: float) -> float:
        drift = Drift(devices=(1.0,) * profile.num_ranks, communication=2.0**logarithm)
        return step_ns - simulated(plan, corrected(profile, drift)).timeline.step_ns

    missing = missing_ns(0.0)
    near, far = 0.0, math.copysign(MOST_DOUBLINGS, missing)
    if missing * missing_ns(far) >= 0:
        return 1.0
    for _ in range(NUM_HALVINGS):
        middle = (near + far) / 2
        if missing * missing_ns(middle) > 0:
            near = middle
        else:
            far = middle
    return float(2.0 ** ((near + far) / 2))


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
    """The job, with everything pinned to ``plan`` on which the state of running ranks depends."""
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
