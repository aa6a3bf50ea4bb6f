"""Whole steps with a head in parts over the in-process transport: any case, not pairs of values alone."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.sharded_pipeline import check_threads
from tests.support.shared_heads import FACTORS, is_allowed, plan_of

CASES = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in FACTORS.items()})


@given(CASES.filter(is_allowed))
@settings(max_examples=40)
def test_gradients_are_those_of_the_whole_model(case: dict[str, Any]) -> None:
    check_threads(plan_of(case))
