"""Admission policy for fields that the CRD cannot check: those that are a number or a list, or a string or a mapping.

Rules of a CustomResourceDefinition (CRD) cannot read such a field; a policy reads the object as it is. It is applied
together with the CRDs. Reference: https://kubernetes.io/docs/reference/access-authn-authz/validating-admission-policy
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core import job_rules
from penstock.core.manifest_schema import JsonSchema
from penstock.core.rules import Rule
from penstock.kube.names import GROUP
from penstock.operator.rules import CANNOT_CHANGE

NAME = f"pipelinejobs.{GROUP}"
_API = "admissionregistration.k8s.io/v1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A condition ``holds``, in CEL over the variables below; if it is false, ``message`` about the field at ``path``.

    ``message_expression``, in CEL, gives a message with values in it.
    """

    path: str
    holds: str
    message: str
    message_expression: str = ""

    def to_manifest(self) -> dict[str, str]:
        """The check in the form of a policy's validation."""
        manifest = {"expression": self.holds, "message": f"{self.path}: {self.message}", "reason": "Invalid"}
        if self.message_expression:
            manifest["messageExpression"] = f"'{self.path}: ' + {self.message_expression}"
        return manifest


def _check(rule: Rule) -> Check:
    form = rule.for_apiserver
    return Check(
        path=f"spec.{form.where}",
        holds=form.cel,
        message=form.message,
        message_expression=form.message_expression,
    )


_VARIABLES = {
    "length": "object.spec.data.sequenceLength",
    "pinned": "has(object.spec.parallelism) ? object.spec.parallelism : {}",
    "slices": "has(variables.pinned.slices) ? variables.pinned.slices : 1",
    "lengths": "type(variables.slices) == list ? variables.slices : [variables.length]",
    "schedule": "has(variables.pinned.schedule) ? variables.pinned.schedule : '1f1b'",
    "recompute": "has(variables.pinned.recompute) ? variables.pinned.recompute : 'none'",
}
_SLICES, _SCHEDULE = "spec.parallelism.slices", "spec.parallelism.schedule"

CHECKS = (
    Check(
        path=_SLICES,
        holds="type(variables.slices) == int || type(variables.slices) == list",
        message="is neither a number of slices nor a list of their lengths: write 8, or [512, 512]",
    ),
    _check(job_rules.SLICES_COUNT),
    Check(
        path=_SLICES,
        holds="variables.lengths.all(each, type(each) == int && each >= 1)",
        message="every slice needs at least one token: write positive lengths",
    ),
    _check(job_rules.SLICES_SUM),
    Check(
        path=_SCHEDULE,
        holds="type(variables.schedule) == string || "
        "(type(variables.schedule) == map && has(variables.schedule.generator))",
        message="is neither a schedule's name nor a mapping with its generator: write zb, or {generator: csv, ...}",
    ),
    Check(
        path=_SCHEDULE,
        holds="type(variables.schedule) != string || !variables.schedule.endsWith('.csv')",
        message="is a path, and no file is uploaded: write {generator: csv, text: ...}, or use `penstock submit`",
    ),
    Check(
        path="spec.parallelism.recompute",
        holds="type(variables.recompute) == bool || type(variables.recompute) == list || "
        "(type(variables.recompute) == string && variables.recompute in ['none', 'selective', 'full'])",
        message="is not a recomputation mode: write none, selective, full, or a list for each pinned stage",
    ),
    Check(
        path="spec.parallelism",
        holds="request.operation != 'UPDATE' || object.spec.parallelism == oldObject.spec.parallelism",
        message=CANNOT_CHANGE,
    ),
)


def policy() -> JsonSchema:
    """The policy."""
    rules = {"apiGroups": [GROUP], "apiVersions": ["*"], "operations": ["CREATE", "UPDATE"]}
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {"resourceRules": [{**rules, "resources": ["pipelinejobs"]}]},
        "variables": [{"name": name, "expression": expression} for name, expression in _VARIABLES.items()],
        "validations": [check.to_manifest() for check in CHECKS],
    }
    return {"apiVersion": _API, "kind": "ValidatingAdmissionPolicy", "metadata": {"name": NAME}, "spec": spec}


def binding() -> JsonSchema:
    """The binding that enforces the policy in all namespaces."""
    spec = {"policyName": NAME, "validationActions": ["Deny"]}
    return {"apiVersion": _API, "kind": "ValidatingAdmissionPolicyBinding", "metadata": {"name": NAME}, "spec": spec}
