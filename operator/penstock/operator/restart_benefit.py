"""Benefit of a restart with more ranks or with a newer measurement, compared with its cost."""

from __future__ import annotations

import math

from penstock.core.job import JobSpec
from penstock.core.lifecycle import Phase
from penstock.core.replanning import pays
from penstock.operator.facts import Facts
from penstock.operator.pending_reasons import short_since

RESTART_SECONDS = 120.0
"""Cost of another attempt, with a measurement on hosts that are new to it."""


def feasible_ranks(facts: Facts) -> int | None:
    """Number of ranks for which the cluster has places.

    For a running attempt, its ranks and those that fit into the free capacity, if that was computed. For an attempt
    that lacks places, the ranks that have one. Otherwise the number that the status last recorded; none if there is
    none.
    """
    per_pod = facts.job.spec.kubernetes.ranks_per_pod
    if facts.status.phase is Phase.RUNNING and facts.capacity is not None:
        return _whole(facts.job.spec, facts.status.ranks + facts.capacity.num_pods * per_pod)
    if short_since(facts) is None:
        return facts.status.feasible_ranks
    placed = sum(1 for pod in facts.pods if pod.node)
    return _whole(facts.job.spec, min(placed * per_pod, facts.status.ranks))


def _whole(spec: JobSpec, ranks: int) -> int:
    """The largest number of ranks, up to ``ranks``, that suits the pinned fields of the plan and fills its pods."""
    pinned = spec.parallelism
    unit = math.lcm((pinned.dp or 1) * (pinned.tp or 1) * (pinned.pp or 1), spec.kubernetes.ranks_per_pod)
    most = min(ranks, spec.resources.ranks)
    return most - most % unit


def growth_pays(facts: Facts) -> bool:
    """Whether the remaining steps would finish sooner on more ranks, if step time is proportional to 1 / ranks."""
    status, plan = facts.status, facts.status.plan
    grown = feasible_ranks(facts)
    if plan is None or plan.step_seconds is None or not grown:
        return False
    return pays(_steps_left(facts), plan.step_seconds * (1 - status.ranks / grown), RESTART_SECONDS)


def _steps_left(facts: Facts) -> int:
    progress = facts.progress
    return facts.job.spec.training.steps - (progress.step if progress else 0)


def replan_pays(facts: Facts) -> bool:
    """Whether the remaining steps may gain more than another attempt costs."""
    plan, progress = facts.status.plan, facts.progress
    if plan is None or plan.step_seconds is None or progress is None or progress.step_seconds is None:
        return False
    return pays(_steps_left(facts), abs(progress.step_seconds - plan.step_seconds), RESTART_SECONDS)
