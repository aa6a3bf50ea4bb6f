"""Choice of recomputation and stage boundaries, against exact solutions by an integer program and by brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from penstock.core.layout import Operation
from penstock.core.model import UnitKind
from penstock.core.remaking import OF_LAYERS, Remakes
from penstock.planner.recompute import Cut, Saving, Savings, cheapest

LYNX_OPT = 1.02
"""Lynx's heuristic is said to be within 2 % of its integer program (arXiv 2406.08756)."""

OWN = {
    UnitKind.ATTENTION: (Operation.NORM, Operation.PROJECT, Operation.ATTEND, Operation.OUTPUT),
    UnitKind.MLP: (Operation.NORM, Operation.PROJECT, Operation.ACTIVATE, Operation.OUTPUT),
}


@st.composite
def savings(draw: st.DrawFn) -> Savings:
    """Draw savings of operations of both units, from few bytes for much time to many bytes for no time."""
    pairs = [(kind, operation) for kind, operations in OWN.items() for operation in operations]
    chosen = draw(st.lists(st.sampled_from(pairs), min_size=1, unique=True))
    found = [
        Saving(unit=kind, operation=each, num_bytes=draw(st.integers(1, 1000)), duration_ns=draw(st.integers(0, 1000)))
        for kind, each in chosen
    ]
    return tuple(sorted(found, key=lambda each: each.duration_ns / each.num_bytes))


def least_ns(among: Savings, counts: Mapping[UnitKind, int], needed_bytes: float) -> int | None:
    """The integer program, solved exactly by HiGHS; none if there is no solution."""
    most = [counts[each.unit] for each in among]
    if needed_bytes > sum(count * each.num_bytes for count, each in zip(most, among, strict=True)):
        return None
    solved = milp(
        [each.duration_ns for each in among],
        integrality=np.ones(len(among)),
        bounds=Bounds(0, most),
        constraints=LinearConstraint([[each.num_bytes for each in among]], lb=math.ceil(needed_bytes)),
        options={"mip_rel_gap": 0},
    )
    assert solved.success
    return round(float(solved.fun))


def of_remakes(remakes: Remakes, among: Savings) -> tuple[int, int]:
    """The bytes and nanoseconds of what they name."""
    by_name = {(each.unit, each.operation): each for each in among}
    found = [(each.count, by_name[each.unit, operation]) for each in remakes for operation in each.operations]
    return sum(n * each.num_bytes for n, each in found), sum(n * each.duration_ns for n, each in found)


def num_units(remakes: Remakes, kind: UnitKind) -> int:
    return sum(each.count for each in remakes if each.unit is kind)


@settings(max_examples=400)
@given(savings(), st.integers(0, 4), st.integers(0, 4), st.floats(-0.1, 1.05))
def test_the_least_time_for_what_is_needed(among: Savings, attentions: int, mlps: int, share: float) -> None:
    """With up to four layers, where rounding to whole units has the largest effect."""
    counts = {UnitKind.ATTENTION: attentions, UnitKind.MLP: mlps}
    needed = share * sum(counts[each.unit] * each.num_bytes for each in among)
    chosen, least = cheapest(among, counts, needed), least_ns(among, counts, needed)
    assert (chosen is None) == (least is None)
    if chosen is None or least is None:
        return
    num_bytes, duration_ns = of_remakes(chosen, among)
    assert num_bytes >= needed
    assert all(num_units(chosen, kind) <= counts[kind] for kind in OF_LAYERS)
    assert least <= duration_ns <= LYNX_OPT * least


@given(savings(), st.integers(0, 96), st.floats(0, 1))
def test_many_layers(among: Savings, layers: int, share: float) -> None:
    counts = dict.fromkeys(OF_LAYERS, layers)
    needed = share * layers * sum(each.num_bytes for each in among)
    chosen, least = cheapest(among, counts, needed), least_ns(among, counts, needed)
    assert chosen is not None
    assert least is not None
    num_bytes, duration_ns = of_remakes(chosen, among)
    assert num_bytes >= needed
    assert least <= duration_ns <= LYNX_OPT * least


@given(savings(), st.integers(1, 40), st.floats(0, 1))
def test_the_first_units_of_a_kind_recompute_the_most(among: Savings, layers: int, share: float) -> None:
    """Each operation is recomputed by the chosen number of units, in few groups, none of which is empty."""
    needed = share * layers * sum(each.num_bytes for each in among)
    chosen = cheapest(among, dict.fromkeys(OF_LAYERS, layers), needed)
    assert chosen is not None
    for kind in OF_LAYERS:
        of_kind = [each for each in chosen if each.unit is kind]
        assert all(each.count > 0 and each.operations for each in of_kind)
        assert all(set(after.operations) < set(before.operations) for before, after in itertools.pairwise(of_kind))


def test_nothing_is_recomputed_if_no_memory_is_needed() -> None:
    free = Saving(unit=UnitKind.MLP, operation=Operation.OUTPUT, num_bytes=10, duration_ns=0)
    assert cheapest((free,), {UnitKind.MLP: 3}, 0.0) == ()
    assert cheapest((free,), {UnitKind.MLP: 3}, -5.0) == ()
    assert cheapest((free,), {UnitKind.MLP: 3}, 31.0) is None
    assert cheapest((), {UnitKind.MLP: 3}, 1.0) is None


@st.composite
def cuts(draw: st.DrawFn, most_units: int = 10) -> Cut:
    """Draw alternating attentions and MLPs between an embedding and a head.

    Each unit holds at least the bytes, and takes at least the time, of its recomputed operations, since it ran them
    before. Earlier ranks hold more micro-batches.
    """
    count, num_stages = draw(st.integers(3, most_units)), draw(st.integers(1, 3))
    among = draw(savings())
    inner = [OF_LAYERS[place % 2] for place in range(count - 2)]
    kinds = [UnitKind.EMBEDDING, *inner, UnitKind.HEAD]
    given_up = {kind: sum(each.num_bytes for each in among if each.unit is kind) for kind in UnitKind}
    recomputed_ns = {kind: sum(each.duration_ns for each in among if each.unit is kind) for kind in UnitKind}
    more_ns = {kind: draw(st.integers(1, 1000)) + 2 * sum(recomputed_ns.values()) for kind in UnitKind}
    more_bytes = {kind: draw(st.integers(0, 1000)) for kind in UnitKind}
    state_bytes = {kind: draw(st.integers(0, 3000)) for kind in UnitKind}
    in_flight = [each / 8 for each in sorted(draw(st.integers(8, 32)) for _ in range(num_stages))][::-1]
    regained = [each * draw(st.integers(2, 8)) / 8 for each in in_flight]
    held = sum(given_up[kind] + more_bytes[kind] for kind in kinds) * in_flight[0] / num_stages
    limits = [round(held * draw(st.floats(0.2, 1.5))) for _ in range(num_stages)]
    return Cut(
        savings=among,
        unit_ns=np.array([more_ns[kind] for kind in kinds]),
        state_bytes=np.array([state_bytes[kind] for kind in kinds]) // 4,
        held_bytes=np.array([given_up[kind] + more_bytes[kind] for kind in kinds]),
        kinds=kinds,
        in_flight=np.array(in_flight),
        regained=np.array(regained),
        limit_bytes=np.array(limits),
        exposed=np.array([draw(st.sampled_from([0.0, 0.25, 1.0, 1.0])) for _ in range(num_stages)]),
        slowness=np.array([draw(st.sampled_from([1.0, 1.0, 1.5, 0.5])) for _ in range(num_stages)]),
    )


def brute_stage_ns(cut: Cut, stage: int, first: int, stop: int) -> float:
    """The least over all policies, counted unit by unit."""
    units = range(first, stop)
    lacking = sum(cut.state_bytes[unit] + cut.in_flight[stage] * cut.held_bytes[unit] for unit in units)
    lacking -= cut.limit_bytes[stage]
    needed = max(lacking / cut.regained[stage], 0)
    counts = {kind: sum(cut.kinds[unit] is kind for unit in units) for kind in OF_LAYERS}
    recomputed_ns = least_ns(cut.savings, counts, needed)
    if recomputed_ns is None:
        return math.inf
    return float(sum(cut.unit_ns[units.start : units.stop]) + cut.exposed[stage] * recomputed_ns)


def all_bounds(num_units: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in itertools.combinations(range(1, num_units), num_stages - 1):
        yield (0, *inner, num_units)


def slowest(cut: Cut, bounds: Sequence[int]) -> float:
    """Return the time of the longest stage with its recomputation, for one stage per rank."""
    longest, stages = 0.0, tuple(itertools.pairwise(bounds))
    together = cut.remakes_of_ranks(stages, range(len(stages)))
    assert together is not None
    for stage, (first, stop) in enumerate(stages):
        remakes = together[stage] if together else ()
        num_bytes, recomputed_ns = of_remakes(remakes, cut.savings)
        assert num_bytes >= float(cut.needed_bytes(stage, first, stop)) - 1e-6
        stage_ns = int(cut.unit_ns[first:stop].sum()) + cut.exposed[stage] * recomputed_ns
        longest = max(longest, cut.slowness[stage] * stage_ns)
    return longest


@settings(max_examples=150)
@given(cuts())
def test_no_other_stages_and_policies_are_faster(cut: Cut) -> None:
    num_units, num_stages = len(cut.unit_ns), len(cut.in_flight)
    if num_units < num_stages:
        return
    known = {
        (stage, first, stop): brute_stage_ns(cut, stage, first, stop)
        for stage in range(num_stages)
        for first, stop in itertools.combinations(range(num_units + 1), 2)
    }
    of_bounds = [
        max(cut.slowness[stage] * known[stage, *units] for stage, units in enumerate(itertools.pairwise(bounds)))
        for bounds in all_bounds(num_units, num_stages)
    ]
    bounds = cut.best()
    assert (bounds is None) == (min(of_bounds) == float("inf"))
    if bounds is not None:
        assert list(bounds) == sorted(set(bounds))
        assert (bounds[0], bounds[-1], len(bounds)) == (0, num_units, num_stages + 1)
        assert slowest(cut, bounds) <= LYNX_OPT * min(of_bounds)


@settings(max_examples=150)
@given(cuts())
def test_the_time_of_stages_lies_between_its_bounds(cut: Cut) -> None:
    """Parts of units take no longer, and greedy choices at least as long; all are infinite for the same stages, but for
    roundings of what is needed.
    """
    for stage in range(len(cut.in_flight)):
        for stop in range(stage + 1, len(cut.unit_ns) + 1):
            for first, (least, greedy) in enumerate(cut.times_of(stage, stop).T.tolist(), start=stage):
                assert least <= cut.stage_ns(stage, first, stop) * (1 + 1e-9)
                assert cut.stage_ns(stage, first, stop) <= greedy
                assert (cut.stage_ns(stage, first, stop) == math.inf) == (greedy == math.inf)


@settings(max_examples=150)
@given(cuts(), st.floats(1, 1.5))
def test_whether_stages_can_take_so_long_is_known_without_the_best(cut: Cut, factor: float) -> None:
    bounds = cut.best()
    if bounds is None:
        assert cut.can_take(0)
        return
    longest = slowest(cut, bounds)
    assert cut.can_take(factor * longest)
    assert not cut.can_take(longest / LYNX_OPT - 1)


def two_ranks(**changes: Any) -> Cut:
    """Ten equal units, of which the first of two ranks can recompute."""
    saving = Saving(unit=UnitKind.MLP, operation=Operation.PROJECT, num_bytes=8, duration_ns=300_000_000)
    fields: dict[str, Any] = {
        "savings": (saving,),
        "unit_ns": np.full(10, 1_000_000_000),
        "state_bytes": np.zeros(10, dtype=np.int64),
        "held_bytes": np.full(10, 10),
        "kinds": [UnitKind.MLP] * 10,
        "in_flight": np.array([2.0, 1.0]),
        "regained": np.array([1.0, 0.0]),
        "limit_bytes": np.array([60, 60]),
        "exposed": np.ones(2),
        "slowness": np.ones(2),
    }
    return Cut(**fields | changes)


def test_the_example_of_the_theory() -> None:
    """A limit of 60 bytes: four and six units."""
    cut = two_ranks()
    bounds = cut.best()
    assert bounds == (0, 4, 10)
    assert slowest(cut, bounds) == 6e9
    assert slowest(cut, (0, 4, 10)) < slowest(cut, (0, 5, 10)) == 6.5e9


def test_a_slow_rank_owns_less_whatever_it_recomputes() -> None:
    """The second takes twice as long: six units with recomputation, and four."""
    cut = two_ranks(limit_bytes=np.array([90, 60]), slowness=np.array([1.0, 2.0]))
    assert cut.best() == (0, 6, 10)
    assert slowest(cut, (0, 6, 10)) == 8e9


def test_hidden_recomputation_takes_no_time() -> None:
    """The first hides everything, so both own five units."""
    cut = two_ranks(exposed=np.array([0.0, 1.0]))
    assert cut.best() == (0, 5, 10)
    assert cut.stage_ns(0, 0, 5) == cut.stage_ns(1, 5, 10) == 5e9


@pytest.mark.parametrize("num_stages", [4, 16])
def test_a_rank_with_enough_memory_recomputes_nothing(num_stages: int) -> None:
    saving = Saving(unit=UnitKind.MLP, operation=Operation.OUTPUT, num_bytes=1, duration_ns=0)
    cut = Cut(
        savings=(saving,),
        unit_ns=np.full(64, 1000),
        state_bytes=np.ones(64, dtype=np.int64),
        held_bytes=np.ones(64, dtype=np.int64),
        kinds=[UnitKind.MLP] * 64,
        in_flight=np.full(num_stages, 2.0),
        regained=np.full(num_stages, 1.0),
        limit_bytes=np.full(num_stages, 10_000),
        exposed=np.ones(num_stages),
        slowness=np.ones(num_stages),
    )
    bounds = cut.best()
    assert bounds is not None
    stages = tuple(itertools.pairwise(bounds))
    assert {stop - first for first, stop in stages} == {64 // num_stages}
    assert cut.remakes_of_ranks(stages, range(num_stages)) == ()
