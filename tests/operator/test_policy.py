"""The admission policy's form; a real apiserver judges by it in `tests/e2e/test_crd.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from penstock.core.job import ParallelismSpec
from penstock.core.manifest_schema import dataclass_schema
from penstock.operator.crd import pipeline_job_crd
from penstock.operator.policy import CHECKS, binding, policy


def untyped(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Fields that may be anything, but for those whose values are all listed."""
    for name, inner in schema.get("properties", {}).items():
        if "x-kubernetes-preserve-unknown-fields" in inner and "enum" not in inner:
            yield f"{path}{name}"
        yield from untyped(inner, f"{path}{name}.")


def test_every_field_without_a_type_is_checked() -> None:
    (version,) = pipeline_job_crd()["spec"]["versions"]
    fields = set(untyped(version["schema"]["openAPIV3Schema"]))
    assert fields == {f"spec.parallelism.{name}" for name in ("slices", "schedule", "recompute")}
    assert fields <= {f"spec.{rule.where}" for rule in CHECKS}


def test_every_check_names_its_field_first() -> None:
    known = {f"spec.parallelism.{name}" for name in dataclass_schema(ParallelismSpec)["properties"]}
    for check in policy()["spec"]["validations"]:
        assert check["message"].partition(":")[0] in {"spec.parallelism", *known}
        assert (
            check.get("messageExpression", check["message"]).strip("'").startswith(check["message"].partition(":")[0])
        )


def test_variables_are_those_that_were_defined_before() -> None:
    known: set[str] = set()
    for variable in policy()["spec"]["variables"]:
        assert set(re.findall(r"variables\.(\w+)", variable["expression"])) <= known
        known.add(variable["name"])
    expressions = " ".join(rule.cel + rule.message_expression for rule in CHECKS)
    used = set(re.findall(r"variables\.(\w+)", expressions))
    assert used <= known


def test_it_counts_for_every_change_of_a_job() -> None:
    (rule,) = policy()["spec"]["matchConstraints"]["resourceRules"]
    assert (rule["operations"], rule["resources"]) == (["CREATE", "UPDATE"], ["pipelinejobs"])
    assert binding()["spec"] == {"policyName": policy()["metadata"]["name"], "validationActions": ["Deny"]}
