"""Pending reasons of an attempt, with remedies: the scheduler and the kubelet report only the reasons."""

from __future__ import annotations

from penstock.core.lifecycle import PLACED_IN_PART_SECONDS, AttemptState
from penstock.kube.names import RANKS_JOB
from penstock.operator.facts import Facts
from penstock.operator.snapshots import PodSnapshot

POD_SECONDS = 15.0
"""Seconds within which a healthy cluster creates an attempt's pods."""

START_SECONDS = 30.0
"""Seconds within which a node that has the image and can mount the volumes starts a pod."""


_GOES_ON = "the job goes on by itself"
_NEW_JOB = "a spec cannot be changed, so make a new job"
_IMAGE = f"push the image or give the account a pull secret, and {_GOES_ON}; or fix kubernetes.image in a new job"

_REMEDIES = (
    ("persistentvolumeclaim", f"make the claim, and {_GOES_ON}"),
    ("Unschedulable", f"add nodes or free some, and {_GOES_ON}; or make a new job that requests less, or has minRanks"),
    ("InvalidImageName", f"fix kubernetes.image; {_NEW_JOB}"),
    ("ErrImage", _IMAGE),
    ("ImagePull", _IMAGE),
    ("CreateContainerConfigError", f"make the objects that kubernetes.env names, and {_GOES_ON}"),
)
"""The first key that occurs in the message decides."""

NO_SERVICE = "the service could deliver the measurement, but is not running; start it, or wait for the agent"


def pending_reason(facts: Facts) -> str:
    """Return the pending reason of the first pod that has one; empty if none has."""
    if facts.jobset is not None and facts.jobset.suspended:
        queue = facts.job.spec.kubernetes.queue_name
        command = f"kubectl get localqueue {queue} -n {facts.job.metadata.namespace}"
        return f"queue {queue} has not admitted the job yet; check that Kueue runs, and the queue with {command}"
    stuck = next((pod for pod in facts.pods if pod.pending_reason), None)
    if stuck is None or stuck.pending_reason is None:
        return ""
    message = with_remedy(f"pod {stuck.name}: {stuck.pending_reason.reason}: {stuck.pending_reason.message}")
    placed = placed_ranks(facts)
    if not placed or placement_since(facts) is None:
        return message
    limit_text = f"given up if that stays so for {PLACED_IN_PART_SECONDS:.0f} s, and tried again"
    return f"{message}; {placed} of {facts.status.ranks} ranks have a place, which is {limit_text}"


def missing_pods(facts: Facts, now: float) -> str:
    """The reason if the cluster has not created the pods for long: the events of the child Job have the cause."""
    since = facts.status.phase_entered_at or now
    if facts.jobset is None or facts.jobset.suspended or now < since + POD_SECONDS:
        return ""
    if len(facts.pods) >= facts.expected_pods:
        return ""
    job = f"{facts.jobset.name}-{RANKS_JOB}-0"
    return f"{len(facts.pods)} of {facts.expected_pods} pods were made; kubectl describe job {job} shows the reason"


def unstarted_pods(facts: Facts, now: float) -> str:
    """The reason if a pod has a node for long and does not start, which the kubelet reports only in events."""
    due = now - START_SECONDS
    waiting = [pod for pod in facts.pods if not (pod.running or pod.end or pod.pending_reason)]
    late = next((pod for pod in waiting if pod.placed_at is not None and pod.placed_at <= due), None)
    if late is None:
        return ""
    return f"pod {late.name} has not started on node {late.node} yet; kubectl describe pod {late.name} shows the reason"


def measuring_message(facts: Facts) -> str:
    """The progress of measuring, or the cause of its delay, after the reason for a new measurement."""
    return "; ".join(filter(None, (facts.profile_message, _measuring(facts))))


def _measuring(facts: Facts) -> str:
    agent = facts.agent
    if agent is None:
        is_bound = len([pod for pod in facts.pods if pod.binding is not None]) == facts.expected_pods
        return pending_reason(facts) or ("" if is_bound else "not all pods have received the request to measure yet")
    pod = first_pod(facts)
    name = pod.name if pod is not None else "of the first rank"
    if agent.problem:
        service = "the service may still deliver it" if facts.service_since is not None else NO_SERVICE
        return f"waiting for the measurement: the agent of pod {name} {agent.problem}; {service}"
    if agent.report is None:
        return f"waiting for the measurement of pod {name}"
    if agent.report.state is AttemptState.STARTING:
        return f"pod {name} is preparing its data"
    done, total = agent.report.done, agent.report.total
    if not total:
        return f"pod {name} is measuring"
    return f"pod {name} has measured {min(10 * done // total, 10)} tenths of its points"  # few values: each is a write


def first_pod(facts: Facts) -> PodSnapshot | None:
    """The pod of the attempt's first rank, which collects the measurements of all, once it is bound to measure."""
    return next((pod for pod in facts.pods if pod.binding is not None and pod.binding.node_rank == 0), None)


def placement_since(facts: Facts) -> float | None:
    """Time since when nothing was placed in an attempt that lacks places; none if it lacks none, or a queue decides.

    Also none if nothing is placed and no pod would get a place if other pods left: such an attempt only waits, and
    competes with no other job.
    """
    since = short_since(facts)
    if since is None or facts.job.spec.kubernetes.queue_name:
        return None
    placed = [pod.placed_at for pod in facts.pods if pod.placed_at is not None]
    if not placed and not any(pod.pending_reason.lacks_capacity for pod in facts.pods if pod.pending_reason):
        return None
    return max([since, *placed])


def placed_ranks(facts: Facts) -> int:
    """Ranks of the attempt that have a place."""
    placed = sum(1 for pod in facts.pods if pod.node)
    return min(placed * facts.job.spec.kubernetes.ranks_per_pod, facts.status.ranks)


def hold_reason(facts: Facts) -> str:
    """Message of a job that is not launched yet, because other jobs want the same places."""
    other = facts.competition.held_by
    return f"waiting in line: {other} wants the same places and is ahead" if other else ""


def short_since(facts: Facts) -> float | None:
    """Time since when pods of the attempt have been without a place."""
    times = [
        pod.pending_reason.since for pod in facts.pods if pod.pending_reason and pod.pending_reason.since is not None
    ]
    return min(times, default=None)


def with_remedy(message: str) -> str:
    """The message, with its remedy if there is one."""
    remedy = next((remedy for key, remedy in _REMEDIES if key in message), "")
    return f"{message}; {remedy}" if remedy else message


def clocks_differ(ahead_seconds: float) -> str:
    """Message about a difference between the operator's and the cluster's clocks; empty if they agree."""
    if not ahead_seconds:
        return ""
    which = "ahead of" if ahead_seconds > 0 else "behind"
    minutes = max(1, round(abs(ahead_seconds) / 60))
    return f"the operator's clock is about {minutes} min {which} the cluster's; synchronise both machines with NTP"
