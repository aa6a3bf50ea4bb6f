"""Jobs of a cluster brought into the store, with the plans that they go by.

It follows a watch, and whoever changes a job tells it at once. What it does not know it finds in the next list, so it
may be ended at any moment, and two that work at the same time do no harm.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from sqlalchemy.exc import DataError, SQLAlchemyError

from penstock.api.cluster.keeper import Keeper
from penstock.api.cluster.kube import Cluster
from penstock.api.cluster.sighting import MOST_DEPTH, gist, sighting, submitter
from penstock.api.store import plans, sightings
from penstock.api.store.epochs import LostLeaseError
from penstock.api.store.jobs import StoredJob
from penstock.api.store.sightings import SOMEBODY
from penstock.api.store.storable import is_nested_beyond
from penstock.api.store.writer import WriterClosedError
from penstock.core.errors import PenstockError, UserError
from penstock.core.packing import UnpackError
from penstock.core.plan import Plan
from penstock.core.status import JobProgress
from penstock.kube.names import attempt_name
from penstock.kube.packing import unpacked_plan
from penstock.kube.resources import CONFIG_MAPS, JOBS
from penstock.kube.transport import KubeError, Listing, Object

log = logging.getLogger(__name__)


class MirrorError(PenstockError):
    """What was seen could not be kept, so it has to be looked at again."""


class Mirror:
    """Keeps what is seen of jobs of the ``cluster`` with that identity, in ``namespace`` or in all.

    What a watch tells goes to ``keeper``, which may refuse it; what ``requests`` looked up is kept by any service.
    """

    def __init__(self, keeper: Keeper, kube: Cluster, cluster: str, namespace: str = "", *, requests: Keeper) -> None:
        self._keeper, self._requests, self._kube, self._namespace = keeper, requests, kube, namespace
        self.cluster = cluster
        self._lock = threading.Lock()
        self._gists: dict[str, bytes] = {}
        self._told: dict[str, JobProgress] = {}
        self._versions: dict[str, str] = {}

    def replace(self, listing: Listing) -> None:
        """These are all the jobs that there are; raises `MirrorError`."""
        known, version = {each["metadata"]["uid"] for each in listing.objects}, int(listing.version)
        cluster, namespace, now = self.cluster, self._namespace, self._keeper.clock()
        with _kept():
            missing = self._keeper.read(lambda c: sightings.missing(c, cluster, namespace, known, version))
            for uid in missing:
                self._gone(uid, now)
            waiting = [(each, self._submit(each)) for each in listing.objects]
            for found, future in waiting:
                self._settle(found, future)

    def put(self, found: Object) -> None:
        """The job came, or changed; raises `MirrorError`."""
        with _kept():
            self._settle(found, self._submit(found))

    def remove(self, found: Object) -> None:
        """The job is gone; raises `MirrorError`."""
        with _kept():
            self._gone(found["metadata"]["uid"], self._keeper.clock())

    def see(self, found: Object, by: str = "") -> StoredJob | None:
        """Keep what somebody was answered who changed or looked up a job, ``by`` whom; the job, if it can be read."""
        future = self._kept_as(found, self._requests, by)
        return None if future is None else future.result()

    def look(self, namespace: str, name: str) -> StoredJob | None:
        """Keep the job as it is now, also before the watch tells of it; none if there is none."""
        try:
            return self.see(self._kube.get(JOBS, namespace, name))
        except KubeError as error:
            if not error.is_missing:
                raise
            return None

    def told(self, uid: str) -> JobProgress | None:
        """The progress that the cluster has of the job, as far as it was seen."""
        with self._lock:
            return self._told.get(uid)

    def version(self, uid: str) -> str:
        """The version at which the job was seen last; empty if it is gone."""
        with self._lock:
            return self._versions.get(uid, "")

    def _submit(self, found: Object) -> Future[StoredJob] | None:
        """Ask the store to keep it, unless nothing of it is news."""
        uid, progress = found["metadata"]["uid"], _progress(found)
        with self._lock:
            self._versions[uid] = found["metadata"]["resourceVersion"]
            if progress is not None:
                self._told[uid] = progress
            known = self._gists.get(uid)
        if known is not None and not is_nested_beyond(found, MOST_DEPTH) and known == gist(found):
            return None
        return self._kept_as(found, self._keeper)

    def _kept_as(self, found: Object, keeper: Keeper, by: str = "") -> Future[StoredJob] | None:
        try:
            seen = sighting(found, self.cluster)
        except UserError as mistake:
            log.warning("job %s: %s", found["metadata"].get("name"), mistake)
            return None
        now, whom = keeper.clock(), by or submitter(found) or SOMEBODY
        return keeper.submit(seen.uid, lambda c: sightings.see(c, seen, now, whom[:63]))

    def _settle(self, found: Object, future: Future[StoredJob] | None) -> None:
        """Wait for the store, and bring the plan."""
        if future is None:
            return
        try:
            stored = future.result()
        except DataError as error:  # of this job alone: of the store it would be another error
            log.warning("job %s cannot be kept: %s", found["metadata"].get("name"), error.orig)
            return
        if self._has_plan(found, stored):
            with self._lock:
                self._gists[stored.uid] = gist(found)

    def _gone(self, uid: str, now: float) -> None:
        self._keeper.write(uid, lambda connection: sightings.gone(connection, uid, now))
        with self._lock:
            self._gists.pop(uid, None)
            self._told.pop(uid, None)
            self._versions.pop(uid, None)

    # Plans

    def _has_plan(self, found: Object, stored: StoredJob) -> bool:
        """Whether the store has the plan that the job goes by, from now on if not before."""
        told = (found.get("status") or {}).get("plan")
        if told is None or stored.plan_digest == told["digest"] or stored.deleted_at is not None:
            return True
        digest, attempt, now = str(told["digest"]), stored.attempt, self._keeper.clock()
        plan = self._keeper.read(lambda connection: plans.plan(connection, digest)) or self._read(stored, digest)
        if plan is None:
            return False
        self._keeper.write(stored.uid, lambda c: plans.keep_plan(c, stored.uid, attempt, plan, now))
        return True

    def _read(self, stored: StoredJob, digest: str) -> Plan | None:
        """As it lies in the attempt's ConfigMap; none if that is gone, holds another, or does not hold it yet."""
        name = attempt_name(stored.name, stored.attempt)
        try:
            plan = unpacked_plan(self._kube.get(CONFIG_MAPS, stored.namespace, name).get("binaryData", {}))
        except KubeError as error:
            if not error.is_missing:
                raise
            return None
        except (UnpackError, UserError) as error:
            log.warning("job %s/%s: ConfigMap %s holds no plan: %s", stored.namespace, stored.name, name, error)
            return None
        return plan if plan is not None and plan.digest == digest else None


def _progress(found: Object) -> JobProgress | None:
    """What the cluster was told; what somebody else wrote there is told anew."""
    told = (found.get("status") or {}).get("progress")
    try:
        return None if told is None else JobProgress.from_manifest(told)
    except UserError:
        return None


@contextmanager
def _kept() -> Iterator[None]:
    try:
        yield
    except (SQLAlchemyError, WriterClosedError, LostLeaseError) as error:
        raise MirrorError(f"the store does not take what was seen: {error}") from error
