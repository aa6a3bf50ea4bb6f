"""What is known of a job when it is looked at, in one piece."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Step
from penstock.core.status import JobProgress, JobStatus
from penstock.operator.agents import News
from penstock.operator.manifests import num_pods
from penstock.operator.places import NO_COMPETITION, Competition
from penstock.operator.room import Room
from penstock.operator.seen import SeenJobSet, SeenNode, SeenPod


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of a job: its own words, and the objects of its newest attempt.

    ``profile`` and ``plan`` are where measuring and planning for that attempt are, with a message for one that failed.
    ``service_since`` is since when the service has been there without a break; none while it is away. ``stepped_at`` is
    when the newest step was heard of. ``room`` is what was found for more of its ranks, if that was looked for. By
    this process's clock all that the cluster dated is ``ahead_seconds`` later. ``hosts`` are the nodes of all its pods,
    also of attempts before: what a lost node had stays there until somebody says that it never comes back.
    ``leftovers`` may be ranks of the attempt and are not known to be: they are waited for, and nothing else.
    ``agent`` is what the agent in the pod of the first rank said, where it was asked.
    ``competition`` is what others have to do with its places; ``holders`` names who has them, once the attempt stood
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
        """What the newest attempt has told; none as long as only one before it has."""
        told, attempt = self.status.progress, self.status.attempt
        return told if told is not None and told.attempt == attempt else None
