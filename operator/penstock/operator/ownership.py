"""Ownership of cluster objects: an object belongs to a PipelineJob if its chain of controllers ends at it.

The operator selects objects by the label with the job's uid, because watches and lists select by labels. Labels prove
nothing: `kubectl debug --copy-to --keep-labels` copies them, and any user may write them in any namespace. Three owner
references prove it, each with the uid of the object that controls the next, all in the job's namespace:

    pod -> Job NAME-aN-ranks-0 -> JobSet NAME-aN -> PipelineJob NAME

The links are remembered for as long as the PipelineJob exists. When a JobSet is deleted in the background, its Job is
deleted after it and its pods last, and until then these pods still write the job's output.

An operator that starts in between knows neither Job nor JobSet. Pods that name such a Job as their controller are not
bound, counted or requested to stop, but another attempt waits until they are gone (`may_be_left`): they may be ranks
of the one before. A cluster removes pods whose controller does not exist, so nothing waits for an invented name.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.kube.names import attempt_name, ranks_job_name
from penstock.operator.snapshots import ChildSnapshot, JobSetSnapshot, PodSnapshot, RanksJobSnapshot


class Ownership:
    """The links that were observed, by the uid of their PipelineJob. Not thread-safe."""

    def __init__(self) -> None:
        self._jobsets: dict[str, dict[str, JobSetSnapshot]] = {}
        self._jobs: dict[str, dict[str, RanksJobSnapshot]] = {}

    def put(self, child: ChildSnapshot) -> None:
        """Remember a JobSet that its PipelineJob controls, and a Job and the JobSet that controls it."""
        if isinstance(child, JobSetSnapshot) and child.owner == child.job_uid:
            self._jobsets.setdefault(child.job_uid, {})[child.uid] = child
        elif isinstance(child, RanksJobSnapshot) and child.owner:
            self._jobs.setdefault(child.job_uid, {})[child.uid] = child

    def forget(self, job_uid: str) -> None:
        """Drop the links of a PipelineJob that is gone, or never existed."""
        self._jobsets.pop(job_uid, None)
        self._jobs.pop(job_uid, None)

    def has_pod(self, namespace: str, name: str, pod: PodSnapshot) -> bool:
        """Whether the pod is a rank's of its PipelineJob, which has that namespace and name."""
        job = self._jobs.get(pod.job_uid, {}).get(pod.owner)
        jobset = self._jobsets.get(pod.job_uid, {}).get(job.owner) if job is not None else None
        if job is None or jobset is None:
            return False
        in_place = pod.namespace == job.namespace == namespace and pod.attempt == jobset.attempt
        return in_place and job.name == ranks_job_name(name, pod.attempt) and has_jobset(namespace, name, jobset)


def has_jobset(namespace: str, name: str, jobset: JobSetSnapshot) -> bool:
    """Whether the JobSet is an attempt's of its PipelineJob, which has that namespace and name."""
    is_its = jobset.owner == jobset.job_uid and jobset.namespace == namespace
    return is_its and jobset.name == attempt_name(name, jobset.attempt)


def ranks(pods: Iterable[PodSnapshot]) -> tuple[PodSnapshot, ...]:
    """Return one pod for each attempt and completion index, the one that was created first; sorted by name.

    A Job deletes the others by itself.
    """
    first: dict[tuple[int, int], PodSnapshot] = {}
    for pod in sorted(pods, key=lambda pod: (pod.made_at, pod.name)):
        first.setdefault((pod.attempt, pod.index), pod)
    return tuple(sorted(first.values(), key=lambda pod: pod.name))


def may_be_left(namespace: str, name: str, pod: PodSnapshot) -> bool:
    """Whether the pod may be one of the job ``name`` whose owners were never observed."""
    return pod.namespace == namespace and pod.owner_name == ranks_job_name(name, pod.attempt)
