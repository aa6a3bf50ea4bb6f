"""Gradients of whole steps with a head in parts, from real processes, against the unsliced model in one process."""

from __future__ import annotations

import pytest

from penstock.core.model import Family
from penstock.planner.realise import program_of
from tests.support.pipeline_ranks import train_rank
from tests.support.sharded_pipeline import check_sharded
from tests.support.small_plans import small_plan
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.xdist_group("worker-pool")


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zbv"])
@pytest.mark.parametrize("head_parts", [2, 3, 4])
def test_a_head_in_parts(worker_pool: WorkerPool, family: Family, schedule: str, head_parts: int) -> None:
    plan = small_plan(
        family=family,
        schedule=schedule,
        slices=(3, 1, 2),
        pp=2,
        num_stages=4,
        num_microbatches=3,
        layers=2,
        head_parts=head_parts,
    )
    program = program_of(plan)
    worker_pool.connect(plan, program)
    check_sharded(plan, worker_pool.run(train_rank, plan, program, num_ranks=plan.num_ranks))
