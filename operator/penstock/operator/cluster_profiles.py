"""ClusterProfiles, measured by jobs that do nothing else (docs/adr/0016).

Of every profile that was not measured yet, or long ago, a PipelineJob is made in one namespace. It lives as any other,
with its queue, its retries and its words, until it has measured; what it measured is laid where it outlives the job,
and is told in the profile's status. Nothing is remembered here: all of it follows from what the cluster has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.core.cluster_profile import ClusterProfile, ClusterProfileStatus
from penstock.core.errors import UserError
from penstock.core.job import JobSpec, PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.profile import Profile
from penstock.core.status import Condition, ConditionStatus, ConditionType, JobStatus
from penstock.kube.names import API_VERSION, PROFILE_FILE, PROFILE_KIND
from penstock.kube.packing import packed
from penstock.kube.resources import CLUSTER_PROFILES, CONFIG_MAPS, JOBS, Resource
from penstock.kube.transport import KubeError, Object
from penstock.operator.actions import Actions
from penstock.operator.cache import Cache
from penstock.operator.kube import Kube
from penstock.operator.measuring import in_short, measuring_job

log = logging.getLogger(__name__)


class ClusterProfiles:
    """Sees to all there are, with jobs in ``namespace``. Belongs to one thread at a time."""

    def __init__(self, kube: Kube, cache: Cache, actions: Actions, namespace: str, clock: Callable[[], float]) -> None:
        self._kube, self._cache, self._actions = kube, cache, actions
        self._namespace, self._clock = namespace, clock

    def turn(self) -> None:
        """Look at each, and tell the cache what jobs may use."""
        try:
            found = self._kube.list(CLUSTER_PROFILES).objects
        except KubeError as error:
            if not error.is_missing:  # a cluster without the definition has none
                raise
            return
        known = [status for status in map(_status, found) if status.profile_key]
        self._cache.see_shared_profiles({status.profile_key: status.profile_ref for status in known})
        for each in found:
            if "deletionTimestamp" not in each["metadata"]:
                self._guarded(each)

    def _guarded(self, found: Object) -> None:
        """What goes wrong with one is no reason to leave the others; it is looked at again."""
        try:
            self._look(found)
        except KubeError as error:
            if not error.is_conflict:
                log.warning("ClusterProfile %s: %s", found["metadata"]["name"], error)
                if error.is_refusal:
                    self._tell(found, _status(found), error.reason, error.message)

    def _look(self, found: Object) -> None:
        status = _status(found)
        try:
            profile = read_profile(found)
        except UserError as mistake:
            self._tell(found, status, "InvalidSpec", str(mistake))
            return
        job = measuring_job(profile, self._namespace)
        there = self._get(JOBS, job.metadata.name)
        is_own = there is not None and _owner(there) == found["metadata"]["uid"]
        if self._is_fresh(found, profile, status):
            if is_own:
                self._remove(there)
        elif there is None:
            made = job.to_manifest()
            self._kube.create({**made, "metadata": {**made["metadata"], "namespace": self._namespace, **_owned(found)}})
            self._tell(found, status, "Measuring", f"job {self._namespace}/{job.metadata.name} measures")
        elif not is_own:
            self._tell(found, status, "NameTaken", f"job {job.metadata.name} in {self._namespace} is somebody else's")
        elif _spec(there) != job.spec:
            self._remove(there)
        else:
            self._follow(found, status, there)

    def _follow(self, found: Object, status: ClusterProfileStatus, job: Object) -> None:
        """The job is there: what it says is said of the profile, and what it measured is kept."""
        name = job["metadata"]["name"]
        try:
            told = JobStatus.from_manifest(job.get("status") or {}, "status")
        except UserError as mistake:
            said = f"the status of job {self._namespace}/{name} cannot be read: {mistake}; delete the job"
            self._tell(found, status, "UnreadableStatus", said)
            return
        if told.profile is not None:
            try:
                measured = self._actions.profile(self._namespace, told.profile.ref)
            except UserError:
                self._remove(job)
                return
            self._keep(found, name, measured, told.profile.key)
        elif told.phase is Phase.FAILED:
            self._tell(found, status, told.reason, told.message)
        else:
            said = f"job {self._namespace}/{name}: {told.phase}{': ' * bool(told.message)}{told.message}"
            self._tell(found, status, "Measuring", said)

    def _keep(self, found: Object, name: str, measured: Profile, key: str) -> None:
        """The measurement first, then that it is there; the job goes at the next look."""
        there = self._get(CONFIG_MAPS, name)
        if there is not None and _owner(there) != found["metadata"]["uid"]:
            message = f"ConfigMap {self._namespace}/{name} belongs to something else; remove it, or rename the profile"
            self._tell(found, _status(found), "NameTaken", message)
            return
        metadata = {"name": name, "namespace": self._namespace, **_owned(found)}
        files = {PROFILE_FILE: packed(measured.to_manifest())}
        self._kube.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "binaryData": files})
        status = ClusterProfileStatus(
            observed_generation=found["metadata"]["generation"],
            conditions=_status(found).conditions,
            profile_ref=f"{self._namespace}/{name}",
            profile_key=key,
            measured_at=self._clock(),
            links=in_short(measured.links),
        )
        self._tell(found, status, "Measured", "", holds=True)

    def _is_fresh(self, found: Object, profile: ClusterProfile, status: ClusterProfileStatus) -> bool:
        """Whether it was measured as the spec is now, not too long ago, and is still there."""
        if not status.profile_ref or status.observed_generation != found["metadata"]["generation"]:
            return False
        age, most = self._clock() - (status.measured_at or 0.0), profile.spec.max_age_seconds
        return not (most and age >= most) and self._exists(status.profile_ref)

    def _exists(self, ref: str) -> bool:
        """Also in another namespace where it may not be read: then it is another operator's, who sees to it."""
        namespace, _, name = ref.partition("/")
        try:
            self._kube.get(CONFIG_MAPS, namespace, name)
        except KubeError as error:
            is_another_s = error.status == 403 and namespace != self._namespace
            if not error.is_missing and not is_another_s:
                raise
            return is_another_s
        return True

    def _get(self, resource: Resource, name: str) -> Object | None:
        """The object of that name where profiles are measured; None if there is none."""
        try:
            return self._kube.get(resource, self._namespace, name)
        except KubeError as error:
            if not error.is_missing:
                raise
            return None

    def _remove(self, job: Object | None) -> None:
        if job is not None and "deletionTimestamp" not in job["metadata"]:
            metadata = job["metadata"]
            self._kube.delete(JOBS, metadata["namespace"], metadata["name"], metadata["uid"])

    def _tell(
        self, found: Object, status: ClusterProfileStatus, reason: str, message: str, *, holds: bool = False
    ) -> None:
        """Write the status with its one condition, unless it is there as it is to be."""
        metadata = found["metadata"]
        condition = Condition(
            type=ConditionType.PROFILED,
            status=ConditionStatus.TRUE if holds else ConditionStatus.FALSE,
            reason=reason,
            message=message,
            observed_generation=metadata["generation"],
        )
        before = next(iter(status.conditions), None)
        is_same = before is not None and before.status is condition.status
        since = before.last_transition_time if before is not None and is_same else self._clock()
        told = replace(status, conditions=(replace(condition, last_transition_time=since),))
        if told == _status(found):
            return
        named = {"name": metadata["name"], "resourceVersion": metadata["resourceVersion"]}
        head = {"apiVersion": API_VERSION, "kind": PROFILE_KIND, "metadata": named}
        self._kube.apply({**head, "status": told.to_manifest()}, "status")


def read_profile(found: Object) -> ClusterProfile:
    """What is to be measured; raises `UserError` for a spec that cannot be read."""
    head = {"apiVersion": API_VERSION, "kind": PROFILE_KIND, "metadata": {"name": found["metadata"]["name"]}}
    return ClusterProfile.from_manifest({**head, "spec": found.get("spec", {})})


def _status(found: Object) -> ClusterProfileStatus:
    """What somebody else wrote there counts for nothing."""
    try:
        return ClusterProfileStatus.from_manifest(found.get("status") or {}, "status")
    except (UserError, ValueError):
        return ClusterProfileStatus()


def _spec(job: Object) -> JobSpec | None:
    """As core reads it; none if it does not."""
    head = {"apiVersion": API_VERSION, "kind": "PipelineJob", "metadata": {"name": job["metadata"]["name"]}}
    try:
        return PipelineJob.from_manifest({**head, "spec": job["spec"]}).spec
    except UserError:
        return None


def _owned(found: Object) -> Mapping[str, Any]:
    """What makes the cluster remove it with its profile."""
    named = {"name": found["metadata"]["name"], "uid": found["metadata"]["uid"]}
    owner = {"apiVersion": API_VERSION, "kind": PROFILE_KIND, **named, "controller": True, "blockOwnerDeletion": False}
    return {"ownerReferences": [owner]}


def _owner(child: Object) -> str:
    """The uid of the object that controls it; empty if none does."""
    owners = child["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")
