"""Translation of a job's facts into the observation of the life cycle, without calls to the cluster and without a
clock.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.lifecycle import (
    LIVE,
    MEASURING_SECONDS,
    NO_STEP,
    PLACES_RELEASED,
    PREPARING_SECONDS,
    AttemptState,
    Observation,
    Phase,
    Step,
)
from penstock.core.pod import MEASURE_EPOCH, TRAIN_EPOCH
from penstock.core.status import JobStatus
from penstock.operator.drift import hardware_drifted_since
from penstock.operator.facts import Facts
from penstock.operator.grace import grace_seconds
from penstock.operator.pending_reasons import (
    measuring_message,
    pending_reason,
    placed_ranks,
    placement_since,
    short_since,
)
from penstock.operator.places import jitter, waiting_since
from penstock.operator.restart_benefit import feasible_ranks, growth_pays, replan_pays
from penstock.operator.snapshots import End, NodeSnapshot, PodSnapshot

NODE_NOTICE_SECONDS = 60.0
"""Kubernetes marks a silent node as not ready after 50 s by default; peers of its pods may have ended by then."""

_ENDS = frozenset({AttemptState.FAILED, AttemptState.DISRUPTED, AttemptState.STOPPED})


def observe(facts: Facts, *, fresh: bool = False) -> Observation:
    """The observation of the life cycle, ``fresh`` if the facts were just read from the cluster."""
    status, spec = facts.status, facts.job.spec
    state, message = attempt_state(facts)
    stop_requested_at = min(
        (pod.stop_requested_at for pod in facts.pods if pod.stop_requested_at is not None), default=None
    )
    progress = facts.progress
    return Observation(
        attempt_state=state,
        attempt_gone=is_gone(facts),
        attempt_ranks=status.ranks,
        unstarted=_is_unstarted(facts),
        fresh=fresh,
        refused=any(pod.end and pod.end.report and pod.end.report.refused for pod in facts.pods),
        stop_requested=stop_requested_at is not None,
        stop_due_at=None if stop_requested_at is None else stop_requested_at + grace_seconds(spec, status),
        attempts_queue=True,
        short_since=short_since(facts),
        node_lost_since=_node_lost_since(facts),
        held=facts.competition.held_by,
        placement_since=placement_since(facts),
        placed_ranks=placed_ranks(facts),
        gives_way_to=facts.competition.gives_way_to,
        followed=facts.competition.followed,
        holders=facts.holders,
        places_released_at=status.phase_entered_at if _released_places(status) else None,
        places_waited_seconds=max(0.0, (status.phase_entered_at or 0.0) - (waiting_since(status) or 0.0)),
        jitter=jitter(facts.job.metadata.uid, status.attempt),
        profile=facts.profile,
        news_due_at=_news_due_at(facts),
        plan=facts.plan,
        message=message if state in _ENDS else _progress_message(facts) or message,
        failed_at=status.failed_at,
        training_since=_training_since(facts),
        last_step_at=_last_step_at(facts),
        predicted_step_seconds=status.plan.step_seconds if status.plan else None,
        last_checkpoint=progress.last_checkpoint if progress else None,
        feasible_ranks=feasible_ranks(facts) if spec.resources.min_ranks is not None else None,
        capacity_stable_since=facts.capacity.since if facts.capacity else None,
        checkpoint_is_current=True,  # an attempt makes one before it stops
        growth_pays=growth_pays(facts),
        drifted_since=hardware_drifted_since(facts),
        replan_pays=replan_pays(facts),
        replans=status.replans,
    )


def _progress_message(facts: Facts) -> str:
    measures = facts.status.phase is Phase.PROFILING
    return measuring_message(facts) if measures else facts.profile_message or facts.plan_message


def _news_due_at(facts: Facts) -> float | None:
    """Time at which an attempt that measures is given up. It may prepare data for long: the longer limit is for agents
    that report so, and for those that never reported while the service runs, such as agents of 0.1.0.
    """
    if facts.status.phase is not Phase.PROFILING or facts.profile is Step.DONE:
        return None
    since, agent = facts.status.phase_entered_at or 0.0, facts.agent
    if agent is None:
        return since + MEASURING_SECONDS
    may_prepare = agent.report.state is AttemptState.STARTING if agent.report else facts.service_since is not None
    return max(since, agent.since) + (PREPARING_SECONDS if may_prepare else MEASURING_SECONDS)


def _released_places(status: JobStatus) -> bool:
    return status.phase is Phase.RECOVERING and status.reason in PLACES_RELEASED


def attempt_state(facts: Facts) -> tuple[AttemptState, str]:
    """Return the state of the newest attempt, and its reason if there is one.

    The order is that of certainty: a pod's report of its own end comes before the state of pods and nodes.
    """
    if _is_unstarted(facts):
        return AttemptState.STARTING, ""
    if facts.status.attempt == 0 or (is_closed(facts) and facts.status.phase not in LIVE):
        return AttemptState.NONE, ""
    ended = _failed(facts) or _done(facts) or _completed(facts) or _disrupted(facts) or _failed_as_a_whole(facts)
    if ended is not None:
        return ended
    if not _is_complete(facts):
        return AttemptState.STARTING, pending_reason(facts)
    if all(pod.binding and pod.binding.epoch >= TRAIN_EPOCH for pod in facts.pods if pod.end is None):
        return AttemptState.RUNNING, ""
    return AttemptState.READY, ""


def _failed(facts: Facts) -> tuple[AttemptState, str] | None:
    """Return the failure of the pod that failed first: its failure was not caused by another pod's end.

    A cluster dates ends in whole seconds. Among ends in the same second, a pod without a report was killed, and the
    others had the time to report that they lost it.

    Ends are ordered by the clocks of their kubelets. The order in which this process observes them would be worse: a
    kubelet reports an end up to seconds late, while peers end within one, and an operator that starts has all ends at
    once. If kubelets' clocks differ by more than that, the message may be of a pod that ended second, and a disruption
    may count as one failure, or a failure as none.
    """
    failed = [(pod, pod.end) for pod in facts.pods if pod.end and not pod.end.succeeded]
    if not failed:
        return None
    pod, end = min(failed, key=lambda failure: (failure[1].at, failure[1].report is not None, failure[0].name))
    lost = _lost_before(facts, end)
    if lost:
        return AttemptState.DISRUPTED, f"{lost}, and pod {pod.name} ended: {end.message}"
    is_disrupted = end.disrupted or pod.being_deleted
    return (AttemptState.DISRUPTED if is_disrupted else AttemptState.FAILED), f"pod {pod.name}: {end.message}"


def _lost_before(facts: Facts, end: End) -> str:
    """The disruption of other pods of the attempt that made this one give up; empty if there was none.

    The disruption may have happened while no operator ran, for example on the operator's own node. An operator that
    starts has both at once, and then a lost node counts as the cause: at worst a failure is not counted. If a user's
    mistake ended the pod, that mistake counts.
    """
    if end.report is not None and end.report.refused:
        return ""
    for pod in facts.pods:
        if pod.end is not None or not pod.node:
            continue
        node = facts.nodes.get(pod.node)
        if node is None:
            return f"node {pod.node} of pod {pod.name} was deleted"
        since = node.not_ready_since
        if since is not None and since <= end.observed_at + NODE_NOTICE_SECONDS:
            return f"node {pod.node} of pod {pod.name} is not ready"
    num_gone = facts.expected_pods - len(facts.pods)
    return f"{num_gone} of {facts.expected_pods} pods are gone" if num_gone > 0 and NO_STEP in end.message else ""


def _done(facts: Facts) -> tuple[AttemptState, str] | None:
    """STOPPED or SUCCEEDED if every pod has ended and none failed."""
    reports = [pod.end.report for pod in facts.pods if pod.end]
    if len(reports) < facts.expected_pods or not reports:
        return None
    stopped = any(report and report.state is AttemptState.STOPPED for report in reports)
    return (AttemptState.STOPPED, "stopped after a checkpoint") if stopped else (AttemptState.SUCCEEDED, "")


def _completed(facts: Facts) -> tuple[AttemptState, str] | None:
    """SUCCEEDED if the JobSet completed and the last step was reported, for pods that were removed unobserved. The
    JobSet of a stopped attempt completes, too.
    """
    progress = facts.progress
    if facts.jobset is None or not facts.jobset.completed or progress is None:
        return None
    return (AttemptState.SUCCEEDED, "") if progress.step >= facts.job.spec.training.steps else None


def _failed_as_a_whole(facts: Facts) -> tuple[AttemptState, str] | None:
    """FAILED if the JobSet failed. This rule is the last one: a JobSet also fails when a pod is evicted, and then the
    pods have a better reason.
    """
    jobset = facts.jobset
    if jobset is None or not jobset.failure:
        return None
    return AttemptState.FAILED, f"JobSet {jobset.name}: {jobset.message or jobset.failure}"


def _disrupted(facts: Facts) -> tuple[AttemptState, str] | None:
    """DISRUPTED if the attempt lost its JobSet, its admission by a queue, or a pod or its node."""
    live = facts.status.phase in LIVE
    if facts.jobset is None or facts.jobset.being_deleted:
        return AttemptState.DISRUPTED, "the JobSet was deleted"
    if facts.jobset.suspended:
        # Its pods ran before. Resumed, it would restart only those that had not ended, so a new attempt has to follow.
        had_a_place = live or facts.pods
        return (AttemptState.DISRUPTED, "was preempted: its JobSet was suspended") if had_a_place else None
    for pod in facts.pods:
        node = facts.nodes.get(pod.node)
        if node is not None and node.not_ready_since is not None and pod.end is None:
            return AttemptState.DISRUPTED, f"node {pod.node} of pod {pod.name} is not ready"
        if pod.being_deleted and pod.end is None:
            return AttemptState.DISRUPTED, f"pod {pod.name} was deleted"
        if live and pod.node and node is None:
            return AttemptState.DISRUPTED, f"node {pod.node} of pod {pod.name} was deleted"
    if live and len(facts.pods) < facts.expected_pods:
        return AttemptState.DISRUPTED, f"{facts.expected_pods - len(facts.pods)} of {facts.expected_pods} pods are gone"
    return None


def _is_complete(facts: Facts) -> bool:
    """Whether every pod is there, runs and can be reached."""
    there = [pod for pod in facts.pods if pod.address and (pod.running or pod.end)]
    return len(there) == facts.expected_pods and facts.jobset is not None and not facts.jobset.suspended


def _is_unstarted(facts: Facts) -> bool:
    """Whether the attempt is written to the status, and its JobSet was never there."""
    status = facts.status
    return status.phase is Phase.QUEUED and status.attempt > status.launched and facts.jobset is None


def is_closed(facts: Facts) -> bool:
    """Whether the attempt's JobSet makes no more pods, because it is gone or being deleted."""
    return facts.jobset is None or facts.jobset.being_deleted


def is_gone(facts: Facts) -> bool:
    """Whether no rank of the attempt is left that may write its output; ranks on a lost node cannot reach their peers.

    If another attempt may follow, the JobSet has to be gone too, or it would be taken for that of the next attempt.
    """
    if any(_may_write(pod, facts.nodes) for pod in (*facts.pods, *facts.leftovers)):
        return False
    return is_closed(facts) or (facts.status.phase.terminal and not _may_create_pods(facts))


def _may_write(pod: PodSnapshot, nodes: Mapping[str, NodeSnapshot]) -> bool:
    if pod.end is not None or not pod.node:
        return False
    node = nodes.get(pod.node)
    return node is not None and node.not_ready_since is None


def _may_create_pods(facts: Facts) -> bool:
    """Whether the JobSet may still make pods, because it has not ended."""
    if facts.jobset is not None and (facts.jobset.failure or facts.jobset.completed):
        return False
    return len([pod for pod in facts.pods if pod.end]) < facts.expected_pods


def measuring(facts: Facts) -> bool:
    """Whether every pod of the attempt was requested to measure."""
    bound = [pod for pod in facts.pods if pod.binding and pod.binding.epoch >= MEASURE_EPOCH]
    return bool(bound) and len(bound) == facts.expected_pods


def _node_lost_since(facts: Facts) -> float | None:
    hosts = [node for name, node in facts.nodes.items() if name in facts.hosts]
    times = [node.not_ready_since for node in hosts if node.not_ready_since is not None]
    return min(times, default=None)


def _last_step_at(facts: Facts) -> float | None:
    """Time of the attempt's last reported step, but not before reports could arrive; none before its first step."""
    progress, training_since = facts.progress, _training_since(facts)
    if training_since is None or progress is None or progress.epoch < TRAIN_EPOCH:
        return None
    return max(facts.stepped_at, training_since)


def _training_since(facts: Facts) -> float | None:
    """Time since when the attempt trains and could have reported steps: without the service there are no reports.

    Every time is by this process's clock, so that no attempt counts as stalled because another clock is off.
    """
    if facts.status.phase is not Phase.RUNNING or facts.service_since is None:
        return None
    return max(facts.status.phase_entered_at or 0.0, facts.service_since)
