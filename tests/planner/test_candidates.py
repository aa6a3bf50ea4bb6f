"""Candidates of a mesh: valid partitions and slicings that obey the pins."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.schedule import ScheduleSpec
from penstock.planner.candidate import Candidate
from penstock.planner.evaluate import Simulated
from penstock.planner.memory_fit import Shortage
from penstock.planner.outlines import outlines
from penstock.planner.pins import pinned_stages
from penstock.planner.problem import Problem
from penstock.planner.schedules.registry import SEARCHED, SEARCHED_VIRTUAL
from penstock.planner.stagecost import equal_slices
from tests.support.planning import TINY_GPT2, TINY_LLAMA, cluster, measured_problem, problem, slower_device
from tests.support.small_plans import looped_schedule


def proposed(asked: Problem) -> list[Candidate]:
    proposer = Simulated(asked).proposer
    found = itertools.chain.from_iterable(map(proposer.candidates, outlines(asked)))
    return [each for each in found if not isinstance(each, Shortage)]


@settings(max_examples=40)
@given(
    st.sampled_from([TINY_LLAMA, TINY_GPT2]),
    st.integers(1, 40),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4, 6]),
)
def test_candidates_cover_the_model_and_the_sequence(model: Any, length: int, ranks: int, batch: int) -> None:
    found = proposed(problem(model=model, sequence_length=length, ranks=ranks, global_batch=batch))
    assert found
    assert len(set(found)) == len(found)
    for candidate in found:
        assert sum(candidate.slices) == length
        assert min(candidate.slices) > 0
        assert len(candidate.stages) == candidate.mesh.pp * (2 if candidate.schedule in SEARCHED_VIRTUAL else 1)
        assert [first for first, _ in candidate.stages] == [0, *(stop for _, stop in candidate.stages[:-1])]
        assert candidate.stages[-1][1] == model.num_units
        assert all(first < stop for first, stop in candidate.stages)
        assert candidate.schedule in (("1f1b",) if candidate.mesh.pp == 1 else (*SEARCHED, *SEARCHED_VIRTUAL))


PINS: list[tuple[dict[str, Any], Any]] = [
    ({"dp": 2}, lambda c: c.mesh.dp == 2),
    ({"tp": 2}, lambda c: c.mesh.tp == 2),
    ({"pp": 4}, lambda c: c.mesh.pp == 4),
    ({"micro_batch": 2}, lambda c: c.mesh.microbatch == 2),
    ({"slices": 3}, lambda c: len(c.slices) == 3),
    ({"slices": 16}, lambda c: c.slices == (1,) * 16),
    ({"slices": (9, 4, 3)}, lambda c: c.slices == (9, 4, 3)),
    ({"schedule": "zb-h1"}, lambda c: c.schedule == "zb-h1"),
    ({"stages": (1.5, 2.5)}, lambda c: c.stages == ((0, 4), (4, 10))),
    ({"stages": (0, 4)}, lambda c: c.stages == ((0, 1), (1, 10))),
    ({"pp": 1, "slices": 2}, lambda c: c.mesh.pp == 1 and c.slices == (8, 8)),
]


def test_every_single_pin_is_obeyed() -> None:
    for pinned, holds in PINS:
        found = proposed(problem(ranks=4, global_batch=4, **pinned))
        assert found, pinned
        assert all(holds(candidate) for candidate in found), pinned


@settings(max_examples=25)
@given(st.integers(1, 60), st.integers(1, 60))
def test_any_number_of_slices_can_be_pinned(length: int, count: int) -> None:
    count = min(count, length)
    found = proposed(problem(sequence_length=length, ranks=2, global_batch=2, slices=count))
    assert {len(candidate.slices) for candidate in found} == {count}


def test_an_imported_schedule_fixes_the_shape() -> None:
    schedule: ScheduleSpec = looped_schedule(num_ranks=2, num_stages=4, num_microbatches=3, num_slices=2)
    found = proposed(problem(ranks=2, global_batch=6, schedule=schedule))
    assert {(c.mesh.pp, c.mesh.num_microbatches, len(c.stages), len(c.slices)) for c in found} == {(2, 3, 4, 2)}


def test_partitions_share_the_work_evenly() -> None:
    asked = measured_problem(ranks=2, global_batch=2, pp=2, slices=1, schedule="1f1b")
    for candidate in proposed(asked):
        busy = Simulated(asked).stage_costs(candidate).slice_ns.sum(axis=1)
        everything = (
            Simulated(asked).stage_costs(Candidate(mesh=candidate.mesh, stages=s, slices=(16,), schedule="1f1b"))
            for s in (((0, cut), (cut, 10)) for cut in range(1, 10))
        )
        assert busy.max() == min(costs.slice_ns.sum(axis=1).max() for costs in everything)


@given(st.integers(1, 200), st.integers(1, 20))
def test_equal_slices_differ_by_at_most_a_token(length: int, count: int) -> None:
    count = min(count, length)
    slices = equal_slices(length, count)
    assert (sum(slices), len(slices)) == (length, count)
    assert max(slices) - min(slices) <= 1
    assert list(slices) == sorted(slices, reverse=True)


def test_a_flush_is_offered_the_slices_of_terapipe() -> None:
    asked = measured_problem(ranks=2, global_batch=2, pp=2, schedule="gpipe")
    for outline in outlines(asked):
        offered = set(Simulated(asked).proposer.slicings(outline))
        assert all(sum(slices) == asked.sequence_length for slices in offered)
    numbers = {len(slices) for outline in outlines(asked) for slices in Simulated(asked).proposer.slicings(outline)}
    assert numbers <= set(range(1, 17))


def test_slices_of_days_are_cut_like_those_of_seconds() -> None:
    """Large micro-batches of long sequences take so long on few devices that sums of nanoseconds leave 64 bits."""
    job: dict[str, Any] = {"ranks": 2, "global_batch": 8, "sequence_length": 256, "pp": 2, "micro_batch": 4}
    usual, slowed = problem(cluster(), **job), problem(cluster(device=slower_device(10**7)), **job)
    for one, other in zip(outlines(usual), outlines(slowed), strict=True):
        offered = list(Simulated(slowed).proposer.slicings(other))
        assert all(sum(slices) == 256 for slices in offered)
        assert len(offered[0]) == len(next(Simulated(usual).proposer.slicings(one)))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_pinned_blocks_become_units(halves: list[int]) -> None:
    num_units = sum(halves) + 2
    stages = pinned_stages([half / 2 for half in halves], num_units)
    sizes = [stop - first for first, stop in stages]
    assert [a == b for (_, a), (b, _) in itertools.pairwise(stages)] == [True] * (len(halves) - 1)
    ends = [1 * (i == 0) + 1 * (i == len(halves) - 1) for i in range(len(halves))]
    assert sizes == [half + end for half, end in zip(halves, ends, strict=True)]


def test_a_cluster_of_one_rank_gets_a_plan_of_one_stage() -> None:
    found = proposed(problem(cluster(num_nodes=1, devices_per_node=1), ranks=1, global_batch=2))
    assert {candidate.stages for candidate in found} == {((0, 10),)}


def test_a_sequence_is_cut_on_one_rank_where_it_does_not_fit_whole() -> None:
    """It was refused, although it fits with slices pinned: logits of a slice take less than those of a sequence."""
    model = dataclasses.replace(TINY_LLAMA, vocab=4096)

    def offers(**more: Any) -> list[Candidate]:
        return proposed(problem(model=model, ranks=1, global_batch=1, sequence_length=512, **more))

    def needed(**pinned: Any) -> int:
        asked = problem(model=model, ranks=1, global_batch=1, sequence_length=512, **pinned)
        return max(Simulated(asked).evaluate(offers(**pinned)[0]).peak_bytes)

    whole, eighths = needed(), needed(slices=8)
    assert eighths < whole
    counts = [len(each.slices) for limit in (whole, whole - 1, eighths) for each in offers(memory=limit)]
    assert 1 == counts[0] < counts[1] <= counts[2] <= 8
