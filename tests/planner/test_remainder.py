"""A last micro-batch that is smaller than the others: sizes, its slices, and what plans say of it."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.schedule import CSV, Schedule, ScheduleSpec
from penstock.core.units import to_nanoseconds
from penstock.planner.budget import Budget
from penstock.planner.compile import schedule_of
from penstock.planner.decide import decide
from penstock.planner.evaluate import Simulated
from penstock.planner.order import from_schedule, to_schedule
from penstock.planner.problem import Mesh, meshes
from penstock.planner.remainder import remainder_slices
from penstock.planner.replay import candidate_of, placement_of, problem_of, simulated
from penstock.planner.schedules.registry import BUILT_IN, SPLITTING, find
from penstock.planner.sizes import divisors, microbatch_sizes
from penstock.planner.stagecost import prefixes
from tests.support.planning import cluster, job, problem
from tests.support.step_costs import shape
from tests.support.strategies import schedules

NEAR = 1.5


# Sizes


@given(st.integers(1, 5_000))
def test_between_divisors_there_are_sizes_where_none_is_near(share: int) -> None:
    sizes = microbatch_sizes(share)
    assert list(sizes) == sorted({*sizes, *divisors(share)})
    for size in set(sizes) - set(divisors(share)):
        assert size == -(-share // -(-share // size)), "another has as many micro-batches, and leaves more for the last"
        assert all(max(size / other, other / size) > NEAR for other in sizes if other != size)


@given(st.integers(0, 12), st.integers(0, 3))
def test_powers_of_two_times_three_at_most_are_divided_alone(exponent: int, threes: int) -> None:
    share = 2**exponent * (3 if threes else 1)
    assert list(microbatch_sizes(share)) == divisors(share)


def test_sizes_of_some_batches() -> None:
    assert microbatch_sizes(7) == (1, 2, 4, 7)
    assert microbatch_sizes(37) == (1, 2, 4, 7, 13, 37)
    assert microbatch_sizes(10) == (1, 2, 5, 10)


@given(st.integers(1, 60), st.integers(1, 60))
def test_a_pinned_size_need_not_divide_the_sequences_of_a_replica(batch: int, size: int) -> None:
    if size > batch:
        with pytest.raises(UserError, match=f"more than the {batch} sequences of a replica"):
            job(global_batch=batch, micro_batch=size)
        return
    asked = problem(ranks=2, global_batch=batch, micro_batch=size)
    found = list(meshes(asked))
    assert all(mesh.microbatch == size and mesh.num_sequences == batch for mesh in found)
    assert all(0 <= mesh.remainder < size <= batch // mesh.dp for mesh in found)
    assert {mesh.dp for mesh in found} == {dp for dp in (1, 2) if batch % dp == 0 and batch // dp >= size}


def test_a_replica_needs_a_micro_batch() -> None:
    with pytest.raises(UserError, match="microBatch 4 is more than the 3 sequences of a replica"):
        job(global_batch=6, dp=2, micro_batch=4)
    with pytest.raises(UserError, match="dp 2 does not divide globalBatch 7"):
        job(global_batch=7, dp=2, micro_batch=1)


def test_a_mesh_says_what_its_last_micro_batch_has() -> None:
    mesh = Mesh.of_share(dp=2, tp=1, pp=4, microbatch=4, share=37)
    assert (mesh.num_microbatches, mesh.num_alike, mesh.remainder, mesh.num_sequences) == (10, 9, 1, 74)
    assert mesh.label == "dp 2 x tp 1 x pp 4, 9 micro-batches of 4 and one of 1"


# Orders


@settings(max_examples=60)
@given(schedules(), st.data())
def test_an_order_loses_what_the_schedule_loses(schedule: Schedule, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, schedule.num_slices))
    order = from_schedule(schedule).with_remainder(count)
    assert order.same_as(from_schedule(schedule.with_remainder(count)))
    assert order.with_remainder(count).same_as(order)
    assert to_schedule(order).num_remainder_slices == count
    last = order.microbatches == order.num_microbatches - 1
    assert np.array_equal(order.columns, order.slices + order.num_slices * (last & (count > 0)))
    forwards = int((order.kinds == 0).sum())
    assert forwards == order.num_stages * order.num_cells


# Slices


@settings(max_examples=40)
@given(st.integers(1, 12), st.integers(2, 9), st.integers(1, 8), st.sampled_from([16, 48, 300]))
def test_no_slice_is_longer_than_the_longest_of_the_others(
    count: int, microbatch: int, remainder: int, length: int
) -> None:
    asked = problem(ranks=4, global_batch=1, sequence_length=length)
    rng = random.Random(f"{count} {length}")
    cuts = sorted(rng.sample(range(1, length), min(count, length) - 1))
    slices = tuple(stop - first for first, stop in itertools.pairwise((0, *cuts, length)))
    mesh = Mesh.of_share(dp=1, tp=1, pp=4, microbatch=microbatch, share=microbatch + remainder)
    found = remainder_slices(asked, mesh, slices)
    if not mesh.remainder:
        assert found == ()
        return
    longest, own = (
        int(asked.slice_ns(1, batch, np.array(each), prefixes(each)).max())
        for batch, each in ((mesh.microbatch, slices), (mesh.remainder, found))
    )
    assert sum(found) == length
    assert 1 <= len(found) <= len(slices)
    assert own <= longest
    fewer = [each for each in asked.slicings(1, mesh.remainder).values() if each.num_slices < len(found)]
    assert all(each.largest_ns > longest for each in fewer)


# Plans


@pytest.mark.parametrize("schedule", BUILT_IN)
def test_a_plan_with_a_smaller_last_micro_batch_is_what_was_simulated(schedule: str) -> None:
    """The compiled Program takes the predicted time, and a rank derives the same schedule from the plan."""
    asked = problem(
        cluster(num_nodes=2, devices_per_node=1), ranks=2, global_batch=10, micro_batch=4, dp=1, slices=3,
        sequence_length=48, schedule=schedule,
    )  # fmt: skip
    decision = decide(asked, Budget(neighbours=0, moves=8))
    plan = decision.plan
    assert (plan.microbatch, plan.num_microbatches, plan.remainder) == (4, 3, 2)
    assert "2 micro-batches of 4 and one of 2" in plan.reasons[0]
    assert decision.program is not None
    assert plan.prediction is not None
    hardware = cluster(num_nodes=2, devices_per_node=1)
    shown = simulated(plan, hardware)
    assert shown.makespan_ns == to_nanoseconds(plan.prediction.step_seconds) == decision.chosen.step_ns
    evaluation = Simulated(problem_of(plan, hardware), plan.receive_ahead, placement_of(plan)).evaluate(
        candidate_of(plan)
    )
    assert evaluation.step_ns == decision.chosen.step_ns
    assert schedule_of(plan).num_remainder_slices == len(plan.remainder_slices)


@pytest.mark.parametrize("num_last", [2, 1])
def test_an_imported_schedule_is_for_its_number_of_micro_batches(num_last: int) -> None:
    """The sizes follow from it, and the slices of the last one from what it has for that."""
    made = to_schedule(find("1f1b").generate(shape(2, 3, 2))).with_remainder(num_last)
    recipe = ScheduleSpec(generator=CSV, text=made.to_csv())
    plan = decide(problem(ranks=2, global_batch=7, sequence_length=32, schedule=recipe)).plan
    assert (plan.microbatch, plan.num_microbatches, plan.remainder) == (3, 3, 1)
    if num_last == 1:
        assert plan.remainder_slices == (32,)
    with pytest.raises(UserError, match="the schedule is for 3 micro-batches, the job has 1 or 2 or 4"):
        decide(problem(ranks=2, global_batch=4, sequence_length=32, schedule=recipe, dp=1))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_the_bound_of_a_candidate_is_no_longer_than_its_step(schedule: str) -> None:
    asked = problem(ranks=4, global_batch=11, micro_batch=4, dp=1, slices=4, sequence_length=64, schedule=schedule)
    judge = Simulated(asked)
    result = decide(asked).result
    for each in (result.best, *result.others):
        assert judge.bound_ns(each.candidate) <= each.step_ns
        assert (each.candidate.schedule in SPLITTING) == (schedule == "zb-h1")


@pytest.mark.parametrize("batch", [5, 7, *(pytest.param(batch, marks=pytest.mark.long) for batch in (11, 13))])
def test_the_best_of_all_sizes_is_hardly_better(batch: int) -> None:
    """Every size of micro-batch pinned in turn: sizes that the search skips are close to one that it tries."""
    free = step_seconds(batch)
    assert all(free <= 1.03 * step_seconds(batch, micro_batch=size) for size in range(1, batch + 1))


@pytest.mark.parametrize("batch", [7, 11, 13])
def test_a_prime_batch_is_nearly_as_good_per_sequence_as_the_next_smooth_one(batch: int) -> None:
    assert step_seconds(batch) <= step_seconds({7: 8, 11: 12, 13: 16}[batch])


def step_seconds(batch: int, micro_batch: int | None = None) -> float:
    """Return the step time of the plan for four ranks."""
    asked = problem(ranks=4, global_batch=batch, sequence_length=64, micro_batch=micro_batch)
    prediction = decide(asked).plan.prediction
    assert prediction is not None
    return prediction.step_seconds


def test_steps_of_many_micro_batches_end_with_the_smaller_one() -> None:
    """A long step that is continued from short ones equals the one that is simulated in full."""
    asked = problem(
        ranks=4, global_batch=1202, sequence_length=64, schedule="1f1b", dp=1, tp=1, pp=4, micro_batch=4, slices=2
    )
    judge = Simulated(asked)
    mesh = Mesh.of_share(dp=1, tp=1, pp=4, microbatch=4, share=1202)
    decision = decide(asked, Budget(neighbours=0, moves=0))
    candidate = dataclasses.replace(decision.chosen.candidate, mesh=mesh)
    short, full = judge.evaluate(candidate), judge.evaluate(candidate, in_full=True)
    assert short.is_exact
    assert short.num_actions < full.num_actions
    assert (short.step_ns, short.peak_bytes, short.parts) == (full.step_ns, full.peak_bytes, full.parts)
