"""Gradients in buckets, in real processes: they are the unsliced model's in fp64, and two replicas train as with whole
stages, to the last bit.

Every pair of values of two factors occurs in some case. Each unit is a bucket of its own, but for parts of a head,
which run as one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.core.invariants import prove
from penstock.core.layout import Precision, tied_stages
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.core.schedule import Kind, Part
from penstock.planner.compile import lowered, program_of
from tests.integration.test_zero import VIRTUAL, name_of
from tests.support.covering import covering_array
from tests.support.pipeline_ranks import train_rank
from tests.support.sharded_pipeline import check_sharded
from tests.support.small_plans import plan_of_case, widened
from tests.support.worker_pool import WorkerPool
from tests.support.zero_ranks import train_steps

pytestmark = pytest.mark.xdist_group("worker-pool")

MOST_RANKS = 16
FACTORS: dict[str, tuple[Any, ...]] = {
    "dp": (2, 4),
    "pp": (1, 2, 3, 4),
    "tp": (1, 2),
    "family": tuple(Family),
    "head_parts": (1, 3),
    "schedule": ("1f1b", "zb", "zbv", "interleaved-1f1b", "gpipe"),
    "slices": ((6,), (3, 1, 2)),
    "num_microbatches": (1, 3),
}


def is_allowed(case: dict[str, Any]) -> bool:
    """At most as many ranks as the pool has; loops want a pipeline. gloo adds the terms of more than two replicas in an
    order that depends on an element's place, so copies of a tensor are equal in every bit only where their places are:
    not in copies of a tied matrix on two stages, nor in shards of unequal parts of a head.
    """
    is_loop = case["schedule"].startswith("interleaved")
    has_copies = case["family"] is Family.GPT2 and case["pp"] > 1
    is_uneven = case["tp"] > 1 and case["head_parts"] > 1
    fits = case["dp"] * case["tp"] * case["pp"] <= MOST_RANKS
    return fits and (case["pp"] > 1 or not is_loop) and (case["dp"] == 2 or not (has_copies or is_uneven))


def plan_of(case: dict[str, Any], **changes: Any) -> Plan:
    """The plan of a case."""
    plan = plan_of_case(case, VIRTUAL, head_parts=case["head_parts"], layers=4, **changes)
    return replace(plan, tp=case["tp"])


def finest(plan: Plan) -> tuple[tuple[Part, ...], ...]:
    """A bucket for each unit of a stage, with all parts of a head in one."""
    head = plan.model.first_head_unit
    buckets = []
    for number, (first, stop) in enumerate(plan.stages):
        body = max(min(stop, head) - first, 1)
        parts = [Part(unit, unit + 1) for unit in range(body)]
        parts += [Part(body, stop - first)] if body < stop - first else []
        is_whole = len(parts) == 1 or number in tied_stages(plan.model, plan.stages)[1:]
        buckets.append(() if is_whole else tuple(reversed(parts)))
    return tuple(buckets)


def in_finest_buckets(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The proved Program of the plan with these buckets."""
    monkeypatch.setattr("penstock.planner.compile.stage_buckets", lambda *arguments: finest(plan))
    program = lowered(plan)
    prove(program, num_trained=[stop - first for first, stop in plan.stages])
    return program


CASES = covering_array(FACTORS, is_allowed)


def test_the_cases_are_few() -> None:
    assert len(CASES) <= 30


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gradients_are_those_of_the_whole_model(
    worker_pool: WorkerPool, case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(case)
    program = in_finest_buckets(plan, monkeypatch)
    starts = [i.action for rank in program.ranks for i in rank.instructions if i.action.kind is Kind.START_REDUCE]
    assert any(action.part is not None for action in starts) == any(finest(plan))
    worker_pool.connect(plan, program)
    check_sharded(plan, worker_pool.run(train_rank, plan, program, num_ranks=plan.num_ranks))


TRAINED: dict[str, dict[str, Any]] = {
    "one stage": {"pp": 1, "schedule": "1f1b"},
    "pipeline": {"pp": 2, "schedule": "zb"},
    "copies on one rank": {"pp": 2, "schedule": "zbv"},
    "copies on three ranks": {"pp": 3, "schedule": "interleaved-1f1b", "head_parts": 3},
    "shards": {"pp": 2, "tp": 2, "schedule": "1f1b"},
}
STEPS = 3


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("layout", TRAINED)
def test_two_replicas_train_alike_in_buckets_or_not(
    worker_pool: WorkerPool, layout: str, family: Family, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms and weights, bit for bit; and as with the state divided, which has whole stages."""
    case = {"dp": 2, "tp": 1, "head_parts": 1, "slices": (3, 1, 2), "num_microbatches": 2, "family": family}
    plan = widened(plan_of({**case, **TRAINED[layout]}, precision=precision))
    divided = replace(plan, zero=1)
    trained = []
    for each, program in ((divided, program_of(divided)), (plan, in_finest_buckets(plan, monkeypatch))):
        worker_pool.connect(each, program)
        trained.append(worker_pool.run(train_steps, each, program, STEPS, num_ranks=each.num_ranks))
    whole, in_buckets = trained
    assert in_buckets[0].losses == whole[0].losses
    assert in_buckets[0].norms == whole[0].norms
    assert [result.weights for result in in_buckets] == [result.weights for result in whole]
