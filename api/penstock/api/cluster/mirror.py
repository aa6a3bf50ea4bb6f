"""Mirror the jobs of a cluster, and the plans that they use, in the store.

Problem. The service's pages, lists and streams read jobs from its database, but the cluster decides about them: users
apply, edit and delete PipelineJobs with kubectl, and the operator writes their status. The store has to follow although
watches end, the service restarts, several replicas share the database, and requests of this service change the same
objects at the same time. No user may see a state of a job that is older than one already shown.

Idea. The unit is a snapshot: one PipelineJob at one resource version, converted by `job_snapshot`. The store keeps the
version of the last snapshot in the job's row and ignores older ones (`penstock.api.store.snapshots.put`). With that, a
snapshot may come from any source, any number of times and in any order:

- the watch (`put`, `remove`), which only the holder of the Lease runs;
- a list (`replace`), at the start of a watch and after every gap, which also finds the jobs whose deletion was missed;
- the cluster's answer to a request of a user (`store`), in any replica, so that users read their own changes at once.

A write of the watch carries the epoch of the Lease (`penstock.api.cluster.fence`), so a former holder that was frozen
cannot write later. Writes for requests need no epoch: they contain what the cluster has just answered.

Example, with the resource versions that the cluster gives to job ``llama``:

    source          version   in the store before   effect
    list                 40   nothing               insert the job, version 40
    answer to resume     44   40                    generation + 1, event "resume-requested", version 44
    watch                42   44                    ignored: a late event of the status before
    watch                44   44                    ignored: the same snapshot
    watch                47   44                    phase Running, event "phase", version 47
    list at 50      missing   47                    deleted; at version 47 <= 50 its deletion was missed
    list at 50      missing   52                    kept: the job was created after the list was made

Plans are too large for a status, which has only their digest. When a snapshot names a digest that the job's row lacks,
the plan is read from the store or else from the attempt's ConfigMap. Until it is there, the snapshot does not count as
mirrored, and the next event or list tries again (`_finish`).

Complexity. Progress is written to the status every few seconds, and most events change nothing else. A digest of each
job without its progress (`gist`, 32 bytes) is kept in memory, and an event with an equal digest costs no transaction: a
thousand running jobs with a report every 5 s cause 200 comparisons a second and no write. A list of n jobs is one query
for missing ones and n submitted writes, which share transactions (`penstock.api.store.writer`).

Rejected designs:

- Reading the cluster for every request: a page of 100 jobs would cost the apiserver more than the operator does, and
  history, curves and logs exist only in the store.
- Trusting the order of watch events: an answer to a request overtakes them, and a list overlaps them.
- Comparing times instead of versions: a cluster dates changes in whole seconds.
- Only the Lease, without epochs: a holder that is frozen inside a transaction would overwrite newer state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from sqlalchemy.exc import DataError, SQLAlchemyError

from penstock.api.cluster.fence import StoreAccess
from penstock.api.cluster.job_snapshot import MOST_DEPTH, gist, job_snapshot, submitter
from penstock.api.cluster.kube import Cluster
from penstock.api.store import plans, snapshots
from penstock.api.store.epochs import LostLeaseError
from penstock.api.store.jobs import StoredJob
from penstock.api.store.sanitize import is_nested_beyond
from penstock.api.store.snapshots import UNKNOWN_USER
from penstock.api.store.writer import WriterClosedError
from penstock.core.errors import PenstockError, UserError
from penstock.core.packing import UnpackError
from penstock.core.plan import Plan
from penstock.core.status import JobProgress
from penstock.kube.names import attempt_name
from penstock.kube.packing import unpacked_plan
from penstock.kube.resources import CONFIG_MAPS, JOBS
from penstock.kube.transport import Listing, Object, unless_missing

log = logging.getLogger(__name__)


class MirrorError(PenstockError):
    """An observed object could not be stored, so a re-list is needed."""


class Mirror:
    """Stores observed jobs of the ``cluster`` with that identity, in ``namespace`` or in all.

    What the watch reports is written by ``store``, which may refuse it; what a user's request reads, by ``requests``.
    """

    def __init__(
        self, store: StoreAccess, kube: Cluster, cluster: str, namespace: str = "", *, requests: StoreAccess
    ) -> None:
        self._store, self._requests, self._kube, self._namespace = store, requests, kube, namespace
        self.cluster = cluster
        self._lock = threading.Lock()
        self._gists: dict[str, bytes] = {}
        self._progress_of: dict[str, JobProgress] = {}
        self._versions: dict[str, str] = {}

    def replace(self, listing: Listing) -> None:
        """Store the full list of jobs, and mark the others as deleted; raises `MirrorError`."""
        known, version = {item["metadata"]["uid"] for item in listing.objects}, int(listing.version)
        cluster, namespace, now = self.cluster, self._namespace, self._store.clock()
        with _storing():
            missing = self._store.read(lambda c: snapshots.missing(c, cluster, namespace, known, version))
            for uid in missing:
                self._gone(uid, now)
            waiting = [(item, self._submit(item)) for item in listing.objects]
            for item, future in waiting:
                self._finish(item, future)

    def put(self, item: Object) -> None:
        """Store a new or changed job; raises `MirrorError`."""
        with _storing():
            self._finish(item, self._submit(item))

    def remove(self, item: Object) -> None:
        """Store the deletion of a job; raises `MirrorError`."""
        with _storing():
            self._gone(item["metadata"]["uid"], self._store.clock())

    def store(self, item: Object, by: str = "") -> StoredJob | None:
        """Store the cluster's answer to a change or read of a job ``by`` a user; return the job, if it can be read."""
        future = self._submit_snapshot(item, self._requests, by)
        return None if future is None else future.result()

    def refresh(self, namespace: str, name: str) -> StoredJob | None:
        """Read and store the job, also before the watch reports it; none if it does not exist."""
        item = unless_missing(self._kube.get, JOBS, namespace, name)
        return None if item is None else self.store(item)

    def reported_progress(self, uid: str) -> JobProgress | None:
        """Return the last observed progress in the job's status on the cluster."""
        with self._lock:
            return self._progress_of.get(uid)

    def version(self, uid: str) -> str:
        """Return the last observed resource version of the job; empty if it was deleted."""
        with self._lock:
            return self._versions.get(uid, "")

    def _submit(self, item: Object) -> Future[StoredJob] | None:
        """Submit a write to the store, unless nothing changed."""
        uid, progress = item["metadata"]["uid"], _progress(item)
        with self._lock:
            self._versions[uid] = item["metadata"]["resourceVersion"]
            if progress is not None:
                self._progress_of[uid] = progress
            known = self._gists.get(uid)
        if known is not None and not is_nested_beyond(item, MOST_DEPTH) and known == gist(item):
            return None
        return self._submit_snapshot(item, self._store)

    def _submit_snapshot(self, item: Object, store: StoreAccess, by: str = "") -> Future[StoredJob] | None:
        try:
            snapshot = job_snapshot(item, self.cluster)
        except UserError as mistake:
            log.warning("job %s is not mirrored, because it cannot be read: %s", _name(item), mistake)
            return None
        now, submitted_by = store.clock(), by or submitter(item) or UNKNOWN_USER
        return store.submit(snapshot.uid, lambda c: snapshots.put(c, snapshot, now, submitted_by[:63]))

    def _finish(self, item: Object, future: Future[StoredJob] | None) -> None:
        """Wait for the store, and add the job's plan."""
        if future is None:
            return
        try:
            stored = future.result()
        except DataError as error:  # caused by this job alone
            log.warning("job %s is not mirrored, because the database refuses its content: %s", _name(item), error.orig)
            return
        if self._has_plan(item, stored):
            with self._lock:
                self._gists[stored.uid] = gist(item)

    def _gone(self, uid: str, now: float) -> None:
        self._store.write(uid, lambda connection: snapshots.mark_gone(connection, uid, now))
        with self._lock:
            self._gists.pop(uid, None)
            self._progress_of.pop(uid, None)
            self._versions.pop(uid, None)

    # Plans

    def _has_plan(self, item: Object, stored: StoredJob) -> bool:
        """Store the plan that the job uses, if it is missing; return whether the store has it."""
        plan_status = (item.get("status") or {}).get("plan")
        if plan_status is None or stored.plan_digest == plan_status["digest"] or stored.deleted_at is not None:
            return True
        digest, attempt, now = str(plan_status["digest"]), stored.attempt, self._store.clock()
        plan = self._store.read(lambda connection: plans.plan(connection, digest)) or self._read(stored, digest)
        if plan is None:
            return False
        self._store.write(stored.uid, lambda c: plans.keep_plan(c, stored.uid, attempt, plan, now))
        return True

    def _read(self, stored: StoredJob, digest: str) -> Plan | None:
        """Return the plan in the attempt's ConfigMap; none if that is gone, or has another plan."""
        name = attempt_name(stored.name, stored.attempt)
        config_map = unless_missing(self._kube.get, CONFIG_MAPS, stored.namespace, name) or {}
        try:
            plan = unpacked_plan(config_map.get("binaryData", {}))
        except (UnpackError, UserError) as error:
            log.warning(
                "job %s/%s: the plan in ConfigMap %s cannot be read, so pages do not show it: %s",
                stored.namespace,
                stored.name,
                name,
                error,
            )
            return None
        return plan if plan is not None and plan.digest == digest else None


def _name(item: Object) -> str:
    return f"{item['metadata'].get('namespace')}/{item['metadata'].get('name')}"


def _progress(item: Object) -> JobProgress | None:
    """Return progress in the job's status; none if it has none that can be read."""
    status_progress = (item.get("status") or {}).get("progress")
    try:
        return None if status_progress is None else JobProgress.from_manifest(status_progress)
    except UserError:
        return None


@contextmanager
def _storing() -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, WriterClosedError, LostLeaseError) as error:
        raise MirrorError(f"the store refuses an observed job: {error}") from error
