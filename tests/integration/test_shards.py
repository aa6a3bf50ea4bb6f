"""Gradients of whole steps with tensor parallelism, from real processes, against the unsliced model in one process.

Every pair of values of two factors occurs in some case: degrees, sequence parallelism, family, slices, schedule,
number of micro-batches, key/value heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.planner.compile import program_of
from tests.support.covering import covering_array
from tests.support.pipeline_ranks import train_rank
from tests.support.sharded_pipeline import check_sharded
from tests.support.small_plans import plan_of_case
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.xdist_group("worker-pool")

MOST_RANKS = 16
VIRTUAL = {"zbv": 2, "v-half": 2, "interleaved-zb": 2, "interleaved-1f1b": 2}
"""Stages per rank; one where not named."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "tp": (2, 4),
    "sequence_parallel": (True, False),
    "family": tuple(Family),
    "slices": ((12,), (4, 4, 4), (5, 1, 6), (7, 5)),
    "schedule": ("gpipe", "1f1b", "zb-h1", "zb", "zbv", "v-half", "interleaved-1f1b", "interleaved-zb"),
    "pp": (1, 2),
    "dp": (1, 2),
    "num_microbatches": (1, 3),
    "kv_heads": (1, 2, 4),
}


def is_allowed(case: dict[str, Any]) -> bool:
    """At most as many ranks as the pool has; gpt2 groups no heads; loops want a pipeline."""
    is_whole = case["family"] is Family.LLAMA or case["kv_heads"] == 4
    is_loop = case["schedule"].startswith("interleaved")
    return case["tp"] * case["pp"] * case["dp"] <= MOST_RANKS and is_whole and (case["pp"] > 1 or not is_loop)


def plan_of(case: dict[str, Any]) -> Plan:
    """The small model's plan for a case."""
    plan = plan_of_case(case, VIRTUAL, layers=4)
    model = replace(plan.model, kv_heads=case["kv_heads"])
    return replace(plan, model=model, tp=case["tp"], sequence_parallel=case["sequence_parallel"])


def name_of(case: dict[str, Any]) -> str:
    """Its values in short."""
    tokens = "by tokens" if case["sequence_parallel"] else "whole"
    degrees = f"{case['dp']}x{case['tp']}x{case['pp']}"
    slices = "+".join(map(str, case["slices"]))
    counts = f"{case['num_microbatches']} {case['kv_heads']}"
    return f"{degrees} {tokens} {case['family']} {slices} {case['schedule']} {counts}"


CASES = covering_array(FACTORS, is_allowed)


def test_the_cases_are_few_and_hold_every_pair() -> None:
    assert len(CASES) <= 60
    assert {(case["tp"], case["schedule"]) for case in CASES} == {
        (tp, schedule) for tp in FACTORS["tp"] for schedule in FACTORS["schedule"]
    }


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gradients_are_those_of_the_whole_model(worker_pool: WorkerPool, case: dict[str, Any]) -> None:
    plan = plan_of(case)
    program = program_of(plan)
    worker_pool.connect(plan, program)
    check_sharded(plan, worker_pool.run(train_rank, plan, program, num_ranks=plan.num_ranks))
