"""Gradients in buckets, in real processes: they are the unsliced model's in fp64, and two replicas train as with whole
stages, to the last bit, whether each has all sums or they divide the state of the optimizer.

Every pair of values of two factors occurs in some case. Each unit is a bucket of its own, but for parts of a head,
which run as one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.core.invariants import prove
from penstock.core.layout import Precision, tied_stages
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.core.schedule import Kind, Part
from penstock.planner.compile import lowered
from tests.integration.test_zero import VIRTUAL, name_of
from tests.support.covering import covering_array
from tests.support.layout_ranks import train_some
from tests.support.pipeline_ranks import put_together, train_rank
from tests.support.sharded_pipeline import check_sharded
from tests.support.small_plans import plan_of_case, widened
from tests.support.worker_pool import WorkerPool
from tests.support.zero_ranks import train_steps

pytestmark = pytest.mark.xdist_group("worker-pool")

MOST_RANKS = 16
FACTORS: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1),
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
    not in copies of a tied matrix on two stages, nor in shards of unequal parts of a head. Replicas that divide the
    state add them in their own order.
    """
    is_loop = case["schedule"].startswith("interleaved")
    has_copies = case["family"] is Family.GPT2 and case["pp"] > 1
    is_uneven = case["tp"] > 1 and case["head_parts"] > 1
    fits = case["dp"] * case["tp"] * case["pp"] <= MOST_RANKS
    return (
        fits and (case["pp"] > 1 or not is_loop) and (case["zero"] or case["dp"] == 2 or not (has_copies or is_uneven))
    )


def plan_of(case: dict[str, Any], **changes: Any) -> Plan:
    """The plan of a case."""
    plan = plan_of_case(case, VIRTUAL, head_parts=case["head_parts"], zero=case["zero"], layers=4, **changes)
    return replace(widened(plan) if case["zero"] else plan, tp=case["tp"])


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
    return in_buckets(plan, finest(plan), monkeypatch)


def in_whole_stages(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Program:
    """The proved Program of the plan without buckets."""
    return in_buckets(plan, ((),) * len(plan.stages), monkeypatch)


def in_buckets(plan: Plan, buckets: tuple[tuple[Part, ...], ...], monkeypatch: pytest.MonkeyPatch) -> Program:
    """The proved Program of the plan with the buckets of every stage."""
    monkeypatch.setattr("penstock.planner.compile.stage_buckets", lambda *arguments: buckets)
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
    results = worker_pool.run(train_rank, plan, program, num_ranks=plan.num_ranks)
    check_sharded(plan, put_together(plan, results) if plan.zero else results)


WALKS: tuple[tuple[bool, dict[str, Any]], ...] = (
    (True, {"zero": 1, "dp": 2, "pp": 1, "schedule": "1f1b"}),
    (False, {"zero": 1, "dp": 2, "pp": 2, "schedule": "1f1b"}),
    (True, {"zero": 1, "dp": 4, "pp": 2, "schedule": "zb"}),
    (True, {"zero": 0, "dp": 2, "pp": 2, "schedule": "zbv"}),
    (True, {"zero": 1, "dp": 2, "pp": 3, "tp": 2, "schedule": "1f1b", "head_parts": 3}),
    (False, {"zero": 1, "dp": 4, "pp": 1, "schedule": "gpipe"}),
    (False, {"zero": 0, "dp": 1, "pp": 2, "schedule": "1f1b"}),
)
"""Whether gradients are in buckets, and the layout."""

WALK_STEPS = 2


@pytest.mark.parametrize(("family", "precision"), [(Family.GPT2, Precision.FP64), (Family.LLAMA, Precision.BF16)])
def test_a_job_goes_on_in_any_layout_with_buckets_or_without(
    worker_pool: WorkerPool, tmp_path: Path, family: Family, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through checkpoints, whose form does not depend on buckets, as one process that does it all learns."""
    shape = {"tp": 1, "head_parts": 1, "slices": (7, 5), "family": family}
    walked: list[float] = []
    for number, (has_buckets, layout) in enumerate(WALKS):
        case = {**shape, **layout, "num_microbatches": 4 // layout["dp"]}
        plan = replace(widened(plan_of(case, precision=precision)), microbatch=1)
        program = (in_finest_buckets if has_buckets else in_whole_stages)(plan, monkeypatch)
        worker_pool.connect(plan, program)
        some = range(WALK_STEPS * number, WALK_STEPS * (number + 1))
        results = worker_pool.run(train_some, plan, program, tmp_path / "walk", some, num_ranks=plan.num_ranks)
        assert all(losses == results[0] for losses in results)
        walked += results[0]
    alone, alone_program = plan, program
    worker_pool.connect(alone, alone_program)
    steps = range(WALK_STEPS * len(WALKS))
    (own, *_) = worker_pool.run(train_some, alone, alone_program, tmp_path / "alone", steps, num_ranks=alone.num_ranks)
    assert walked == pytest.approx(own, rel=1e-10 if precision is Precision.FP64 else 0.02)


TRAINED: dict[str, dict[str, Any]] = {
    "one stage": {"pp": 1, "schedule": "1f1b"},
    "pipeline": {"pp": 2, "schedule": "zb"},
    "copies on one rank": {"pp": 2, "schedule": "zbv"},
    "copies on three ranks": {"pp": 3, "schedule": "interleaved-1f1b", "head_parts": 3},
    "shards": {"pp": 2, "tp": 2, "schedule": "1f1b"},
}
STEPS = 3


@pytest.mark.parametrize(("family", "precision"), [(Family.GPT2, Precision.FP32), (Family.LLAMA, Precision.BF16)])
@pytest.mark.parametrize("layout", TRAINED)
def test_two_replicas_train_alike_in_buckets_or_not(
    worker_pool: WorkerPool, layout: str, family: Family, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms, weights and losses of evaluations between steps, bit for bit, with the state divided and not."""
    case = {"dp": 2, "tp": 1, "head_parts": 1, "slices": (3, 1, 2), "num_microbatches": 2, "family": family, "zero": 1}
    divided = plan_of({**case, **TRAINED[layout]}, precision=precision)
    plan = replace(divided, zero=0)
    programs = [(divided, in_whole_stages(divided, monkeypatch))]
    programs += [(variant, in_finest_buckets(variant, monkeypatch)) for variant in (plan, divided)]
    trained = []
    for variant, program in programs:
        worker_pool.connect(variant, program)
        trained.append(worker_pool.run(train_steps, variant, program, STEPS, num_ranks=plan.num_ranks))
    whole, *in_buckets = trained
    for results in in_buckets:
        assert results[0].losses == whole[0].losses
        assert results[0].norms == whole[0].norms
        assert results[0].evaluated == whole[0].evaluated
        assert [result.weights for result in results] == [result.weights for result in whole]
