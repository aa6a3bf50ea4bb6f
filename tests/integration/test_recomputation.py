"""Gradients of whole steps with partial recomputation, from real processes: exact, and the bits of a plan without.

Every pair of values of two factors occurs in some case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.core.layout import Operation
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.core.remaking import SELECTIVE, uniform_remakes
from penstock.planner.compile import program_of
from tests.support.covering import covering_array
from tests.support.pipeline_ranks import RankResult, train_rank
from tests.support.remaking import randomly_recomputed
from tests.support.sharded_pipeline import check_sharded
from tests.support.small_plans import plan_of_case
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.xdist_group("worker-pool")

VIRTUAL = {"zbv": 2, "interleaved-1f1b": 2}
"""Stages per rank; one where not named."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "pp": (1, 2, 3, 4),
    "dp": (1, 2),
    "tp": (1, 2),
    "policy": ("selective", "full", "random"),
    "sequence_parallel": (True, False),
    "family": tuple(Family),
    "slices": ((6,), (3, 1, 2)),
    "schedule": ("gpipe", "1f1b", "zb-h1", "zbv", "interleaved-1f1b"),
    "num_microbatches": (1, 3),
}


def is_allowed(case: dict[str, Any]) -> bool:
    """Loops want a pipeline, only shards divide tokens, and the pool has eight processes."""
    is_loop = case["schedule"].startswith("interleaved")
    few = case["pp"] * case["dp"] * case["tp"] <= 8
    return few and (case["pp"] > 1 or not is_loop) and (case["tp"] > 1 or case["sequence_parallel"])


CASES = covering_array(FACTORS, is_allowed)


def name_of(case: dict[str, Any]) -> str:
    """Its values in short."""
    return " ".join(f"{name[0]}{value}" for name, value in case.items()).replace(" ", "")


def recomputed(plan: Plan, policy: str) -> Plan:
    """The plan with remakes of all stages by the policy."""
    if policy == "random":
        return randomly_recomputed(plan, 5)
    operations = tuple(Operation) if policy == "full" else SELECTIVE
    return replace(plan, recompute=tuple(uniform_remakes(plan.model, stage, operations) for stage in plan.stages))


def run(pool: WorkerPool, plan: Plan) -> list[RankResult]:
    """One step on every rank."""
    program = program_of(plan)
    pool.connect(plan, program)
    return pool.run(train_rank, plan, program, num_ranks=plan.num_ranks)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gradients_are_those_of_the_whole_model_and_of_a_plan_that_keeps_all(
    worker_pool: WorkerPool, case: dict[str, Any]
) -> None:
    plan = plan_of_case(case, VIRTUAL, layers=4)
    plan = replace(plan, tp=case["tp"], sequence_parallel=case["sequence_parallel"])
    results = run(worker_pool, recomputed(plan, case["policy"]))
    check_sharded(plan, results)
    if case["dp"] > 1:
        return  # replicas are summed in any order
    for one, other in zip(results, run(worker_pool, plan), strict=True):
        assert one.loss == other.loss
        for stage, gradients in one.gradients.items():
            assert all(np.array_equal(array, other.gradients[stage][name]) for name, array in gradients.items())
