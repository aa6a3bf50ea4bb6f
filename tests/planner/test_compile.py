"""A plan's Program is the same wherever it is made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.core.errors import UserError
from penstock.core.layout import Precision, shared_parameters
from penstock.core.model import Family
from penstock.core.schedule import Group, Kind
from penstock.planner.compile import (
    fitting_program_of,
    has_shared_gradients,
    program_of,
    schedule_of,
)
from penstock.planner.decide import decide
from penstock.planner.problem import Problem
from tests.support.planning import measured_problem, problem
from tests.support.small_plans import looped_schedule, small_plan


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_reductions_are_those_the_plan_needs(family: Family, dp: int, schedule: str) -> None:
    program = program_of(small_plan(family=family, schedule=schedule, dp=dp, num_microbatches=2))
    groups = {Group.NORM} | ({Group.DP} if dp > 1 else set()) | ({Group.TIE} if family is Family.GPT2 else set())
    assert {reduction.group for reduction in program.reductions} == groups
    assert program_of(small_plan(family=family, schedule=schedule, dp=dp, num_microbatches=2)).digest == program.digest


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_sum_exactly_where_a_gradient_is_shared(tp: int, sequence_parallel: bool, kv_heads: int) -> None:
    plan = small_plan(num_microbatches=2)
    model = replace(plan.model, kv_heads=kv_heads)
    plan = replace(plan, model=model, tp=tp, sequence_parallel=sequence_parallel)
    is_shared = any(shared_parameters(model, unit, plan.sharding) for unit in model.units)
    assert has_shared_gradients(model, plan.sharding) == is_shared
    program = program_of(plan)
    assert any(reduction.group is Group.TP for reduction in program.reductions) == is_shared
    starts = {
        instruction.action.stage
        for own in program.ranks
        for instruction in own.instructions
        if instruction.action.kind is Kind.START_REDUCE and instruction.action.group is Group.TP
    }
    assert starts == (set(range(len(plan.stages))) if is_shared else set())


def test_a_plan_keeps_its_imported_schedule() -> None:
    recipe = looped_schedule(num_ranks=2, num_stages=4, num_microbatches=2, num_slices=3)
    plan = small_plan(schedule=recipe, num_stages=4, num_microbatches=2, precision=Precision.FP32)
    assert schedule_of(plan).to_csv() == recipe.text
    assert program_of(plan).num_stages == 4


@pytest.mark.parametrize("asked", [problem(pp=2), measured_problem(pp=2), problem(pp=2, schedule="zbv")])
def test_a_program_fits_into_its_predicted_memory_and_not_into_a_byte_less(asked: Problem) -> None:
    plan = decide(asked).plan
    assert plan.prediction is not None
    needed = max(plan.prediction.peak_bytes)
    assert fitting_program_of(plan, needed) == program_of(plan)
    with pytest.raises(UserError, match="the plan needs") as caught:
        fitting_program_of(plan, needed - 1)
    assert caught.value.where == "spec.resources.memoryPerRank"
    assert "allow 1Mi" in caught.value.remedy


def test_the_memory_of_a_long_plan_is_checked_when_it_is_compiled() -> None:
    decision = decide(problem(sequence_length=64, global_batch=64, micro_batch=1, pp=2, slices=16, schedule="zb-h1"))
    assert decision.program is None
    prediction = decision.plan.prediction
    assert prediction is not None
    arena = program_of(decision.plan).ranks[0].arena_bytes
    needed = prediction.peak_bytes[0] - prediction.slot_bytes[0] + arena
    with pytest.raises(UserError, match="the plan needs"):
        fitting_program_of(decision.plan, needed - 1)


def test_a_plan_without_a_prediction_is_proved_without_limits() -> None:
    assert fitting_program_of(small_plan(), 1) == program_of(small_plan())
