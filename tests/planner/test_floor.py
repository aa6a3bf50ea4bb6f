"""The floor: no step is below it, and a rank that never waits reaches it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.candidate import Candidate
from penstock.planner.evaluate import Simulated
from penstock.planner.floor import floor_ns, grid
from penstock.planner.outlines import outlines
from penstock.planner.problem import meshes
from tests.support.planning import TINY_GPT2, TINY_LLAMA, cluster, problem, slower_device

PROBLEMS = st.fixed_dictionaries(
    {
        "model": st.sampled_from([TINY_LLAMA, TINY_GPT2]),
        "sequence_length": st.sampled_from([4, 16, 40]),
        "ranks": st.sampled_from([1, 2, 4]),
        "global_batch": st.sampled_from([1, 2, 12]),
    }
)


@settings(max_examples=40)
@given(PROBLEMS, st.data())
def test_no_step_is_below_the_floor(chosen: dict[str, Any], data: st.DataObject) -> None:
    asked = problem(**chosen)
    judge, outline = Simulated(asked), data.draw(st.sampled_from(outlines(asked)))
    for candidate in judge.proposer.candidates(outline):
        assert isinstance(candidate, Candidate)
        step_ns = judge.evaluate(candidate, in_full=True).step_ns
        assert floor_ns(asked, [outline.mesh]) <= step_ns
        assert floor_ns(asked, meshes(asked)) <= floor_ns(asked, [outline.mesh])


def test_a_rank_alone_is_at_the_floor_but_for_the_start_of_its_actions() -> None:
    asked = problem(ranks=1, global_batch=4)
    judge = Simulated(asked)
    steps = [
        judge.evaluate(each, in_full=True).step_ns
        for outline in outlines(asked)
        for each in judge.proposer.candidates(outline)
        if isinstance(each, Candidate)
    ]
    assert min(steps) == pytest.approx(floor_ns(asked, meshes(asked)), rel=0.02)


def test_work_of_weeks_has_a_floor() -> None:
    """A sum of nanoseconds that is ranked leaves 64 bits from three days a slice on."""
    slower = 10**7
    job: dict[str, Any] = {"ranks": 1, "global_batch": 8, "sequence_length": 256}
    usual, slowed = problem(**job), problem(cluster(device=slower_device(slower)), **job)
    floors = [floor_ns(each, meshes(each)) for each in (usual, slowed)]
    assert floors[1] == pytest.approx(slower * floors[0], rel=1e-3)


def test_the_grid_has_at_most_64_places() -> None:
    assert [grid(problem(sequence_length=length)) for length in (1, 64, 65)] == [1, 1, 2]
