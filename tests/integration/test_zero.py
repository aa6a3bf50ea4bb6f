"""Replicas that divide the optimizer's state, in real processes: gradients are the unsliced model's, and training that
of replicas that do not, to the last bit. Jobs go on in any layout.

Every pair of values of two factors occurs in some case. The model is wide enough that each of four replicas has a part
of every stage.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.buckets import MOST_BUCKETS
from penstock.core.layout import Precision, num_parameters
from penstock.core.model import Family
from penstock.core.moments import MomentType
from penstock.core.plan import Plan
from penstock.core.replicas import BLOCK, ReductionType
from penstock.planner.compile import program_of
from penstock.planner.memory import optimizer_bytes_per_parameter
from penstock.trainer.checkpoint import find_checkpoints, read_weights
from tests.support.covering import covering_array
from tests.support.layout_ranks import train_some
from tests.support.pipeline_ranks import put_together, train_rank
from tests.support.sharded_pipeline import check_sharded
from tests.support.small_plans import plan_of_case, small_plan, widened
from tests.support.worker_pool import WorkerPool
from tests.support.zero_ranks import peak_of_two_steps, train_steps

pytestmark = pytest.mark.xdist_group("worker-pool")

MOST_RANKS = 16
VIRTUAL = {"zbv": 2, "interleaved-1f1b": 2, "interleaved-zb": 2}
"""Stages per rank; one where not named."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1),
    "dp": (1, 2, 4),
    "pp": (1, 2, 3, 4),
    "tp": (1, 2),
    "family": tuple(Family),
    "head_parts": (1, 3),
    "schedule": ("1f1b", "zb", "zbv", "interleaved-1f1b"),
    "slices": ((6,), (3, 1, 2)),
    "num_microbatches": (1, 3),
}


def is_allowed(case: dict[str, Any]) -> bool:
    """One replica divides nothing; at most as many ranks as the pool has; loops want a pipeline."""
    is_loop = case["schedule"].startswith("interleaved")
    num_ranks = case["dp"] * case["tp"] * case["pp"]
    return (case["dp"] > 1 or not case["zero"]) and num_ranks <= MOST_RANKS and (case["pp"] > 1 or not is_loop)


def plan_of(case: dict[str, Any], **changes: Any) -> Plan:
    """The plan of a case."""
    plan = plan_of_case(case, VIRTUAL, head_parts=case["head_parts"], zero=case["zero"], layers=4, **changes)
    return replace(widened(plan), tp=case["tp"])


def name_of(case: dict[str, Any]) -> str:
    """Its values in short."""
    return " ".join(f"{name[0]}{value}" for name, value in case.items()).replace(" ", "")


CASES = covering_array(FACTORS, is_allowed)


def test_the_cases_are_few() -> None:
    assert len(CASES) <= 30


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gradients_are_those_of_the_whole_model(worker_pool: WorkerPool, case: dict[str, Any]) -> None:
    plan = plan_of(case)
    program = program_of(plan)
    worker_pool.connect(plan, program)
    results = worker_pool.run(train_rank, plan, program, num_ranks=plan.num_ranks)
    check_sharded(plan, put_together(plan, results) if plan.zero else results)


TRAINED: dict[str, dict[str, Any]] = {
    "one stage": {"pp": 1, "schedule": "1f1b"},
    "pipeline": {"pp": 2, "schedule": "zb"},
    "copies on one rank": {"pp": 2, "schedule": "zbv"},
    "copies on three ranks": {"pp": 3, "schedule": "interleaved-1f1b", "head_parts": 3},
    "shards": {"pp": 2, "tp": 2, "schedule": "1f1b"},
}
STEPS = 4


@pytest.mark.parametrize(
    ("family", "precision", "moment_type", "reduction_type"),
    [
        (Family.GPT2, Precision.FP32, MomentType.FP32, ReductionType.FP32),
        (Family.LLAMA, Precision.BF16, MomentType.FP32, ReductionType.FP32),
        (Family.LLAMA, Precision.FP32, MomentType.BF16, ReductionType.FP32),
        (Family.GPT2, Precision.FP32, MomentType.FP32, ReductionType.BF16),
        (Family.LLAMA, Precision.BF16, MomentType.FP32, ReductionType.BF16),
    ],
)
@pytest.mark.parametrize("layout", TRAINED)
def test_two_replicas_train_alike_with_the_state_divided_or_not(
    worker_pool: WorkerPool,
    layout: str,
    family: Family,
    precision: Precision,
    moment_type: MomentType,
    reduction_type: ReductionType,
) -> None:
    """Losses, norms and weights, bit for bit, with clipping at work in every step."""
    case = {"dp": 2, "tp": 1, "head_parts": 1, "slices": (3, 1, 2), "num_microbatches": 2, "family": family}
    trained = []
    for zero in (0, 1):
        plan = plan_of({**case, **TRAINED[layout], "zero": zero}, precision=precision)
        plan = replace(plan, moment_type=moment_type, gradient_reduction_type=reduction_type)
        program = program_of(plan)
        worker_pool.connect(plan, program)
        results = worker_pool.run(train_steps, plan, program, STEPS, num_ranks=plan.num_ranks)
        assert all(result.losses == results[0].losses and result.norms == results[0].norms for result in results)
        trained.append(results)
    whole, divided = trained
    assert divided[0].losses == whole[0].losses
    assert divided[0].norms == whole[0].norms
    assert divided[0].evaluated == whole[0].evaluated
    assert min(whole[0].norms) > whole[0].clip
    assert whole[0].losses[-1] < whole[0].losses[0]
    assert [result.weights for result in divided] == [result.weights for result in whole]


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("moment_type", MomentType)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_the_state_of_the_optimizer_falls_by_dp(
    worker_pool: WorkerPool, dp: int, precision: Precision, moment_type: MomentType
) -> None:
    """Moments as they were allocated, up to two blocks per bucket; the masters of bf16 with them."""
    measured = []
    for zero in (0, 1):
        plan = widened(small_plan(pp=1, dp=dp, zero=zero, precision=precision, layers=8))
        plan = replace(plan, moment_type=moment_type)
        program = program_of(plan)
        worker_pool.connect(plan, program)
        results = worker_pool.run(train_steps, plan, program, 1, num_ranks=dp)
        measured.append(max(result.state_bytes for result in results))
    whole, divided = measured
    per_parameter = optimizer_bytes_per_parameter(precision, moment_type)
    assert whole == per_parameter * num_parameters(plan.model)
    assert whole / dp <= divided <= whole / dp + per_parameter * MOST_BUCKETS * 2 * BLOCK


WALKS: tuple[dict[str, Any], ...] = (
    {"dp": 2, "pp": 2, "zero": 1, "schedule": "1f1b"},
    {"dp": 4, "pp": 1, "zero": 1, "schedule": "gpipe"},
    {"dp": 1, "pp": 3, "zero": 0, "schedule": "zb"},
    {"dp": 2, "pp": 2, "tp": 2, "zero": 1, "schedule": "zbv", "head_parts": 3},
    {"dp": 2, "pp": 1, "tp": 4, "zero": 1, "schedule": "1f1b"},
    {"dp": 4, "pp": 2, "zero": 0, "schedule": "1f1b"},
    {"dp": 2, "pp": 4, "zero": 1, "schedule": "interleaved-1f1b"},
    {"dp": 1, "pp": 1, "zero": 0, "schedule": "1f1b"},
)
WALK_STEPS = 2


@pytest.mark.parametrize(("family", "precision"), [(Family.GPT2, Precision.FP64), (Family.LLAMA, Precision.BF16)])
def test_a_job_goes_on_in_any_layout_with_the_state_divided_or_not(
    worker_pool: WorkerPool, tmp_path: Path, family: Family, precision: Precision
) -> None:
    """Through checkpoints, as one process that does it all learns; in fp64 to 1e-10. Each checkpoint has every element
    once, and whole tensors can be read from it.
    """
    steps = range(WALK_STEPS * len(WALKS))
    alone = plan_of({**SHAPE, "family": family, **WALKS[-1], "num_microbatches": 2}, precision=precision)
    (own,) = run_some(worker_pool, alone, tmp_path / "alone", steps)
    walked: list[float] = []
    for number, layout in enumerate(WALKS):
        plan = plan_of(
            {**SHAPE, "family": family, **layout, "num_microbatches": 4 // layout["dp"]}, precision=precision
        )
        plan = replace(plan, microbatch=1)
        some = range(WALK_STEPS * number, WALK_STEPS * (number + 1))
        first, *others = run_some(worker_pool, plan, tmp_path / "walk", some)
        assert all(losses == first for losses in others)
        walked += first
        (newest,) = find_checkpoints(tmp_path / "walk")
        weights = read_weights(newest.folder)
        assert sum(map(torch.numel, weights.values())) == num_parameters(plan.model)
    assert walked == pytest.approx(own, rel=1e-10 if precision is Precision.FP64 else 0.02)


SHAPE: dict[str, Any] = {"tp": 1, "head_parts": 1, "slices": (7, 5)}


def run_some(pool: WorkerPool, plan: Plan, root: Path, steps: range) -> list[list[float]]:
    """The losses of every rank."""
    program = program_of(plan)
    pool.connect(plan, program)
    return pool.run(train_some, plan, program, root, steps, num_ranks=plan.num_ranks)


@pytest.mark.parametrize(
    ("precision", "moment_type"),
    [(Precision.FP32, MomentType.FP32), (Precision.BF16, MomentType.FP32), (Precision.BF16, MomentType.BF16)],
)
def test_the_peak_of_resident_memory_falls_too(precision: Precision, moment_type: MomentType) -> None:
    """Of eight million parameters, over building and two steps, in new processes: no exchange takes back what shards
    spare.
    """
    peaks = []
    for zero in (0, 1):
        plan = small_plan(pp=1, dp=2, zero=zero, precision=precision, layers=8)
        model = replace(plan.model, hidden=256, ffn_hidden=704, vocab=4096)
        plan = replace(plan, model=model, moment_type=moment_type)
        program, pool = program_of(plan), WorkerPool(2)
        try:
            pool.connect(plan, program)
            peaks.append(max(pool.run(peak_of_two_steps, plan, program)))
        finally:
            pool.close()
    spared = num_parameters(plan.model) * optimizer_bytes_per_parameter(precision, moment_type) // 2
    assert spared > 30 * 2**20
    assert peaks[0] - peaks[1] == pytest.approx(spared, abs=6 * 2**20)
