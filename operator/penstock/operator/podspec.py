"""The pod that an attempt's ranks run in, within the restricted Pod Security Standard.

It may do nothing in the cluster: the one token that it holds is for the service's ears alone. See
https://kubernetes.io/docs/concepts/security/pod-security-standards
"""

from __future__ import annotations

from typing import Any

from penstock.core.job import Device, PipelineJob
from penstock.core.pod import ATTEMPT_FILES, BINDING_FILE, POD_FILES, STOP_FILE, TOKEN_FILE
from penstock.kube.names import (
    ATTEMPT_LABEL,
    BINDING_ANNOTATION,
    HOST_LABEL,
    INGEST_AUDIENCE,
    STOP_ANNOTATION,
    TRAINER_CONTAINER,
    UID_LABEL,
    attempt_name,
    claim_name,
)
from penstock.operator.settings import Settings

USER = 65_532
"""Neither root nor any user of the nodes."""

TOKEN_SECONDS = 600
STORAGE = "/penstock"
"""Below it lie ``out``, ``data/NAME`` and ``models/NAME``."""

LOCAL = "/var/lib/penstock"
AGENT_BYTES = 512 * 2**20
"""What a pod gets beside its ranks' memory, for the processes that start, watch and report."""


def pod_spec(job: PipelineJob, attempt: int, settings: Settings, grace_seconds: int) -> dict[str, Any]:
    """The template's spec."""
    kubernetes = job.spec.kubernetes
    found: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(job, attempt, settings)],
        "volumes": [*_own_volumes(job, attempt), *_storage(job)],
        "topologySpreadConstraints": [_spread(job, attempt)],
    }
    if kubernetes.node_selector:
        found["nodeSelector"] = dict(kubernetes.node_selector)
    if kubernetes.tolerations:
        found["tolerations"] = [toleration.to_manifest() for toleration in kubernetes.tolerations]
    return found


def _container(job: PipelineJob, attempt: int, settings: Settings) -> dict[str, Any]:
    return {
        "name": TRAINER_CONTAINER,
        "image": job.spec.kubernetes.image or settings.image,
        "args": ["pod", "--attempt", str(attempt), "--storage", STORAGE, "--local", LOCAL],
        "env": _env(job),
        "resources": _resources(job),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [*_own_mounts(), *_storage_mounts(job)],
    }


def _env(job: PipelineJob) -> list[dict[str, Any]]:
    uid = {"name": "PENSTOCK_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}
    home = {"name": "HOME", "value": LOCAL}
    return [*(entry.to_manifest() for entry in job.spec.kubernetes.env), uid, home]


def _resources(job: PipelineJob) -> dict[str, Any]:
    """Asked for and limited alike: what a plan counts on is there, and no neighbour takes it."""
    resources, ranks = job.spec.resources, job.spec.kubernetes.ranks_per_pod
    amounts = {
        "cpu": str(resources.threads_per_rank * ranks),
        "memory": str(resources.memory_per_rank * ranks + AGENT_BYTES),
    }
    if resources.device is Device.CUDA:
        amounts = {job.spec.kubernetes.accelerator_resource: str(ranks)}
    return {"requests": amounts, "limits": amounts}


def _spread(job: PipelineJob, attempt: int) -> dict[str, Any]:
    """Ranks that share a host share its memory's bandwidth, so pods go to different hosts where they can."""
    selector = {"matchLabels": {UID_LABEL: job.metadata.uid, ATTEMPT_LABEL: str(attempt)}}
    return {
        "maxSkew": 1,
        "topologyKey": HOST_LABEL,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": selector,
    }


def _own_volumes(job: PipelineJob, attempt: int) -> list[dict[str, Any]]:
    annotations = {BINDING_FILE: BINDING_ANNOTATION, STOP_FILE: STOP_ANNOTATION}
    items = [
        {"path": path, "fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}
        for path, annotation in annotations.items()
    ]
    token_path = TOKEN_FILE.rpartition("/")[2]
    token = {"path": token_path, "audience": INGEST_AUDIENCE, "expirationSeconds": TOKEN_SECONDS}
    name = attempt_name(job.metadata.name, attempt)
    return [
        {"name": "attempt", "configMap": {"name": name, "optional": True}},
        {"name": "pod", "downwardAPI": {"items": items}},
        {"name": "token", "projected": {"sources": [{"serviceAccountToken": token}]}},
        {"name": "local", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def _own_mounts() -> list[dict[str, Any]]:
    return [
        {"name": "attempt", "mountPath": ATTEMPT_FILES, "readOnly": True},
        {"name": "pod", "mountPath": POD_FILES, "readOnly": True},
        {"name": "token", "mountPath": TOKEN_FILE.rpartition("/")[0], "readOnly": True},
        {"name": "local", "mountPath": LOCAL},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


def _storage(job: PipelineJob) -> list[dict[str, Any]]:
    return [
        {"name": _volume(root), "persistentVolumeClaim": {"claimName": claim_name(job, root)}}
        for root in job.spec.kubernetes.volumes
    ]


def _storage_mounts(job: PipelineJob) -> list[dict[str, Any]]:
    return [
        {"name": _volume(root), "mountPath": f"{STORAGE}/{root}", "readOnly": root != "out"}
        for root in job.spec.kubernetes.volumes
    ]


def _volume(root: str) -> str:
    return f"root-{root.replace('/', '-').lower()}"
