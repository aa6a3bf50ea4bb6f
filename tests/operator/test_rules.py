"""The rules of the definitions and of the policy: all of core's, once."""

from __future__ import annotations

from penstock.core.rules import Rule
from penstock.operator.policy import CHECKS
from penstock.operator.rules import RULES
from tests.support.rule_manifests import core_rules


def test_every_rule_of_core_is_in_its_type_s_definition_or_in_the_policy() -> None:
    def places(name: str, rule: Rule) -> int:
        return (CHECKS if rule.is_untyped else RULES[name]).count(rule.for_apiserver)

    assert {rule.id: places(name, rule) for name, rule in core_rules() if rule.cel and places(name, rule) != 1} == {}


def test_what_an_apiserver_cannot_check_is_listed() -> None:
    """The vocabulary may be the tokenizer's, and stages may be recomputed in a form that is no type to an apiserver."""
    without_cel = {rule.id for _, rule in core_rules() if not rule.cel}
    assert without_cel == {"head-parts", "recompute-pinned", "recompute-stages"}
