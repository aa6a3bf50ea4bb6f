"""A stage costs what its units cost, summed one by one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.layout import Precision
from penstock.core.model import ModelSpec
from penstock.core.remaking import remade_of
from penstock.core.schedule import Kind
from penstock.core.scratch import scratch_bytes
from penstock.core.sharding import Sharding
from penstock.planner.cost import CostModel
from penstock.planner.fit import measured_cost
from penstock.planner.remake import remake_until_ns
from penstock.planner.stagecost import (
    PASSES,
    UNIT_KINDS,
    Stages,
    UnitTable,
    first_like,
    pass_seconds,
    prefixes,
    stage_costs,
    stage_slice_ns,
    unit_counts,
    unit_totals,
)
from penstock.planner.work import Work
from tests.support.planning import TINY_GPT2, TINY_LLAMA, measured, problem, profile
from tests.support.remaking import random_remakes

MODELS = st.sampled_from([TINY_LLAMA, TINY_GPT2])
SLICES = st.lists(st.integers(1, 20), min_size=1, max_size=5).map(tuple)


@st.composite
def partitions(draw: st.DrawFn, model: ModelSpec) -> Stages:
    cuts = draw(st.sets(st.integers(1, model.num_units - 1), max_size=model.num_units - 1))
    return tuple(itertools.pairwise((0, *sorted(cuts), model.num_units)))


def contended() -> CostModel:
    units = tuple(measured(u, k, slowdown=1.0 + i / 4) for i, u in enumerate(UNIT_KINDS) for k in PASSES)
    return measured_cost(profile(units))


COST = problem().cost_of(1)
COSTS = st.sampled_from([contended(), problem().cost_of(1), problem().cost_of(2)])


def summed(cost: CostModel, model: ModelSpec, stage: tuple[int, int], kind: Kind, slowed: bool, *at: int) -> float:
    units = model.units[stage[0] : stage[1]]
    factors = [cost.slowdown(unit.kind, kind) if slowed else 1.0 for unit in units]
    seconds = [float(cost.unit_seconds(unit.kind, kind, Work.of(*at))) for unit in units]
    return sum(f * s for f, s in zip(factors, seconds, strict=True)) + cost.action_overhead_seconds


@given(MODELS, COSTS, SLICES, st.integers(1, 3), st.data())
def test_stage_costs_are_sums_over_units(
    model: ModelSpec, cost: CostModel, slices: tuple[int, ...], batch: int, data: st.DataObject
) -> None:
    stages = data.draw(partitions(model))
    costs = stage_costs(UnitTable.of(cost, batch, slices), model, stages)
    for (p, kind), (s, stage), (i, length) in itertools.product(
        enumerate(PASSES), enumerate(stages), enumerate(slices)
    ):
        at = (batch, length, sum(slices[:i]))
        assert costs.alone_ns[p, s, i] == pytest.approx(1e9 * summed(cost, model, stage, kind, False, *at), abs=1)
        together = 1e9 * summed(cost, model, stage, kind, True, *at)
        assert costs.concurrent_ns[p, s, i] == pytest.approx(together, rel=2e-6, abs=2)
    assert costs.slice_ns.tolist() == costs.concurrent_ns.sum(axis=0).tolist()


@given(MODELS, st.data())
def test_counts_are_of_the_units_in_the_range(model: ModelSpec, data: st.DataObject) -> None:
    stages = data.draw(partitions(model))
    counts = unit_counts(model, stages)
    for row, (first, stop) in zip(counts.tolist(), stages, strict=True):
        assert row == [sum(unit.kind is kind for unit in model.units[first:stop]) for kind in UNIT_KINDS]


@given(MODELS, COSTS, SLICES, st.integers(1, 3))
def test_totals_of_units_add_up_to_the_whole_model(
    model: ModelSpec, cost: CostModel, slices: tuple[int, ...], batch: int
) -> None:
    totals = unit_totals(UnitTable.of(cost, batch, slices), model)
    whole = stage_costs(UnitTable.of(cost, batch, slices), model, ((0, model.num_units),)).slice_ns.sum()
    overhead = 3e9 * cost.action_overhead_seconds * len(slices)
    assert totals.shape == (model.num_units,)
    assert totals.sum() + overhead == pytest.approx(whole, rel=1e-4, abs=model.num_units)


@given(MODELS, COSTS, SLICES, st.integers(1, 3), st.data())
def test_a_slice_costs_its_three_passes(
    model: ModelSpec, cost: CostModel, slices: tuple[int, ...], batch: int, data: st.DataObject
) -> None:
    stages = data.draw(partitions(model))
    expected = stage_costs(UnitTable.of(cost, batch, slices), model, stages).slice_ns
    for counts, row in zip(unit_counts(model, stages), expected.tolist(), strict=True):
        seconds = pass_seconds(cost, batch, slices, prefixes(slices))
        assert stage_slice_ns(cost, counts, seconds).tolist() == pytest.approx(row, rel=1e-5, abs=6)


@given(st.sampled_from([TINY_LLAMA, TINY_GPT2, TINY_LLAMA.divided(3)]), st.integers(0, 2**32), st.data())
def test_stages_like_others_are_what_these_are(model: ModelSpec, seed: int, data: st.DataObject) -> None:
    """They begin with the first units of their kinds, and make as much again in as much time and memory."""
    for stage in data.draw(partitions(model)):
        like = first_like(model, stage)
        kinds, kinds_of_like = ([unit.kind for unit in model.units[slice(*each)]] for each in (stage, like))
        assert kinds == kinds_of_like
        assert like[0] <= min(stage[0], 2) or stage[1] > model.first_head_unit
        (remakes,) = random_remakes(model, (stage,), seed)
        remade = remade_of(model, stage, remakes)
        assert remade_of(model, like, remakes) == remade
        times = [remake_until_ns(COST, model, each, (7, 5), 2, remade).tolist() for each in (stage, like)]
        assert times[0] == times[1]
        bytes_of = [scratch_bytes(model, Precision.BF16, *each, 2, 7, Sharding(2), remade) for each in (stage, like)]
        assert bytes_of[0] == bytes_of[1]
