"""Drift of step times from the prediction: its size, its start, and whether a new measurement would help."""

from __future__ import annotations

import dataclasses

from penstock.core import lifecycle
from penstock.core.lifecycle import Phase
from penstock.core.records import WARM_UP_STEPS
from penstock.core.replanning import SETTLED_RATIO, drift_ratio
from penstock.core.status import ConditionStatus, ConditionType, JobStatus, PlanStatus
from penstock.operator.facts import Facts

BEGINNING = "Beginning"
"""Reason of `Drifted=False` while no step of the attempt was compared yet."""


def step_seconds(facts: Facts) -> tuple[float, float] | None:
    """Measured and predicted seconds of the newest step; none before the first comparable step."""
    plan, progress = facts.status.plan, facts.progress
    if facts.status.phase is not Phase.RUNNING or plan is None or progress is None or progress.step < WARM_UP_STEPS:
        return None
    if not plan.step_seconds or not progress.step_seconds:
        return None
    return progress.step_seconds, plan.step_seconds


def drifted_since(status: JobStatus) -> float | None:
    """Start of the current drift, also if it began in an earlier attempt; none without drift.

    Also none where the prediction was wrong for hardware that had just been measured.
    """
    condition = status.condition(ConditionType.DRIFTED)
    if condition is None or condition.status is not ConditionStatus.TRUE or (status.plan and status.plan.mispredicted):
        return None
    return condition.last_transition_time


def hardware_drifted_since(facts: Facts) -> float | None:
    """Start of the current drift, if the hardware is no longer as it was measured; none otherwise."""
    since, seconds = drifted_since(facts.status), step_seconds(facts)
    if since is None or seconds is None or drift_ratio(*seconds) <= SETTLED_RATIO:
        return None
    return None if _is_own(facts.status.plan, facts, since) else since


def with_drift(status: JobStatus, facts: Facts, now: float) -> JobStatus:
    """Return the status with the time of the first comparison with the prediction, and whether the prediction is wrong.

    The prediction is wrong if an attempt that measured its own hardware has drifted since its first comparisons, for
    `REPLAN_AFTER_DRIFT_SECONDS`. Another measurement would not help: the next prediction would be as wrong.
    """
    if status.phase is not Phase.RUNNING or status.plan is None or step_seconds(facts) is None:
        return status
    plan = status.plan
    if plan.compared_since is None:
        plan = dataclasses.replace(plan, compared_since=_compared_since(facts, plan) or now)
    since = drifted_since(status)
    if since is not None and now >= since + lifecycle.REPLAN_AFTER_DRIFT_SECONDS and _is_own(plan, facts, since):
        plan = dataclasses.replace(plan, mispredicted=True)
    return dataclasses.replace(status, plan=plan)


def _is_own(plan: PlanStatus | None, facts: Facts, since: float) -> bool:
    """Whether the attempt measured its own hardware, and its steps drifted soon after the first comparison.

    The time is not counted from the attempt's start: the first step may come long after it, on a slow machine or with
    long steps.
    """
    compared_since = _compared_since(facts, plan)
    if compared_since is None or facts.progress is None or not facts.progress.profile_ref:
        return False
    return since < compared_since + lifecycle.REPLAN_AFTER_DRIFT_SECONDS


def _compared_since(facts: Facts, plan: PlanStatus | None) -> float | None:
    """Time of the first comparison of a step with the attempt's prediction; none before it.

    Version 0.1.0 kept no such time, and counted from the start of the phase. Its conditions say whether it compared.
    """
    if plan is None or plan.compared_since is not None:
        return plan.compared_since if plan else None
    status, drifted = facts.status, facts.status.condition(ConditionType.DRIFTED)
    is_compared = status.phase is Phase.RUNNING and drifted is not None and drifted.reason != BEGINNING
    return status.phase_entered_at if is_compared else None
