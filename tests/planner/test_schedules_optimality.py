"""Orders against the best that an exact solver found (`./dev bench schedule_optimality` makes the sample again)."""

from __future__ import annotations

import json

from penstock.planner.schedules.greedy_order import makespan_ns, peak_stash
from tests.support.optimality import family_of, instance
from tests.support.repository import ROOT

SAMPLE = json.loads((ROOT / "tests" / "fixtures" / "optimal_steps.json").read_text())
"""Nanoseconds of the best step that is known, by the number of the instance."""


def test_orders_of_a_sample_are_near_the_best_that_is_known() -> None:
    gaps = []
    for number, best in SAMPLE.items():
        inputs = instance(int(number))
        order = family_of(inputs).best_order(inputs)
        assert (peak_stash(inputs, order) <= inputs.caps[0]).all()
        gaps.append(makespan_ns(inputs, order) / best - 1)
    assert sum(gaps) / len(gaps) <= 0.02
    assert max(gaps) <= 0.05
