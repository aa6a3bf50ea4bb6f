"""What the operator knows of the cluster between looking: kept by watches, read by reconciles, safe among threads.

Everything is found by the uid of the PipelineJob that it belongs to, because that is what reconciles are about.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from penstock.core.errors import UserError
from penstock.core.job import API_VERSION, KIND, PipelineJob
from penstock.core.status import JobStatus, ProfileStatus
from penstock.kube.transport import Object
from penstock.operator.seen import SeenJobSet, SeenNode, SeenPod

Child = TypeVar("Child", SeenJobSet, SeenPod)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenJob:
    """A PipelineJob. ``job`` is none if what it says is refused, for the reason in ``mistake``."""

    namespace: str
    name: str
    uid: str
    generation: int
    version: int
    being_deleted: bool
    job: PipelineJob | None
    status: JobStatus
    mistake: str = ""


class Children(Generic[Child]):
    """The children of all jobs, of one kind."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Child]] = {}

    def of(self, job_uid: str) -> tuple[Child, ...]:
        """Those of one job, by name."""
        found = self._of.get(job_uid, {})
        return tuple(found[name] for name in sorted(found))

    def put(self, child: Child) -> bool:
        """Know it as it is now; whether that is news."""
        found = self._of.setdefault(child.job_uid, {})
        if found.get(child.name) == child:
            return False
        found[child.name] = child
        return True

    def remove(self, child: Child) -> bool:
        """Know it no longer, unless it was replaced by a namesake; whether that is news."""
        found = self._of.get(child.job_uid, {})
        known = found.get(child.name)
        if known is None or known.uid != child.uid:
            return False
        del found[child.name]
        if not found:
            del self._of[child.job_uid]
        return True

    def replace(self, children: Iterable[Child]) -> set[str]:
        """Know these and no others; the jobs that this is news for."""
        found: dict[str, dict[str, Child]] = {}
        for child in children:
            found.setdefault(child.job_uid, {})[child.name] = child
        before, self._of = self._of, found
        return {uid for uid in before.keys() | found.keys() if before.get(uid) != found.get(uid)}


class Cache:
    """Everything, behind one lock; ``news`` is called with the uid of each job that something changed for."""

    def __init__(self, news: Callable[[str], None] = lambda uid: None) -> None:
        self._lock = threading.RLock()
        self._news = news
        self._jobs: dict[str, SeenJob] = {}
        self._jobsets: Children[SeenJobSet] = Children()
        self._pods: Children[SeenPod] = Children()
        self._nodes: dict[str, SeenNode] = {}
        self._service_since: float | None = None

    # Jobs

    def job(self, uid: str) -> SeenJob | None:
        """The job with that uid, if there is one."""
        with self._lock:
            return self._jobs.get(uid)

    def uids(self) -> list[str]:
        """Of all jobs."""
        with self._lock:
            return list(self._jobs)

    def put_job(self, found: Object) -> SeenJob:
        """Know the job as it is in ``found``, unless something newer is known. Progress alone is no news."""
        with self._lock:
            known = self._jobs.get(found["metadata"]["uid"])
            job = see_job(found, known)
            if known is not None and job.version < known.version:
                return known
            self._jobs[job.uid] = job
        if known is None or _without_progress(job) != _without_progress(known):
            self._news(job.uid)
        return job

    def remove_job(self, uid: str) -> None:
        """It is gone from the cluster."""
        with self._lock:
            gone = self._jobs.pop(uid, None)
        if gone is not None:
            self._news(uid)

    def keep_jobs(self, uids: Iterable[str]) -> None:
        """A list of all jobs held these alone: the others' deletion was missed."""
        kept = set(uids)
        for uid in self.uids():
            if uid not in kept:
                self.remove_job(uid)

    def profile(self, namespace: str, key: str) -> ProfileStatus | None:
        """A measurement with that key which a job of the namespace went by."""
        with self._lock:
            told = (job.status.profile for job in self._jobs.values() if job.namespace == namespace)
            return next((each for each in told if each is not None and each.key == key), None)

    # What belongs to jobs

    def jobsets(self, job_uid: str) -> tuple[SeenJobSet, ...]:
        """Those of a job."""
        with self._lock:
            return self._jobsets.of(job_uid)

    def pods(self, job_uid: str) -> tuple[SeenPod, ...]:
        """Those of a job."""
        with self._lock:
            return self._pods.of(job_uid)

    def put_jobset(self, jobset: SeenJobSet) -> None:
        """Know it as it is now."""
        self._told(jobset.job_uid, self._locked(lambda: self._jobsets.put(jobset)))

    def remove_jobset(self, jobset: SeenJobSet) -> None:
        """It is gone from the cluster."""
        self._told(jobset.job_uid, self._locked(lambda: self._jobsets.remove(jobset)))

    def replace_jobsets(self, jobsets: Iterable[SeenJobSet]) -> None:
        """These are all there are."""
        for uid in self._locked(lambda: self._jobsets.replace(jobsets)):
            self._news(uid)

    def put_pod(self, pod: SeenPod) -> None:
        """Know it as it is now."""
        self._told(pod.job_uid, self._locked(lambda: self._pods.put(pod)))

    def remove_pod(self, pod: SeenPod) -> None:
        """It is gone from the cluster."""
        self._told(pod.job_uid, self._locked(lambda: self._pods.remove(pod)))

    def replace_pods(self, pods: Iterable[SeenPod]) -> None:
        """These are all there are."""
        for uid in self._locked(lambda: self._pods.replace(pods)):
            self._news(uid)

    # Nodes and the service

    def nodes(self) -> Mapping[str, SeenNode]:
        """By name; not to be changed."""
        with self._lock:
            return self._nodes

    def put_node(self, node: SeenNode) -> None:
        """Know it as it is now; one that comes or goes is news for the jobs that have pods on it."""
        with self._lock:
            known = self._nodes.get(node.name)
            self._nodes = {**self._nodes, node.name: node}
        if known != node:
            self._news_of_node(node.name)

    def remove_node(self, name: str) -> None:
        """It is gone from the cluster."""
        with self._lock:
            self._nodes = {each: node for each, node in self._nodes.items() if each != name}
        self._news_of_node(name)

    def replace_nodes(self, nodes: Iterable[SeenNode]) -> None:
        """These are all there are."""
        found = {node.name: node for node in nodes}
        with self._lock:
            before, self._nodes = self._nodes, found
        for name in before.keys() | found.keys():
            if before.get(name) != found.get(name):
                self._news_of_node(name)

    @property
    def service_since(self) -> float | None:
        """Since when the service has been there; none while it is away."""
        with self._lock:
            return self._service_since

    def see_service(self, there: bool, now: float) -> None:
        """The service is there, or away."""
        with self._lock:
            if there != (self._service_since is not None):
                self._service_since = now if there else None

    def _news_of_node(self, name: str) -> None:
        with self._lock:
            uids = [uid for uid in self._jobs if any(pod.node == name for pod in self._pods.of(uid))]
        for uid in uids:
            self._news(uid)

    def _locked(self, change: Callable[[], T]) -> T:
        with self._lock:
            return change()

    def _told(self, uid: str, is_news: bool) -> None:
        if is_news:
            self._news(uid)


T = TypeVar("T")


def see_job(found: Object, known: SeenJob | None = None) -> SeenJob:
    """The extract of a PipelineJob; what was read of the same generation is not read again."""
    metadata = found["metadata"]
    generation = int(metadata.get("generation", 0))
    if known is not None and known.generation == generation:
        job, mistake = known.job, known.mistake
    else:
        job, mistake = _read(found)
    return SeenJob(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=generation,
        version=int(metadata.get("resourceVersion", 0)),
        being_deleted="deletionTimestamp" in metadata,
        job=job,
        status=JobStatus.from_manifest(found.get("status") or {}, "status"),
        mistake=mistake,
    )


def _read(found: Object) -> tuple[PipelineJob | None, str]:
    """The job as core reads it; of its metadata what ranks have use for."""
    metadata = found["metadata"]
    kept = {name: metadata[name] for name in ("name", "namespace", "uid", "labels") if name in metadata}
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": kept, "spec": found.get("spec", {})}
    try:
        return PipelineJob.from_manifest(manifest), ""
    except UserError as mistake:
        return None, str(mistake)


def _without_progress(job: SeenJob) -> SeenJob:
    """Progress that names a new measurement is more than progress."""
    progress = job.status.progress
    told = None if progress is None else (progress.attempt, progress.profile_ref)
    status = replace(job.status, progress=None, message=f"{job.status.message} {told}")
    return replace(job, version=0, status=status)
