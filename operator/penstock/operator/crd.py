"""The CustomResourceDefinitions of PipelineJob and ClusterProfile, made from core's types.

`deploy/crds` has them as YAML, which `tests/operator/test_crd.py` compares with this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core import cluster_profile, job
from penstock.core.cluster_profile import ClusterProfileStatus
from penstock.core.job import API_VERSION
from penstock.core.manifest_schema import JsonSchema, cluster_profile_schema, dataclass_schema, job_schema
from penstock.core.status import JobStatus
from penstock.kube.names import GROUP, VERSION
from penstock.operator.structural import structural

JOB_COLUMNS = (
    ("Phase", "string", ".status.phase"),
    ("Plan", "string", ".status.plan.summary"),
    ("Step", "integer", ".status.progress.step"),
    ("Steps", "integer", ".spec.training.steps"),
    ("Loss", "string", ".status.progress.loss"),
    ("Attempt", "integer", ".status.attempt"),
    ("Ranks", "integer", ".status.ranks"),
    ("Age", "date", ".metadata.creationTimestamp"),
    ("Reason", "string", ".status.reason"),
)
PROFILE_COLUMNS = (
    ("Profiled", "string", ".status.conditions[?(@.type=='Profiled')].status"),
    ("Ranks", "integer", ".spec.ranks"),
    ("Slowest", "number", ".status.links.slowest.bytesPerSecond"),
    ("Measured", "date", ".status.measuredAt"),
    ("Age", "date", ".metadata.creationTimestamp"),
)
ONLY_WIDE = ("Reason",)
"""Columns that `kubectl get -o wide` adds."""


def pipeline_job_crd() -> JsonSchema:
    """The CustomResourceDefinition of PipelineJob; its scale subresource counts ranks."""
    scale = {"specReplicasPath": ".spec.resources.ranks", "statusReplicasPath": ".status.ranks"}
    names = {"kind": job.KIND, "plural": "pipelinejobs", "shortNames": ["pj"]}
    schema = _whole(job_schema(), JobStatus)
    return _definition(names, "Namespaced", schema, JOB_COLUMNS, {"status": {}, "scale": scale})


def cluster_profile_crd() -> JsonSchema:
    """The CustomResourceDefinition of ClusterProfile."""
    names = {"kind": cluster_profile.KIND, "plural": "clusterprofiles", "shortNames": ["cprof"]}
    schema = _whole(cluster_profile_schema(), ClusterProfileStatus)
    return _definition(names, "Cluster", schema, PROFILE_COLUMNS, {"status": {}})


def _whole(schema: JsonSchema, status: type) -> JsonSchema:
    """A resource: its spec as a person writes it, its status as it is reported, and metadata as Kubernetes has it."""
    properties = {
        "apiVersion": {"type": "string", "description": f"`{API_VERSION}`"},
        "kind": {"type": "string", "description": "The kind of the resource."},
        "metadata": {"type": "object"},
        "spec": structural(schema["properties"]["spec"]),
        "status": structural(dataclass_schema(status)) | {"default": {}},
    }
    head = structural({key: value for key, value in schema.items() if key != "properties"})
    return head | {"required": ["spec"], "properties": properties}


def _definition(
    names: Mapping[str, Any],
    scope: str,
    schema: JsonSchema,
    columns: Sequence[tuple[str, str, str]],
    subresources: Mapping[str, Any],
) -> JsonSchema:
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [_column(*column) for column in columns],
        "subresources": subresources,
        "schema": {"openAPIV3Schema": schema},
    }
    singular = names["kind"].lower()
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names['plural']}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {**names, "singular": singular, "listKind": f"{names['kind']}List", "categories": ["penstock"]},
            "scope": scope,
            "versions": [version],
        },
    }


def _column(name: str, kind: str, path: str) -> JsonSchema:
    column = {"name": name, "type": kind, "jsonPath": path}
    return {**column, "priority": 1} if name in ONLY_WIDE else column
