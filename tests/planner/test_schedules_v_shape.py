"""zbv: two stages per rank along a V fill in half the time, keep within their caps, and are never stuck."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.planner.order import to_schedule
from penstock.planner.passes.rounds import find_rounds
from penstock.planner.schedules.blocks import word_of
from penstock.planner.schedules.greedy_order import least_caps, makespan_ns, peak_stash
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.pipeline import cost_table, pipeline_of
from penstock.planner.schedules.refine import dated
from penstock.planner.schedules.seeds import BLOCKS
from penstock.planner.schedules.v_shape import ZBV, zbv
from penstock.planner.schedules.zero_bubble import zb
from tests.support.step_costs import rows

PLENTY = 1 << 30


def equal_inputs(num_ranks: int, num_microbatches: int, num_slices: int, *, per_rank: int = 2) -> ScheduleInputs:
    """F, I and W of 120 per rank, shared by its stages; memory is no matter."""
    table = ((120 // per_rank,) * num_slices,) * (num_ranks * per_rank)
    return ScheduleInputs(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        stages_per_rank=per_rank,
        forward_ns=table,
        input_ns=table,
        weight_ns=table,
        caps=(PLENTY,) * num_ranks,
    )


@st.composite
def v_inputs(draw: st.DrawFn) -> ScheduleInputs:
    """Random pipelines with two stages per rank, whatever their actions take and leave."""
    num_ranks, num_slices = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2, 3, 5]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    table = (2 * num_ranks, num_slices)
    forward, gradient, weight, down, up = rng.integers(0, 30, (5, *table))
    taken = rng.integers(0, 9, table)
    exchanged = np.maximum(rng.integers(-4, 9, table), -taken)
    return ScheduleInputs(
        num_ranks=num_ranks,
        num_microbatches=draw(st.integers(1, 8)),
        num_slices=num_slices,
        stages_per_rank=2,
        forward_ns=rows(forward),
        input_ns=rows(gradient),
        weight_ns=rows(weight),
        send_forward_ns=rows(down),
        send_backward_ns=rows(up),
        forward_stash=rows(taken),
        input_stash=rows(exchanged),
        weight_stash=rows(-taken - exchanged),
        receive_ahead=draw(st.integers(1, 4)),
        late_receives=draw(st.booleans()),
    )


def owned(inputs: ScheduleInputs) -> np.ndarray:
    first = np.arange(inputs.num_ranks)
    return np.stack([first, inputs.num_stages - 1 - first], axis=1)


@settings(max_examples=40)
@given(v_inputs(), st.integers(0, 30))
def test_the_best_order_keeps_within_its_caps(inputs: ScheduleInputs, spare: int) -> None:
    """Down to the least caps that hold one micro-batch."""
    caps = least_caps(inputs, owned(inputs)) + spare
    tight = dataclasses.replace(inputs, caps=tuple(caps.tolist()))
    for order in (zbv(tight), zbv(ZBV.best(tight))):
        find_rounds(to_schedule(order))
        assert (peak_stash(tight, order) <= caps).all()


@settings(max_examples=20)
@given(v_inputs(), st.sets(st.integers(0, 9)))
def test_blocks_are_legal_orders_also_if_stages_take_no_time(inputs: ScheduleInputs, free: set[int]) -> None:
    """An order of actions that begin at the same time has to follow their inputs."""
    costs: dict[str, Any] = {
        name: tuple((0,) * len(row) if stage in free else row for stage, row in enumerate(getattr(inputs, name)))
        for name in ("forward_ns", "input_ns", "weight_ns", "send_forward_ns", "send_backward_ns")
    }
    pipeline = pipeline_of(dataclasses.replace(inputs, **costs), owned(inputs))
    for block in BLOCKS:
        _, _, starts = dated(pipeline, word_of(block, pipeline))
        assert starts.min() >= 0, f"{block} deadlocks"


@settings(max_examples=20)
@given(v_inputs())
def test_no_step_is_shorter_than_its_busiest_rank(inputs: ScheduleInputs) -> None:
    order = zbv(inputs)
    times = sum(cost_table(inputs, name).sum(axis=1) for name in ("forward_ns", "input_ns", "weight_ns"))
    work = inputs.num_microbatches * times[owned(inputs)].sum(axis=1)
    assert makespan_ns(inputs, order) >= work.max()
    assert order.stage_ranks.tolist() == [*range(inputs.num_ranks), *reversed(range(inputs.num_ranks))]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_with_enough_micro_batches_only_the_fill_is_idle(num_ranks: int, num_slices: int) -> None:
    """Equal costs: the last rank waits for K - 1 forwards of half a slice each, the others no longer."""
    inputs = equal_inputs(num_ranks, 2 * num_ranks, num_slices)
    work = inputs.num_units * 3 * 120
    assert makespan_ns(inputs, zbv(inputs)) == work + (num_ranks - 1) * 60


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_few_micro_batches_wait_less_than_with_one_stage_per_rank(num_ranks: int) -> None:
    """The idle time under zbv is at most three quarters of that under zb."""
    for num_microbatches, num_slices in ((1, 8), (2, 4), (4, 2)):
        shape = (num_ranks, num_microbatches, num_slices)
        straight, bent = equal_inputs(*shape, per_rank=1), equal_inputs(*shape)
        work = straight.num_units * 3 * 120
        idle = makespan_ns(straight, zb(straight)) - work
        assert makespan_ns(bent, zbv(bent)) - work <= 3 * idle // 4


def test_a_cap_below_one_micro_batch_is_refused() -> None:
    inputs = dataclasses.replace(equal_inputs(3, 4, 4), caps=(12, 12, 7))
    with pytest.raises(UserError, match="rank 2: a stash of 7 cannot hold one micro-batch, which needs 8"):
        zbv(inputs)


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(UserError, match="17 is not a variant of zbv"):
        zbv(dataclasses.replace(equal_inputs(2, 1, 1), variant=17))
