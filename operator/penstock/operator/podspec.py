"""The pod that an attempt's ranks run in, within the restricted Pod Security Standard.

It may do nothing in the cluster: the one token that it holds is for the service's ears alone. See
https://kubernetes.io/docs/concepts/security/pod-security-standards
"""

from __future__ import annotations

from typing import Any

from penstock.core.job import Device, PipelineJob
from penstock.core.pod import (
    ATTEMPT_FILES,
    BINDING_FILE,
    NODE_NAME_VARIABLE,
    POD_FILES,
    POD_UID_VARIABLE,
    STOP_FILE,
    TOKEN_FILE,
)
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
OUT = "out"
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
        # As process 1 it could not be ended before it asks for SIGTERM, and would stay for all of the grace.
        "shareProcessNamespace": True,
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
        "command": ["penstock"],
        "args": _arguments(attempt),
        "env": _env(job),
        "resources": {"requests": resources(job), "limits": resources(job)},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [*_own_mounts(), *_storage_mounts(job)],
    }


def _arguments(attempt: int) -> list[str]:
    folders = ["--out", f"{STORAGE}/{OUT}", "--data", f"{STORAGE}/data", "--local", LOCAL]
    return ["pod", "--attempt", str(attempt), *folders]


def _env(job: PipelineJob) -> list[dict[str, Any]]:
    told = {POD_UID_VARIABLE: "metadata.uid", NODE_NAME_VARIABLE: "spec.nodeName"}
    own = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in told.items()]
    return [
        *(entry.to_manifest() for entry in job.spec.kubernetes.env),
        *own,
        *({"name": name, "value": LOCAL} for name in ("HOME", "TMPDIR")),
    ]


def resources(job: PipelineJob) -> dict[str, str]:
    """What a pod asks for, and is limited to: what a plan counts on is there, and no neighbour takes it."""
    wanted, ranks = job.spec.resources, job.spec.kubernetes.ranks_per_pod
    if wanted.device is Device.CUDA:
        return {job.spec.kubernetes.accelerator_resource: str(ranks)}
    memory_bytes = wanted.memory_per_rank * ranks + AGENT_BYTES
    return {"cpu": str(wanted.threads_per_rank * ranks), "memory": str(memory_bytes)}


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
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


def _own_mounts() -> list[dict[str, Any]]:
    return [
        {"name": "attempt", "mountPath": ATTEMPT_FILES, "readOnly": True},
        {"name": "pod", "mountPath": POD_FILES, "readOnly": True},
        {"name": "token", "mountPath": TOKEN_FILE.rpartition("/")[0], "readOnly": True},
        {"name": "local", "mountPath": LOCAL},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]


def _storage(job: PipelineJob) -> list[dict[str, Any]]:
    """What the job names; the output of one that names none lasts as long as its pod."""
    found: list[dict[str, Any]] = [
        {"name": _volume(root), "persistentVolumeClaim": {"claimName": claim_name(job, root)}}
        for root in job.spec.kubernetes.volumes
    ]
    return found if OUT in job.spec.kubernetes.volumes else [*found, {"name": _volume(OUT), "emptyDir": {}}]


def _storage_mounts(job: PipelineJob) -> list[dict[str, Any]]:
    return [
        {"name": _volume(root), "mountPath": f"{STORAGE}/{root}", "readOnly": root != OUT}
        for root in {OUT: None, **job.spec.kubernetes.volumes}
    ]


def _volume(root: str) -> str:
    return f"root-{root.replace('/', '-').lower()}"
