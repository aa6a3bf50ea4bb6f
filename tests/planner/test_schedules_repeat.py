"""Orders of many micro-batches: short ones with their middle repeated are legal, hold no more, and lose little."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.schedules.greedy_order import makespan_ns, peak_stash
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.refine import refine
from penstock.planner.schedules.repeat import rounds
from penstock.planner.schedules.v_shape import ZBV
from penstock.planner.schedules.variants import QUICK_FROM
from penstock.planner.simulate.periodic import enough_to_repeat
from tests.planner.test_schedules_variants import FAMILIES, equal_inputs, measured_inputs, pipeline, prove_order

LONG = {"zb": (8, 1, 400, 4), "zbv": (8, 2, 200, 4), "interleaved-zb": (4, 2, 430, 3)}
"""Ranks, stages per rank, micro-batches, slices: more actions than are made in full."""


@settings(max_examples=40)
@given(measured_inputs(), st.integers(1, 3), st.integers(1, 4), st.data())
def test_any_round_may_be_repeated(inputs: ScheduleInputs, period: int, count: int, data: st.DataObject) -> None:
    """Legal, and between rounds a rank holds what it held before the first."""
    shape = dataclasses.replace(inputs, num_microbatches=inputs.num_microbatches + 2 * period)
    tables = pipeline(shape)
    seed = FAMILIES["zbv"]._shape(shape).seeds.words[data.draw(st.integers(0, 5))]
    run = refine(tables, seed, tables.peaks(seed), 50)
    for again in itertools.islice(rounds(tables, run, period), 2):
        longer = dataclasses.replace(shape, num_microbatches=shape.num_microbatches + count * period)
        order = tables.order(again.repeated(run[1], count))
        prove_order(order)
        once = tables.order(again.repeated(run[1], 1))
        assert (peak_stash(longer, order) == peak_stash(longer, once)).all()


@pytest.mark.parametrize("name", sorted(LONG))
@pytest.mark.parametrize("variant", [3, 10, QUICK_FROM + 10])
def test_a_long_order_grows_by_rounds_and_keeps_within_its_target(name: str, variant: int) -> None:
    family, inputs = FAMILIES[name], equal_inputs(LONG[name], (100, 110, 80, 5))
    inputs = dataclasses.replace(inputs, variant=variant)
    growing = family.growing(inputs)
    assert growing.first is not None
    counts = [growing.first, growing.first + growing.period, inputs.num_microbatches]
    orders = [growing.generate(count) for count in counts]
    assert [order.num_microbatches for order in orders] == counts
    prove_order(orders[0])
    prove_order(orders[1])
    once, often = (
        peak_stash(dataclasses.replace(inputs, num_microbatches=order.num_microbatches), order) for order in orders[1:]
    )
    assert (once == often).all()
    assert orders[2].same_as(family.order(inputs))


@pytest.mark.parametrize("name", sorted(LONG))
def test_the_best_of_a_frontier_respects_the_caps_of_a_long_order(name: str) -> None:
    inputs = equal_inputs(LONG[name], (100, 110, 80, 5), caps=(60,) * LONG[name][0])
    order = FAMILIES[name].order(FAMILIES[name].best(inputs))
    assert (peak_stash(inputs, order) <= 60).all()


@pytest.mark.parametrize("name", sorted(LONG))
def test_rounds_lose_little(name: str) -> None:
    """At most 3 % over the work of the busiest rank, filling and draining included."""
    ranks, per_rank, microbatches, slices = LONG[name]
    inputs = dataclasses.replace(equal_inputs(LONG[name], (100, 110, 80, 5)), variant=10)
    work = per_rank * microbatches * slices * (100 + 110 + 80)
    assert microbatches > 2 * enough_to_repeat(ranks, slices)
    assert makespan_ns(inputs, FAMILIES[name].order(inputs)) <= 1.03 * work


def test_no_round_is_longer_than_its_step() -> None:
    tables = pipeline(equal_inputs((2, 2, 2, 1), (10, 10, 10, 0)))
    seed = ZBV._shape(equal_inputs((2, 2, 2, 1), (10, 10, 10, 0))).seeds.words[0]
    run = refine(tables, seed, tables.peaks(seed), 0)
    assert list(rounds(tables, run, 2)) == []
    assert all(np.array_equal(np.sort(np.unique(each.actions)), np.arange(6)) for each in rounds(tables, run, 1))
