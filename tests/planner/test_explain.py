"""What people are told: true of the numbers it is about."""

from __future__ import annotations

import re
from dataclasses import replace

from penstock.core.units import format_bytes
from penstock.planner.decide import decide
from penstock.planner.explain import MOST_ALTERNATIVES, MOST_REJECTED, _slower, alternatives, reasons
from penstock.planner.problem import Problem
from penstock.planner.search import Budget, Ending, Result
from tests.support.planning import problem

WIDE = Budget(candidates=200, moves=20)


def asked(memory: int = 2**30) -> Problem:
    return problem(ranks=4, global_batch=4, memory=memory)


def result(memory: int = 2**30) -> Result:
    return decide(asked(memory), WIDE).result


def test_reasons_name_the_plan_its_parts_and_its_memory() -> None:
    found = result()
    best = found.best
    label, parts, slices, memory, effort, floor = reasons(asked(), found, best)
    assert label.startswith(best.candidate.label)
    shares = [float(share) for share in re.findall(r"([\d.]+) %", parts.partition(";")[0])]
    assert abs(sum(shares) - 100) < 0.4
    assert ("not sliced" in slices) == (len(best.candidate.slices) == 1)
    assert format_bytes(max(best.peak_bytes)) in memory
    assert f"{found.num_judged} candidates of {found.num_outlines} outlines" in effort
    assert re.search(r"is below .*; this one is [\d.]+ % above$", floor)


def test_the_next_best_are_of_other_kinds_and_told_by_how_much() -> None:
    found = result()
    told = alternatives(asked(), found, found.best)
    assert 1 <= len(told) <= MOST_ALTERNATIVES
    labels = [each.label for each in told]
    assert len(set(labels)) == len(labels)
    assert found.best.candidate.label not in labels
    for each in told:
        if each.step_seconds is None:
            assert re.fullmatch(r"takes at least .*, whatever its order", each.reason)
            continue
        slower = 100 * (each.step_seconds / (found.best.step_ns / 1e9) - 1)
        if slower > 0:
            assert each.reason.startswith(f"{slower:.1f} % slower, mostly ")
        else:
            assert each.reason in ("equally fast, but takes more memory", "equally fast")


def test_what_was_rejected_says_what_it_lacks() -> None:
    found = result(memory=600_000)
    told = alternatives(asked(600_000), found, found.best)
    rejected = [each for each in told if each.reason.startswith("needs")]
    too_large = [each for each in found.too_large if max(each.peak_bytes) > 600_000]
    assert len(rejected) == min(len(too_large), MOST_REJECTED)
    for each in rejected:
        assert each.peak_bytes is not None
        assert each.peak_bytes > 600_000
    lacking = [each for each in told if each.reason.startswith("no stages fit")]
    assert len(lacking) == min(len({each.candidate.label for each in found.shortages}), MOST_REJECTED)
    assert len(lacking) == len({each.label for each in lacking})
    assert rejected or lacking


def test_a_pinned_single_slice_is_called_pinned_and_nothing_else() -> None:
    pinned = problem(ranks=4, global_batch=4, slices=1)
    found = decide(pinned, WIDE).result
    assert reasons(pinned, found, found.best)[2] == "sequences are not sliced: pinned"


def test_slices_are_told_as_they_are() -> None:
    """Not as a fall from the longest to the shortest, which they may not be."""
    pinned = problem(ranks=4, global_batch=4, slices=(3, 8, 5))
    found = decide(pinned, WIDE).result
    told = reasons(pinned, found, found.best)[2]
    assert told.startswith("3 slices of 3, 8, 5 tokens, as pinned, over ")


def test_a_search_that_ended_at_its_budget_claims_no_more() -> None:
    found = result()
    for ending in Ending:
        effort = reasons(asked(), replace(found, ending=ending), found.best)[-2]
        assert ("budget" in effort) == (ending is Ending.BUDGET)
        assert ("estimates" in effort) == (ending is Ending.ESTIMATES)
        assert ("all that could fit were looked at" in effort) == (ending is Ending.EVERYTHING)


def test_another_costs_more_devices_only_if_it_does() -> None:
    found = result()
    best = found.best
    faster = replace(best, step_ns=best.step_ns // 2, candidate=replace(best.candidate, variant=99))
    assert "devices" not in _slower(faster, best)
    mesh = replace(best.candidate.mesh, dp=2 * best.candidate.mesh.dp)
    wider = replace(faster, candidate=replace(best.candidate, mesh=mesh))
    assert _slower(wider, best) == f"50.0 % faster, but on {mesh.num_devices} devices, not {mesh.num_devices // 2}"
