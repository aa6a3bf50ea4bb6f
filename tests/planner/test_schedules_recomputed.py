"""Orders of a split backward with R as an action of its own: legal, within their caps, and in waits."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.invariants import prove
from penstock.core.layout import SlotKind
from penstock.planner.lowering import lower
from penstock.planner.order import FORWARD, INPUT_GRADIENT, RECOMPUTE, Order, to_schedule
from penstock.planner.schedules.generator import in_waves, looped
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.one_f_one_b import zb_h1
from penstock.planner.schedules.pipeline import Ints, Pipeline, cost_table, pipeline_of, stages_by_rank
from penstock.planner.schedules.recomputed import recomputing, with_refined_recomputation
from penstock.planner.schedules.variants import one_by_one
from penstock.planner.simulate.arrays import simulate_arrays
from penstock.planner.simulate.costs import compute_table, uncontended

NO_CAPS = 10**9


def random_inputs(rng: random.Random) -> ScheduleInputs:
    """Two to four ranks with one or two stages, and costs that differ between stages and slices."""
    num_ranks, per_rank, num_slices = rng.randint(2, 4), rng.randint(1, 2), rng.randint(1, 3)

    def table(low: int, high: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(rng.randint(low, high) for _ in range(num_slices)) for _ in range(num_ranks * per_rank))

    stash, weight = table(3, 9), table(1, 3)
    return ScheduleInputs(
        num_ranks=num_ranks,
        stages_per_rank=per_rank,
        num_microbatches=rng.randint(1, 6),
        num_slices=num_slices,
        forward_ns=table(50, 150),
        input_ns=table(50, 150),
        weight_ns=table(50, 150),
        send_forward_ns=table(0, 40),
        send_backward_ns=table(0, 40),
        forward_stash=stash,
        input_stash=tuple(tuple(w - s for s, w in zip(*each, strict=True)) for each in zip(stash, weight, strict=True)),
        weight_stash=tuple(tuple(-w for w in row) for row in weight),
        receive_ahead=rng.randint(1, 4),
    )


def step_ns(inputs: ScheduleInputs, order: Order, again_ns: Ints) -> int:
    """The simulated step, each rank on its own host."""
    names = ("forward_ns", "input_ns", "weight_ns", "send_forward_ns", "send_backward_ns")
    f, i, w, down, up = (cost_table(inputs, name) for name in names)
    compute = compute_table(f, i, w)
    compute[RECOMPUTE] = again_ns
    costs = uncontended(compute, np.stack([down, up]), num_ranks=inputs.num_ranks)
    return simulate_arrays(order, costs, receive_ahead=inputs.receive_ahead).makespan_ns


def peaks(order: Order, stash: Ints) -> list[int]:
    """Per rank, the most stash of ``stash`` [kind, stage, slice] at once."""
    changes = stash[order.kinds, order.stages, order.slices]
    return [
        int(np.cumsum(changes[lo:hi]).max(initial=0))
        for lo, hi in zip(order.offsets[:-1], order.offsets[1:], strict=True)
    ]


def one_byte(kind: SlotKind, stage: int, tokens: int) -> int:
    return 1


@settings(max_examples=80)
@given(st.integers(0, 2**32), st.booleans())
def test_orders_are_legal_and_within_their_caps(seed: int, has_cap: bool) -> None:
    rng = random.Random(seed)
    inputs = random_inputs(rng)
    place = rng.choice([looped, in_waves])
    owned = stages_by_rank(place(inputs.num_ranks, inputs.stages_per_rank), inputs.num_ranks)
    pipeline = pipeline_of(inputs, owned)
    recomputed = frozenset(rng.sample(range(inputs.num_stages), rng.randint(1, inputs.num_stages)))
    shape = (inputs.num_stages, inputs.num_slices)
    again_ns, remade = (
        np.array([[rng.randint(1, most) for _ in range(shape[1])] for _ in range(shape[0])]) for most in (120, 5)
    )
    base = one_by_one(inputs, place)
    stash = stash_table(inputs, recomputed, remade)
    direct = base.with_recomputation(recomputed)
    caps = np.array(peaks(direct, stash)) + (rng.randint(0, 30) if has_cap else NO_CAPS)
    order = with_refined_recomputation(pipeline, base, recomputed, again_ns, remade, caps)
    assert sorted(columns(order)) == sorted(columns(direct))
    places = {key: number for number, key in enumerate(columns(order))}
    for (kind, *cell), number in places.items():
        if kind == RECOMPUTE:
            assert places[FORWARD, *cell] < number < places[INPUT_GRADIENT, *cell]
    assert (np.array(peaks(order, stash)) <= caps).all()
    assert step_ns(inputs, order, again_ns) <= step_ns(inputs, direct, again_ns)
    prove(lower(to_schedule(order), one_byte, slices=(1,) * order.num_slices, receive_ahead=4, dp=False))


def columns(order: Order) -> list[tuple[int, ...]]:
    arrays = (order.kinds, order.stages, order.microbatches, order.slices)
    return list(zip(*(array.tolist() for array in arrays), strict=True))


def stash_table(inputs: ScheduleInputs, recomputed: frozenset[int], remade: Ints) -> Ints:
    """Changes in stash by kind, stage and slice: F, B (none), I, W and R."""
    f, i, w = (cost_table(inputs, name) for name in ("forward_stash", "input_stash", "weight_stash"))
    made = remade * np.isin(np.arange(inputs.num_stages), list(recomputed))[:, None]
    return np.stack([f, np.zeros_like(f), i - made, w, made])


def test_recomputation_runs_in_the_wait_for_the_first_gradient() -> None:
    """H1 of four equal ranks and micro-batches: of the first ranks only as much is exposed as they have no wait for."""
    table = ((100,),) * 4
    inputs = ScheduleInputs(
        num_ranks=4, num_microbatches=4, num_slices=1, forward_ns=table, input_ns=table, weight_ns=table
    )
    order, again_ns, remade = zb_h1(inputs), np.full((4, 1), 50), np.zeros((4, 1), dtype=np.int64)
    pipeline: Pipeline = pipeline_of(inputs, np.arange(4)[:, None])
    recomputed = frozenset({0, 1, 2})
    refined = with_refined_recomputation(pipeline, order, recomputed, again_ns, remade, np.full(4, NO_CAPS))
    direct = order.with_recomputation(recomputed)
    assert step_ns(inputs, order, again_ns) <= step_ns(inputs, refined, again_ns) < step_ns(inputs, direct, again_ns)
    extended = recomputing(pipeline, recomputed, again_ns, remade)
    assert extended.work_ns.tolist() == [4 * 350, 4 * 350, 4 * 350, 4 * 300]
