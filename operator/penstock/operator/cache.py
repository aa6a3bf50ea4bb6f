"""The operator's cache of the cluster: updated by watches, read by reconciles, thread-safe.

Objects are indexed by the uid of the PipelineJob that they belong to, since a reconcile handles one job. An object that
only claims by a label to belong to one is cached, but not returned to reconciles (`penstock.operator.ownership`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.errors import UserError
from penstock.core.instants import parse_instant
from penstock.core.job import API_VERSION, KIND, PipelineJob
from penstock.core.lifecycle import LIVE, Phase
from penstock.core.status import JobStatus, ProfileStatus
from penstock.kube.transport import Object
from penstock.operator.capacity import Capacity
from penstock.operator.children import Children, Gone
from penstock.operator.ownership import Ownership, has_jobset, may_be_left, ranks
from penstock.operator.places import NO_COMPETITION, Competition, Contender, Places, competitor, contender, holders
from penstock.operator.snapshots import (
    UNREADABLE,
    ChildSnapshot,
    JobSetSnapshot,
    NodeSnapshot,
    PodSnapshot,
    RanksJobSnapshot,
    observed_child,
    observed_node,
)

log = logging.getLogger(__name__)

CLOCK_SLACK_SECONDS = 30.0
"""Clock differences below this are not reported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSnapshot:
    """A PipelineJob. ``job`` is none if its spec is invalid, for the reason in ``mistake``.

    ``stepped_at`` is when its newest step was reported, by this process's clock: other clocks may be off.
    """

    namespace: str
    name: str
    uid: str
    generation: int
    version: int
    being_deleted: bool
    job: PipelineJob | None
    status: JobStatus
    mistake: str = ""
    stepped_at: float = 0.0


class Cache:
    """All cached objects, behind one lock. ``notify`` is called with the uid of each job that a change affects."""

    def __init__(self, clock: Callable[[], float], notify: Callable[[str], None] = lambda uid: None) -> None:
        self._lock = threading.RLock()
        self._clock, self._notify = clock, notify
        self._jobs: dict[str, JobSnapshot] = {}
        self._profiles: dict[tuple[str, str], dict[tuple[str, str], ProfileStatus]] = {}
        self._profile_keys: dict[str, dict[str, None]] = {}
        self._gone = Gone()
        self._jobsets: Children[JobSetSnapshot] = Children()
        self._pods: Children[PodSnapshot] = Children()
        self._children: Mapping[type[ChildSnapshot], Children[Any]] = {
            JobSetSnapshot: self._jobsets,
            RanksJobSnapshot: Children(),
            PodSnapshot: self._pods,
        }
        self._ownership = Ownership()
        self._places = Places()
        self._nodes: Mapping[str, NodeSnapshot] = {}
        self._service_since: float | None = None
        self._capacities: Mapping[str, Capacity] = {}
        self._ahead_seconds = 0.0
        self._shared: Mapping[str, str] = {}

    # Jobs

    def job(self, uid: str) -> JobSnapshot | None:
        """The job with that uid, if there is one."""
        with self._lock:
            return self._jobs.get(uid)

    def jobs(self) -> list[JobSnapshot]:
        """All cached jobs."""
        with self._lock:
            return list(self._jobs.values())

    def put_job(self, item: Object) -> JobSnapshot | None:
        """Cache the job, unless this version, a newer one or the deletion is cached already; return the cached job.

        Every status that the operator writes comes back from the watch, so half of the events of a burst carry a
        version that is cached already. Progress alone does not notify. A job with an unreadable status stays as it is
        cached, and an error is logged.
        """
        uid = item["metadata"]["uid"]
        with self._lock:
            known = self._jobs.get(uid)
            if uid in self._gone or (known is not None and _version(item) <= known.version):
                return known
            try:
                job = job_snapshot(item, self._clock(), known)
            except UNREADABLE as error:
                log.error(
                    "job %s/%s: the status cannot be read, so the cached one stays in use: %s",
                    item["metadata"].get("namespace"),
                    item["metadata"]["name"],
                    error,
                )
                return known
            self._jobs[uid] = job
            self._index_profile(job)
            is_changed = known is None or _without_progress(job) != _without_progress(known)
            affected_uids = self._places.put(uid, _contender(job)) if is_changed else []
        for affected_uid in [uid, *affected_uids] if is_changed else []:
            self._notify(affected_uid)
        return job

    def remove_job(self, uid: str) -> None:
        """Drop a job that is gone from the cluster."""
        with self._lock:
            self._gone.add(uid)
            gone = self._jobs.pop(uid, None)
            if gone is not None:
                self._forget_profiles(gone)
            self._ownership.forget(uid)
            affected_uids = self._places.put(uid, None)
        for affected_uid in [uid, *affected_uids] if gone is not None else []:
            self._notify(affected_uid)

    def replace_jobs(self, items: Iterable[Object], version: int) -> None:
        """Cache these, which are all jobs at ``version``: the others' deletion was missed."""
        kept = set()
        for item in items:
            kept.add(item["metadata"]["uid"])
            self.put_job(item)
        for job in self.jobs():
            if job.uid not in kept and job.version <= version:
                self.remove_job(job.uid)

    def profiles(self, namespace: str, key: str) -> list[ProfileStatus]:
        """Return the measurements with that key that jobs of the namespace made or used, newest first: those that a
        status names now, or has named since this process started.
        """
        with self._lock:
            return list(reversed(self._profiles.get((namespace, key), {}).values()))

    def _index_profile(self, job: JobSnapshot) -> None:
        """Add the job's measurement. Older ones stay: a job may return to hosts that an earlier attempt measured."""
        newest = job.status.profile
        for profile in (*job.status.measurements, *([newest] if newest is not None else [])):
            keys = self._profile_keys.setdefault(job.uid, {})
            keys[profile.key] = None
            of_key = self._profiles.setdefault((job.namespace, profile.key), {})
            if profile is newest or (job.uid, profile.ref) not in of_key:
                of_key.pop((job.uid, profile.ref), None)
                of_key[job.uid, profile.ref] = profile

    def _forget_profiles(self, job: JobSnapshot) -> None:
        for key in self._profile_keys.pop(job.uid, {}):
            of_key = self._profiles[job.namespace, key]
            for name in [name for name in of_key if name[0] == job.uid]:
                del of_key[name]
            if not of_key:
                del self._profiles[job.namespace, key]

    def shared_profile(self, key: str) -> ProfileStatus | None:
        """The measurement with that key which a ClusterProfile names, for jobs of all namespaces."""
        with self._lock:
            ref = self._shared.get(key)
        return None if ref is None else ProfileStatus(ref=ref, key=key)

    def set_shared_profiles(self, refs: Mapping[str, str]) -> None:
        """Cache the ConfigMaps that ClusterProfiles name, by the keys of their profiles."""
        with self._lock:
            self._shared = dict(refs)

    # Places

    def competition(self, job: PipelineJob, status: JobStatus) -> Competition:
        """The competition of other jobs for the places of a job with that status."""
        own = contender(job, status)
        with self._lock:
            return NO_COMPETITION if own is None else self._places.competition(own)

    def holders(self, job: PipelineJob, status: JobStatus) -> str:
        """The holders of the places that the job lacks, in words."""
        holding = [other for other in self.jobs() if other.job is not None and self._holds_places(other)]
        running = (competitor(other.job, other.status) for other in holding if other.job)
        return holders(competitor(job, status), running)

    def _holds_places(self, snapshot: JobSnapshot) -> bool:
        if snapshot.status.phase not in (Phase.QUEUED, *LIVE):
            return False
        return any(pod.node and pod.end is None for pod in self.pods(snapshot.uid))

    # Objects that belong to jobs, or claim to

    def jobsets(self, job_uid: str) -> tuple[JobSetSnapshot, ...]:
        """JobSets of a job."""
        with self._lock:
            job = self._jobs.get(job_uid)
            if job is None:
                return ()
            jobsets = self._jobsets.of(job_uid)
            return tuple(jobset for jobset in jobsets if has_jobset(job.namespace, job.name, jobset))

    def pods(self, job_uid: str) -> tuple[PodSnapshot, ...]:
        """A job's ranks' pods, one for each attempt and completion index."""
        with self._lock:
            job = self._jobs.get(job_uid)
            if job is None:
                return ()
            pods = self._pods.of(job_uid)
            return ranks(pod for pod in pods if self._ownership.has_pod(job.namespace, job.name, pod))

    def leftovers(self, job_uid: str) -> tuple[PodSnapshot, ...]:
        """Return pods outside `pods` that may write to the job's output."""
        with self._lock:
            job = self._jobs.get(job_uid)
            if job is None:
                return ()
            known = {pod.uid for pod in self.pods(job_uid)}
            others = [pod for pod in self._pods.of(job_uid) if pod.uid not in known]
            return tuple(pod for pod in others if may_be_left(job.namespace, job.name, pod))

    def put_child(self, child: ChildSnapshot) -> None:
        """Cache the current version."""
        with self._lock:
            self._ownership.put(child)
            is_changed = self._children[type(child)].put(self._observed(child))
        self._notify_if(child.job_uid, is_changed)

    def _observed(self, child: ChildSnapshot) -> ChildSnapshot:
        return observed_child(child, self._children[type(child)].get(child), self._clock())

    def remove_child(self, child: ChildSnapshot) -> None:
        """Drop an object that was deleted from the cluster. Its owner links stay, unless their PipelineJob is gone."""
        with self._lock:
            if child.job_uid not in self._jobs and not isinstance(child, PodSnapshot):
                self._ownership.forget(child.job_uid)
            is_changed = self._children[type(child)].remove(child)
        self._notify_if(child.job_uid, is_changed)

    def replace_children(
        self, kind: type[ChildSnapshot], listed: Iterable[ChildSnapshot], version: int, job: JobSnapshot | None = None
    ) -> None:
        """Cache these, which are all objects of the kind at ``version``, of one job or of all."""
        known, listed = self._children[kind], list(listed)
        with self._lock:
            children = [self._observed(child) for child in listed]
            for child in children:
                self._ownership.put(child)
            if job is not None:
                is_changed = known.replace_of(job.uid, children, version, job.namespace)
                uids = {job.uid} if is_changed else set()
            else:
                uids = known.replace(children, version)
        for uid in uids:
            self._notify(uid)

    # Nodes, the service and the cluster's clock

    def nodes(self) -> Mapping[str, NodeSnapshot]:
        """Nodes by name. Callers do not change the mapping."""
        with self._lock:
            return self._nodes

    def put_node(self, node: NodeSnapshot) -> None:
        """Cache the node; a change notifies the jobs that have pods on it."""
        self._change_nodes(lambda nodes: {**nodes, node.name: observed_node(node, nodes.get(node.name), self._clock())})

    def remove_node(self, name: str) -> None:
        """Drop an object that was deleted from the cluster."""
        self._change_nodes(lambda nodes: {other: node for other, node in nodes.items() if other != name})

    def replace_nodes(self, nodes: Iterable[NodeSnapshot]) -> None:
        """Cache these, which are all nodes."""
        current, now = {node.name: node for node in nodes}, self._clock()
        self._change_nodes(
            lambda before: {name: observed_node(node, before.get(name), now) for name, node in current.items()}
        )

    def _change_nodes(self, change: Callable[[Mapping[str, NodeSnapshot]], Mapping[str, NodeSnapshot]]) -> None:
        with self._lock:
            before, self._nodes = self._nodes, change(self._nodes)
            changed = {name for name, _ in before.items() ^ self._nodes.items()}
            jobs = self._jobs if changed else ()  # a heartbeat changes nothing
            uids = [uid for uid in jobs if any(pod.node in changed for pod in self._pods.of(uid))]
        for uid in uids:
            self._notify(uid)

    @property
    def service_since(self) -> float | None:
        """Time since when the service has been running; none while it is not."""
        with self._lock:
            return self._service_since

    def set_service(self, there: bool, now: float) -> None:
        """Store whether the service renews its Lease."""
        with self._lock:
            if there != (self._service_since is not None):
                self._service_since = now if there else None

    @property
    def ahead_seconds(self) -> float:
        """Seconds by which this process's clock is ahead of the cluster's, negative if it is behind; 0 if that is too
        little to matter. Users read it; no decision depends on it.
        """
        with self._lock:
            return self._ahead_seconds

    def compare_clocks(self, made: Object, requested_at: float) -> None:
        """Compare clocks by an object that the cluster has just created and dated, in whole seconds."""
        made_at = parse_instant(made["metadata"].get("creationTimestamp"), "creationTimestamp")
        if made_at is None:
            return
        ahead = max(0.0, requested_at - made_at) or min(0.0, self._clock() - made_at)
        with self._lock:
            self._ahead_seconds = ahead if abs(ahead) > CLOCK_SLACK_SECONDS else 0.0

    def capacity(self, uid: str) -> Capacity | None:
        """Free capacity for more of a job's ranks, if it was computed."""
        with self._lock:
            return self._capacities.get(uid)

    def set_capacities(self, pods_by_job: Mapping[str, int], now: float) -> None:
        """Cache the number of further pods that fit for these jobs; forget it for all others."""
        with self._lock:
            before = self._capacities
            self._capacities = {
                uid: before[uid]
                if uid in before and before[uid].num_pods == count
                else Capacity(num_pods=count, since=now)
                for uid, count in pods_by_job.items()
            }

    def _notify_if(self, uid: str, is_changed: bool) -> None:
        if is_changed:
            self._notify(uid)


def _contender(snapshot: JobSnapshot) -> Contender | None:
    return None if snapshot.job is None or snapshot.being_deleted else contender(snapshot.job, snapshot.status)


def job_snapshot(item: Object, now: float, known: JobSnapshot | None = None) -> JobSnapshot:
    """The extract of a PipelineJob; a spec of the same generation is not parsed again."""
    metadata = item["metadata"]
    generation = int(metadata.get("generation", 0))
    if known is not None and known.generation == generation:
        job, mistake = known.job, known.mistake
    else:
        job, mistake = read_job(item)
    status = JobStatus.from_manifest(item.get("status") or {}, "status")
    return JobSnapshot(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata["uid"],
        generation=generation,
        version=_version(item),
        being_deleted="deletionTimestamp" in metadata,
        job=job,
        status=status,
        mistake=mistake,
        stepped_at=known.stepped_at if known is not None and _step(known.status) == _step(status) else now,
    )


def _version(item: Object) -> int:
    return int(item["metadata"].get("resourceVersion", 0))


def _step(status: JobStatus) -> tuple[int, int] | None:
    return None if status.progress is None else (status.progress.attempt, status.progress.step)


def read_job(item: Object) -> tuple[PipelineJob | None, str]:
    """Return the job as core reads it, with the metadata that ranks use; or none, and the mistake in its spec."""
    metadata = item["metadata"]
    kept = {name: metadata[name] for name in ("name", "namespace", "uid", "labels") if name in metadata}
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": kept, "spec": item.get("spec", {})}
    try:
        return PipelineJob.from_manifest(manifest), ""
    except UserError as mistake:
        return None, str(mistake)


def _without_progress(job: JobSnapshot) -> JobSnapshot:
    """Return the job without its progress, except for a measurement that the progress names."""
    progress = job.status.progress
    essentials = None if progress is None else (progress.attempt, progress.profile_ref)
    status = replace(job.status, progress=None, message=f"{job.status.message} {essentials}")
    return replace(job, version=0, stepped_at=0.0, status=status)
