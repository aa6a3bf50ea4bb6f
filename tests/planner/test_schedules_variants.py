"""Orders at memory targets: legal within their caps, monotone in memory, bounded in micro-batches, ahead of others'."""

from __future__ import annotations

import csv
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.invariants import prove
from penstock.core.layout import SlotKind
from penstock.planner.lowering import lower
from penstock.planner.order import FORWARD, Order, from_schedule, to_schedule
from penstock.planner.schedules.blocks import Block, word_of
from penstock.planner.schedules.generator import in_waves, looped
from penstock.planner.schedules.greedy_order import makespan_ns, peak_stash
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.interleaved import INTERLEAVED
from penstock.planner.schedules.pipeline import MOST_STAGES_PER_RANK, Ints, Pipeline, cost_table, pipeline_of
from penstock.planner.schedules.refine import dated, improve, refine
from penstock.planner.schedules.registry import BUILT_IN, find, order_from_spec, to_spec
from penstock.planner.schedules.seeds import BLOCKS, NUM_DEPTHS, depths
from penstock.planner.schedules.v_shape import HALF, MINIMUM, ZBV, v_half, v_min
from penstock.planner.schedules.zero_bubble import ZB
from tests.support.repository import ROOT
from tests.support.step_costs import rows

FAMILIES = {"zb": ZB, "zbv": ZBV, "interleaved-zb": INTERLEAVED}


def one_byte(kind: SlotKind, stage: int, tokens: int) -> int:
    return 1


def prove_order(order: Order, receive_ahead: int = 2) -> None:
    schedule = to_schedule(order)
    prove(lower(schedule, one_byte, slices=(1,) * schedule.num_slices, receive_ahead=receive_ahead, dp=False))


def equal_inputs(
    shape: tuple[int, int, int, int], times: tuple[int, int, int, int], caps: tuple[int, ...] = ()
) -> ScheduleInputs:
    """Of (ranks, stages per rank, micro-batches, slices): every action takes its ``times`` (F, I, W, transfer).

    A slice on one stage holds three units of stash, W one of them.
    """
    num_ranks, per_rank, num_microbatches, num_slices = shape

    def table(value: int) -> tuple[tuple[int, ...], ...]:
        return ((value,) * num_slices,) * (num_ranks * per_rank)

    forward, gradient, weight, transfer = map(table, times)
    return ScheduleInputs(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        stages_per_rank=per_rank,
        forward_ns=forward,
        input_ns=gradient,
        weight_ns=weight,
        send_forward_ns=transfer,
        send_backward_ns=transfer,
        forward_stash=table(3),
        input_stash=table(-2),
        weight_stash=table(-1),
        caps=caps,
        receive_ahead=4,
    )


@st.composite
def measured_inputs(draw: st.DrawFn, most_stages: int = 3) -> ScheduleInputs:
    """Pipelines with costs as measured ones: stages and slices differ, a transfer takes less than a pass."""
    num_ranks, num_slices = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2, 3]))
    per_rank = draw(st.integers(1, most_stages))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    table = (num_ranks * per_rank, num_slices)
    forward, gradient, weight = (rng.integers(500, 1500, table) for _ in range(3))
    transfer = np.full(table, draw(st.sampled_from([0, 20, 300])))
    taken = rng.integers(6, 12, table)
    kept = rng.integers(1, 6, table)
    return ScheduleInputs(
        num_ranks=num_ranks,
        num_microbatches=draw(st.integers(1, 9)),
        num_slices=num_slices,
        stages_per_rank=per_rank,
        forward_ns=rows(forward),
        input_ns=rows(gradient),
        weight_ns=rows(weight),
        send_forward_ns=rows(transfer),
        send_backward_ns=rows(transfer),
        forward_stash=rows(taken),
        input_stash=rows(kept - taken),
        weight_stash=rows(-kept),
        receive_ahead=4,
    )


def pipeline(inputs: ScheduleInputs, place: Any = in_waves) -> Pipeline:
    owners = place(inputs.num_ranks, inputs.stages_per_rank)
    return pipeline_of(inputs, np.argsort(owners, kind="stable").reshape(inputs.num_ranks, -1))


def least_caps(inputs: ScheduleInputs, place: Any = in_waves) -> Ints:
    alone = dataclasses.replace(inputs, num_microbatches=1)
    found = pipeline(alone, place)
    least: Ints = np.array([found.peaks(word_of(block, found)) for block in BLOCKS]).min(axis=0)
    return least


# Words


@settings(max_examples=30)
@given(measured_inputs(), st.sampled_from(BLOCKS), st.sampled_from([in_waves, looped]), st.integers(2, 9))
def test_words_and_links_do_not_depend_on_other_costs_of_the_same_shape(
    inputs: ScheduleInputs, block: Block, place: Any, times: int
) -> None:
    """Schedules of a block are cached by shape."""
    forward = tuple(tuple(times * cost + 1 for cost in row) for row in inputs.forward_ns)
    one, other = (
        pipeline(same_shape, place) for same_shape in (inputs, dataclasses.replace(inputs, forward_ns=forward))
    )
    for kept, new in zip(one.links, other.links, strict=True):
        assert (kept.successors == new.successors).all()
        assert (kept.num_awaited == new.num_awaited).all()
    if block.in_slots:
        assert (word_of(block, one) == word_of(block, other)).all()
    starts = dated(other, word_of(block, other))[2]
    for before, (afters, delays) in enumerate(zip(other.links[0].successors, other.links[0].delays, strict=True)):
        for after, delay in zip(afters.tolist(), delays.tolist(), strict=True):
            assert after < 0 or starts[after] >= starts[before] + other.durations[before] + delay


@settings(max_examples=60)
@given(measured_inputs(), st.sampled_from(BLOCKS), st.sampled_from([in_waves, looped]), st.sampled_from([0, 50, 100]))
def test_blocks_run_and_refined_ones_hold_no_more(
    inputs: ScheduleInputs, block: Block, place: Any, patience: int
) -> None:
    tables = pipeline(inputs, place)
    word = word_of(block, tables)
    prove_order(tables.order(word))
    caps = tables.peaks(word)
    assert (peak_stash(inputs, tables.order(word)) == caps).all()
    makespan, refined, starts = refine(tables, word, caps, patience)
    prove_order(tables.order(refined))
    assert (tables.peaks(refined) <= caps).all()
    assert makespan >= tables.work_ns.max()
    better, improved, _ = improve(tables, (makespan, refined, starts), caps, 3)
    assert better <= makespan
    assert (tables.peaks(improved) <= caps).all()


@settings(max_examples=60)
@given(measured_inputs(), st.sampled_from(BLOCKS), st.sampled_from([0, 50, 100]), st.floats(0.8, 1.3))
def test_refining_stops_early_only_without_a_shorter_step(
    inputs: ScheduleInputs, block: Block, patience: int, factor: float
) -> None:
    tables = pipeline(inputs)
    word = word_of(block, tables)
    makespan, refined, starts = refine(tables, word, tables.peaks(word), patience)
    most_ns = int(factor * makespan)
    stopped = refine(tables, word, tables.peaks(word), patience, most_ns=most_ns)
    if makespan < most_ns:
        assert stopped[0] == makespan
        assert (stopped[1] == refined).all()
        assert (stopped[2] == starts).all()
    else:
        assert stopped[0] >= most_ns
    prove_order(tables.order(stopped[1]))


@settings(max_examples=30)
@given(measured_inputs())
def test_without_transfers_to_share_a_refined_step_is_the_simulated_one(inputs: ScheduleInputs) -> None:
    """Transfers that are shorter than passes never wait for their channel, and four receives are posted ahead."""
    tables = pipeline(dataclasses.replace(inputs, receive_ahead=64), looped)
    word = word_of(HALF, tables)
    makespan, refined, _ = refine(tables, word, tables.peaks(word), 50)
    free = dataclasses.replace(inputs, receive_ahead=64)
    assert makespan_ns(free, tables.order(refined)) == makespan
    assert dated(tables, refined)[0] == makespan


@settings(max_examples=40)
@given(measured_inputs(), st.sampled_from(BLOCKS), st.sampled_from([in_waves, looped]))
def test_a_word_is_dated_as_it_is_simulated(inputs: ScheduleInputs, block: Block, place: Any) -> None:
    free = dataclasses.replace(inputs, receive_ahead=64)
    tables = pipeline(free, place)
    word = word_of(block, tables)
    length, _, starts = dated(tables, word)
    assert length == makespan_ns(free, tables.order(word))
    assert starts.min() == 0
    assert (starts + tables.durations).max() == length


@settings(max_examples=40)
@given(measured_inputs())
def test_an_order_is_its_word(inputs: ScheduleInputs) -> None:
    tables = pipeline(inputs)
    word = word_of(MINIMUM, tables)
    assert (tables.word(tables.order(word)) == word).all()


def test_too_many_stages_per_rank_are_refused() -> None:
    with pytest.raises(UserError, match="43 stages per rank are more than 42"):
        pipeline(equal_inputs((1, MOST_STAGES_PER_RANK + 1, 1, 1), (1, 1, 1, 0)))


@pytest.mark.parametrize("num_ranks", [4, 5, 8, 16])
def test_v_half_and_v_min_hold_what_they_are_named_after(num_ranks: int) -> None:
    """In units of 1F1B's memory: a half and a third, and a micro-batch more at most."""
    inputs = equal_inputs((num_ranks, 2, 3 * num_ranks, 1), (10, 10, 10, 0))
    of_1f1b = 6 * num_ranks
    assert peak_stash(inputs, v_half(inputs)).max() <= of_1f1b / 2 + 6
    assert peak_stash(inputs, v_min(inputs)).max() <= of_1f1b / 3 + 6


def test_published_v_half_is_matched_at_equal_memory() -> None:
    """The example of `refine`: 8 ranks, 24 micro-batches, microseconds of one chunk as the authors measured them."""
    inputs = equal_inputs((8, 2, 24, 1), (4959, 5217, 3519, 213))
    order, work = v_half(inputs), 2 * 24 * (4959 + 5217 + 3519)
    assert peak_stash(inputs, order).max() == 30
    assert makespan_ns(inputs, order) / work == pytest.approx(1.164, abs=1e-3)


# Generators


@settings(max_examples=120)
@given(st.sampled_from(sorted(BUILT_IN)), st.integers(1, 6), st.integers(1, 9), st.integers(1, 4), st.integers(2, 5))
def test_every_generator_runs_at_any_shape(name: str, num_ranks: int, count: int, slices: int, per_rank: int) -> None:
    generator = find(name)
    num_stages = num_ranks * (per_rank if generator.is_virtual else generator.stages_per_rank)
    shape: dict[str, Any] = {"num_ranks": num_ranks, "num_microbatches": count, "num_slices": slices}
    if generator.uses_costs:
        of_shape = ScheduleInputs(**shape, stages_per_rank=num_stages // num_ranks)
        order = generator.generate(of_shape if name.startswith("v-") else FAMILIES[name].best(of_shape))
    else:
        order = generator.of_shape(**shape, num_stages=num_stages)
    prove_order(order)
    assert order.stage_ranks.tolist() == list(generator.stage_ranks(num_ranks, num_stages))
    recipe = to_spec(name, ScheduleInputs(**shape, stages_per_rank=num_stages // num_ranks, variant=1))
    assert order_from_spec(recipe, **shape, num_stages=num_stages).num_stages == num_stages


def test_a_plan_chooses_how_many_stages_a_rank_has() -> None:
    assert find("interleaved-zb").per_rank(4, 16) == 4
    assert find("interleaved-zb").per_rank(4) == find("interleaved-zb").per_rank(4, 18) == 2
    assert find("v-half").per_rank(4, 16) == 2
    assert find("zbv").stage_ranks(2, 8) == (0, 1, 1, 0, 0, 1, 1, 0)
    assert find("interleaved-1f1b").stage_ranks(2, 6) == (0, 1, 0, 1, 0, 1)
    assert find("1f1b").stage_ranks(3) == (0, 1, 2)


def test_interleaved_1f1b_written_out() -> None:
    order = find("interleaved-1f1b").of_shape(num_ranks=2, num_microbatches=2, num_slices=1)
    texts = [" ".join(map(str, actions)) for actions in to_schedule(order).ranks]
    assert texts[0] == "0F0.0 0F1.0 2F0.0 2F1.0 2B0.0 2B1.0 0B0.0 0B1.0"
    assert texts[1] == "1F0.0 1F1.0 3F0.0 3B0.0 3F1.0 3B1.0 1B0.0 1B1.0"


def test_eager_1f1b_runs_twice_as_far_ahead() -> None:
    order = find("eager-1f1b").of_shape(num_ranks=4, num_microbatches=12, num_slices=1)
    for rank, actions in enumerate(to_schedule(order).ranks):
        kinds = "".join(action.kind.value for action in actions)
        assert kinds.index("B") == 2 * (3 - rank) + 1


# Under caps


@settings(max_examples=30)
@given(measured_inputs(), st.sampled_from(sorted(FAMILIES)), st.data())
def test_more_memory_is_never_slower_and_no_cap_is_exceeded(
    inputs: ScheduleInputs, name: str, data: st.DataObject
) -> None:
    family = FAMILIES[name]
    if name == "zb":
        inputs = ScheduleInputs(num_ranks=inputs.num_ranks, num_microbatches=inputs.num_microbatches, num_slices=2)
    least = least_caps(inputs, family.place)
    caps = least + np.array(data.draw(st.lists(st.integers(0, 60), min_size=len(least), max_size=len(least))))
    more = caps + np.array(data.draw(st.lists(st.integers(0, 60), min_size=len(least), max_size=len(least))))
    steps = []
    for limits in (least, caps, more):
        capped = dataclasses.replace(inputs, caps=tuple(limits.tolist()))
        chosen, order = family.order(family.best(capped)), family.best_order(capped)
        assert (peak_stash(capped, chosen) <= limits).all()
        assert (peak_stash(capped, order) <= limits).all()
        steps.append((makespan_ns(capped, chosen), makespan_ns(capped, order)))
    assert steps[0] >= steps[1] >= steps[2]
    assert steps[0][1] >= steps[1][1] >= steps[2][1]


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("num_slices", [1, 3])
def test_memory_is_bounded_in_micro_batches(name: str, num_slices: int) -> None:
    per_rank = 1 if name == "zb" else 2
    for num_microbatches in (12, 24, 48):
        inputs = equal_inputs((4, per_rank, num_microbatches, num_slices), (10, 12, 7, 1))
        for number in (2, 6, 10):
            order = FAMILIES[name].order(dataclasses.replace(inputs, variant=number))
            beyond_one_microbatch = depths(4)[number - 1] / 12
            assert peak_stash(inputs, order).max() <= 3 * per_rank * (num_slices + beyond_one_microbatch)


def test_variants_keep_within_their_depth() -> None:
    inputs = equal_inputs((8, 2, 16, 1), (10, 12, 7, 1))
    for number, depth in enumerate(depths(8), start=1):
        held = peak_stash(inputs, ZBV.order(dataclasses.replace(inputs, variant=number)))
        assert (held <= 6 + 6 * depth / 12).all()
    assert len(depths(8)) == len(depths(1)) == NUM_DEPTHS


def test_the_frontier_falls() -> None:
    inputs = equal_inputs((4, 2, 8, 1), (10, 12, 7, 1), caps=(1000,) * 4)
    points = ZBV.frontier(inputs)
    steps = [point.makespan_ns for point in points]
    assert steps == sorted(set(steps), reverse=True)
    assert [makespan_ns(inputs, point.order) for point in points] == steps
    assert points[-1].order.same_as(ZBV.best_order(inputs))
    assert all(tuple(peak_stash(inputs, point.order).tolist()) == point.peaks for point in points)


def test_a_cap_below_one_micro_batch_is_refused() -> None:
    inputs = equal_inputs((3, 3, 4, 1), (1, 1, 1, 0), caps=(9, 9, 8))
    with pytest.raises(UserError, match="rank 2: a stash of 8 cannot hold one micro-batch, which needs 9"):
        INTERLEAVED.best(inputs)


# Against published orders


PUBLISHED = list(csv.DictReader((ROOT / "tests" / "fixtures" / "published_orders.csv").read_text().splitlines()))
"""Steps and peaks of the orders of the zero-bubble authors and of torch.distributed.pipelining 2.14, simulated here."""


@pytest.mark.parametrize(
    "row",
    [row for row in PUBLISHED if int(row["ranks"]) * int(row["microbatches"]) <= 64 or row["forward"] == "4959"],
    ids=lambda row: "-".join([row["order"], row["ranks"], row["stages_per_rank"], row["microbatches"]]),
)
def test_published_schedules_are_not_faster_at_their_memory(row: dict[str, str]) -> None:
    family = INTERLEAVED if "interleaved" in row["order"] else ZBV
    shape = (int(row["ranks"]), int(row["stages_per_rank"]), int(row["microbatches"]), 1)
    times = (int(row["forward"]), int(row["input"]), int(row["weight"]), int(row["transfer"]))
    inputs = equal_inputs(shape, times, caps=(int(row["peak_thirds"]),) * shape[0])
    order = family.best_order(inputs)
    assert peak_stash(inputs, order).max() <= int(row["peak_thirds"])
    assert makespan_ns(inputs, order) <= int(row["step"])


def test_all_work_is_done_once() -> None:
    inputs = equal_inputs((4, 3, 5, 2), (10, 12, 7, 1))
    order = INTERLEAVED.best_order(inputs)
    assert (order.kinds == FORWARD).sum() == 4 * 3 * 5 * 2
    assert from_schedule(to_schedule(order)).same_as(order)
    assert cost_table(inputs, "forward_ns").sum() * 5 == sum(10 for _ in range(4 * 3 * 5 * 2))
