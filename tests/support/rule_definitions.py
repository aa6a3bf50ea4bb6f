"""Definitions with core's rules alone, and the rules that an apiserver names."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.operator.crd import cluster_profile_crd, pipeline_job_crd
from tests.support.rule_manifests import Broken, core_rules

GROUP = "rules.penstock.dev"
"""Of definitions with nothing but core's rules, whose messages are the rules' ids."""

DEFINITIONS = {"PipelineJob": pipeline_job_crd(), "ClusterProfile": cluster_profile_crd()}


def definition(kind: str) -> dict[str, Any]:
    """A CustomResourceDefinition with core's rules alone, in a group of its own."""
    whole = copy.deepcopy(DEFINITIONS[kind])
    whole["metadata"]["name"] = f"{whole['spec']['names']['plural']}.{GROUP}"
    whole["spec"]["group"], whole["spec"]["scope"] = GROUP, "Cluster"
    whole["spec"]["names"].update(shortNames=[f"{kind.lower()}rules"], categories=[])
    ids = {(rule.cel, rule.where): rule.id for _, rule in core_rules() if rule.cel and not rule.is_untyped}
    (version,) = whole["spec"]["versions"]
    _name_rules(version["schema"]["openAPIV3Schema"], ids)
    return whole


def _name_rules(schema: Any, ids: Mapping[tuple[str, str], str]) -> None:
    if isinstance(schema, list):
        for item in schema:
            _name_rules(item, ids)
    elif isinstance(schema, dict):
        named = [
            {"rule": rule["rule"], "message": ids[rule["rule"], rule.get("fieldPath", "").lstrip(".")]}
            for rule in schema.pop("x-kubernetes-validations", ())
            if (rule["rule"], rule.get("fieldPath", "").lstrip(".")) in ids
        ]
        for inner in schema.values():
            _name_rules(inner, ids)
        if named:
            schema["x-kubernetes-validations"] = named


def broken_in_cel(causes: Iterable[tuple[str, str]]) -> Broken:
    """The rules that an apiserver names; any other cause counts as one."""
    return {(field, message.rpartition(": ")[2]) for field, message in causes}
