"""The points that are measured: enough of them, inside the sequence, and no more than needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.fitness import batches_to_measure
from penstock.trainer.profiling.grid import (
    Point,
    halvings,
    profile_grid,
    sparse_grid,
    transient_grid,
)

LENGTHS = st.integers(1, 5000)
BATCHES = st.integers(1, 64).map(batches_to_measure)


@given(LENGTHS, BATCHES)
def test_points_lie_inside_the_sequence_and_differ(length: int, batches: tuple[int, ...]) -> None:
    for grid in (profile_grid(length, batches), sparse_grid(length, batches), transient_grid(length, batches)):
        assert len(set(grid)) == len(grid)
        for point in grid:
            assert point.length >= 1
            assert point.prefix >= 0
            assert point.length + point.prefix <= length
            assert point.batch in batches


@given(LENGTHS, BATCHES)
def test_used_points_reach_to_the_ends(length: int, batches: tuple[int, ...]) -> None:
    used = [point for point in profile_grid(length, batches) if not point.held_out]
    assert Point(1, length, 0) in used
    assert {point.batch for point in used} == set(batches)
    for short in halvings(length):
        assert {point.prefix for point in used if (point.batch, point.length) == (1, short)} >= {0, length - short}


@given(LENGTHS, BATCHES)
def test_a_sparse_grid_has_the_whole_sequence_both_ends_of_it_and_the_largest_micro_batch(
    length: int, batches: tuple[int, ...]
) -> None:
    used = {point for point in sparse_grid(length, batches) if not point.held_out}
    assert Point(1, length, 0) in used
    assert max(point.batch for point in used) == max(batches)
    for short in {point.length for point in used}:
        assert {point.prefix for point in used if (point.batch, point.length) == (1, short)} == {0, length - short}
    assert len(used) <= max(len(profile_grid(length, batches)) // 2 + 1, 2)


@given(st.integers(128, 5000), BATCHES)
def test_held_out_points_lie_between_used_ones(length: int, batches: tuple[int, ...]) -> None:
    grid = profile_grid(length, batches)
    used = [point for point in grid if not point.held_out and point.batch == 1]
    held_out = [point for point in grid if point.held_out]
    assert len(held_out) == 2
    for point in held_out:
        assert min(p.length for p in used) < point.length < max(p.length for p in used)
        assert 0 < point.prefix < max(p.prefix for p in used)
        assert (point.length, point.prefix) not in {(p.length, p.prefix) for p in used}


@pytest.mark.parametrize("length", [64, 256, 1024, 4096])
def test_attention_inside_a_slice_can_be_told_from_the_matrices(length: int) -> None:
    """That takes equal numbers of tokens in one and in several sequences."""
    used = [point for point in profile_grid(length, (1, 2, 4)) if not point.held_out and not point.prefix]
    single = {point.tokens for point in used if point.batch == 1}
    assert any(point.tokens in single for point in used if point.batch > 1)


@given(LENGTHS, BATCHES)
def test_memory_is_weighed_up_to_the_largest_micro_batch(length: int, batches: tuple[int, ...]) -> None:
    grid = transient_grid(length, batches)
    assert {point.tokens for point in grid} >= {batch * length for batch in batches} | set(halvings(length))


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_short_passes_are_repeated_more(one: int, other: int) -> None:
    few, many = Point(1, max(one, other), 0).repeats, Point(1, min(one, other), 0).repeats
    assert 3 <= few <= many <= 6


def test_cost_is_bounded() -> None:
    """In passes over one token, as they take about equally long; more only with a reason."""
    grid = profile_grid(1024, batches_to_measure(4))
    sparse = sparse_grid(1024, batches_to_measure(4))
    dense_cost, sparse_cost = (
        sum((2 * p.repeats + 1) * p.tokens * (1.0 if p.whole else 0.5) for p in each) for each in (grid, sparse)
    )
    assert dense_cost < 45_000
    assert sparse_cost < 0.6 * dense_cost


@pytest.mark.parametrize(
    ("global_batch", "expected"), [(1, (1,)), (2, (1, 2)), (3, (1, 3)), (8, (1, 2, 4)), (6, (1, 2, 3))]
)
def test_micro_batches_divide_the_batch(global_batch: int, expected: tuple[int, ...]) -> None:
    assert batches_to_measure(global_batch) == expected
