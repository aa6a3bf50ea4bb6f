"""Times from a table: rows as they are, lines between and beyond them, and plans that use nothing else."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.cost_table import CostRow, Pass
from penstock.core.errors import UserError
from penstock.core.model import UnitKind
from penstock.core.schedule import Kind
from penstock.planner.budget import Budget
from penstock.planner.cost_table import table_times
from penstock.planner.decide import decide
from penstock.planner.problem import problem_from_cluster
from penstock.planner.work import PASSES_WITH_WORK, Work
from tests.support.planning import cluster, job

PER_TOKEN, PER_PAIR, FIXED = 1e-6, 1e-8, 1e-5


def affine(unit: UnitKind, tokens: float, pairs: float) -> float:
    return FIXED + PER_TOKEN * tokens + (PER_PAIR * pairs if unit is UnitKind.ATTENTION else 0.0)


def table(
    tokens: tuple[int, ...] = (4, 16),
    seconds: Callable[[UnitKind, float, float], float] = affine,
    prefixes: tuple[int, ...] = (0, 12),
) -> tuple[CostRow, ...]:
    rows = []
    for (unit, kind), n, c in itertools.product(PASSES_WITH_WORK, tokens, prefixes):
        pairs = n * c + n * (n + 1) // 2
        if unit is UnitKind.ATTENTION or c == 0:
            took = seconds(unit, n, pairs)
            rows.append(CostRow(unit=unit, pass_=Pass(kind.value), tokens=n, pairs=pairs, seconds=took))
    return tuple(rows)


def test_costs_at_the_rows_are_those_of_the_rows() -> None:
    rows = table((1, 5, 16), lambda unit, n, pairs: 1.0 + n**1.5 + pairs**0.5)
    times = table_times(rows)
    for row in rows:
        work = Work(tokens=np.array(float(row.tokens)), pairs=np.array(float(row.pairs)))
        assert float(times.unit_seconds(row.unit, Kind(row.pass_), work)) == pytest.approx(row.seconds)


@given(st.integers(4, 16), st.integers(0, 60))
def test_linear_costs_are_exact_between_rows_and_at_any_prefix(length: int, prefix: int) -> None:
    work = Work.of(1, length, prefix)
    seconds = table_times(table()).unit_seconds(UnitKind.MLP, Kind.F, work)
    assert float(seconds) == pytest.approx(affine(UnitKind.MLP, length, 0))
    for node in (4, 16):
        attended = Work.of(1, node, prefix)
        found = float(table_times(table()).unit_seconds(UnitKind.ATTENTION, Kind.I, attended))
        assert found == pytest.approx(affine(UnitKind.ATTENTION, node, float(attended.pairs)))


def test_below_the_first_row_on_its_line_and_beyond_the_last_in_proportion() -> None:
    times = table_times(table())
    assert float(times.unit_seconds(UnitKind.MLP, Kind.W, Work.of(1, 2, 0))) == pytest.approx(12e-6)
    assert float(times.unit_seconds(UnitKind.MLP, Kind.W, Work.of(4, 16, 0))) == pytest.approx(4 * 26e-6)


@given(st.lists(st.integers(1, 64), min_size=2, max_size=6), st.integers(0, 64), st.data())
def test_a_growing_table_never_shrinks(lengths: list[int], prefix: int, data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.floats(0, 1e-3), min_size=3, max_size=3))
    nodes = (2, 8, 32)
    total = dict(zip(nodes, np.cumsum(steps), strict=True))
    times = table_times(table(nodes, lambda unit, n, pairs: float(total[int(n)]) + PER_PAIR * pairs))
    for unit, kind in PASSES_WITH_WORK:
        seconds = times.unit_seconds(unit, kind, Work.of(1, np.sort(lengths), prefix))
        assert (np.diff(seconds) >= -1e-15).all()
        assert (seconds >= 0).all()


def test_one_count_of_tokens_is_enough() -> None:
    times = table_times(table((8,)))
    assert float(times.unit_seconds(UnitKind.MLP, Kind.F, Work.of(1, 16, 0))) == pytest.approx(2 * 18e-6)
    assert float(times.unit_seconds(UnitKind.MLP, Kind.F, Work.of(1, 4, 0))) == pytest.approx(18e-6)


def test_a_missing_pass_is_named() -> None:
    rows = [row for row in table() if (row.unit, row.pass_) != (UnitKind.MLP, Pass.I)]
    with pytest.raises(UserError, match="holds no mlp I"):
        table_times(rows)


def test_attention_needs_two_numbers_of_pairs() -> None:
    with pytest.raises(UserError, match="the cost of an attended pair"):
        table_times(table(prefixes=(0,)))


def test_a_plan_by_a_table_asks_nothing_else_of_the_device() -> None:
    rows = table()
    slow = dataclasses.replace(cluster().device, peak_flops=1.0)
    fast, slowed = (
        decide(problem_from_cluster(job(), cluster(costs=rows, device=device)), Budget(candidates=20)).plan
        for device in (cluster().device, slow)
    )
    assert fast.for_ranks == dataclasses.replace(slowed.for_ranks, reasons=fast.reasons)
    assert fast.reasons[1:] == slowed.reasons[1:], "the first has the utilization"
    assert fast.prediction is not None
    assert slowed.prediction is not None
    speed = slowed.prediction.speed
    assert slowed.prediction == dataclasses.replace(fast.prediction, peak_flops=1.0, speed=speed)
    assert fast.tp == 1
    assert problem_from_cluster(job(tp=2), cluster(costs=rows)).tp_degrees == (2,)
