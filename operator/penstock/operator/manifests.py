"""Manifests of a job's objects: its claims, and for each attempt a JobSet and two ConfigMaps, one with the job and its
plan and one with its measurement. Nothing is read or sent here.

Concepts: https://jobset.sigs.k8s.io/docs/concepts; the files of a pod: `penstock.core.pod`.
"""

from __future__ import annotations

import json
from typing import Any

from penstock.core.job import PipelineJob
from penstock.core.kubernetes_spec import Reclaim
from penstock.core.plan import Plan
from penstock.core.pod import ADDRESS_FILE, ATTEMPT_FILES, CA_FILE, JOB_FILE
from penstock.core.profile import Profile
from penstock.core.supervision import Address
from penstock.kube.names import (
    API_VERSION,
    ATTEMPT_LABEL,
    JOB_KIND,
    JOB_LABEL,
    JOBSET_GROUP,
    JOBSET_KIND,
    PRIORITY_LABEL,
    PROFILE_FILE,
    QUEUE_LABEL,
    RANKS_JOB,
    UID_LABEL,
    attempt_name,
    claim_name,
    profile_name,
)
from penstock.kube.packing import packed, packed_plan
from penstock.operator.podspec import pod_spec
from penstock.operator.settings import Settings

JOBSET_API = f"{JOBSET_GROUP}/v1alpha2"


def num_pods(job: PipelineJob, ranks: int) -> int:
    """Pods of an attempt with that many ranks; the last one may start fewer than the others."""
    return -(-ranks // job.spec.kubernetes.ranks_per_pod)


def labels(job: PipelineJob, attempt: int) -> dict[str, str]:
    """Labels of all objects of an attempt."""
    return {JOB_LABEL: job.metadata.name, UID_LABEL: job.metadata.uid, ATTEMPT_LABEL: str(attempt)}


def config_map(job: PipelineJob, attempt: int, settings: Settings, plan: Plan | None = None) -> dict[str, Any]:
    """The attempt's ConfigMap: the job, the service's address, and the plan once there is one."""
    files = {JOB_FILE: json.dumps(job.to_manifest(), separators=(",", ":")), **_service_files(settings)}
    manifest: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, attempt),
        "data": files,
    }
    if plan is not None:
        manifest["binaryData"] = packed_plan(plan)
    return manifest


def measurement(job: PipelineJob, attempt: int, profile: Profile) -> dict[str, Any]:
    """The ConfigMap with the profile of an attempt."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**_metadata(job, attempt), "name": profile_name(job.metadata.name, attempt)},
        "binaryData": {PROFILE_FILE: packed(profile.to_manifest())},
    }


def _service_files(settings: Settings) -> dict[str, str]:
    if not settings.service:
        return {}
    ca_file = f"{ATTEMPT_FILES}/{CA_FILE}" if settings.service_ca else ""
    address = json.dumps(Address(server=settings.service, ca_file=ca_file).to_manifest())
    return {ADDRESS_FILE: address, **({CA_FILE: settings.service_ca} if ca_file else {})}


def jobset(job: PipelineJob, attempt: int, ranks: int, settings: Settings, grace_seconds: int) -> dict[str, Any]:
    """The attempt's JobSet: one indexed Job of equal pods, none of which is ever restarted.

    With a queue it is made suspended, and the queue's controller resumes it.
    """
    pods = num_pods(job, ranks)
    metadata = _metadata(job, attempt)
    metadata["labels"] |= _queue_labels(job)
    template = {
        "metadata": {"labels": labels(job, attempt)},
        "spec": pod_spec(job, attempt, settings, grace_seconds),
    }
    ranks_job = {
        "metadata": {"labels": labels(job, attempt)},
        "spec": {
            "completionMode": "Indexed",
            "parallelism": pods,
            "completions": pods,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "template": template,
        },
    }
    return {
        "apiVersion": JOBSET_API,
        "kind": JOBSET_KIND,
        "metadata": metadata,
        "spec": {
            "suspend": bool(job.spec.kubernetes.queue_name),
            "failurePolicy": {"maxRestarts": 0},
            "network": {"enableDNSHostnames": False},
            "replicatedJobs": [{"name": RANKS_JOB, "replicas": 1, "template": ranks_job}],
        },
    }


def _queue_labels(job: PipelineJob) -> dict[str, str]:
    """Labels by which Kueue queues a JobSet and orders it by priority, the same as the job's."""
    queue, priority = job.spec.kubernetes.queue_name, job.metadata.labels.get(PRIORITY_LABEL, "")
    if not queue:
        return {}
    return {QUEUE_LABEL: queue, **({PRIORITY_LABEL: priority} if priority else {})}


def claims(job: PipelineJob) -> list[dict[str, Any]]:
    """Claims that the operator creates for the job.

    A claim with reclaim policy Retain has no owner, so it outlives the job.
    """
    manifests = []
    for root, volume in job.spec.kubernetes.volumes.items():
        if volume.template is None:
            continue
        metadata: dict[str, Any] = {
            "name": claim_name(job, root),
            "namespace": job.metadata.namespace,
            "labels": {JOB_LABEL: job.metadata.name, UID_LABEL: job.metadata.uid},
        }
        if volume.reclaim is Reclaim.DELETE:
            metadata["ownerReferences"] = [owner_reference(JOB_KIND, job.metadata.name, job.metadata.uid)]
        spec: dict[str, Any] = {
            "accessModes": [mode.value for mode in volume.template.access_modes],
            "resources": {"requests": {"storage": str(volume.template.size)}},
        }
        if volume.template.storage_class:
            spec["storageClassName"] = volume.template.storage_class
        manifests.append({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec})
    return manifests


def _metadata(job: PipelineJob, attempt: int) -> dict[str, Any]:
    return {
        "name": attempt_name(job.metadata.name, attempt),
        "namespace": job.metadata.namespace,
        "labels": labels(job, attempt),
        "ownerReferences": [owner_reference(JOB_KIND, job.metadata.name, job.metadata.uid)],
    }


def owner_reference(kind: str, name: str, uid: str) -> dict[str, Any]:
    """The owner reference by which the cluster removes a child with its owner; it does not block the owner's
    deletion.
    """
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }
