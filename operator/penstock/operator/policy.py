"""Admission policy for fields that the CRD cannot check: those that are a number or a list, or a string or a mapping.

Rules of a CustomResourceDefinition (CRD) cannot read such a field; a policy reads the object as it is. It is applied
together with the CRDs. Reference: https://kubernetes.io/docs/reference/access-authn-authz/validating-admission-policy
"""

from __future__ import annotations

from penstock.core import job_rules
from penstock.core.manifest_schema import JsonSchema
from penstock.core.rules import ApiserverRule
from penstock.kube.names import GROUP
from penstock.operator.rules import CANNOT_CHANGE

NAME = f"pipelinejobs.{GROUP}"
_API = "admissionregistration.k8s.io/v1"

_VARIABLES = {
    "length": "object.spec.data.sequenceLength",
    "pinned": "has(object.spec.parallelism) ? object.spec.parallelism : {}",
    "slices": "has(variables.pinned.slices) ? variables.pinned.slices : 1",
    "lengths": "type(variables.slices) == list ? variables.slices : [variables.length]",
    "schedule": "has(variables.pinned.schedule) ? variables.pinned.schedule : '1f1b'",
    "recompute": "has(variables.pinned.recompute) ? variables.pinned.recompute : 'none'",
}
_SLICES, _SCHEDULE = "parallelism.slices", "parallelism.schedule"

CHECKS = (
    ApiserverRule(
        where=_SLICES,
        cel="type(variables.slices) == int || type(variables.slices) == list",
        message="is neither a number of slices nor a list of their lengths: write 8, or [512, 512]",
    ),
    job_rules.SLICES_COUNT.for_apiserver,
    ApiserverRule(
        where=_SLICES,
        cel="variables.lengths.all(each, type(each) == int && each >= 1)",
        message="every slice needs at least one token: write positive lengths",
    ),
    job_rules.SLICES_SUM.for_apiserver,
    ApiserverRule(
        where=_SCHEDULE,
        cel="type(variables.schedule) == string || "
        "(type(variables.schedule) == map && has(variables.schedule.generator))",
        message="is neither a schedule's name nor a mapping with its generator: write zb, or {generator: csv, ...}",
    ),
    ApiserverRule(
        where=_SCHEDULE,
        cel="type(variables.schedule) != string || !variables.schedule.endsWith('.csv')",
        message="is a path, and no file is uploaded: write {generator: csv, text: ...}, or use `penstock submit`",
    ),
    ApiserverRule(
        where="parallelism.recompute",
        cel="type(variables.recompute) == bool || type(variables.recompute) == list || "
        "(type(variables.recompute) == string && variables.recompute in ['none', 'selective', 'full'])",
        message="is not a recomputation mode: write none, selective, full, or a list for each pinned stage",
    ),
    ApiserverRule(
        where="parallelism",
        cel="request.operation != 'UPDATE' || object.spec.parallelism == oldObject.spec.parallelism",
        message=CANNOT_CHANGE,
    ),
)
"""Rules over the variables above."""


def policy() -> JsonSchema:
    """The policy."""
    rules = {"apiGroups": [GROUP], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"]}
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [{**rules, "resources": ["pipelinejobs"]}]},
        "variables": [{"name": name, "expression": expression} for name, expression in _VARIABLES.items()],
        "validations": [_validation(rule) for rule in CHECKS],
    }
    return {"apiVersion": _API, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": NAME}, "spec": spec}


def _validation(rule: ApiserverRule) -> dict[str, str]:
    validation = {"expression": rule.cel, "message": f"spec.{rule.where}: {rule.message}", "reason": "Invalid"}
    if rule.message_expression:
        validation["messageExpression"] = f"'spec.{rule.where}: ' + {rule.message_expression}"
    return validation


def binding() -> JsonSchema:
    """The binding that enforces the policy in all namespaces."""
    spec = {"policyName": NAME, "validationActions": ["Deny"]}
    return {"apiVersion": _API, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": NAME}, "spec": spec}
