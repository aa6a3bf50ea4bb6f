"""Pod of an attempt's ranks, within the restricted Pod Security Standard.

The pod has no permissions in the cluster: its one token has only the service as audience. Reference:
https://kubernetes.io/docs/concepts/security/pod-security-standards

A sidecar next to the ranks' container reports: it starts first and is ended last (ADR 0020). It also answers the
operator (ADR 0030).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.kubernetes_spec import AccessMode
from penstock.core.pod import (
    AGENT_ADDRESS_VARIABLE,
    AGENT_PORT,
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
    REPORTER_CONTAINER,
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
"""Mount point of ``out`` and ``data/NAME``."""

LOCAL = "/var/lib/penstock"
AGENT_BYTES = 512 * 2**20
"""Memory of the ranks' container in addition to the ranks', for the processes that start and watch them."""

REPORTER_MEMORY = str(128 * 2**20)
REPORTER_REQUESTS = {"cpu": "20m", "memory": REPORTER_MEMORY}
REPORTER_LIMITS = {"cpu": "1", "memory": REPORTER_MEMORY}
"""The sidecar needs little: it sleeps most of the time, and while it works, ranks often wait for messages."""


def pod_spec(job: PipelineJob, attempt: int, settings: Settings, grace_seconds: int) -> dict[str, Any]:
    """The template's spec."""
    kubernetes = job.spec.kubernetes
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        # Otherwise the command is process 1, which ignores SIGTERM until it installs a handler, and then runs for the
        # whole grace period.
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [_reporter(job, attempt, settings)],
        "containers": [_trainer(job, attempt, settings)],
        "volumes": [*_own_volumes(job, attempt), *_storage(job)],
        "topologySpreadConstraints": [_spread(job, attempt)],
    }
    if kubernetes.node_selector:
        spec["nodeSelector"] = dict(kubernetes.node_selector)
    if kubernetes.tolerations:
        spec["tolerations"] = [toleration.to_manifest() for toleration in kubernetes.tolerations]
    return spec


def _trainer(job: PipelineJob, attempt: int, settings: Settings) -> dict[str, Any]:
    folders = ["--out", f"{STORAGE}/{OUT}", "--data", f"{STORAGE}/data", "--local", LOCAL]
    return {
        **_container(job, settings),
        "name": TRAINER_CONTAINER,
        "args": ["pod", "--attempt", str(attempt), *folders],
        "resources": {"requests": resources(job), "limits": resources(job)},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [*_mounts("attempt", "pod", "local", "shm"), *_storage_mounts(job)],
    }


def _reporter(job: PipelineJob, attempt: int, settings: Settings) -> dict[str, Any]:
    folders = ["--out", f"{STORAGE}/{OUT}", "--local", LOCAL]
    return {
        **_container(job, settings),
        "name": REPORTER_CONTAINER,
        "restartPolicy": "Always",
        "args": ["report-pod", "--attempt", str(attempt), *folders],
        "ports": [{"name": "agent", "containerPort": AGENT_PORT}],
        "resources": {"requests": REPORTER_REQUESTS, "limits": REPORTER_LIMITS},
        "volumeMounts": [*_mounts("attempt", "token", "local"), _storage_mount(OUT)],
    }


def _container(job: PipelineJob, settings: Settings) -> dict[str, Any]:
    return {
        "image": job.spec.kubernetes.image or settings.image,
        "command": ["penstock"],
        "env": _env(job),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _env(job: PipelineJob) -> list[dict[str, Any]]:
    path_by_variable = {
        POD_UID_VARIABLE: "metadata.uid",
        NODE_NAME_VARIABLE: "spec.nodeName",
        AGENT_ADDRESS_VARIABLE: "status.podIP",
    }
    own = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in path_by_variable.items()]
    return [
        *(entry.to_manifest() for entry in job.spec.kubernetes.env),
        *own,
        *({"name": name, "value": LOCAL} for name in ("HOME", "TMPDIR")),
    ]


def resources(job: PipelineJob) -> dict[str, str]:
    """Requests and limits of the ranks' container. They are equal, so other pods cannot take what the plan relies on.

    The pod also requests `REPORTER_REQUESTS`.
    """
    spec, ranks = job.spec.resources, job.spec.kubernetes.ranks_per_pod
    memory_bytes = spec.host_memory_bytes(ranks)
    if memory_bytes is None:
        return {job.spec.kubernetes.accelerator_resource: str(ranks)}
    return {"cpu": str(spec.threads_per_rank * ranks), "memory": str(memory_bytes + AGENT_BYTES)}


def _spread(job: PipelineJob, attempt: int) -> dict[str, Any]:
    """The constraint that spreads pods over hosts where possible: ranks of one host share its memory bandwidth."""
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


_MOUNTS: Mapping[str, Mapping[str, Any]] = {
    "attempt": {"mountPath": ATTEMPT_FILES, "readOnly": True},
    "pod": {"mountPath": POD_FILES, "readOnly": True},
    "token": {"mountPath": TOKEN_FILE.rpartition("/")[0], "readOnly": True},
    "local": {"mountPath": LOCAL},
    "shm": {"mountPath": "/dev/shm"},
}


def _mounts(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, **_MOUNTS[name]} for name in names]


def _storage(job: PipelineJob) -> list[dict[str, Any]]:
    """The volumes that the job names. Output without a volume lasts as long as its pod."""
    volumes: list[dict[str, Any]] = [
        {"name": _volume(root), "persistentVolumeClaim": {"claimName": claim_name(job, root)}}
        for root in job.spec.kubernetes.volumes
    ]
    return volumes if OUT in job.spec.kubernetes.volumes else [*volumes, {"name": _volume(OUT), "emptyDir": {}}]


def _storage_mounts(job: PipelineJob) -> list[dict[str, Any]]:
    return [_storage_mount(root) for root in {OUT: None, **job.spec.kubernetes.volumes}]


def _storage_mount(root: str) -> dict[str, Any]:
    return {"name": _volume(root), "mountPath": f"{STORAGE}/{root}", "readOnly": root != OUT}


def _volume(root: str) -> str:
    return f"root-{root.replace('/', '-').lower()}"


_WHERE = f"spec.kubernetes.volumes.{OUT}"
_REMEDY = "name a claim with access mode ReadWriteMany, or a template of a storage class that offers it"


def require_shared_output(
    job: PipelineJob, num_pods: int, modes_of_claim: Callable[[str], Sequence[str] | None]
) -> None:
    """Raise `UserError` unless ``num_pods`` pods may all write the job's output: the next attempt must be able to read
    it, on any node.

    ``modes_of_claim`` returns the access modes of a claim; none if the claim does not exist yet. A missing claim is no
    error: the pods wait for it.
    """
    if num_pods < 2:
        return
    volume = job.spec.kubernetes.volumes.get(OUT)
    if volume is None:
        raise UserError(
            what=f"is missing, but {num_pods} pods have to share their output", where=_WHERE, remedy=_REMEDY
        )
    if volume.template is not None:
        modes: Sequence[str] | None = [mode.value for mode in volume.template.access_modes]
    else:
        modes = modes_of_claim(volume.claim or "")
    if modes is not None and AccessMode.READ_WRITE_MANY.value not in modes:
        what = f"offers {', '.join(modes) or 'no access mode'}, but {num_pods} pods have to write there"
        raise UserError(what=what, where=_WHERE, remedy=_REMEDY)
