"""Rules about several fields: each is one object, in Python for all who read manifests and in CEL for the apiserver.

core's types list their rules (`penstock.core.manifest.Manifest.rules`) and check them when they are built. The operator
writes the same objects into the CustomResourceDefinitions, so that the apiserver refuses the same values on
`kubectl apply`. `tests/e2e/test_rules.py` evaluates both forms on the same manifests.

Example: ``ranks: 4`` with ``minRanks: 6`` breaks the rule ``min-ranks`` of `ResourcesSpec`. Python raises "6 is more
than ranks 4", and the apiserver answers "is more than ranks: lower it" about the field ``minRanks``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import UserError

Text = str | Callable[[Any], str]
"""Words, or the function that makes them from the instance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiserverRule:
    """If ``cel``, evaluated on ``self``, is false, the apiserver reports ``message`` for the field ``where``.

    ``message_expression``, in CEL, makes a message with values in it; ``message`` is used where that fails. Reference:
    https://kubernetes.io/docs/reference/using-api/cel
    """

    cel: str
    message: str
    where: str = ""
    message_expression: str = ""
    reason: str = "FieldValueInvalid"

    def to_manifest(self) -> dict[str, str]:
        """The rule in the form of ``x-kubernetes-validations``."""
        manifest = {"rule": self.cel, "message": self.message, "messageExpression": self.message_expression}
        manifest |= {"fieldPath": f".{self.where}" if self.where else "", "reason": self.reason}
        return {key: value for key, value in manifest.items() if value}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """If ``holds`` is false for an instance, the error has ``what``, ``where`` and ``remedy``.

    ``cel`` is the same condition for the apiserver; empty if it cannot check it. For the apiserver, ``message``
    replaces ``what`` and ``remedy``, which may depend on the instance. An instance may lack fields
    (`penstock.core.manifest.read_dataclass`): then ``holds`` raises AttributeError. ``is_untyped``: the apiserver knows
    no type for the field, so only its policy can read it (`penstock.operator.policy`), and ``cel`` is over that
    policy's variables.
    """

    id: str
    where: str
    holds: Callable[[Any], bool]
    what: Text
    remedy: Text
    cel: str = ""
    message: str = ""
    message_expression: str = ""
    reason: str = "FieldValueInvalid"
    is_untyped: bool = False

    def mistake(self, instance: Any) -> UserError:
        """The error about an instance that breaks the rule."""
        return UserError(what=_of(self.what, instance), where=self.where, remedy=_of(self.remedy, instance))

    @property
    def for_apiserver(self) -> ApiserverRule:
        """The rule in CEL."""
        return ApiserverRule(
            cel=self.cel,
            message=self.message or f"{self.what}: {self.remedy}",
            where=self.where,
            message_expression=self.message_expression,
            reason=self.reason,
        )


def _of(text: Text, instance: Any) -> str:
    return text if isinstance(text, str) else text(instance)


def exactly_one(remedy: str, **fields: str) -> Rule:
    """Exactly one of ``fields`` is given: keywords are attributes, values their names in manifests."""
    *others, last = fields.values()
    return Rule(
        id=f"one-of-{'-'.join(fields.values())}",
        where="",
        holds=lambda instance: sum(getattr(instance, name) is not None for name in fields) == 1,
        what=f"needs exactly one of {', '.join(others)} and {last}",
        remedy=remedy,
        cel=" + ".join(f"(has(self.{name}) ? 1 : 0)" for name in fields.values()) + " == 1",
    )
