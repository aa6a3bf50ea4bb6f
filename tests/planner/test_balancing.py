"""Stages of ranks that share a head, against every cut, and when a head is worth being divided."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.model import Family, ModelSpec
from penstock.planner.balancing import MOST_DEGREES, head_degrees, time_balanced_stages
from penstock.planner.pins import check_pins, parts_of_pinned_stages, pinned_stages
from penstock.planner.problem import Mesh, Problem, most_units
from penstock.planner.stages import balanced_bounds, evened_bounds, headed_bounds, rank_loads, shared_head_bounds
from tests.support.planning import TINY_LLAMA, cluster, problem

HEAVY = ModelSpec(family=Family.LLAMA, layers=2, hidden=32, heads=4, vocab=2400)
"""Its head is 70 % of the work."""

V, LOOP = (0, 1, 1, 0), (0, 1, 2, 0, 1, 2)


def mesh(pp: int, tp: int = 1) -> Mesh:
    return Mesh(dp=1, tp=tp, pp=pp, microbatch=1, num_microbatches=4)


def degrees(asked: Problem, pp: int, *placements: tuple[int, ...], tp: int = 1) -> tuple[int, ...]:
    return head_degrees(asked, mesh(pp, tp), (16,), placements or (tuple(range(pp)),))


@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=6),
    st.integers(1, 200),
    st.integers(2, 6),
    st.sampled_from([V, LOOP, (0, 1, 0, 1), (0, 1)]),
)
def test_ranks_that_share_a_head_are_as_even_as_any_cut_makes_them(
    layers: list[int], part: int, parts: int, owners: tuple[int, ...]
) -> None:
    unit_ns = [*layers, *[part] * parts]
    assume(len(owners) <= len(unit_ns))
    inner = itertools.combinations(range(1, len(unit_ns)), len(owners) - 1)
    least = min(rank_loads(unit_ns, (0, *cut, len(unit_ns)), owners).max() for cut in inner)
    assert rank_loads(unit_ns, shared_head_bounds(unit_ns, parts, owners), owners).max() == least


@given(st.integers(20, 60), st.integers(2, 20), st.integers(1, 300), st.sampled_from([8, 12]), st.booleans())
def test_many_stages_are_no_less_even_than_without_an_eye_for_the_head(
    layers: int, parts: int, part: int, ranks: int, is_v: bool
) -> None:
    owners = (*range(ranks), *(reversed(range(ranks)) if is_v else range(ranks)))
    unit_ns = [30] * layers + [part] * parts
    assume(len(owners) <= len(unit_ns))
    bounds = shared_head_bounds(unit_ns, parts, owners)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(unit_ns), len(owners) + 1)
    assert all(a < b for a, b in itertools.pairwise(bounds))
    headed = headed_bounds(unit_ns, parts, owners, min(parts, ranks))
    if headed is not None:
        assert rank_loads(unit_ns, bounds, owners).max() <= rank_loads(unit_ns, headed, owners).max()


def test_a_head_part_per_rank_balances_ranks_that_moving_units_cannot() -> None:
    """Eight ranks along a V: a stage of four layers each, and then a part each of a head as long as a layer."""
    owners, unit_ns = (*range(8), *reversed(range(8))), [330, 670] * 32 + [115] * 8
    moved = evened_bounds(unit_ns, balanced_bounds(unit_ns, 16), owners)
    assert rank_loads(unit_ns, moved, owners).max() > 4500
    assert rank_loads(unit_ns, shared_head_bounds(unit_ns, 8, owners), owners).max() == 4115


def test_a_heavy_head_is_tried_in_more_parts_while_each_step_helps() -> None:
    asked = problem(model=HEAVY)
    found = degrees(asked, 2)
    assert found[0] == 1
    assert 2 <= len(found) <= 1 + MOST_DEGREES
    loads = []
    for parts in found:
        divided = asked.divided(parts)
        stages = time_balanced_stages(divided, mesh(2), (16,), (0, 1))
        units = divided.units(1, 1, (16,)).seconds.sum(axis=(0, 2))
        kinds = [list(type(unit.kind)).index(unit.kind) for unit in divided.model.units]
        loads.append(max(sum(units[kind] for kind in kinds[first:stop]) for first, stop in stages))
    assert all(1.01 * after <= before for before, after in itertools.pairwise(loads))


def test_a_light_head_and_a_single_rank_have_no_head_parts() -> None:
    assert degrees(problem(model=TINY_LLAMA), 2) == (1,)
    assert degrees(problem(model=HEAVY), 1) == (1,)


def test_a_pin_decides() -> None:
    assert degrees(problem(model=HEAVY, head_parts=5), 2) == (5,)
    assert degrees(problem(model=HEAVY, head_parts=1), 2) == (1,)


def test_the_hardware_says_what_can_be() -> None:
    asked = dataclasses.replace(problem(model=HEAVY), head_degrees=lambda tp: (1, 2, 3))
    assert degrees(asked, 2) == (1, 2, 3)
    assert degrees(dataclasses.replace(asked, head_degrees=lambda tp: (1,)), 2) == (1,)


def test_every_shard_of_a_part_has_a_token() -> None:
    asked = problem(model=dataclasses.replace(HEAVY, hidden=8, vocab=6))
    assert max(degrees(asked, 2, tp=4)) == 1


def test_more_ranks_than_units_get_the_fewest_parts_that_are_enough() -> None:
    """Embedding, two layers and a head are six units."""
    asked = problem(cluster(num_nodes=4), model=HEAVY, ranks=8, global_batch=8)
    assert most_units(asked, 1) > 8 > HEAVY.num_units
    assert min(degrees(asked, 8)) == 3
    assert most_units(problem(model=TINY_LLAMA), 1) == TINY_LLAMA.num_units


# What is pinned


def test_one_part_joins_each_of_the_last_pinned_stages() -> None:
    assert pinned_stages((1, 1, 0, 0), 2 * 2 + 1 + 3, 3) == ((0, 3), (3, 6), (6, 7), (7, 8))
    assert pinned_stages((1, 0.5, 0.5), 6) == ((0, 3), (3, 4), (4, 6))
    assert pinned_stages((2, 0), 7, 2) == ((0, 6), (6, 7))


@st.composite
def pinned_halves(draw: st.DrawFn) -> tuple[list[int], int]:
    """Half layers of stages, whole layers in all, and a number of parts of the head."""
    halves = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    halves[0] += sum(halves) % 2 or 2 * (not any(halves))
    return halves, draw(st.integers(1, len(halves)))


@given(pinned_halves())
def test_pinned_stages_are_possible_where_they_hold_all_units_in_order(pinned: tuple[list[int], int]) -> None:
    """By the other way round: every stage has a unit, and the last ones exactly one part each."""
    halves, parts = pinned
    blocks, layers = [half / 2 for half in halves], sum(halves) / 2
    stages = pinned_stages(blocks, 2 * int(layers) + 1 + parts, parts)
    first = 2 * int(layers) + 1
    held = [max(stop - max(first, start), 0) for start, stop in stages]
    is_possible = all(start < stop for start, stop in stages) and held == [0] * (len(blocks) - parts) + [1] * parts
    assert (parts in parts_of_pinned_stages(blocks, int(layers))) == is_possible


def test_pinned_stages_with_empty_ones_behind_say_how_many_parts_there_can_be() -> None:
    assert parts_of_pinned_stages((1, 1, 0), 2) == (1, 2)
    assert parts_of_pinned_stages((1, 1, 0, 0), 2) == (2, 3)
    assert parts_of_pinned_stages((2, 0), 2) == (1, 2)
    assert parts_of_pinned_stages((1, 1), 2) == (1,)
    assert degrees(problem(model=HEAVY, stages=(1, 1, 0, 0), ranks=4), 4) == (2, 3)


@pytest.mark.parametrize(
    ("pinned", "where", "what"),
    [
        ({"head_parts": 3, "stages": (1, 1), "pp": 2}, "headParts", "3 parts of the head need a stage each"),
        ({"head_parts": 2, "stages": (1, 0, 1), "pp": 3, "ranks": 3}, "stages[2]", "after part 1 of 2 of the head"),
        ({"head_parts": 1, "stages": (1, 1, 0, 0), "ranks": 4}, "stages[2]", "holds no unit"),
        ({"stages": (1, 0, 1, 0), "ranks": 4}, "stages[1]", "holds no unit"),
        ({"head_parts": 2, "pp": 8, "ranks": 8}, "pp", "8 stages cannot share the model's 7 units"),
    ],
)
def test_pins_that_cannot_be_say_why(pinned: dict[str, object], where: str, what: str) -> None:
    with pytest.raises(UserError) as mistake:
        check_pins(problem(cluster(num_nodes=4), model=HEAVY, global_batch=8, **pinned), 4)
    assert str(mistake.value.where).endswith(where)
    assert what in mistake.value.what


def test_hardware_without_measured_head_parts_is_an_error() -> None:
    asked = dataclasses.replace(
        problem(model=HEAVY, head_parts=4), head_degrees=lambda tp: (1, 2), profile_digest="measured"
    )
    with pytest.raises(UserError, match="a head in 4 parts was not measured") as mistake:
        check_pins(asked, 4)
    assert "pin one of: 1, 2" in mistake.value.remedy
    with pytest.raises(UserError, match="those of a whole head"):
        check_pins(dataclasses.replace(asked, profile_digest=""), 4)
