"""Whenever any partition fits one is found that does, and the fastest of them: against trying all partitions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.core.remaking import Recompute
from penstock.planner.budget import Budget
from penstock.planner.candidate import Candidate
from penstock.planner.evaluate import Simulated, owners_of
from penstock.planner.judge import NothingFitsError
from penstock.planner.memory_fit import Shortage, enough_microbatches
from penstock.planner.order import RECOMPUTE
from penstock.planner.outlines import Outline, outlines
from penstock.planner.problem import Mesh, Problem, meshes
from penstock.planner.recompute import fully_recomputed
from penstock.planner.search import search
from penstock.planner.simulate.memory import high_water_bytes
from penstock.planner.tables import stage_memory
from tests.support.planning import TINY_GPT2, TINY_LLAMA, cluster, problem

FIRST = Budget(candidates=0, neighbours=0, moves=0)
OF_SHAPE = ("1f1b", "zb-h1", "gpipe")
"""The schedules whose order follows from the shape."""

SMALL = [
    dataclasses.replace(TINY_LLAMA, layers=2),
    dataclasses.replace(TINY_LLAMA, layers=2, vocab=1000),
    dataclasses.replace(TINY_GPT2, layers=2, ffn_hidden=512),
]

PROBLEMS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(SMALL),
        "ranks": st.sampled_from([1, 2, 4]),
        "global_batch": st.sampled_from([4, 8]),
        "micro_batch": st.sampled_from([1, 2]),
        "slices": st.sampled_from([(16,), (1, 15), (15, 1), (3, 5, 8), (4, 4, 4, 4)]),
        "schedule": st.sampled_from([None, *OF_SHAPE]),
    }
)


def every_candidate(asked: Problem) -> Iterator[Candidate]:
    """All partitions of every division, under every order that follows from the shape."""
    pinned, num_units = asked.pinned, asked.model.num_units
    assert isinstance(pinned.slices, tuple)
    names = OF_SHAPE if pinned.schedule is None else (str(pinned.schedule),)
    for mesh in meshes(asked):
        for cuts in itertools.combinations(range(1, num_units), mesh.pp - 1):
            stages = tuple(itertools.pairwise((0, *cuts, num_units)))
            for name in names if mesh.pp > 1 or pinned.schedule else ("1f1b",):
                yield Candidate(mesh=mesh, stages=stages, slices=pinned.slices, schedule=name)


def peak(judge: Simulated, candidate: Candidate) -> int:
    return max(judge.evaluate(candidate).peak_bytes)


@settings(max_examples=40)
@given(PROBLEMS, st.floats(0, 1))
def test_a_plan_is_found_whenever_any_partition_fits(chosen: dict[str, Any], place: float) -> None:
    roomy = problem(**chosen)
    peaks = sorted({peak(Simulated(roomy), each) for each in every_candidate(roomy)})
    limit = peaks[int(place**3 * (len(peaks) - 1))]
    asked = problem(**chosen, memory=limit)
    found = search(asked, Simulated(asked), FIRST)
    assert max(found.best.peak_bytes) <= limit


@settings(max_examples=40)
@given(PROBLEMS, st.floats(0, 1))
def test_a_plan_is_found_if_any_partition_fits_with_full_recomputation(chosen: dict[str, Any], place: float) -> None:
    roomy = problem(**chosen)
    judge = Simulated(roomy)
    full = {fully_recomputed(roomy, each) for each in every_candidate(roomy)}
    peaks = sorted({peak(judge, each) for each in full})
    limit = peaks[int(place**3 * (len(peaks) - 1))]
    asked = problem(**chosen, memory=limit)
    found = search(asked, Simulated(asked), FIRST)
    assert max(found.best.peak_bytes) <= limit


@settings(max_examples=40)
@given(PROBLEMS.filter(lambda chosen: chosen["schedule"] is not None), st.floats(0, 1), st.data())
def test_ranks_recompute_as_much_as_their_memory_requires(
    chosen: dict[str, Any], place: float, data: st.DataObject
) -> None:
    """They recompute nothing if all buffers fit, for schedules whose order does not depend on recomputation."""
    roomy = problem(**chosen)
    outline = data.draw(st.sampled_from([each for each in outlines(roomy) if each.head_parts == 1]))
    judge = Simulated(roomy)
    balanced = next(each for each in offered(roomy, outline) if isinstance(each, Candidate))
    most, least = peak(judge, balanced), peak(judge, fully_recomputed(roomy, balanced))
    limit = round(least + place * (most - least))
    fit = Simulated(problem(**chosen, memory=limit)).proposer.memory_fit
    (found,) = fit.recomputing(balanced)
    assert isinstance(found, Candidate)
    assert peak(judge, found) <= limit
    if limit >= most:
        assert found == balanced
    owners = owners_of(found)
    work, everything = (
        judge.costs(each, owners).compute_ns[RECOMPUTE].sum() for each in (found, fully_recomputed(roomy, found))
    )
    assert work <= everything


@settings(max_examples=40)
@given(PROBLEMS.filter(lambda chosen: chosen["schedule"] is not None), st.floats(0, 1), st.data())
def test_the_stages_are_the_fastest_that_fit(chosen: dict[str, Any], place: float, data: st.DataObject) -> None:
    roomy = problem(**chosen)
    pipelines = [each for each in outlines(roomy) if each.mesh.pp > 1 and each.head_parts == 1]
    assume(pipelines)
    outline = data.draw(st.sampled_from(pipelines))
    judge = Simulated(roomy)
    of_mesh = [
        dataclasses.replace(each, zero=outline.zero) for each in every_candidate(roomy) if each.mesh == outline.mesh
    ]
    peaks = {each: peak(judge, each) for each in of_mesh}
    limit = sorted(peaks.values())[int(place * (len(peaks) - 1))]
    longest = {each: judge.stage_costs(each).slice_ns.sum(axis=1).max() for each in of_mesh}
    best = min(longest[each] for each in of_mesh if peaks[each] <= limit)
    (found,) = offered(problem(**chosen, memory=limit), outline)
    assert isinstance(found, Candidate)
    assert peaks[found] <= limit
    assert longest[found] <= 1.25 * best


def offered(asked: Problem, outline: Outline) -> list[Candidate | Shortage]:
    return list(Simulated(asked).proposer.candidates(outline))


@settings(max_examples=60)
@given(
    st.sampled_from(OF_SHAPE[:2]),
    st.integers(1, 6),
    st.integers(1, 40),
    st.sampled_from([(16,), (9, 7), (1, 2, 3, 10), (2,) * 8, (1,) * 16]),
)
def test_a_few_micro_batches_hold_as_much_as_all(schedule: str, pp: int, count: int, slices: tuple[int, ...]) -> None:
    asked = problem(cluster(num_nodes=3), ranks=pp, global_batch=count)
    cuts = [asked.model.num_units * rank // pp for rank in range(pp + 1)]
    mesh = Mesh(dp=1, tp=1, pp=pp, microbatch=1, num_microbatches=count)
    all_of_them = Candidate(mesh=mesh, stages=tuple(itertools.pairwise(cuts)), slices=slices, schedule=schedule)
    few = dataclasses.replace(mesh, num_microbatches=enough_microbatches(all_of_them, 4))
    judge = Simulated(asked)
    held = [
        high_water_bytes(judge.order(each), stage_memory(asked, each).slot_bytes, slices, 4)
        for each in (all_of_them, dataclasses.replace(all_of_them, mesh=few))
    ]
    assert held[0].tolist() == held[1].tolist()


def test_candidates_are_the_same_if_only_the_last_walk_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(model=TINY_LLAMA, ranks=2, global_batch=4, memory=600_000)
    all_kept = [offered(asked, outline) for outline in outlines(asked)]
    monkeypatch.setattr("penstock.planner.memory_fit.MOST_WALKED", 1)
    monkeypatch.setattr("penstock.planner.memory_fit.FEWEST_WALKS", 1)
    judge = Simulated(asked)
    assert [list(judge.proposer.candidates(outline)) for outline in outlines(asked)] == all_kept
    assert len(judge.proposer.memory_fit._walks) == 1


def test_more_memory_changes_nothing_where_the_balanced_stages_fit() -> None:
    chosen: dict[str, Any] = {"ranks": 4, "global_batch": 8, "pp": 4, "micro_batch": 1, "slices": 4, "schedule": "1f1b"}
    (outline,) = outlines(problem(**chosen))
    (roomy,) = offered(problem(**chosen), outline)
    assert isinstance(roomy, Candidate)
    needed = peak(Simulated(problem(**chosen)), roomy)
    assert offered(problem(**chosen, memory=needed), outline) == [roomy]
    assert offered(problem(**chosen, memory=needed - 1), outline) != [roomy]


def test_a_schedule_with_a_memory_limit_is_offered_stages_for_its_least_memory_and_for_that_of_zb_h1() -> None:
    chosen: dict[str, Any] = {"ranks": 4, "global_batch": 8, "pp": 4, "micro_batch": 1, "slices": 1, "schedule": "zb"}
    roomy = problem(**chosen)
    (outline,) = outlines(roomy)
    plain = peak(Simulated(roomy), dataclasses.replace(offered_one(roomy, outline), schedule="zb-h1"))
    tight = problem(**chosen, memory=plain - 1)
    candidates = [candidate for candidate in offered(tight, outline) if isinstance(candidate, Candidate)]
    assert len(candidates) == len({candidate.stages for candidate in candidates}) > 0


def offered_one(asked: Problem, outline: Outline) -> Candidate:
    (found,) = offered(asked, outline)
    assert isinstance(found, Candidate)
    return found


@pytest.mark.parametrize("recompute", [Recompute.NONE, None])
def test_one_byte_less_than_the_least_memory_is_refused(recompute: Recompute | None) -> None:
    chosen: dict[str, Any] = {"ranks": 2, "global_batch": 4, "micro_batch": 1, "pp": 2, "slices": (8, 8)}
    roomy = problem(**chosen, schedule="1f1b")
    tried = every_candidate(roomy) if recompute else (fully_recomputed(roomy, each) for each in every_candidate(roomy))
    least = min(peak(Simulated(roomy), each) for each in tried)
    asked = problem(**chosen, schedule="1f1b", memory=least - 1, recompute=recompute)
    with pytest.raises(NothingFitsError) as refused:
        search(asked, Simulated(asked), FIRST)
    assert least - 1 < refused.value.least_bytes
