"""Status of a job from decisions and observations: the phase, its times, and the conditions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from penstock.core.lifecycle import (
    LIVE,
    LOSSES,
    NO_STEP,
    PLACED_IN_PART_SECONDS,
    PLACES_RELEASED,
    AttemptState,
    Launch,
    Phase,
    SetPhase,
    Step,
    enter,
)
from penstock.core.plan import Plan
from penstock.core.pod import CheckpointName
from penstock.core.records import WARM_UP_STEPS
from penstock.core.replanning import DRIFTED_RATIO, SETTLED_RATIO, drift_ratio
from penstock.core.speed import step_text
from penstock.core.status import Condition, ConditionStatus, ConditionType, JobStatus, PlanStatus
from penstock.kube.transport import KubeError
from penstock.operator.drift import BEGINNING, step_seconds, with_drift
from penstock.operator.facts import Facts
from penstock.operator.observe import attempt_state
from penstock.operator.pending_reasons import (
    clocks_differ,
    hold_reason,
    measuring_message,
    missing_pods,
    pending_reason,
    placed_ranks,
    placement_since,
    unstarted_pods,
)
from penstock.operator.places import PlacementState

_WAITS = {
    Phase.QUEUED: ConditionType.ADMITTED,
    Phase.PROFILING: ConditionType.PROFILED,
    Phase.PLANNING: ConditionType.PLANNED,
    Phase.BINDING: ConditionType.BOUND,
}
"""The condition that a phase waits for."""

ROUNDING_SECONDS = 0.001
"""A stored time is rounded, so it may be this much later than the clock was."""

_PLANNED = frozenset({Phase.BINDING, Phase.RUNNING, Phase.SUCCEEDED})
_PROFILED = _PLANNED | {Phase.PLANNING}


def enter_phase(status: JobStatus, decision: SetPhase, now: float) -> JobStatus:
    """Return the status in the decided phase; raises `IllegalTransitionError` for one that cannot follow."""
    phase = enter(status.phase, decision.phase)
    lost = decision.reason in LOSSES
    return dataclasses.replace(
        status,
        phase=phase,
        reason=decision.reason,
        message=decision.message,
        phase_entered_at=now,
        failures=status.failures + lost,
        replans=status.replans + (decision.reason == "Drift"),
        failed_at=now if lost else status.failed_at,
        finished_at=now if phase.terminal else status.finished_at,
    )


def begin_attempt(status: JobStatus, launch: Launch, queues: bool, now: float) -> JobStatus:
    """Return the status that announces an attempt, before its objects exist.

    If the attempt ``queues``, the job's active time does not start yet.
    """
    started_at = now if status.started_at is None and not queues else status.started_at
    return dataclasses.replace(status, attempt=launch.attempt, ranks=launch.ranks, plan=None, started_at=started_at)


def without_future(status: JobStatus, now: float) -> JobStatus:
    """Return the status with times after ``now`` replaced by ``now``.

    They were written by an operator whose clock was ahead of this one's. Stored again, they make nothing due later than
    its full duration from now; a limit that counted from now at every step would never be reached. Other times of
    conditions only order jobs that wait, and stay. Jobs in line whose phases began in the future lose their order.
    """

    def past(at: float | None) -> float | None:
        return at if at is None or at <= now + ROUNDING_SECONDS else now

    def dated(condition: Condition) -> Condition:
        return dataclasses.replace(condition, last_transition_time=past(condition.last_transition_time))

    plan, drifted = status.plan, status.condition(ConditionType.DRIFTED)
    times = (
        status.phase_entered_at,
        status.started_at,
        status.failed_at,
        status.finished_at,
        plan.compared_since if plan is not None else None,
        drifted.last_transition_time if drifted is not None else None,
    )
    if all(past(at) == at for at in times):
        return status
    return dataclasses.replace(
        status,
        phase_entered_at=past(status.phase_entered_at),
        started_at=past(status.started_at),
        failed_at=past(status.failed_at),
        finished_at=past(status.finished_at),
        plan=dataclasses.replace(plan, compared_since=past(plan.compared_since)) if plan is not None else None,
        conditions=tuple(
            dated(condition) if condition.type is ConditionType.DRIFTED else condition
            for condition in status.conditions
        ),
    )


def summarize(plan: Plan) -> PlanStatus:
    """Return the summary of a plan for the status."""
    mesh = [f"{name} {size}" for name, size in (("dp", plan.dp), ("tp", plan.tp), ("pp", plan.pp)) if size > 1]
    slices = f"{len(plan.slices)} slices" if len(plan.slices) > 1 else "unsliced"
    batches = f"{plan.num_alike} x {plan.microbatch}" + (f" + {plan.remainder}" if plan.remainder else "")
    prediction = plan.prediction
    return PlanStatus(
        digest=plan.digest,
        summary=", ".join([*(mesh or ["pp 1"]), batches, slices, plan.schedule.generator]),
        step_seconds=prediction.step_seconds if prediction else None,
        speed=plan.speed(),
        peak_bytes=max(prediction.peak_bytes, default=None) if prediction else None,
    )


def compute_status(status: JobStatus, facts: Facts, generation: int, now: float) -> JobStatus:
    """Return the status with its conditions, and the pending reason as its message; equal if nothing changed."""
    facts = dataclasses.replace(facts, status=status)
    queued = status.phase is Phase.QUEUED
    waits_for = _waits_for(status, facts, now) if queued else ""
    message = waits_for if queued else status.message
    if status.phase is Phase.PROFILING and facts.profile is not Step.DONE:
        message = measuring_message(facts)
    conditions = merged(status.conditions, _conditions(status, facts, waits_for, now), generation, now)
    return dataclasses.replace(
        with_drift(dataclasses.replace(status, conditions=conditions), facts, now),
        observed_generation=generation,
        message=message,
        started_at=_active_since(status, facts, now),
        checkpoint=_newest_checkpoint(status, facts),
    )


def _newest_checkpoint(status: JobStatus, facts: Facts) -> CheckpointName | None:
    """Newest checkpoint that the service or the agent reported. Only users read it: ranks search by themselves
    (docs/adr/0018).
    """
    progress, report = facts.progress, facts.agent.report if facts.agent is not None else None
    checkpoints = [status.checkpoint, report.checkpoint if report is not None else None]
    if progress is not None and progress.last_checkpoint is not None:
        checkpoints.append(CheckpointName(attempt=progress.attempt, step=progress.last_checkpoint))
    known = (name for name in checkpoints if name is not None)
    return max(known, key=lambda name: (name.step, name.attempt), default=None)


def is_reported_by_service(status: JobStatus) -> bool:
    """Whether the service's part of the status names the newest checkpoint."""
    name, progress = status.checkpoint, status.progress
    if name is None or progress is None:
        return False
    return (name.attempt, name.step) == (progress.attempt, progress.last_checkpoint)


def _waits_for(status: JobStatus, facts: Facts, now: float) -> str:
    if facts.jobset is None and status.attempt <= status.launched:
        return hold_reason(facts)
    return pending_reason(facts) or missing_pods(facts, now) or unstarted_pods(facts, now)


def _active_since(status: JobStatus, facts: Facts, now: float) -> float | None:
    """Start of the active time, like the startTime of a Kubernetes Job. None while the job is suspended by its spec or
    by a queue; when it resumes, the time limit starts from zero.
    """
    if status.phase is Phase.SUSPENDED or (facts.jobset is not None and facts.jobset.suspended):
        return None
    return now if status.started_at is None and facts.jobset is not None else status.started_at


def denied(status: JobStatus, error: KubeError, generation: int, now: float) -> JobStatus:
    """Return the status of a job for which the cluster refused a call that will be retried."""
    waits = _WAITS.get(status.phase)
    new = [] if waits is None else [condition(waits, False, "", error.reason or "Refused", error.message)]
    conditions = merged(status.conditions, new, generation, now)
    message = error.message if new else status.message  # keeps the cause of a failure
    return dataclasses.replace(status, observed_generation=generation, message=message, conditions=conditions)


def refused(status: JobStatus, mistake: str, generation: int, now: float) -> JobStatus:
    """Return the failed status of a job with an invalid spec."""
    failed = enter_phase(status, SetPhase(Phase.FAILED, "InvalidSpec", mistake), now)
    new = [
        condition(ConditionType.COMPLETE, False, "", "Failed", ""),
        condition(ConditionType.FAILED, True, "InvalidSpec", "", mistake),
    ]
    conditions = merged(status.conditions, new, generation, now)
    return dataclasses.replace(failed, observed_generation=generation, conditions=conditions)


def _conditions(status: JobStatus, facts: Facts, waits_for: str, now: float) -> Iterable[Condition]:
    """The conditions that apply in this phase, with their current content."""
    live = status.phase in LIVE
    if status.attempt or waits_for:
        is_admitted = live or status.phase is Phase.SUCCEEDED
        message = "; ".join(filter(None, (waits_for, clocks_differ(facts.ahead_seconds))))
        yield condition(ConditionType.ADMITTED, is_admitted, "Admitted", _admission_reason(status, facts, now), message)
    if status.phase in _PROFILED or status.phase is Phase.PROFILING:
        yield _profiled(status, facts)
    if status.plan is not None or status.phase is Phase.PLANNING or status.reason == "NoPlan":
        yield _planned(status)
    if live:
        is_bound = attempt_state(facts)[0] in (AttemptState.RUNNING, AttemptState.SUCCEEDED)
        yield condition(ConditionType.BOUND, is_bound, "Bound", "Waiting", "")
    yield from _stale_conditions(status)
    if status.condition(ConditionType.STALLED) or NO_STEP in status.message:
        stalled = NO_STEP in status.message and status.phase in (Phase.RECOVERING, Phase.FAILED)
        yield condition(ConditionType.STALLED, stalled, "NoStep", "Stepping", status.message if stalled else "")
    drifted = _drifted(facts)
    if drifted is not None:
        yield drifted
    if facts.job.spec.run_policy.suspend or status.condition(ConditionType.SUSPENDED):
        yield condition(ConditionType.SUSPENDED, status.phase is Phase.SUSPENDED, "Suspended", "Active", "")
    if status.phase.terminal:
        succeeded = status.phase is Phase.SUCCEEDED
        yield condition(ConditionType.COMPLETE, succeeded, "Completed", "Failed", "")
        yield condition(ConditionType.FAILED, not succeeded, status.reason or "Failed", "Completed", status.message)


def _admission_reason(status: JobStatus, facts: Facts, now: float) -> str:
    """Reason of the condition Admitted, which encodes the job's placement state (`penstock.operator.places`)."""
    before = status.condition(ConditionType.ADMITTED)
    was_in_line = before is not None and before.reason in (PlacementState.IN_LINE, PlacementState.PLACING)
    if facts.job.spec.kubernetes.queue_name or status.phase not in (Phase.QUEUED, Phase.RECOVERING):
        return "Waiting"
    if status.phase is Phase.RECOVERING:
        return PlacementState.IN_LINE if was_in_line or status.reason in PLACES_RELEASED else "Waiting"
    if placement_since(facts) is not None:
        return PlacementState.IN_PART if placed_ranks(facts) else PlacementState.SHORT
    if facts.jobset is None and status.attempt <= status.launched:
        return PlacementState.IN_LINE if was_in_line or facts.competition.held_by else "Waiting"
    due = now if facts.jobset is None else facts.jobset.made_at + PLACED_IN_PART_SECONDS
    is_placing = was_in_line and not _is_placed(facts) and now <= due
    return PlacementState.PLACING if is_placing else "Waiting"


def _is_placed(facts: Facts) -> bool:
    return len([pod for pod in facts.pods if pod.node]) >= facts.expected_pods


def _stale_conditions(status: JobStatus) -> Iterable[Condition]:
    """Conditions of an attempt that has ended, set to false."""
    gone = [ConditionType.PROFILED, ConditionType.PLANNED] if status.phase is Phase.QUEUED else []
    if status.phase not in LIVE and status.phase is not Phase.SUCCEEDED:
        gone.append(ConditionType.BOUND)
    for kind in gone:
        if status.condition(kind) is not None:
            yield condition(kind, False, "", "Waiting", "")


def _profiled(status: JobStatus, facts: Facts) -> Condition:
    if status.phase is not Phase.PROFILING or facts.profile is Step.DONE:
        return condition(ConditionType.PROFILED, True, "Measured", "", "")
    is_unreachable = facts.service_since is None and facts.agent is not None and bool(facts.agent.problem)
    reason = "ServiceUnavailable" if is_unreachable else "Measuring"
    return condition(ConditionType.PROFILED, False, "", reason, measuring_message(facts))


def _planned(status: JobStatus) -> Condition:
    if status.plan is not None:
        return condition(ConditionType.PLANNED, True, "Planned", "", status.plan.summary)
    if status.reason == "NoPlan":
        return condition(ConditionType.PLANNED, False, "", "NoPlan", status.message)
    return condition(ConditionType.PLANNED, False, "", "Planning", "")


def _drifted(facts: Facts) -> Condition | None:
    """Condition Drifted: whether step times differ from the prediction.

    Drift of an attempt stays in the status until the next attempt trains, because the next profile may have to be newer
    than the drift.
    """
    status, progress = facts.status, facts.progress
    before, seconds = status.condition(ConditionType.DRIFTED), step_seconds(facts)
    if seconds is None:
        begins = status.phase is Phase.RUNNING and (progress is None or progress.step < WARM_UP_STEPS)
        return condition(ConditionType.DRIFTED, False, "", BEGINNING, "") if begins and before is not None else None
    was_drifted = before is not None and before.status is ConditionStatus.TRUE
    if drift_ratio(*seconds) <= (SETTLED_RATIO if was_drifted else DRIFTED_RATIO):
        return condition(ConditionType.DRIFTED, False, "", "AsPredicted", "")
    measured, predicted = seconds
    now = step_text(measured, progress.speed if progress else None)
    then = step_text(predicted, status.plan.speed if status.plan else None)
    message = f"a step takes {now}, and {then} were predicted"
    return condition(ConditionType.DRIFTED, True, "Slower" if measured > predicted else "Faster", "", message)


def condition(kind: ConditionType, holds: bool, when_true: str, when_false: str, message: str) -> Condition:
    status = ConditionStatus.TRUE if holds else ConditionStatus.FALSE
    return Condition(type=kind, status=status, reason=when_true if holds else when_false, message=message)


def merged(
    before: tuple[Condition, ...], changes: Iterable[Condition], generation: int, now: float
) -> tuple[Condition, ...]:
    """Return all conditions in the order of their types. A transition time changes only with the condition's status."""
    old = {known.type: known for known in before}
    new = {change.type: _dated(change, old.get(change.type), generation, now) for change in changes}
    merged = {**old, **new}
    return tuple(merged[kind] for kind in ConditionType if kind in merged)


def _dated(change: Condition, before: Condition | None, generation: int, now: float) -> Condition:
    since = before.last_transition_time if before and before.status is change.status else now
    return dataclasses.replace(change, observed_generation=generation, last_transition_time=since)
