"""Input of a reconcile: one snapshot of a job and its objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Step
from penstock.core.status import JobProgress, JobStatus
from penstock.operator.agents import AgentAnswer
from penstock.operator.capacity import Capacity
from penstock.operator.manifests import num_pods
from penstock.operator.places import NO_COMPETITION, Competition
from penstock.operator.snapshots import JobSetSnapshot, NodeSnapshot, PodSnapshot


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A snapshot of a job: its spec and status, and the objects of its newest attempt.

    ``profile`` and ``plan`` are the states of measuring and planning for that attempt, with a message for one that
    failed. ``service_since`` is the time from which the service has run without a break; none while it does not run.
    ``stepped_at`` is when the newest step was reported. ``capacity`` is the free capacity for more of its ranks, if it
    was computed. This process's clock is ``ahead_seconds`` ahead of the cluster's, which only users read. ``hosts`` are
    the nodes of all its pods, also of earlier attempts: pods of a lost node stay there until the node is deleted.
    ``leftovers`` are pods that may be ranks of the attempt (`penstock.operator.ownership`): the operator only waits
    until they are gone.
    ``agent`` is the answer of the agent in the pod of the first rank, if it was polled. ``competition`` is that of
    other jobs for the places that this job needs. ``holders`` names the jobs that use these places; it is set after the
    placement of the attempt has been stuck for a while.
    """

    job: PipelineJob
    status: JobStatus
    jobset: JobSetSnapshot | None
    pods: tuple[PodSnapshot, ...]
    nodes: Mapping[str, NodeSnapshot]
    profile: Step = Step.MISSING
    plan: Step = Step.MISSING
    plan_message: str = ""
    service_since: float | None = None
    stepped_at: float = 0.0
    profile_message: str = ""
    capacity: Capacity | None = None
    ahead_seconds: float = 0.0
    hosts: frozenset[str] = frozenset()
    leftovers: tuple[PodSnapshot, ...] = ()
    competition: Competition = NO_COMPETITION
    holders: str = ""
    agent: AgentAnswer | None = None

    @property
    def expected_pods(self) -> int:
        """Pods that the newest attempt has when it is complete."""
        return num_pods(self.job, self.status.ranks)

    @property
    def progress(self) -> JobProgress | None:
        """Progress of the newest attempt; none as long as only an earlier one has reported."""
        progress, attempt = self.status.progress, self.status.attempt
        return progress if progress is not None and progress.attempt == attempt else None
