"""The CustomResourceDefinitions of PipelineJob and ClusterProfile, made from core's types.

`deploy/crds` has them as YAML, which `tests/operator/test_crd.py` compares with this module.

A custom resource has a structural schema, which allows less than core's JSON Schema. The only alternative that it
allows is "integer or string". The alternative null is left out, because the apiserver drops nulls, and a field that may
be a number or a list has no type. Unknown fields are not refused but pruned, unless the client requests strict checks,
as kubectl does. A titled object gets the rules of its type. The apiserver estimates the cost of each rule and accepts
them because all input is bounded (`penstock.core.limits`). Reference:
https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core import cluster_profile, job
from penstock.core.cluster_profile import ClusterProfileStatus
from penstock.core.job import API_VERSION
from penstock.core.manifest_schema import JsonSchema, cluster_profile_schema, dataclass_schema, job_schema
from penstock.core.status import JobStatus
from penstock.kube.names import GROUP, VERSION
from penstock.operator.rules import RULES

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


LIST_KEYS = {"env": "name", "conditions": "type"}
"""Lists whose items have a key field, so that several clients may write their own."""
_BOUNDS = ("minimum", "maximum", "minItems", "maxItems", "maxLength", "maxProperties")
_KEPT = (*_BOUNDS, "pattern", "format", "default", "required")


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
        "spec": _structural(schema["properties"]["spec"]),
        "status": _structural(dataclass_schema(status)) | {"default": {}},
    }
    head = _structural({key: value for key, value in schema.items() if key != "properties"})
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


def _structural(schema: Mapping[str, Any], name: str = "") -> JsonSchema:
    """The structural schema of a field ``name`` with that JSON Schema."""
    plain = _collapsed(schema)
    result = {"description": plain["description"].replace("``", "`")} if "description" in plain else {}
    result |= _type(plain) | {key: plain[key] for key in _KEPT if key in plain and _is_exact(plain[key])}
    result |= _exclusive(plain)
    result |= _choices(plain)
    if "properties" in plain:
        properties = plain["properties"].items()
        result["properties"] = {child: _structural(inner, child) for child, inner in properties}
    if isinstance(plain.get("additionalProperties"), Mapping):
        result["additionalProperties"] = _structural(plain["additionalProperties"])
    if "items" in plain and "type" in result:
        result["items"] = _structural(plain["items"])
    if name in LIST_KEYS:
        result |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [LIST_KEYS[name]]}
    elif result.get("type") == "array":
        result["x-kubernetes-list-type"] = "atomic"
    if rules := RULES.get(plain.get("title", "")):
        result["x-kubernetes-validations"] = [rule.to_manifest() for rule in rules]
    return result


def _is_exact(value: Any) -> bool:
    """Whether the apiserver can represent a bound, as a float; ``format: int64`` replaces the others."""
    return not isinstance(value, int) or int(float(value)) == value


def _collapsed(schema: Mapping[str, Any]) -> JsonSchema:
    """Return the schema without null, and with a tuple as a list, whose items all have one schema."""
    options = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    result = dict(schema)
    if len(options) == 1:
        result = {**options[0], **{key: value for key, value in schema.items() if key != "anyOf"}}
    if "prefixItems" in result:
        first, *others = result["prefixItems"]
        assert all(other == first for other in others), "a list's items have one schema"
        result["items"] = first
    return result


def _type(plain: Mapping[str, Any]) -> JsonSchema:
    options = {option["type"]: option for option in plain.get("anyOf", ())}
    if options.keys() == {"integer", "string"}:
        either = {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
        return either | {key: value for option in options.values() for key, value in option.items() if key != "type"}
    if "type" in plain:
        return {"type": plain["type"]} | ({"format": "int64"} if plain["type"] == "integer" else {})
    values = plain.get("enum", [plain["const"]] if "const" in plain else [])
    return {"type": "string"} if values else {"x-kubernetes-preserve-unknown-fields": True}


def _exclusive(plain: Mapping[str, Any]) -> JsonSchema:
    """An exclusive bound is a flag next to the bound in OpenAPI 3.0."""
    bounds: JsonSchema = {}
    for side in ("minimum", "maximum"):
        flag = f"exclusive{side.capitalize()}"
        if flag in plain:
            bounds |= {side: plain[flag], flag: True}
    return bounds


def _choices(plain: Mapping[str, Any]) -> JsonSchema:
    """Enumerate all values where they are few, also those of a field that is a string or a boolean."""
    options = [option for option in plain.get("anyOf", ()) if option != {"type": "null"}]
    of_options = [[True, False] if option["type"] == "boolean" else option.get("enum", []) for option in options]
    values = [plain["const"]] if "const" in plain else plain.get("enum", [])
    if all(of_options):
        values = [*values, *itertools.chain.from_iterable(of_options)]
    allowed = [value for value in values if value is not None]
    return {"enum": allowed} if allowed else {}
