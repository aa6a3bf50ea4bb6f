"""The first loss does not depend, to the last bit, on how the model is divided or in which order its slices run."""

from __future__ import annotations

import pytest

from penstock.core.layout import Precision
from penstock.core.model import Family
from penstock.planner.compile import program_of
from tests.support.pipeline_ranks import RankResult, train_rank
from tests.support.small_plans import small_plan
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.xdist_group("worker-pool")


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_first_loss_is_bit_identical(worker_pool: WorkerPool, family: Family, precision: Precision) -> None:
    losses = {
        result.loss
        for pp in (1, 2, 4)
        for schedule in ("gpipe", "1f1b", "zb", "zbv")
        for result in run(worker_pool, family, precision, pp, schedule)
    }
    assert len(losses) == 1


@pytest.mark.parametrize("family", Family)
def test_evaluation_sees_the_loss_of_training(worker_pool: WorkerPool, family: Family) -> None:
    for result in run(worker_pool, family, Precision.FP32, 2, "1f1b"):
        assert result.evaluated_loss == result.loss


def run(pool: WorkerPool, family: Family, precision: Precision, pp: int, schedule: str) -> list[RankResult]:
    plan = small_plan(
        family=family, precision=precision, pp=pp, schedule=schedule, slices=(4, 4, 4), num_microbatches=3
    )
    program = program_of(plan)
    pool.connect(plan, program)
    return pool.run(train_rank, plan, program, num_ranks=pp)
