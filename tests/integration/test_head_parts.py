"""Gradients of whole steps with a head in parts, from real processes, against the unsliced model in one process.

Every pair of values of two factors (`tests.support.shared_heads`) occurs in some case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.core.layout import Precision
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.core.schedule import Group
from penstock.planner.compile import program_of
from tests.support.covering import covering_array
from tests.support.pipeline_ranks import train_rank
from tests.support.sharded_pipeline import check_sharded
from tests.support.shared_heads import FACTORS, is_allowed, plan_of
from tests.support.small_plans import looped_schedule, parts_alone, small_plan, with_stages
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.xdist_group("worker-pool")


def name_of(case: dict[str, Any]) -> str:
    """Its values in short."""
    return " ".join(f"{name[0]}{value}" for name, value in case.items()).replace(" ", "")


CASES = covering_array(FACTORS, is_allowed)


def check(pool: WorkerPool, plan: Plan) -> None:
    """Run a step and compare."""
    program = program_of(plan)
    pool.connect(plan, program)
    check_sharded(plan, pool.run(train_rank, plan, program, num_ranks=plan.num_ranks))


def test_the_cases_are_few_and_hold_every_pair() -> None:
    assert len(CASES) <= 40
    assert {(case["tp"], case["schedule"]) for case in CASES} == {
        (tp, schedule) for tp in FACTORS["tp"] for schedule in FACTORS["schedule"]
    }


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gradients_are_those_of_the_whole_model(worker_pool: WorkerPool, case: dict[str, Any]) -> None:
    check(worker_pool, plan_of(case))


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("remainder", [0, 1])
@pytest.mark.parametrize("alone", [False, True])
def test_recomputed_parts_and_a_smaller_last_micro_batch(
    worker_pool: WorkerPool, family: Family, remainder: int, alone: bool
) -> None:
    schedule = looped_schedule(num_ranks=2, num_stages=6, num_microbatches=3, num_slices=3, recompute=True)
    plan = small_plan(
        family=family,
        schedule=schedule,
        slices=(3, 1, 2),
        num_stages=6,
        num_microbatches=3,
        head_parts=3,
        remainder=remainder,
        remainder_slices=(5, 1) if remainder else (),
    )
    check(worker_pool, with_stages(plan, parts_alone(plan)) if alone else plan)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("first", [6, 7, 8])
def test_recompute_that_goes_on_inside_of_the_head(worker_pool: WorkerPool, family: Family, first: int) -> None:
    """Part by part, in a stage that begins before the first part, with it, and after it."""
    stages = ((0, first), (first, 9))
    schedule = looped_schedule(num_ranks=2, num_stages=2, num_microbatches=2, num_slices=3, num_units=(0, 9 - first))
    plan = small_plan(family=family, schedule=schedule, slices=(3, 1, 2), num_microbatches=2, head_parts=2)
    check(worker_pool, with_stages(plan, stages))


def test_a_rank_with_several_stages_of_a_tied_head_sums_their_rows_at_once(worker_pool: WorkerPool) -> None:
    plan = small_plan(family=Family.GPT2, schedule="interleaved-1f1b", pp=3, num_stages=9, head_parts=4, dp=2)
    plan = replace(plan, stages=parts_alone(plan))
    program = program_of(plan)
    (tie,) = [reduction for reduction in program.reductions if reduction.group is Group.TIE]
    assert tie.ranks == (0, 1, 2)
    assert tie.stages == (0, 5, 6, 7, 8)
    starts = [
        [i.action.stage for i in rank.instructions if str(i.action).endswith("START_REDUCE(tie)")]
        for rank in program.ranks
    ]
    assert starts == [[0], [7], [5]]
    check(worker_pool, plan)


@pytest.mark.parametrize("family", Family)
def test_the_loss_in_bf16_is_close_to_that_of_a_whole_head(worker_pool: WorkerPool, family: Family) -> None:
    losses = {}
    for parts in (1, 3):
        plan = small_plan(family=family, schedule="zbv", pp=2, num_stages=4, head_parts=parts, precision=Precision.BF16)
        plan = replace(plan, stages=parts_alone(plan)) if parts > 1 else plan
        program = program_of(plan)
        worker_pool.connect(plan, program)
        first, *_ = worker_pool.run(train_rank, plan, program, num_ranks=2)
        losses[parts] = (first.loss, first.evaluated_loss, first.gradient_norm)
    assert losses[3] == pytest.approx(losses[1], rel=2e-3)
