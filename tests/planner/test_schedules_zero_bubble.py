"""zb: the published figures, never behind H1 where H1 fits, within its caps, and never stuck."""

from __future__ import annotations

import dataclasses
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings

from penstock.core.errors import UserError
from penstock.core.schedule import parse_schedule
from penstock.planner.order import from_schedule
from penstock.planner.schedules.greedy_order import makespan_ns, peak_stash
from penstock.planner.schedules.inputs import ScheduleInputs, StageTable
from penstock.planner.schedules.one_f_one_b import zb_h1
from penstock.planner.schedules.pipeline import cost_table
from penstock.planner.schedules.zero_bubble import H1, ZB, zb
from tests.support.step_costs import rows, zb_inputs


def equal_inputs(
    num_ranks: int, num_microbatches: int, num_slices: int, times: tuple[int, int, int], caps: tuple[int, ...] = ()
) -> ScheduleInputs:
    forward, gradient, weight = (((time,) * num_slices,) * num_ranks for time in times)
    return ScheduleInputs(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        forward_ns=forward,
        input_ns=gradient,
        weight_ns=weight,
        caps=caps,
    )


def test_four_ranks_with_free_memory_beat_h1() -> None:
    """F, I, W of 10, 20, 5 on 4 ranks, 8 micro-batches: H1 takes 355, a greedy order without a cap 340 or less."""
    free = equal_inputs(4, 8, 1, (10, 20, 5), caps=(100,) * 4)
    assert makespan_ns(free, zb_h1(free)) == 355
    assert makespan_ns(free, zb(free)) <= 340


def test_one_micro_batch_has_no_w_for_its_first_wait() -> None:
    """Unit costs, K = 2, S = 8, M = 1: 26, not 25, for the gradients of slices come in reverse."""
    inputs = equal_inputs(2, 1, 8, (1, 1, 1))
    assert makespan_ns(inputs, zb(inputs)) == 26
    assert makespan_ns(inputs, zb_h1(inputs)) == 26


def test_equal_costs_reach_the_floor_of_a_synchronous_step() -> None:
    """F = I = W: no step is shorter than M (F + I + W) + (K - 1) F / S, and H1 already takes no more."""
    for num_ranks, num_slices in ((4, 1), (4, 4), (8, 2)):
        inputs = equal_inputs(num_ranks, 16, num_slices, (7, 7, 7))
        assert makespan_ns(inputs, zb(inputs)) == 16 * num_slices * 21 + (num_ranks - 1) * 7


@settings(max_examples=60)
@given(zb_inputs())
def test_never_behind_h1_at_equal_memory(inputs: ScheduleInputs) -> None:
    order, h1 = zb(inputs), zb_h1(inputs)
    assert makespan_ns(inputs, order) <= makespan_ns(inputs, h1)
    assert (peak_stash(inputs, order) <= peak_stash(inputs, h1)).all()


def test_a_cap_below_one_micro_batch_is_refused() -> None:
    inputs = equal_inputs(3, 4, 4, (1, 1, 1), caps=(6, 6, 3))
    with pytest.raises(UserError, match="rank 2: a stash of 3 cannot hold one micro-batch, which needs 4"):
        zb(inputs)


@pytest.mark.parametrize(
    ("taken", "exchanged", "returned"),
    [
        (((2, 2), (2, 2)), (), ()),
        (((-1, 1), (1, 1)), (), ((1, -1), (-1, -1))),
        ((), ((-2, 0), (0, 0)), ((1, -1), (-1, -1))),
    ],
)
def test_a_stash_that_does_not_balance_is_refused(
    taken: StageTable, exchanged: StageTable, returned: StageTable
) -> None:
    inputs = dataclasses.replace(
        equal_inputs(2, 2, 2, (1, 1, 1)),
        variant=1,
        forward_stash=taken,
        input_stash=exchanged,
        weight_stash=returned,
    )
    with pytest.raises(UserError, match="gives back more or less than was taken"):
        zb(inputs)


def test_more_memory_never_makes_the_choice_slower_than_h1() -> None:
    for extra in range(0, 12, 3):
        inputs = equal_inputs(4, 6, 2, (5, 9, 4), caps=(5 + extra,) * 4)
        assert makespan_ns(inputs, zb(inputs)) <= makespan_ns(inputs, zb_h1(inputs))


def test_without_memory_for_h1_a_leaner_order_is_used() -> None:
    inputs = equal_inputs(4, 6, 2, (5, 9, 4), caps=(2,) * 4)
    assert ZB.best(inputs).variant != H1
    assert (peak_stash(inputs, zb(inputs)) == 2).all()


@settings(max_examples=25)
@given(zb_inputs())
def test_the_named_variant_is_the_best_and_is_kept(inputs: ScheduleInputs) -> None:
    best = ZB.best(inputs)
    assert ZB.best(best) is best
    every = [ZB.order(dataclasses.replace(inputs, variant=variant)) for variant in range(ZB.count)]
    usual = peak_stash(inputs, zb_h1(inputs))
    fitting = [makespan_ns(inputs, order) for order in every if (peak_stash(inputs, order) <= usual).all()]
    assert makespan_ns(inputs, zb(best)) <= min(fitting)


def long_context(num_ranks: int, num_microbatches: int, num_slices: int, cap: int) -> ScheduleInputs:
    """Equal stages whose F and I grow with the prefix and whose W does not, over links that take a little."""
    prefix = np.arange(num_slices) / num_slices
    forward, gradient, weight, message = (
        rows(np.tile(times.astype(np.int64), (num_ranks, 1)))
        for times in (1000 + 300 * prefix, 1100 + 660 * prefix, 900 + 0 * prefix, 40 + 0 * prefix)
    )
    return ScheduleInputs(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        forward_ns=forward,
        input_ns=gradient,
        weight_ns=weight,
        send_forward_ns=message,
        send_backward_ns=message,
        caps=(cap,) * num_ranks,
    )


def test_half_more_memory_saves_a_third_of_the_bubble_of_h1() -> None:
    """16 ranks, 8 micro-batches, 8 slices: the share over the busiest rank's work falls from 19 % to 11 %."""
    inputs = long_context(16, 8, 8, cap=34)
    work = 8 * int(sum(cost_table(inputs, name)[0].sum() for name in ("forward_ns", "input_ns", "weight_ns")))
    assert makespan_ns(inputs, zb_h1(inputs)) > 1.19 * work
    assert makespan_ns(inputs, zb(inputs)) < 1.12 * work


# Against the best order there is


def all_orders(num_units: int) -> list[tuple[str, ...]]:
    """Every order of F, I and W of a rank in which unit u's I follows its F and its W follows its I (one slice)."""
    found: list[tuple[str, ...]] = []

    def extend(order: tuple[str, ...], begun: tuple[int, int, int]) -> None:
        forward, gradient, weight = begun
        if weight == num_units:
            found.append(order)
        if forward < num_units:
            extend((*order, "F"), (forward + 1, gradient, weight))
        if gradient < forward:
            extend((*order, "I"), (forward, gradient + 1, weight))
        if weight < gradient:
            extend((*order, "W"), (forward, gradient, weight + 1))

    extend((), (0, 0, 0))
    return found


def as_rows(kinds: tuple[str, ...], rank: int) -> str:
    counts = dict.fromkeys("FIW", 0)
    cells = []
    for kind in kinds:
        cells.append(f"{rank}{kind}{counts[kind]}")
        counts[kind] += 1
    return ",".join(cells)


@pytest.mark.parametrize(
    "times",
    [
        ((3, 5, 2), (3, 5, 2)),
        ((4, 4, 4), (7, 4, 4)),
        ((2, 6, 3), (5, 1, 1)),
        ((1, 1, 6), (1, 1, 6)),
        ((6, 2, 2), (3, 8, 5)),
    ],
)
def test_two_ranks_are_as_fast_as_the_best_of_all_orders(times: tuple[tuple[int, int, int], ...]) -> None:
    """Three micro-batches on two ranks: all pairs of orders that can run."""
    tables = [tuple((row[kind],) for row in times) for kind in range(3)]
    inputs = ScheduleInputs(
        num_ranks=2,
        num_microbatches=3,
        num_slices=1,
        forward_ns=tables[0],
        input_ns=tables[1],
        weight_ns=tables[2],
        caps=(3, 3),
    )
    every = (f"{as_rows(first, 0)}\n{as_rows(second, 1)}\n" for first, second in product(all_orders(3), repeat=2))
    assert makespan_ns(inputs, zb(inputs)) == min(found for text in every if (found := simulated(inputs, text)))


def simulated(inputs: ScheduleInputs, text: str) -> int | None:
    """The step of a schedule's text, none if it cannot run."""
    schedule, _ = parse_schedule(text)
    try:
        return makespan_ns(inputs, from_schedule(schedule))
    except UserError:
        return None
