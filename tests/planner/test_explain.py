"""Sentences of the explanation agree with the numbers that they are about."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest

from penstock.core.errors import UserError
from penstock.core.explanation import Explanation, StepParts
from penstock.core.layout import Operation, remaking
from penstock.core.model import Family, ModelSpec, UnitKind, step_flops
from penstock.core.plan import Plan
from penstock.core.remaking import Recompute, Remake
from penstock.core.timeline import Activity
from penstock.core.units import format_bytes
from penstock.planner.budget import Budget
from penstock.planner.candidate import Candidate, label_of
from penstock.planner.decide import best_plans, decide
from penstock.planner.explain import (
    MOST_ALTERNATIVES,
    MOST_REJECTED,
    _recomputed_operations,
    _slower,
    alternatives,
    explained,
)
from penstock.planner.judge import Ending, Evaluation
from penstock.planner.problem import Mesh, Problem
from penstock.planner.replay import simulated
from penstock.planner.search import Result
from tests.support.planning import cluster, problem
from tests.support.small_plans import looped_schedule

WIDE = Budget(candidates=200, moves=20)


def problem_with(memory: int = 2**30) -> Problem:
    return problem(ranks=4, global_batch=4, memory=memory)


def result(memory: int = 2**30) -> Result:
    return decide(problem_with(memory), WIDE).result


def reasons(about: Problem, found: Result, chosen: Evaluation, place: int = 1) -> tuple[str, ...]:
    return explained(about, found, chosen, place).reasons


def test_reasons_name_the_plan_its_parts_and_its_memory() -> None:
    found = result()
    best = found.best
    plan_reasons = reasons(problem_with(), found, best)
    label, parts, slices, *shards, memory, time_limit, memory_limit, pinned, effort, floor = plan_reasons
    assert len(shards) == (best.candidate.mesh.tp > 1)
    assert label.startswith(best.candidate.label)
    assert re.search(r" per step, [\d,]+ tokens/s per device, MFU [\d.]+ %$", label)
    means = [float(share) for share in re.findall(r"[a-z] ([\d.]+) %", parts)]
    assert abs(sum(means) - 100) < 0.4
    assert time_limit.startswith("limited by ")
    assert memory_limit == "no plan was left out for lack of memory"
    assert pinned == "nothing is pinned"
    assert ("not sliced" in slices) == (len(best.candidate.slices) == 1)
    assert format_bytes(max(best.peak_bytes)) in memory
    assert f"{found.num_judged} candidates of {found.num_outlines} outlines" in effort
    assert re.search(r"is below .*; this one is [\d.]+ % above$", floor)


@pytest.mark.parametrize(
    ("sequence_parallel", "sentence", "pinned"),
    [
        (None, "tensor parallelism: each rank's units are divided over 2 devices, hidden states by tokens", "tp 2"),
        (
            False,
            "tensor parallelism: each rank's units are divided over 2 devices, hidden states are whole on each",
            "tp 2, sequenceParallel false",
        ),
    ],
)
def test_reasons_say_how_devices_share_units(sequence_parallel: bool | None, sentence: str, pinned: str) -> None:
    plan = decide(problem(ranks=4, tp=2, sequence_parallel=sequence_parallel), WIDE).plan
    assert sentence in plan.reasons
    assert f"pinned: {pinned}" in plan.reasons
    assert plan.sequence_parallel is (sequence_parallel is None)
    assert plan.shards_text == ("" if plan.sequence_parallel else " (not sequence parallel)")


def test_one_device_per_rank_is_planned_the_same_whatever_shards_would_do() -> None:
    usual, other = (decide(problem(ranks=4, tp=1, sequence_parallel=each), WIDE).plan for each in (None, False))
    assert replace(other, reasons=usual.reasons, prediction=usual.prediction) == usual
    assert "sequenceParallel" not in other.to_manifest()
    assert other.shards_text == ""


def test_alternatives_are_of_different_kinds_and_state_how_much_slower_they_are() -> None:
    found = result()
    listed = alternatives(problem_with(), found, found.best)
    assert 1 <= len(listed) <= MOST_ALTERNATIVES
    labels = [each.label for each in listed]
    assert len(set(labels)) == len(labels)
    assert found.best.candidate.label not in labels
    for each in listed:
        if each.step_seconds is None:
            assert re.fullmatch(r"takes at least .* \([\d.]+ % slower\), whatever its order", each.reason)
            continue
        slower = 100 * (each.step_seconds / (found.best.step_ns / 1e9) - 1)
        if slower > 0:
            assert each.reason.startswith(f"{slower:.1f} % slower")
            changes = [float(change) for change in re.findall(r"[a-z] ([+-][\d.]+) %", each.reason)]
            assert sum(changes) == pytest.approx(slower, abs=0.3)
        else:
            assert each.reason in ("equally fast, but takes more memory", "equally fast, with as much memory")


def test_each_alternative_has_the_speed_of_its_step_on_its_devices() -> None:
    found = result()
    about = replace(problem_with(), peak_flops=1e12)
    tokens = about.global_batch * about.sequence_length
    others = {each.candidate.label: each.candidate for each in (*found.others, *found.too_large)}
    timed = [each for each in alternatives(about, found, found.best) if each.step_seconds is not None]
    assert timed
    for each in timed:
        assert each.speed is not None
        assert each.step_seconds is not None
        device_seconds = each.step_seconds * others[each.label].mesh.num_devices
        assert each.speed.tokens_per_second_per_device == pytest.approx(tokens / device_seconds)
        assert each.speed.model_flops_utilization == pytest.approx(
            step_flops(about.model, about.global_batch, about.sequence_length) / (device_seconds * 1e12)
        )
    on_cpu = alternatives(replace(about, peak_flops=None), found, found.best)
    assert not any(each.speed.model_flops_utilization for each in on_cpu if each.speed is not None)


@pytest.mark.parametrize(
    ("num_microbatches", "num_slices", "label"),
    [
        (1, 1, "dp 1 x tp 1 x pp 2, 1 micro-batch of 4, 1 slice, zb"),
        (2, 3, "dp 1 x tp 1 x pp 2, 2 micro-batches of 4, 3 slices, zb"),
    ],
)
def test_one_is_called_one(num_microbatches: int, num_slices: int, label: str) -> None:
    mesh = Mesh(dp=1, tp=1, pp=2, microbatch=4, num_microbatches=num_microbatches)
    assert label_of(mesh, num_slices, "zb") == label


def test_rejected_candidates_state_the_missing_memory() -> None:
    found = result(memory=400_000)
    listed = alternatives(problem_with(400_000), found, found.best)
    rejected = [each for each in listed if each.reason.startswith("needs")]
    too_large = [each for each in found.too_large if max(each.peak_bytes) > 400_000]
    assert len(rejected) == min(len(too_large), MOST_REJECTED)
    for each in rejected:
        assert each.peak_bytes is not None
        assert each.peak_bytes > 400_000
    lacking = [each for each in listed if each.reason.startswith("no stages fit")]
    assert len(lacking) == min(len({each.candidate.label for each in found.shortages}), MOST_REJECTED)
    assert len(lacking) == len({each.label for each in lacking})
    assert rejected or lacking


def test_a_pinned_single_slice_is_called_pinned_and_nothing_else() -> None:
    pinned = problem(ranks=4, global_batch=4, slices=1)
    found = decide(pinned, WIDE).result
    assert reasons(pinned, found, found.best)[2] == "sequences are not sliced: pinned"


def test_slices_are_listed_in_order() -> None:
    """Not as a range from the longest to the shortest: pinned slices may have any order."""
    pinned = problem(ranks=4, global_batch=4, slices=(3, 8, 5))
    found = decide(pinned, WIDE).result
    slices_reason = reasons(pinned, found, found.best)[2]
    assert slices_reason.startswith("3 slices of 3, 8, 5 tokens, as pinned, over ")


def test_a_search_that_ended_at_its_budget_claims_no_more() -> None:
    found = result()
    for ending in Ending:
        effort = reasons(problem_with(), replace(found, ending=ending), found.best)[-2]
        assert ("budget" in effort) == (ending is Ending.BUDGET)
        assert ("estimates" in effort) == (ending is Ending.ESTIMATES)
        assert ("every outline that could fit was opened" in effort) == (ending is Ending.EVERYTHING)


def test_another_costs_more_devices_only_if_it_does() -> None:
    found = result()
    best = found.best
    faster = replace(best, step_ns=best.step_ns // 2, candidate=replace(best.candidate, variant=99))
    assert "devices" not in _slower(faster, best)
    narrow = replace(best.candidate, mesh=replace(best.candidate.mesh, dp=3 * best.candidate.mesh.dp))
    narrower = replace(best, step_ns=best.step_ns * 999 // 1000)
    assert _slower(narrower, replace(best, candidate=narrow)) == (
        "0.1 % faster, which is too little to leave devices unused"
    )
    mesh = replace(best.candidate.mesh, dp=2 * best.candidate.mesh.dp)
    wider = replace(faster, candidate=replace(best.candidate, mesh=mesh))
    assert _slower(wider, best) == f"50.0 % faster, but on {mesh.num_devices} devices, not {mesh.num_devices // 2}"


def test_the_reason_of_another_is_the_difference_of_the_parts() -> None:
    best = result().best
    assert best.parts is not None
    slower = round(1.25 * best.step_ns)
    waiting = replace(best.parts.waiting, mean=(0.25 + best.parts.waiting.mean) / 1.25)
    others = {name: replace(part, mean=part.mean / 1.25) for name, part in best.parts.named if name != "waiting"}
    other = replace(best, step_ns=slower, parts=StepParts(waiting=waiting, **others))
    assert _slower(other, best) == "25.0 % slower: waiting +25.0 %"


def test_the_explanation_has_the_same_facts_as_data() -> None:
    about = problem(ranks=4, global_batch=4, pp=2, slices=(3, 8, 5))
    decision = decide(about, WIDE)
    prediction = decision.plan.prediction
    assert prediction is not None
    explanation = prediction.explanation
    assert explanation is not None
    assert Explanation.from_manifest(explanation.to_manifest()) == explanation
    assert explanation.pinned == ("pp 2", "slices 3/8/5")
    assert f"pinned: {', '.join(explanation.pinned)}" in decision.plan.reasons
    assert set(explanation.limits) < set(decision.plan.reasons)
    assert explanation.search is not None
    assert (explanation.search.ending, explanation.search.candidates) == (
        decision.result.ending.value,
        decision.result.num_judged,
    )
    assert explanation.search.floor_seconds is not None
    assert explanation.search.floor_seconds <= prediction.step_seconds
    assert explanation.parts is not None
    assert sum(part.mean for _, part in explanation.parts.named) == pytest.approx(1.0)
    assert explanation.parts.waiting == prediction.waiting
    busiest = prediction.compute_seconds / prediction.step_seconds
    assert explanation.parts.compute.worst == pytest.approx(busiest)


def test_memory_is_called_a_limit_only_where_a_faster_plan_needs_more() -> None:
    found = result(memory=600_000)
    about = problem_with(600_000)
    faster = [each for each in found.too_large if each.step_ns < found.best.step_ns]
    limit = explained(about, found, found.best).explanation.limits[-1]
    assert limit.startswith("memory is a limit: ") == bool(faster)
    large = replace(found.best, step_ns=found.best.step_ns // 2, peak_bytes=(700_000,) * 4)
    limit = explained(about, replace(found, too_large=(large,)), found.best).explanation.limits[-1]
    assert limit == f"memory is a limit: {large.candidate.label} is 50.0 % faster, but needs 684 KiB of 586 KiB"


def test_the_best_plans_are_distinct_and_in_the_order_of_their_predictions() -> None:
    about = problem_with()
    decision = decide(about, WIDE)
    plans = list(best_plans(about, decision, 3))
    assert plans[0] == decision.plan
    assert len(plans) == 3
    assert len({plan.reasons[0].partition(":")[0] for plan in plans}) == 3
    seconds = [plan.prediction.step_seconds for plan in plans if plan.prediction]
    assert seconds == sorted(seconds)
    assert [plan.reasons[-2].partition(" of ")[0] for plan in plans] == [
        "the best",
        "number 2 by prediction",
        "number 3 by prediction",
    ]


def test_a_plan_that_is_pinned_whole_has_no_rivals() -> None:
    pinned = problem(ranks=2, pp=2, dp=1, micro_batch=1, slices=2, schedule="1f1b")
    assert len(list(best_plans(pinned, decide(pinned, WIDE), 5))) == 1


DEEP = ModelSpec(family=Family.LLAMA, layers=4, hidden=128, heads=4, kv_heads=2, ffn_hidden=256, vocab=100)


def crowded(mebibytes: int, **pinned: Any) -> Problem:
    return problem(model=DEEP, ranks=4, global_batch=4, sequence_length=256, memory=mebibytes * 2**20, tp=1, **pinned)


def recomputation(plan: Plan) -> str:
    (sentence,) = [each for each in plan.reasons if each.startswith("recomputation: ")]
    return sentence


def more_work(plan: Plan) -> float:
    """Return the simulated time of R as a share of all other compute."""
    events = [event for event in simulated(plan, cluster()).timeline.events if event.activity is Activity.COMPUTE]
    recomputation_ns = sum(event.duration_ns for event in events if "R" in event.action)
    return recomputation_ns / (sum(event.duration_ns for event in events) - recomputation_ns)


EARLIER = r"(?:begun up to \d actions? before its backward|in earlier waits of its ranks than those for gradients)"
RECOMPUTATION = (
    r"recomputation: (.*), which do not fit in (\d) MiB: ([\d.]+) % more work"
    rf"(?:, {EARLIER})?; (.*)"
)


@pytest.mark.parametrize(
    ("mebibytes", "rest"), [(8, r"the best plan found without recomputation takes .*, [\d.]+ % slower"), (4, "")]
)
def test_a_plan_states_what_it_recomputes_and_why(mebibytes: int, rest: str) -> None:
    decision = decide(crowded(mebibytes), WIDE)
    plan = decision.plan
    match = re.fullmatch(RECOMPUTATION, recomputation(plan))
    assert match
    assert int(match[2]) == mebibytes
    assert float(match[3]) == pytest.approx(100 * more_work(plan), abs=0.1)
    assert match[1] == _recomputed_operations(crowded(mebibytes), decision.chosen.candidate)
    assert re.fullmatch(rest or "no plan found without recomputation fits", match[4])
    keeping = [each for each in plan.alternatives if "recomputes" not in each.label and each.step_seconds is not None]
    assert bool(keeping) == bool(rest)
    assert all("slower" in each.reason or "needs" in each.reason for each in keeping)


@pytest.mark.parametrize("pin", [Recompute.SELECTIVE, Recompute.FULL])
def test_pinned_recomputation_is_called_pinned(pin: Recompute) -> None:
    plan = decide(crowded(400, recompute=pin, pp=2, dp=2, schedule="1f1b"), WIDE).plan
    text = rf"recomputation: (.*): pinned, ([\d.]+) % more work(?:, {EARLIER})?"
    match = re.fullmatch(text, recomputation(plan))
    assert match
    assert float(match[2]) == pytest.approx(100 * more_work(plan), abs=0.1)
    assert ("norms and activation functions of" in match[1]) == (pin is Recompute.SELECTIVE)
    assert ("everything of " in match[1]) == (pin is Recompute.FULL)
    assert any(reason.startswith("pinned: ") and f"recompute {pin.value}" in reason for reason in plan.reasons)


def test_recomputation_of_an_imported_schedule_is_attributed_to_it() -> None:
    schedule = looped_schedule(num_ranks=2, num_stages=2, num_microbatches=2, num_slices=2, recompute=True)
    plan = decide(problem(ranks=2, global_batch=2, dp=1, pp=2, tp=1, schedule=schedule), WIDE).plan
    assert re.search(r": part of the imported schedule, [1-9][\d.]* % more work$", recomputation(plan))


def test_a_plan_without_recomputation_does_not_mention_it() -> None:
    for pinned in ({}, {"recompute": Recompute.NONE}):
        plan = decide(crowded(400, pp=2, dp=2, schedule="1f1b", **pinned), WIDE).plan
        assert not any("recomputation" in reason for reason in plan.reasons)


@pytest.mark.parametrize("pin", [Recompute.NONE, Recompute.SELECTIVE])
def test_a_recomputation_pin_that_exceeds_memory_is_the_first_remedy(pin: Recompute) -> None:
    """At 4 MiB only recomputation helps, at 1 MiB nothing does."""
    with pytest.raises(UserError, match="nothing fits") as caught:
        decide(crowded(4, recompute=pin), WIDE)
    assert caught.value.remedy.startswith("leave out parallelism.recompute, and ranks recompute as much")
    with pytest.raises(UserError, match="nothing fits") as caught:
        decide(crowded(1, recompute=pin), WIDE)
    assert "leave out" not in caught.value.remedy


NORMS, ALL = (Operation.NORM,), tuple(remaking(DEEP, UnitKind.MLP))


@pytest.mark.parametrize(
    ("policies", "text"),
    [
        ("aa", "all 2 stages recompute norms of both MLPs"),
        (" a", "stage 1 recomputes norms of both MLPs"),
        (
            "ab",
            "stage 0 recomputes norms of both MLPs; stage 1 recomputes everything of 1 of 2 and norms of 1 of 2 MLPs",
        ),
        ("a", "the only stage recomputes norms of 2 of 4 MLPs"),
        ("abab", "all 4 stages recompute everything of 2 of 4 and norms of 2 of 4 MLPs"),
        ("a a ", "stage 0 recomputes norms of the MLP; stage 2 recomputes norms of the MLP"),
        ("aabb", "stages 0 to 1 recompute norms of the MLP; stages 2 to 3 recompute everything of the MLP"),
    ],
)
def test_policies_are_listed_by_stage_unless_many_differ(policies: str, text: str) -> None:
    per_stage = 4 // len(policies)
    count = min(per_stage, 2)
    norms = Remake(unit=UnitKind.MLP, count=count, operations=NORMS)
    mixed = (Remake(unit=UnitKind.MLP, count=1, operations=ALL), *[replace(norms, count=1)] * (count - 1))
    bounds = [0, *(1 + 2 * per_stage * (i + 1) for i in range(len(policies) - 1)), DEEP.num_units]
    candidate = Candidate(
        mesh=Mesh(dp=1, tp=1, pp=len(policies), microbatch=1, num_microbatches=4),
        stages=tuple(itertools.pairwise(bounds)),
        slices=(256,),
        schedule="1f1b",
        recompute=tuple({"a": (norms,), "b": mixed, " ": ()}[each] for each in policies),
    )
    assert _recomputed_operations(crowded(400), candidate) == text


def test_one_alternative_keeps_everything() -> None:
    found = result()
    chosen = found.best
    remakes = (Remake(unit=UnitKind.MLP, count=1, operations=NORMS),)
    shape = replace(chosen.candidate, recompute=(remakes, *[()] * (len(chosen.candidate.stages) - 1)))
    others = tuple(
        replace(chosen, candidate=replace(shape, slices=(1,) * count), step_ns=chosen.step_ns + count)
        for count in range(2, 12)
    )
    keeping = replace(chosen, step_ns=chosen.step_ns + 99)
    crowd = replace(found, best=others[0], others=(*others[1:], keeping), ruled_out=(), too_large=(), shortages=())
    labels = [each.label for each in alternatives(problem_with(), crowd, others[0])]
    assert labels == [*(each.candidate.label for each in others[1:MOST_ALTERNATIVES]), keeping.candidate.label]
    assert keeping.candidate.label not in [each.label for each in alternatives(problem_with(), crowd, keeping)]
