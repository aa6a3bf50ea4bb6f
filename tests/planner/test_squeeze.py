"""Whenever any partition fits the search finds a plan: against trying all partitions."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.candidates import Candidate, Proposer
from penstock.planner.evaluate import Simulated
from penstock.planner.problem import Mesh, Problem, meshes
from penstock.planner.search import Budget, NothingFitsError, search
from penstock.planner.squeeze import LEAN_SCHEDULES
from tests.support.planning import TINY_GPT2, TINY_LLAMA, problem

FIRST = Budget(candidates=0, moves=0)

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
        "schedule": st.sampled_from([None, *LEAN_SCHEDULES]),
    }
)


def every_candidate(asked: Problem) -> Iterator[Candidate]:
    """All partitions of every division, under every order that follows from the shape."""
    pinned, num_units = asked.pinned, asked.model.num_units
    assert isinstance(pinned.slices, tuple)
    names = LEAN_SCHEDULES if pinned.schedule is None else (str(pinned.schedule),)
    for mesh in meshes(asked):
        for cuts in itertools.combinations(range(1, num_units), mesh.pp - 1):
            stages = tuple(itertools.pairwise((0, *cuts, num_units)))
            for name in names:
                yield Candidate(mesh=mesh, stages=stages, slices=pinned.slices, schedule=name)


@settings(max_examples=40)
@given(PROBLEMS, st.floats(0, 1))
def test_whenever_any_candidate_fits_one_is_found(chosen: dict[str, Any], place: float) -> None:
    roomy = problem(**chosen)
    peaks = sorted({max(Simulated(roomy).evaluate(each).peak_bytes) for each in every_candidate(roomy)})
    limit = peaks[int(place**3 * (len(peaks) - 1))]
    asked = problem(**chosen, memory=limit)
    found = search(asked, Simulated(asked), FIRST)
    assert max(found.best.peak_bytes) <= limit
    assert found.num_meshes > 0
    assert found.best.candidate.mesh not in {each.mesh for each in found.shortages}


def test_a_rank_alone_may_hold_one_micro_batch_at_a_time() -> None:
    asked = problem(model=SMALL[0], ranks=1, global_batch=16, micro_batch=1, memory=1_000_000)
    assert search(asked, Simulated(asked)).best.candidate.schedule == "1f1b"


def test_a_pinned_schedule_is_partitioned_for_what_it_holds() -> None:
    wide = dataclasses.replace(TINY_LLAMA, vocab=2000)
    chosen: dict[str, Any] = {"model": wide, "pp": 2, "global_batch": 16, "micro_batch": 1, "slices": (16,)}
    roomy, tight = (problem(**chosen, schedule="gpipe", memory=memory) for memory in (2**30, 3_300_000))
    (mesh,) = meshes(roomy)
    (fastest,), (lean,) = offers(roomy, mesh), offers(tight, mesh)
    assert max(Simulated(roomy).evaluate(fastest).peak_bytes) > 3_300_000
    assert max(Simulated(tight).evaluate(lean).peak_bytes) <= 3_300_000


def offers(asked: Problem, mesh: Mesh) -> list[Candidate]:
    found = Proposer(asked).candidates(mesh)
    assert isinstance(found, list)
    return found


def test_one_byte_less_than_the_least_is_said_to_be_too_little() -> None:
    chosen: dict[str, Any] = {"ranks": 2, "global_batch": 4, "micro_batch": 1, "pp": 2, "slices": (8, 8)}
    roomy = problem(**chosen, schedule="1f1b")
    least = min(max(Simulated(roomy).evaluate(each).peak_bytes) for each in every_candidate(roomy))
    asked = problem(**chosen, schedule="1f1b", memory=least - 1)
    with pytest.raises(NothingFitsError):
        search(asked, Simulated(asked), FIRST)
