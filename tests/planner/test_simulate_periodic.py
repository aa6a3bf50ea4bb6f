"""Long steps continued from short ones equal the long step; the lower bound is never above any."""

from __future__ import annotations

import dataclasses
import random
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.core.program import Reduction
from penstock.core.schedule import Group, Schedule, parse_schedule
from penstock.planner.order import BACKWARD, INPUT_GRADIENT, RECOMPUTE, Order, from_schedule
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.registry import find
from penstock.planner.schedules.zero_bubble import ZB
from penstock.planner.simulate.arrays import StepTimes, simulate_arrays
from penstock.planner.simulate.bound import lower_bound_ns
from penstock.planner.simulate.costs import MILLION, Costs, InstructionCosts, compute_table, hosts, uncontended
from penstock.planner.simulate.periodic import extrapolate
from tests.support.step_costs import equal_costs, random_costs, rows, shape
from tests.support.strategies import schedules

TOTALS = ("makespan_ns", "finish_ns", "compute_ns", "bubble_ns", "communication_ns", "reduction_ns", "step_ns")


def assert_equal(found: StepTimes, expected: StepTimes) -> None:
    for name in TOTALS:
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def pipeline_costs(rng: np.random.Generator, num_ranks: int, num_slices: int) -> Costs:
    """Equal or unequal stages, links from free to slow that take parts of cards, one card and contention per host."""
    table = (num_ranks, num_slices)
    if rng.random() < 0.6:
        forward, gradient, weight = (np.tile(rng.integers(5, 40, num_slices), (num_ranks, 1)) for _ in range(3))
        forward[-1] += rng.integers(0, 15)
    else:
        forward, gradient, weight = (rng.integers(5, 40, table) for _ in range(3))
    compute = compute_table(forward, gradient, weight)
    together = MILLION if rng.random() < 0.5 else 1_300_000
    return dataclasses.replace(
        uncontended(compute, rng.integers(0, rng.choice([1, 5, 60]), (2, *table))),
        slowdown_ppm=np.full_like(compute, together),
        card_ppm=rng.integers(MILLION // 10, MILLION + 1, (2, 2, num_ranks)),
        hosts=hosts(tuple(sorted(rng.integers(0, rng.integers(1, num_ranks + 1), num_ranks).tolist()))),
        instructions=InstructionCosts(post_ns=int(rng.integers(0, 3)), wait_send_ns=int(rng.integers(0, 2))),
        reduce_ns={Group.NORM: (7,) * num_ranks},
        optimizer_ns=tuple(rng.integers(0, 9, num_ranks).tolist()),
    )


@settings(max_examples=120)
@given(st.sampled_from(["1f1b", "zb-h1"]), st.integers(0, 2**32), st.booleans())
def test_fixed_orders_are_continued_exactly(name: str, seed: int, late: bool) -> None:
    rng = np.random.default_rng(seed)
    num_ranks, num_slices, count = int(rng.integers(1, 6)), int(rng.choice([1, 1, 2, 4])), int(rng.integers(40, 120))
    own = int(rng.integers(0, num_slices + 1))
    costs, receive_ahead = pipeline_costs(rng, num_ranks, num_slices + own), int(rng.integers(1, 5))
    costs = dataclasses.replace(costs, num_remainder_slices=own)
    norm = [Reduction(Group.NORM, tuple(range(num_ranks)))]

    def generate(num_microbatches: int) -> Order:
        return find(name).generate(shape(num_ranks, num_microbatches, num_slices)).with_remainder(own)

    found = extrapolate(generate, count, costs, receive_ahead=receive_ahead, late_receives=late, reductions=norm)
    whole = simulate_arrays(generate(count), costs, receive_ahead=receive_ahead, late_receives=late, reductions=norm)
    assert found.times.trace.size == 0
    if found.is_exact:
        assert_equal(found.times, whole)
    else:
        assert found.times.makespan_ns == pytest.approx(whole.makespan_ns, rel=0.05)


def test_equal_stages_need_a_small_part_of_a_long_step() -> None:
    costs = equal_costs(8, 4, 10, 12, 9, transfer=2)
    for name, late in product(("1f1b", "zb-h1"), (False, True)):
        found = extrapolate(
            lambda count, name=name: find(name).generate(shape(8, count, 4)),  # type: ignore[misc]
            300,
            costs,
            late_receives=late,
        )
        assert found.is_exact
        assert found.num_simulated < 40
        whole = simulate_arrays(find(name).generate(shape(8, 300, 4)), costs, late_receives=late)
        assert_equal(found.times, whole)


@pytest.mark.parametrize("own", [1, 3, 4])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_smaller_last_micro_batch_spares_as_much(own: int, late: bool, name: str) -> None:
    equal = equal_costs(8, 4 + own, 10, 12, 9, transfer=2)
    compute = equal.compute_ns.copy()
    compute[..., 4:] = compute[..., 4:] * 2 // 3
    costs = dataclasses.replace(equal, compute_ns=compute, num_remainder_slices=own)

    def generate(count: int) -> Order:
        return find(name).generate(shape(8, count, 4)).with_remainder(own)

    found = extrapolate(generate, 300, costs, late_receives=late)
    assert found.is_exact
    assert found.num_simulated < 40
    assert_equal(found.times, simulate_arrays(generate(300), costs, late_receives=late))


def test_96_stages_and_1536_micro_batches_take_a_fifth_of_them() -> None:
    """GPT-3 175B's deepest pipeline, its head a little heavier than a block: the last rank sets the pace."""
    equal = equal_costs(96, 1, 1000, 1100, 900, transfer=40)
    compute = equal.compute_ns.copy()
    compute[:, -1] += 300
    costs = dataclasses.replace(equal, compute_ns=compute, hosts=hosts([rank // 8 for rank in range(96)]))
    found = extrapolate(lambda count: find("1f1b").generate(shape(96, count, 1)), 1536, costs, receive_ahead=4)
    assert found.is_exact
    assert found.num_simulated < 1536 // 5 + 96
    assert found.times.compute_ns[-1] == 1536 * (1300 + 2300)
    assert lower_bound_ns(costs, 1536, stage_ranks=range(96), split=False) <= found.times.makespan_ns


def test_a_variant_of_zb_is_continued() -> None:
    table = rows(np.full((6, 2), 10))
    inputs = ScheduleInputs(
        num_ranks=6, num_microbatches=1, num_slices=2, forward_ns=table, input_ns=table, weight_ns=table, variant=2
    )

    def generate(count: int) -> Order:
        return ZB.order(dataclasses.replace(inputs, num_microbatches=count))

    costs = equal_costs(6, 2, 10, 10, 10)
    found = extrapolate(generate, 150, costs)
    assert found.is_exact
    assert found.num_simulated < 150
    assert_equal(found.times, simulate_arrays(generate(150), costs))


def test_a_flush_is_a_straight_line() -> None:
    """The order of gpipe never repeats itself, but more micro-batches cost the same each."""
    costs = equal_costs(4, 2, 10, 12, 9)
    found = extrapolate(lambda count: find("gpipe").generate(shape(4, count, 2)), 200, costs)
    assert not found.is_exact
    assert_equal(found.times, simulate_arrays(find("gpipe").generate(shape(4, 200, 2)), costs))


def test_a_short_step_is_simulated_as_it_is() -> None:
    costs = equal_costs(4, 2, 10, 12, 9)
    found = extrapolate(lambda count: find("1f1b").generate(shape(4, count, 2)), 8, costs)
    assert found.is_exact
    assert found.num_simulated == 8


# The bound


@settings(max_examples=200)
@given(schedules(), st.integers(0, 2**32))
def test_no_schedule_is_below_the_bound(schedule: Schedule, seed: int) -> None:
    """Any legal order, with virtual stages and recomputation; those that mix B with I and W have no single price.
    The last micro-batch may have other slices. Reductions may start before the end, or not.
    """
    rng = random.Random(seed)
    own = rng.randint(0, schedule.num_slices) if schedule.num_microbatches > 1 else 0
    order = from_schedule(schedule.with_remainder(own))
    kinds = set(order.kinds.tolist())
    assume(not {BACKWARD, INPUT_GRADIENT} <= kinds)
    costs = random_costs(rng, order.num_ranks, order.num_stages, order.num_columns)
    costs = dataclasses.replace(costs, num_remainder_slices=own)
    ends = sorted({schedule.stage_ranks[0], schedule.stage_ranks[-1]})
    reductions = [
        *([Reduction(Group.TIE, tuple(ends))] if len(ends) == 2 and rng.random() < 0.5 else []),
        *([Reduction(Group.TP, tuple(range(order.num_ranks)))] if rng.random() < 0.5 else []),
        Reduction(Group.DP, tuple(range(order.num_ranks))),
        Reduction(Group.NORM, tuple(range(order.num_ranks))),
    ]
    late = rng.random() < 0.5
    whole = simulate_arrays(order, costs, receive_ahead=rng.randint(1, 3), late_receives=late, reductions=reductions)
    cells = order.num_stages * order.num_cells
    bound = lower_bound_ns(
        costs,
        order.num_microbatches,
        stage_ranks=order.stage_ranks.tolist(),
        split=INPUT_GRADIENT in kinds,
        recompute=int((order.kinds == RECOMPUTE).sum()) == cells,
        reductions=reductions,
    )
    assert bound <= whole.makespan_ns


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_the_bound_is_close_for_equal_stages(name: str) -> None:
    """Fill, work and drain are all there is to 1F1B with free messages; H1's own wait is (K - 1)(B - W) / S more."""
    costs = equal_costs(6, 4, 10, 12, 9)
    whole = simulate_arrays(find(name).generate(shape(6, 12, 4)), costs, receive_ahead=4)
    bound = lower_bound_ns(costs, 12, stage_ranks=range(6), split=name == "zb-h1")
    assert whole.makespan_ns - bound == (5 * (12 - 9) if name == "zb-h1" else 0)


def test_the_bound_knows_one_micro_batch_turns_round_at_the_last_stage() -> None:
    """M = 1: every slice has to come down before the first gradient goes up."""
    costs = equal_costs(4, 8, 1, 1, 1)
    whole = simulate_arrays(find("zb-h1").generate(shape(4, 1, 8)), costs, receive_ahead=8)
    assert lower_bound_ns(costs, 1, stage_ranks=range(4), split=True) == whole.makespan_ns == 24 + 2 * 3


def test_the_bound_counts_all_stages_of_a_rank() -> None:
    """Four stages folded over two ranks; a third rank has none. Work of rank 1, between its first F and stage 0's B."""
    equal = equal_costs(4, 1, 10, 12, 9)
    costs = dataclasses.replace(equal, hosts=hosts([0, 1, 2]), reduce_ns={Group.NORM: (0, 0, 500)})
    bound = lower_bound_ns(costs, 2, stage_ranks=(0, 1, 1, 0), split=False)
    assert bound == 10 + 2 * 2 * 31 + 21
    order = from_schedule(parse_schedule("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")[0])
    whole = simulate_arrays(order, dataclasses.replace(equal, hosts=hosts([0, 1])))
    assert lower_bound_ns(costs, 1, stage_ranks=(0, 1, 1, 0), split=False) <= whole.makespan_ns


def test_a_rank_without_stages_only_joins_the_end() -> None:
    costs = dataclasses.replace(
        equal_costs(2, 1, 5, 5, 5), hosts=hosts([0, 1, 2]), optimizer_ns=(0, 0, 99), reduce_ns={Group.DP: (7, 8)}
    )
    assert lower_bound_ns(costs, 1, stage_ranks=(0, 2), split=False) == 5 + 15 + 99
    replicas = [Reduction(Group.DP, (0, 1, 2))]
    assert lower_bound_ns(costs, 1, stage_ranks=(0, 2), split=False, reductions=replicas) == 5 + 15 + 8 + 99
    assert lower_bound_ns(costs, 1, stage_ranks=(0, 1), split=False) == 99


def test_the_bound_counts_the_end_of_the_step() -> None:
    costs = dataclasses.replace(
        equal_costs(2, 1, 5, 5, 5), reduce_ns={Group.NORM: (3, 4), Group.DP: (10, 20)}, optimizer_ns=(1, 6)
    )
    reductions = [Reduction(Group.DP, (0, 1)), Reduction(Group.NORM, (0, 1))]
    bare = lower_bound_ns(costs, 3, stage_ranks=(0, 1), split=False)
    assert bare == max(3 * 15 + 15 + 1, 3 * 15 + 5 + 6)
    ended = lower_bound_ns(costs, 3, stage_ranks=(0, 1), split=False, reductions=reductions)
    assert ended == max(3 * 15 + 15 + 10, 3 * 15 + 5 + 20) + 4 + 6
