"""The points that are measured: enough of them, inside the sequence, and no more than needed."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.core.profile_matching import ENOUGH_TOKENS, LARGEST_BATCH, batches_to_measure, largest_microbatch
from penstock.trainer.profiling.grid import (
    SHORTEST_LENGTH,
    Point,
    halvings,
    profile_grid,
    sparse_grid,
    transient_grid,
)

LENGTHS = st.integers(1, 5000)
GLOBAL_BATCHES = st.integers(1, 64)
BATCHES = GLOBAL_BATCHES.map(batches_to_measure)


def dense(length: int, global_batch: int) -> tuple[Point, ...]:
    return profile_grid(length, batches_to_measure(global_batch), largest_microbatch(global_batch, length))


def sparse(length: int, global_batch: int) -> tuple[Point, ...]:
    return sparse_grid(length, batches_to_measure(global_batch), largest_microbatch(global_batch, length))


@given(LENGTHS, GLOBAL_BATCHES)
@example(16, 4)
def test_points_lie_inside_the_sequence_and_differ(length: int, global_batch: int) -> None:
    batches = batches_to_measure(global_batch)
    for grid in (dense(length, global_batch), sparse(length, global_batch), transient_grid(length, batches)):
        assert len({(point.batch, point.length, point.prefix) for point in grid}) == len(grid)
        for point in grid:
            assert point.length >= 1
            assert point.prefix >= 0
            assert point.length + point.prefix <= length
            assert point.batch in batches or point.single


@given(LENGTHS, GLOBAL_BATCHES)
def test_used_points_reach_to_the_ends(length: int, global_batch: int) -> None:
    used = [point for point in dense(length, global_batch) if not point.held_out]
    assert Point(1, length, 0) in used
    assert {point.batch for point in used} >= set(batches_to_measure(global_batch))
    for short in halvings(length):
        assert {point.prefix for point in used if (point.batch, point.length) == (1, short)} >= {0, length - short}


@given(LENGTHS, GLOBAL_BATCHES)
def test_whole_microbatches_are_measured_up_to_enough_tokens(length: int, global_batch: int) -> None:
    """Every division of the batch into smaller micro-batches lies between measured points, not beyond them."""
    divisors = [b for b in range(1, global_batch + 1) if global_batch % b == 0]
    within = max(b for b in divisors if b <= LARGEST_BATCH or b * length <= ENOUGH_TOKENS)
    for grid, least_length in (
        (dense(length, global_batch), 2 * SHORTEST_LENGTH),
        (sparse(length, global_batch), 4 * SHORTEST_LENGTH),
    ):
        used = [point for point in grid if not point.held_out]
        assert max(point.tokens for point in used) == within * length
        assert all(point.prefix == 0 and point.length == length for point in used if point.single)
        assert sum((point.batch, point.length) == (within, length) and not point.prefix for point in used) == 1
        assert length < least_length or sum(point.single for point in used) == (within > 1)


@given(LENGTHS, GLOBAL_BATCHES)
def test_a_sparse_grid_has_the_whole_sequence_both_ends_of_it_and_the_largest_micro_batch(
    length: int, global_batch: int
) -> None:
    used = {point for point in sparse(length, global_batch) if not point.held_out}
    assert Point(1, length, 0) in used
    assert max(point.batch for point in used if not point.single) == max(batches_to_measure(global_batch))
    for short in {point.length for point in used}:
        assert {point.prefix for point in used if (point.batch, point.length) == (1, short)} == {0, length - short}
    assert len(used) <= max(len(dense(length, global_batch)) // 2 + 1, 3)


@given(st.integers(128, 5000), GLOBAL_BATCHES)
def test_held_out_points_lie_between_used_ones(length: int, global_batch: int) -> None:
    grid = dense(length, global_batch)
    used = [point for point in grid if not point.held_out and point.batch == 1]
    held_out = [point for point in grid if point.held_out]
    assert len(held_out) == 2
    for point in held_out:
        assert min(p.length for p in used) < point.length < max(p.length for p in used)
        assert 0 < point.prefix < max(p.prefix for p in used)
        assert (point.length, point.prefix) not in {(p.length, p.prefix) for p in used}


@pytest.mark.parametrize("length", [64, 256, 1024, 4096])
def test_attention_inside_a_slice_can_be_separated_from_the_matrices(length: int) -> None:
    """Separating them needs equal numbers of tokens in one and in several sequences."""
    used = [point for point in dense(length, 4) if not point.held_out and not point.prefix]
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
    assert many <= Point(1, min(one, other), 0, single=True).repeats <= 6


BLOCKS = 4


def test_cost_is_bounded() -> None:
    """In passes of four blocks over one token, as they take about equally long; more only with a reason."""
    dense_cost, sparse_cost = (
        sum((2 * p.repeats + 1) * p.tokens * (1 if p.whole else 0.5) / (BLOCKS if p.single else 1) for p in grid)
        for grid in (dense(1024, 4), sparse(1024, 4))
    )
    assert dense_cost < 52_000
    assert sparse_cost < 0.65 * dense_cost


@pytest.mark.parametrize(
    ("global_batch", "expected"), [(1, (1,)), (2, (1, 2)), (3, (1, 3)), (8, (1, 2, 4)), (6, (1, 2, 3))]
)
def test_micro_batches_divide_the_batch(global_batch: int, expected: tuple[int, ...]) -> None:
    assert batches_to_measure(global_batch) == expected
