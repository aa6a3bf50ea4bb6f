"""Reconciles ClusterProfiles with jobs that only measure (docs/adr/0016).

For every profile without a fresh measurement, a PipelineJob is created in one namespace. It is queued, retried and
reported as any other job until it has measured. The measurement is stored in a ConfigMap that outlives the job, and the
profile's status names it. No state is kept here: all of it follows from the cluster's objects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.core.cluster_profile import ClusterProfile, ClusterProfileStatus
from penstock.core.errors import UserError
from penstock.core.lifecycle import Phase
from penstock.core.profile import Profile
from penstock.core.status import ConditionType, JobStatus
from penstock.kube.names import API_VERSION, GROUP, PROFILE_FILE, PROFILE_KIND
from penstock.kube.owners import controller
from penstock.kube.packing import packed
from penstock.kube.resources import CLUSTER_PROFILES, CONFIG_MAPS, JOBS
from penstock.kube.transport import KubeError, Object, unless_missing
from penstock.operator.actions import Actions
from penstock.operator.cache import Cache, read_job
from penstock.operator.kube import Kube
from penstock.operator.manifests import owner_reference
from penstock.operator.measuring import measuring_job, summarize
from penstock.operator.statuses import condition, merged

log = logging.getLogger(__name__)


class ClusterProfiles:
    """Reconciles all ClusterProfiles, with jobs in ``namespace``. Belongs to one thread at a time."""

    def __init__(self, kube: Kube, cache: Cache, actions: Actions, namespace: str, clock: Callable[[], float]) -> None:
        self._kube, self._cache, self._actions = kube, cache, actions
        self._namespace, self._clock = namespace, clock

    def reconcile_all(self) -> None:
        """Reconcile every profile, and cache those that jobs may use."""
        listing = unless_missing(self._kube.list, CLUSTER_PROFILES)
        if listing is None:
            return  # the cluster does not have the CRD
        objects = listing.objects
        known = [status for status in map(_status, objects) if status.profile_key]
        self._cache.set_shared_profiles({status.profile_key: status.profile_ref for status in known})
        for item in objects:
            if "deletionTimestamp" not in item["metadata"]:
                self._guarded(item)

    def _guarded(self, item: Object) -> None:
        """Reconcile one. An error does not affect the others; it is retried."""
        try:
            self._reconcile(item)
        except KubeError as error:
            if not error.is_conflict:
                log.warning(
                    "ClusterProfile %s: reconcile failed (%s); retrying at the next periodic reconcile",
                    item["metadata"]["name"],
                    error,
                )
                if error.is_refusal:
                    self._write_status(item, _status(item), error.reason, error.message)

    def _reconcile(self, item: Object) -> None:
        status = _status(item)
        try:
            profile = read_profile(item)
        except UserError as mistake:
            self._write_status(item, status, "InvalidSpec", str(mistake))
            return
        job = measuring_job(profile, self._namespace)
        there = unless_missing(self._kube.get, JOBS, self._namespace, job.metadata.name)
        is_own = there is not None and controller(there, PROFILE_KIND, GROUP)[1] == item["metadata"]["uid"]
        if self._is_fresh(item, profile, status):
            if is_own:
                self._remove(there)
        elif there is None:
            made = job.to_manifest()
            self._kube.create({**made, "metadata": {**made["metadata"], "namespace": self._namespace, **_owned(item)}})
            self._write_status(item, status, "Measuring", f"job {self._namespace}/{job.metadata.name} measures")
        elif not is_own:
            message = f"job {job.metadata.name} in {self._namespace} belongs to another owner"
            self._write_status(item, status, "NameTaken", message)
        elif (known := read_job(there)[0]) is None or known.spec != job.spec:
            self._remove(there)
        else:
            self._follow(item, status, there)

    def _follow(self, item: Object, status: ClusterProfileStatus, job: Object) -> None:
        """Copy the existing job's status to the profile, and keep its measurement."""
        name = job["metadata"]["name"]
        try:
            job_status = JobStatus.from_manifest(job.get("status") or {}, "status")
        except UserError as mistake:
            message = f"the status of job {self._namespace}/{name} cannot be read: {mistake}; delete the job"
            self._write_status(item, status, "UnreadableStatus", message)
            return
        if job_status.profile is not None:
            try:
                measured = self._actions.profile(self._namespace, job_status.profile.ref)
            except UserError:
                self._remove(job)
                return
            self._keep(item, name, measured, job_status.profile.key)
        elif job_status.phase is Phase.FAILED:
            self._write_status(item, status, job_status.reason, job_status.message)
        else:
            reason = f": {job_status.message}" if job_status.message else ""
            message = f"job {self._namespace}/{name}: {job_status.phase}{reason}"
            self._write_status(item, status, "Measuring", message)

    def _keep(self, item: Object, name: str, measured: Profile, key: str) -> None:
        """Write the measurement first, then the status; the job is deleted at the next reconcile."""
        there = unless_missing(self._kube.get, CONFIG_MAPS, self._namespace, name)
        if there is not None and controller(there, PROFILE_KIND, GROUP)[1] != item["metadata"]["uid"]:
            message = f"ConfigMap {self._namespace}/{name} belongs to something else; remove it, or rename the profile"
            self._write_status(item, _status(item), "NameTaken", message)
            return
        metadata = {"name": name, "namespace": self._namespace, **_owned(item)}
        files = {PROFILE_FILE: packed(measured.to_manifest())}
        self._kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": files})
        status = ClusterProfileStatus(
            observed_generation=item["metadata"]["generation"],
            conditions=_status(item).conditions,
            profile_ref=f"{self._namespace}/{name}",
            profile_key=key,
            measured_at=self._clock(),
            links=summarize(measured.links),
        )
        self._write_status(item, status, "Measured", "", holds=True)

    def _is_fresh(self, item: Object, profile: ClusterProfile, status: ClusterProfileStatus) -> bool:
        """Whether the measurement matches the current spec, is recent enough and still exists."""
        if not status.profile_ref or status.observed_generation != item["metadata"]["generation"]:
            return False
        age, most = self._clock() - (status.measured_at or 0.0), profile.spec.max_age_seconds
        return not (most and age >= most) and self._exists(status.profile_ref)

    def _exists(self, ref: str) -> bool:
        """Whether the ConfigMap exists. Also true if it may not be read: another operator handles its namespace."""
        namespace, _, name = ref.partition("/")
        try:
            return unless_missing(self._kube.get, CONFIG_MAPS, namespace, name) is not None
        except KubeError as error:
            if error.status == 403 and namespace != self._namespace:
                return True
            raise

    def _remove(self, job: Object | None) -> None:
        if job is not None and "deletionTimestamp" not in job["metadata"]:
            metadata = job["metadata"]
            self._kube.delete(JOBS, metadata["namespace"], metadata["name"], metadata["uid"])

    def _write_status(
        self, item: Object, status: ClusterProfileStatus, reason: str, message: str, *, holds: bool = False
    ) -> None:
        """Write the status with its one condition, unless it is unchanged."""
        metadata, profiled = item["metadata"], condition(ConditionType.PROFILED, holds, reason, reason, message)
        conditions = merged(status.conditions, [profiled], metadata["generation"], self._clock())
        updated = replace(status, conditions=conditions)
        if updated == _status(item):
            return
        named = {"name": metadata["name"], "resourceVersion": metadata["resourceVersion"]}
        head = {"apiVersion": API_VERSION, "kind": PROFILE_KIND, "metadata": named}
        self._kube.apply({**head, "status": updated.to_manifest()}, "status")


def read_profile(item: Object) -> ClusterProfile:
    """Return the profile to measure; raises `UserError` for a spec that cannot be read."""
    head = {"apiVersion": API_VERSION, "kind": PROFILE_KIND, "metadata": {"name": item["metadata"]["name"]}}
    return ClusterProfile.from_manifest({**head, "spec": item.get("spec", {})})


def _status(item: Object) -> ClusterProfileStatus:
    """The status; empty if another writer made it unreadable."""
    try:
        return ClusterProfileStatus.from_manifest(item.get("status") or {}, "status")
    except (UserError, ValueError):
        return ClusterProfileStatus()


def _owned(item: Object) -> dict[str, Any]:
    owner = owner_reference(PROFILE_KIND, item["metadata"]["name"], item["metadata"]["uid"])
    return {"ownerReferences": [owner]}
