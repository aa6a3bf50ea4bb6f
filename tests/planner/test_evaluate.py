"""The judge: bounds that hold, parts that add up, and orders that are the plan's."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.schedule import ScheduleSpec
from penstock.planner import evaluate
from penstock.planner.candidate import Candidate
from penstock.planner.decide import decide
from penstock.planner.device_order import devices_by_number
from penstock.planner.evaluate import MAKING, Simulated
from penstock.planner.judge import Evaluation
from penstock.planner.order import to_schedule
from penstock.planner.problem import Mesh, Problem
from penstock.planner.schedules.registry import SEARCHED
from penstock.planner.schedules.variants import QUICK_FROM
from penstock.planner.stagecost import equal_slices
from tests.support.planning import TINY_GPT2, TINY_LLAMA, cluster, measured_problem, problem


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    model = draw(st.sampled_from([TINY_LLAMA, TINY_GPT2]))
    if draw(st.booleans()):
        return measured_problem(model=model, ranks=4, global_batch=12, slowdown=draw(st.sampled_from([1.0, 1.7])))
    described = cluster(num_nodes=draw(st.sampled_from([1, 2, 4])), devices_per_node=4)
    return problem(described, model=model, ranks=4, global_batch=12)


@st.composite
def candidates(draw: st.DrawFn, asked: Problem) -> Candidate:
    pp = draw(st.integers(1, 4))
    dp = draw(st.sampled_from([1, 2])) if pp < 3 else 1
    microbatch = draw(st.sampled_from([1, 2]))
    cuts = draw(st.sets(st.integers(1, asked.model.num_units - 1), min_size=pp - 1, max_size=pp - 1))
    slices = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    return Candidate(
        mesh=Mesh(dp=dp, tp=1, pp=pp, microbatch=microbatch, num_microbatches=draw(st.integers(1, 6))),
        stages=tuple(itertools.pairwise((0, *sorted(cuts), asked.model.num_units))),
        slices=tuple(slices),
        schedule=draw(st.sampled_from(SEARCHED)),
    )


def parts(evaluation: Evaluation) -> int:
    names = ("compute_ns", "bubble_ns", "communication_ns", "reduction_ns", "optimizer_ns")
    return sum(getattr(evaluation, name) for name in names)


@settings(max_examples=150)
@given(st.data())
def test_no_step_is_shorter_than_its_bound_and_its_parts_add_up(data: st.DataObject) -> None:
    asked = data.draw(problems())
    candidate = data.draw(candidates(asked))
    judge = Simulated(asked)
    found = judge.evaluate(candidate)
    assert judge.bound_ns(candidate) <= found.step_ns
    assert parts(found) == found.step_ns
    assert min(found.compute_ns, found.bubble_ns, found.communication_ns, found.reduction_ns) >= 0


@settings(max_examples=40)
@given(st.sampled_from(["1f1b", "zb-h1", "zb"]), st.integers(1, 3), st.integers(20, 60), st.booleans())
def test_a_long_step_is_as_long_extrapolated_as_in_full(schedule: str, pp: int, count: int, slow: bool) -> None:
    asked = measured_problem(ranks=4, global_batch=count, slowdown=1.5 if slow else 1.0)
    candidate = Candidate(
        mesh=Mesh(dp=1, tp=1, pp=pp, microbatch=1, num_microbatches=count),
        stages={1: ((0, 10),), 2: ((0, 5), (5, 10)), 3: ((0, 4), (4, 7), (7, 10))}[pp],
        slices=(6, 5, 5),
        schedule=schedule,
    )
    judge = Simulated(asked)
    quick, full = judge.evaluate(candidate), judge.evaluate(candidate, in_full=True)
    assert full.is_exact
    assert quick.peak_bytes == full.peak_bytes or not quick.is_exact
    assert quick.step_ns == pytest.approx(full.step_ns, rel=1e-9 if quick.is_exact else 0.02)
    assert parts(quick) == quick.step_ns


@settings(max_examples=40)
@given(st.data())
def test_the_recipe_of_a_candidate_is_the_order_that_was_simulated(data: st.DataObject) -> None:
    asked = data.draw(problems())
    judge = Simulated(asked)
    found = judge.evaluate(data.draw(candidates(asked))).candidate
    recipe = dataclasses.replace(found, schedule=judge.spec(found))
    assert judge.order(recipe).same_as(judge.order(found))


def test_zb_without_memory_for_its_stash_has_the_bytes_of_its_leanest_order() -> None:
    mesh = Mesh(dp=1, tp=1, pp=2, microbatch=1, num_microbatches=2)
    candidate = Candidate(mesh=mesh, stages=((0, 5), (5, 10)), slices=(8, 8), schedule="zb")
    tight = Simulated(problem(memory=1000))
    found, of_h1 = tight.evaluate(candidate), tight.evaluate(dataclasses.replace(candidate, schedule="zb-h1"))
    assert found.candidate.variant == QUICK_FROM + 1
    assert all(lean < h1 for lean, h1 in zip(found.peak_bytes, of_h1.peak_bytes, strict=True))


def test_a_schedule_of_another_shape_is_refused() -> None:
    judge = Simulated(problem())
    mesh = Mesh(dp=1, tp=1, pp=2, microbatch=1, num_microbatches=2)
    candidate = Candidate(mesh=mesh, stages=((0, 5), (5, 10)), slices=(16,), schedule="1f1b")
    text = to_schedule(judge.order(candidate)).to_csv()
    imported = dataclasses.replace(candidate, schedule=ScheduleSpec(generator="csv", text=text))
    assert judge.evaluate(imported).step_ns == judge.evaluate(candidate).step_ns
    with pytest.raises(UserError, match="2 stages, the plan 3"):
        judge.evaluate(dataclasses.replace(imported, stages=((0, 3), (3, 6), (6, 10))))
    with pytest.raises(UserError, match="1 slices, the plan has 2"):
        judge.evaluate(dataclasses.replace(imported, slices=(8, 8)))


@pytest.mark.parametrize("schedule", ["zb", "zbv", "interleaved-zb"])
def test_no_step_is_shorter_than_what_its_order_takes(schedule: str) -> None:
    asked = problem(cluster(num_nodes=4, devices_per_node=1), ranks=4, global_batch=2000)
    mesh = Mesh(dp=1, tp=1, pp=4, microbatch=1, num_microbatches=2000)
    per_rank = 1 if schedule == "zb" else 2
    stages = ((0, 3), (3, 5), (5, 7), (7, 10)) if per_rank == 1 else (*((i, i + 1) for i in range(7)), (7, 10))
    judge = Simulated(asked)
    candidate = Candidate(mesh=mesh, stages=stages, slices=(8, 8), schedule=schedule)
    bound = judge.order_bound(candidate)
    assert bound is not None
    assert 0.9 * judge.evaluate(candidate).step_ns <= bound.step_ns <= judge.evaluate(candidate).step_ns
    assert 0 < bound.num_actions < MAKING * candidate.num_actions


def test_orders_have_no_bound_where_they_are_formulas_or_ranks_slow_each_other_down() -> None:
    mesh = Mesh(dp=1, tp=1, pp=4, microbatch=1, num_microbatches=2000)
    candidate = Candidate(mesh=mesh, stages=((0, 3), (3, 5), (5, 7), (7, 10)), slices=(8, 8), schedule="zb")
    assert Simulated(problem(ranks=4)).order_bound(dataclasses.replace(candidate, schedule="zb-h1")) is None
    assert Simulated(measured_problem(ranks=4, slowdown=1.7)).order_bound(candidate) is None


@settings(max_examples=20)
@given(st.data(), st.integers(1, 3), st.sampled_from([0, 1]))
def test_a_candidate_after_one_with_other_slices_is_judged_as_by_a_new_judge(
    data: st.DataObject, count: int, zero: int
) -> None:
    asked = data.draw(problems())
    first = data.draw(candidates(asked))
    other = dataclasses.replace(first, slices=equal_slices(asked.sequence_length, count), zero=zero)
    judge = Simulated(asked)
    judge.evaluate(first)
    assert judge.bound_ns(other) == Simulated(asked).bound_ns(other)
    assert judge.evaluate(other) == Simulated(asked).evaluate(other)


def test_a_step_that_is_never_simulated_in_full_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "MOST_SIMULATED_ACTIONS", 0)
    described = cluster(num_nodes=4, devices_per_node=1)
    asked = problem(described, ranks=4, global_batch=4000, micro_batch=1, pp=4, slices=2, schedule="zb")
    decision = decide(asked)
    assert decision.plan.prediction is not None
    assert not decision.result.best.is_exact
    (warning,) = decision.plan.prediction.warnings
    assert "96,000 actions" in warning


@settings(max_examples=30)
@given(st.data(), st.integers(1, 40))
def test_a_judge_with_another_limit_is_like_a_new_one(data: st.DataObject, part: int) -> None:
    """Tables that it shares with the first do not depend on the limit, orders that do are its own."""
    asked = data.draw(problems())
    candidate = data.draw(candidates(asked))
    judge = Simulated(asked)
    most = max(judge.evaluate(candidate).peak_bytes)
    limit = most * part // 20
    shared, new = judge.limited(limit), Simulated(dataclasses.replace(asked, memory_limit_bytes=limit))
    assert shared.problem.memory_limit_bytes == limit
    assert list(shared.proposer.memory_fit.fitted(candidate)) == list(new.proposer.memory_fit.fitted(candidate))
    assert shared.best_variant(candidate) == new.best_variant(candidate)
    assert shared.evaluate(candidate) == new.evaluate(candidate)


@settings(max_examples=20)
@given(st.data())
def test_a_judge_that_places_ranks_elsewhere_is_like_a_new_one(data: st.DataObject) -> None:
    asked = data.draw(problems())
    candidate = data.draw(candidates(asked))
    judge = Simulated(asked)
    judge.evaluate(candidate)

    def backwards(mesh: Mesh) -> tuple[int, ...]:
        return devices_by_number(mesh)[::-1]

    assert judge.placing(backwards).evaluate(candidate) == Simulated(asked, placed_by=backwards).evaluate(candidate)
