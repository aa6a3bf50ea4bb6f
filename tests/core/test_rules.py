"""Rules about several fields: reading keeps each of them, and their objects are whole."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import Phase, given, settings

from penstock.core.errors import UserError, mistakes_in
from penstock.core.job import ResourcesSpec
from penstock.core.kubernetes_spec import EnvSource
from penstock.core.rules import Rule
from tests.support.rule_manifests import MANIFESTS, TYPES, broken_in_python, core_rules

RULES = [*core_rules()]


def test_ids_are_unique_within_a_type() -> None:
    counts = Counter((name, rule.id) for name, rule in RULES)
    assert max(counts.values()) == 1


@pytest.mark.parametrize(("name", "rule"), RULES, ids=lambda value: getattr(value, "id", value))
def test_an_apiserver_says_the_same_or_a_text_of_its_own(name: str, rule: Rule) -> None:
    has_values = not (isinstance(rule.what, str) and isinstance(rule.remedy, str))
    assert not rule.cel or not has_values or rule.message
    assert rule.cel or not (rule.message or rule.message_expression)


@settings(max_examples=300, deadline=None)
@given(manifest=MANIFESTS)
def test_what_breaks_a_rule_is_refused_and_only_that(manifest: dict[str, Any]) -> None:
    """A mistake is below the object whose rule is broken; rules of a whole that a part is wrong of are not all made."""
    places = {path for path, _ in broken_in_python(manifest)}
    try:
        TYPES[manifest["kind"]].from_manifest(manifest)
    except UserError as error:
        wrong = [mistake.where.replace("volumes.out", "volumes[out]") for mistake in mistakes_in(error)]
        wrong = [where.replace("volumes.data/a", "volumes[data/a]") for where in wrong]
        assert all(any(where.startswith(path) for path in places) for where in wrong), (wrong, places)
    else:
        assert places == set()


def test_generated_manifests_break_every_rule() -> None:
    met = set[str]()

    @settings(max_examples=1000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(manifest=MANIFESTS)
    def meet(manifest: dict[str, Any]) -> None:
        met.update(name for _, name in broken_in_python(manifest))

    meet()
    assert met == {rule.id for _, rule in RULES if rule.cel and not rule.is_untyped}


def test_the_message_has_values_here_and_none_for_an_apiserver() -> None:
    (rule,) = ResourcesSpec.rules
    with pytest.raises(UserError) as caught:
        ResourcesSpec(ranks=4, min_ranks=6)
    assert (caught.value.where, caught.value.what) == ("minRanks", "6 is more than ranks 4")
    assert rule.for_apiserver.to_manifest() == {
        "rule": "!has(self.minRanks) || self.minRanks <= self.ranks",
        "message": "is more than ranks: lower it",
        "fieldPath": ".minRanks",
        "reason": "FieldValueInvalid",
    }


def test_exactly_one_lists_its_fields() -> None:
    (rule,) = EnvSource.rules
    assert rule.what == "needs exactly one of secretKeyRef, configMapKeyRef and fieldRef"
    assert rule.for_apiserver.message == f"{rule.what}: {rule.remedy}"
