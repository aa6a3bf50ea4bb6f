"""What keeps an attempt from starting, in words that say what to do."""

from __future__ import annotations

from penstock.kube.names import RANKS_JOB
from penstock.operator.facts import Facts
from penstock.operator.remedies import remedied

POD_SECONDS = 15.0
"""A cluster that would make pods has made them by then."""

START_SECONDS = 30.0
"""A node that has the image, and can mount what is asked for, has started a pod by then."""


def hindrance(facts: Facts) -> str:
    """What keeps the attempt from starting, of the first pod that says something; empty if nothing does."""
    if facts.jobset is not None and facts.jobset.suspended:
        queue = facts.job.spec.kubernetes.queue_name
        return f"queue {queue} has not admitted it yet; it has to be in this namespace, and Kueue in the cluster"
    found = next((pod for pod in facts.pods if pod.hindrance), None)
    if found is None or found.hindrance is None:
        return ""
    return remedied(f"pod {found.name}: {found.hindrance.reason}: {found.hindrance.message}")


def missing_pods(facts: Facts, now: float) -> str:
    """That the cluster refuses to make pods, where it has not made them for long; it tells the child Job why."""
    since = facts.status.phase_entered_at or now
    if facts.jobset is None or facts.jobset.suspended or now < since + POD_SECONDS:
        return ""
    if len(facts.pods) >= facts.wanted_pods:
        return ""
    job = f"{facts.jobset.name}-{RANKS_JOB}-0"
    return f"{len(facts.pods)} of {facts.wanted_pods} pods were made; kubectl describe job {job} says why"


def unstarted_pods(facts: Facts, now: float) -> str:
    """That a pod has a node for long and does not start, of which the kubelet tells in events alone."""
    due = now - START_SECONDS - facts.ahead_seconds
    waiting = [pod for pod in facts.pods if not (pod.running or pod.end or pod.hindrance)]
    late = next((pod for pod in waiting if pod.placed_at is not None and pod.placed_at <= due), None)
    if late is None:
        return ""
    return f"pod {late.name} has not started on node {late.node} yet; kubectl describe pod {late.name} says why"


def short_since(facts: Facts) -> float | None:
    """Since when pods of the attempt have had no place."""
    times = [pod.hindrance.since for pod in facts.pods if pod.hindrance and pod.hindrance.since is not None]
    return min(times) + facts.ahead_seconds if times else None
