"""The operator's writes to the cluster for one job. Nothing is decided here.

Children are created under fixed names, and an existing child is used as it is. So the end of the operator may cut any
action short, and the next operator repeats it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.core.errors import UserError
from penstock.core.instants import format_instant
from penstock.core.job import PipelineJob
from penstock.core.job_policy import combined
from penstock.core.packing import UnpackError
from penstock.core.plan import Plan
from penstock.core.pod import PodBinding
from penstock.core.profile import Profile
from penstock.core.status import JobStatus, operator_part
from penstock.kube.allowing import refusals_on
from penstock.kube.names import (
    API_VERSION,
    BINDING_ANNOTATION,
    GROUP,
    JOB_KIND,
    PROFILE_FILE,
    REMINDER_ANNOTATION,
    STOP_ANNOTATION,
    UID_LABEL,
    attempt_name,
)
from penstock.kube.owners import controller
from penstock.kube.packing import unpacked, unpacked_plan
from penstock.kube.resources import CLAIMS, CONFIG_MAPS, JOBS, JOBSETS
from penstock.kube.transport import KubeError, Object, unless_missing
from penstock.operator import manifests
from penstock.operator.cache import Cache, JobSnapshot
from penstock.operator.grace import grace_seconds
from penstock.operator.kube import KINDS, Kube
from penstock.operator.podspec import require_shared_output
from penstock.operator.settings import Settings
from penstock.operator.snapshots import CHILDREN, PodSnapshot, jobset_snapshot, pod_snapshot

log = logging.getLogger(__name__)

MAX_PARALLEL_ANNOTATIONS = 8
"""Pods of a job that are annotated at the same time. A hundred pods, one after the other, would take a second."""


IsOf = Callable[[Object, str], bool]
"""Whether the job with that uid has the object."""


def _is_of(owned: Object, job_uid: str) -> bool:
    """Whether the operator created the object for the job: the job controls it, and its label has the job's uid."""
    labels = owned["metadata"].get("labels", {})
    return labels.get(UID_LABEL) == job_uid and controller(owned, JOB_KIND, GROUP)[1] == job_uid


def _may_be_its_measurement(owned: Object, job_uid: str) -> bool:
    """Whether the job owns the object. The service of 0.1.0 made the job an owner, but not the controller."""
    owners = {owner["uid"] for owner in owned["metadata"].get("ownerReferences") or ()}
    return owned["metadata"].get("labels", {}).get(UID_LABEL) == job_uid and job_uid in owners


class Actions:
    """Acts on a cluster; its writes are in the cache when a call returns."""

    def __init__(self, kube: Kube, cache: Cache, settings: Settings, clock: Callable[[], float]) -> None:
        self._kube, self._cache, self._settings, self._clock = kube, cache, settings, clock

    def write_status(self, snapshot: JobSnapshot, status: JobStatus) -> JobSnapshot:
        """Write ``status`` as the operator's part of the status; raises `KubeError` if the job changed.

        The job is identified by its resource version, because a cluster ignores the uid where only a status is written.
        """
        manifest = {
            "apiVersion": API_VERSION,
            "kind": JOB_KIND,
            "metadata": {
                "name": snapshot.name,
                "namespace": snapshot.namespace,
                "resourceVersion": str(snapshot.version),
            },
            "status": operator_part(status),
        }
        try:
            current = self._kube.apply(manifest, "status")
        except KubeError as error:
            raise KubeError(409, "Conflict", error.message) if error.is_missing else error from None
        return self._cache.put_job(current) or snapshot

    def refresh(self, snapshot: JobSnapshot) -> JobSnapshot | None:
        """Read the job from the cluster into the cache; none if it is gone."""
        current = unless_missing(self._kube.get, JOBS, snapshot.namespace, snapshot.name)
        if current is None or current["metadata"]["uid"] != snapshot.uid:
            self._cache.remove_job(snapshot.uid)
            return None
        return self._cache.put_job(current)

    def refresh_children(self, snapshot: JobSnapshot) -> None:
        """Read the job's children from the cluster into the cache, which watches may not have updated yet."""
        for resource, kind, extract in CHILDREN:
            try:
                listing = self._kube.list(resource, snapshot.namespace, f"{UID_LABEL}={snapshot.uid}")
            except KubeError as error:
                if error.is_missing and resource is JOBSETS:
                    continue  # a kind that the cluster does not know has no objects
                raise
            self._cache.replace_children(kind, map(extract, listing.objects), int(listing.version), snapshot)

    def require_storage(self, job: PipelineJob, ranks: int) -> None:
        """Raise `UserError` if the pods of ``ranks`` ranks could not share their output."""

        def modes(claim: str) -> Sequence[str] | None:
            existing = unless_missing(self._kube.get, CLAIMS, job.metadata.namespace, claim)
            return None if existing is None else [str(mode) for mode in existing["spec"].get("accessModes", ())]

        require_shared_output(job, manifests.num_pods(job, ranks), modes)

    def launch(self, job: PipelineJob, status: JobStatus) -> None:
        """Create the job's claims, and the ConfigMap and the JobSet of the status's attempt.

        JobSets of earlier attempts and the ConfigMap of the previous one are deleted first. An existing claim is used
        as it is: it holds files of an earlier job. Raises `KubeError` for a job that the policy does not allow: the
        operator holds it, and retries.
        """
        self._require_allowed(job)
        self._forget_attempts_before(job, status.attempt)
        for claim in manifests.claims(job):
            self._make(claim)
        self._make_own(manifests.config_map(job, status.attempt, self._settings))
        grace = math.ceil(grace_seconds(job.spec, status))
        try:
            made = self._make_own(manifests.jobset(job, status.attempt, status.ranks, self._settings, grace))
        except KubeError as error:
            raise _without_jobsets(error) from None
        self._cache.put_child(jobset_snapshot(made))

    def _require_allowed(self, job: PipelineJob) -> None:
        if reasons := refusals_on(self._kube, job, self._settings.policy_for(job)):
            raise KubeError(403, "NotAllowed", " ".join(str(combined(reasons)).split()))

    def _make(self, manifest: Mapping[str, Any]) -> Object:
        """Create the object; return it, or the existing one of that name."""
        metadata, now = manifest["metadata"], self._clock()
        try:
            made = self._kube.create(manifest)
            self._cache.compare_clocks(made, now)
            return made
        except KubeError as error:
            if not error.is_taken:
                raise
        return self._kube.get(KINDS[manifest["kind"]], metadata["namespace"], metadata["name"])

    def _make_own(self, manifest: Mapping[str, Any], is_of: IsOf = _is_of) -> Object:
        """Like `_make`, but raise `KubeError` if an existing object of that name is not the job's."""
        existing, expected = self._make(manifest), manifest["metadata"]
        if is_of(existing, expected["labels"][UID_LABEL]):
            return existing
        what = f"{manifest['kind']} {expected['name']} belongs to something else; remove it, or rename the job"
        raise KubeError(409, "NameTaken", what)

    def _forget_attempts_before(self, job: PipelineJob, attempt: int) -> None:
        namespace = job.metadata.namespace
        for jobset in self._cache.jobsets(job.metadata.uid):
            if jobset.attempt < attempt:
                self._kube.delete(JOBSETS, namespace, jobset.name, jobset.uid)
        if attempt > 1:
            self._forget_config_map(job, attempt_name(job.metadata.name, attempt - 1), _is_of)

    def _forget_config_map(self, job: PipelineJob, name: str, is_of: IsOf) -> None:
        existing = unless_missing(self._kube.get, CONFIG_MAPS, job.metadata.namespace, name)
        if existing is not None and is_of(existing, job.metadata.uid):
            self._kube.delete(CONFIG_MAPS, job.metadata.namespace, name, existing["metadata"]["uid"])

    def end_attempt(self, snapshot: JobSnapshot) -> None:
        """Delete the newest attempt's JobSet, and with it its pods."""
        for jobset in self._cache.jobsets(snapshot.uid):
            if jobset.attempt == snapshot.status.attempt and not jobset.being_deleted:
                self._kube.delete(JOBSETS, snapshot.namespace, jobset.name, jobset.uid)

    def remove_job(self, snapshot: JobSnapshot) -> None:
        """Delete the job; the cluster then deletes the objects that it owns."""
        self._kube.delete(JOBS, snapshot.namespace, snapshot.name, snapshot.uid)

    def bind(self, pods: Iterable[PodSnapshot], bindings: Iterable[PodBinding]) -> None:
        """Write its binding to each pod that does not have it."""
        unbound = [
            (pod, json.dumps(binding.to_manifest(), separators=(",", ":")))
            for pod, binding in zip(pods, bindings, strict=True)
            if pod.binding != binding
        ]
        self._annotate_all(BINDING_ANNOTATION, unbound)

    def request_stop(self, pods: Iterable[PodSnapshot], now: float) -> None:
        """Request a stop with a checkpoint from each running pod without such a request."""
        pods_to_stop = [pod for pod in pods if pod.stop_requested_at is None and pod.end is None]
        self._annotate_all(STOP_ANNOTATION, [(pod, str(format_instant(now))) for pod in pods_to_stop])

    def remind(self, pods: Iterable[PodSnapshot]) -> None:
        """Make the kubelets of these pods rewrite the files with their annotations; a pod that is gone is ignored."""
        for pod in pods:
            try:
                self._annotate(pod, REMINDER_ANNOTATION, pod.annotated)
            except KubeError as error:
                if not error.is_refusal:
                    raise

    def _annotate_all(self, name: str, text_by_pod: Sequence[tuple[PodSnapshot, str]]) -> None:
        """Annotate many pods concurrently: they start together, so all wait for the last one."""
        with ThreadPoolExecutor(MAX_PARALLEL_ANNOTATIONS, thread_name_prefix="annotate") as threads:
            calls = [threads.submit(self._annotate, pod, name, text) for pod, text in text_by_pod]
        for call in calls:
            call.result()

    def _annotate(self, pod: PodSnapshot, name: str, text: str) -> None:
        annotated = self._kube.annotate((pod.namespace, pod.name, pod.uid), {name: text})
        self._cache.put_child(pod_snapshot(annotated))

    def publish_plan(self, job: PipelineJob, attempt: int, plan: Plan) -> None:
        """Write the plan to the attempt's ConfigMap, which its pods mount."""
        self._kube.apply(manifests.config_map(job, attempt, self._settings, plan))

    def published_plan(self, job: PipelineJob, attempt: int) -> Plan | None:
        """Return the plan in the attempt's ConfigMap; none if it is missing or cannot be read."""
        name = attempt_name(job.metadata.name, attempt)
        existing = unless_missing(self._kube.get, CONFIG_MAPS, job.metadata.namespace, name)
        try:
            return unpacked_plan(existing.get("binaryData", {})) if existing is not None else None
        except (UnpackError, UserError) as error:
            log.warning(
                "job %s/%s: the published plan of attempt %d cannot be read, so it is computed again: %s",
                job.metadata.namespace,
                job.metadata.name,
                attempt,
                error,
            )
        return None

    def keep_profile(self, job: PipelineJob, attempt: int, profile: Profile) -> str:
        """Create the ConfigMap with the profile of an attempt, unless it exists; return its name."""
        kept = self._make_own(manifests.measurement(job, attempt, profile), _may_be_its_measurement)
        return str(kept["metadata"]["name"])

    def forget_profile(self, job: PipelineJob, name: str) -> None:
        """Delete the ConfigMap with one of the job's measurements. If that is refused, the cluster deletes it with the
        job.
        """
        try:
            self._forget_config_map(job, name, _may_be_its_measurement)
        except KubeError as error:
            if not error.is_refusal:
                raise

    def profile(self, namespace: str, name: str) -> Profile:
        """Return the measurement in a ConfigMap of that namespace, or of the namespace that ``name`` begins with.

        Raises `UserError` if it is gone, is no profile, or is in a namespace that this operator may not read.
        """
        where, remedy = f"ConfigMap {name}", "no action is needed: the next attempt measures again"
        is_elsewhere = "/" in name
        if is_elsewhere:
            namespace, _, name = name.partition("/")
        try:
            existing = self._kube.get(CONFIG_MAPS, namespace, name)
            return Profile.from_manifest(unpacked(existing.get("binaryData", {}).get(PROFILE_FILE, "")))
        except KubeError as error:
            if not error.is_missing and not (is_elsewhere and error.is_refusal):
                raise
            raise UserError(what="was deleted, and with it the measurement", where=where, remedy=remedy) from None
        except (UnpackError, UserError) as error:
            why = str(error).partition("\n")[0]
            raise UserError(what=f"holds no measurement: {why}", where=where, remedy=remedy) from None


def _without_jobsets(error: KubeError) -> KubeError:
    """The error with a better message, if the cluster does not define the kind: it says only "page not found"."""
    if not error.is_missing or "page not found" not in error.message:
        return error
    remedy = "install JobSet (https://jobset.sigs.k8s.io); the job goes on then by itself"
    return KubeError(404, "JobSetMissing", f"this cluster has no JobSets: {remedy}")
