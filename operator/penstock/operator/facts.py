"""Input of a reconcile: one snapshot of a job and its objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Step
from penstock.core.status import JobProgress, JobStatus
from penstock.operator.agents import News
from penstock.operator.capacity import Room
from penstock.operator.manifests import num_pods
from penstock.operator.places import NO_COMPETITION, Competition
from penstock.operator.snapshots import SeenJobSet, SeenNode, SeenPod


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A snapshot of a job: its spec and status, and the objects of its newest attempt.

    ``profile`` and ``plan`` are where measuring and planning for that attempt are, with a message for one that failed.
    ``service_since`` is since when the service has been there without a break; none while it is away. ``stepped_at`` is
    when the newest step was heard of. ``room`` is the free capacity for more of its ranks, if it was computed. By
    this process's clock all that the cluster dated is ``ahead_seconds`` later. ``hosts`` are the nodes of all its pods,
    also of attempts before: pods of a lost node stay there until the node is deleted.
    ``leftovers`` may be ranks of the attempt, which is not certain: they are only waited for.
    ``agent`` is the answer of the agent in the pod of the first rank, if it was polled.
    ``competition`` is that of other jobs for its places; ``holders`` names who has them, once the attempt stood
    still for long.
    """

    job: PipelineJob
    status: JobStatus
    jobset: SeenJobSet | None
    pods: tuple[SeenPod, ...]
    nodes: Mapping[str, SeenNode]
    profile: Step = Step.MISSING
    plan: Step = Step.MISSING
    plan_message: str = ""
    service_since: float | None = None
    stepped_at: float = 0.0
    profile_message: str = ""
    room: Room | None = None
    ahead_seconds: float = 0.0
    hosts: frozenset[str] = frozenset()
    leftovers: tuple[SeenPod, ...] = ()
    competition: Competition = NO_COMPETITION
    holders: str = ""
    agent: News | None = None

    @property
    def wanted_pods(self) -> int:
        """Pods that the newest attempt has when it is complete."""
        return num_pods(self.job, self.status.ranks)

    @property
    def progress(self) -> JobProgress | None:
        """Progress of the newest attempt; none as long as only an earlier one has reported."""
        progress, attempt = self.status.progress, self.status.attempt
        return progress if progress is not None and progress.attempt == attempt else None
