"""The simulator against what is known on paper (token-level: shape (K ranks, M micro-batches, S slices))."""

from __future__ import annotations

from itertools import product

import pytest

from penstock.planner.order import Order
from penstock.planner.schedules.registry import find
from penstock.planner.simulate.arrays import StepTimes, simulate_arrays
from penstock.planner.simulate.costs import Costs
from tests.support.step_costs import equal_costs, shape, slice_costs

TIMES = [(1, 1, 1), (10, 20, 5), (4, 4, 4), (7, 9, 2), (30, 10, 10)]
RECEIVE_AHEAD = 4


def step(name: str, pipeline: tuple[int, int, int], costs: Costs, receive_ahead: int = RECEIVE_AHEAD) -> StepTimes:
    order: Order = find(name).generate(shape(*pipeline))
    return simulate_arrays(order, costs, receive_ahead=receive_ahead)


@pytest.mark.parametrize("times", TIMES)
def test_gpipe_and_1f1b_idle_one_pipeline_of_slices(times: tuple[int, int, int]) -> None:
    """(K - 1)(F + B + W) / S idle on every rank, with F, B, W of a micro-batch; S = 1 is GPipe and 1F1B themselves."""
    for num_ranks, num_microbatches, num_slices in product((1, 2, 3, 4, 8), (1, 2, 5, 8), (1, 2, 4, 8)):
        pipeline = (num_ranks, num_microbatches, num_slices)
        costs = equal_costs(num_ranks, num_slices, *times)
        work = num_microbatches * num_slices * sum(times)
        for name in ("gpipe", "1f1b"):
            found = step(name, pipeline, costs)
            assert found.makespan_ns == work + (num_ranks - 1) * sum(times)
            assert (found.compute_ns == work).all()
            assert (found.bubble_ns == (num_ranks - 1) * sum(times)).all()


@pytest.mark.parametrize("times", [(10, 20, 5), (4, 4, 4), (7, 9, 2), (10, 12, 9), (3, 6, 6), (11, 17, 14)])
def test_h1_idles_without_the_weight_gradients(times: tuple[int, int, int]) -> None:
    """(K - 1)(F + B - W) / S for M >= 2, M S >= 2 K, W <= F, B (ZB-H1, arXiv 2401.10241, table 2, over slices).

    A W longer than F does not fit into F's place in the round: for F < W <= B it is (K - 1) B / S.
    """
    forward, gradient, weight = times
    for num_ranks, num_microbatches, num_slices in product((1, 2, 3, 4, 8), (2, 4, 8, 16), (1, 2, 4, 8)):
        if num_microbatches * num_slices < 2 * num_ranks:
            continue
        found = step("zb-h1", (num_ranks, num_microbatches, num_slices), equal_costs(num_ranks, num_slices, *times))
        work = num_microbatches * num_slices * sum(times)
        assert found.makespan_ns == work + (num_ranks - 1) * (max(forward, weight) + gradient - weight)


def test_h1_with_one_micro_batch_waits_for_the_whole_gradient() -> None:
    """M = 1: (K - 1)(F + B) / S, since the gradients of slices come in reverse and leave no W for the first wait."""
    for num_ranks, num_slices in ((2, 4), (2, 8), (3, 8), (4, 16)):
        found = step("zb-h1", (num_ranks, 1, num_slices), equal_costs(num_ranks, num_slices, 1, 1, 1))
        assert found.makespan_ns == 3 * num_slices + 2 * (num_ranks - 1)


def test_the_quoted_figures() -> None:
    assert step("zb-h1", (2, 1, 8), equal_costs(2, 8, 1, 1, 1)).makespan_ns == 26
    assert step("zb-h1", (4, 8, 1), equal_costs(4, 1, 10, 20, 5)).makespan_ns == 355


@pytest.mark.parametrize(
    ("forward", "gradient", "weight"),
    [
        ([5, 5, 5], [7, 7, 7], [3, 3, 3]),
        ([9, 5, 2], [4, 8, 12], [3, 3, 3]),
        ([2, 5, 9, 11], [3, 6, 12, 20], [4, 3, 2, 1]),
        ([11, 2, 9, 1, 7], [1, 30, 2, 8, 8], [5, 5, 5, 5, 5]),
    ],
)
def test_the_flush_takes_the_sum_and_the_largest_slice(
    forward: list[int], gradient: list[int], weight: list[int]
) -> None:
    """M sum(f) + (K - 1) max(f), and the same backward (TeraPipe, arXiv 2102.07988, equation 5, for M micro-batches).

    It supposes that finished slices can queue, so every receive is posted beforehand.
    """
    backward = [i + w for i, w in zip(gradient, weight, strict=True)]
    for num_ranks, num_microbatches in product((1, 2, 4, 7), (1, 2, 5)):
        costs = slice_costs(num_ranks, forward, gradient, weight)
        pipeline = (num_ranks, num_microbatches, len(forward))
        found = step("gpipe", pipeline, costs, receive_ahead=num_microbatches * len(forward))
        expected = num_microbatches * (sum(forward) + sum(backward)) + (num_ranks - 1) * (max(forward) + max(backward))
        assert found.makespan_ns == expected


def test_a_transfer_is_paid_per_hop_on_the_way_down_and_back() -> None:
    """GPipe with equal costs: 2 (K - 1) t more, since messages overlap compute in between."""
    for num_ranks, transfer in product((2, 3, 5), (1, 4)):
        free = step("gpipe", (num_ranks, 4, 2), equal_costs(num_ranks, 2, 4, 5, 6))
        slow = step("gpipe", (num_ranks, 4, 2), equal_costs(num_ranks, 2, 4, 5, 6, transfer))
        assert slow.makespan_ns - free.makespan_ns == 2 * (num_ranks - 1) * transfer


def test_a_link_slower_than_compute_sets_the_pace() -> None:
    """Two ranks, forwards of 1 and messages of 10: the second rank's last forward starts after M S messages."""
    found = step("gpipe", (2, 3, 4), equal_costs(2, 4, 1, 1, 1, transfer=10))
    last_forward = 1 + 12 * 10 + 1
    last_gradient = last_forward + 2 + 12 * 10 + 2
    assert found.makespan_ns == last_gradient
