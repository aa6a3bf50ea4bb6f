"""A job that goes on in one layout after another, real processes and checkpoints in between, learns what one process
does.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.core.layout import Precision
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.planner.realise import program_of
from tests.support.layout_ranks import STEPS, train_some
from tests.support.small_plans import small_plan
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.xdist_group("worker-pool")

LAYOUTS = 10
NUM_SEQUENCES = 4
SLICES = ((12,), (4, 4, 4), (5, 1, 6), (7, 5))
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zbv", "interleaved-1f1b")
VIRTUAL = {"zbv": 2, "interleaved-1f1b": 2}
"""Stages per rank; one where not named."""
HEAD_PARTS = (1, 2, 3, 5)


def layout(chance: random.Random, family: Family, precision: Precision) -> Plan:
    """Any that 16 ranks can run."""
    dp, tp, pp = chance.choice(((1, 2, 2), (1, 4, 1), (2, 2, 2), (1, 4, 2), (2, 1, 2), (4, 2, 1), (1, 2, 4), (2, 4, 2)))
    microbatch = chance.choice([size for size in (1, 2) if NUM_SEQUENCES // dp % size == 0])
    schedule = chance.choice(SCHEDULES)
    plan = small_plan(
        family=family,
        schedule=schedule,
        slices=chance.choice(SLICES),
        dp=dp,
        pp=pp,
        num_stages=pp * VIRTUAL.get(schedule, 1),
        head_parts=chance.choice(HEAD_PARTS),
        microbatch=microbatch,
        num_microbatches=NUM_SEQUENCES // dp // microbatch,
        precision=precision,
        layers=4,
    )
    return replace(plan, tp=tp, sequence_parallel=chance.random() < 0.7)


def losses_of(pool: WorkerPool, plan: Plan, root: Path, steps: range, *, is_reversed: bool = False) -> list[float]:
    """What all ranks have for every step; they agree."""
    program = program_of(plan)
    pool.connect(plan, program)
    first, *others = pool.run(train_some, plan, program, root, steps, is_reversed, num_ranks=plan.num_ranks)
    assert all(each == first for each in others)
    return list(first)


def alone(family: Family, precision: Precision) -> Plan:
    """One process, one sequence after the other."""
    return small_plan(
        family=family, pp=1, slices=(12,), microbatch=1, num_microbatches=NUM_SEQUENCES, precision=precision, layers=4
    )


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("precision", [Precision.FP64, Precision.FP32])
def test_ten_layouts_learn_what_one_process_learns(
    worker_pool: WorkerPool, tmp_path: Path, family: Family, precision: Precision
) -> None:
    """In fp64 to 1e-10; in fp32 to five times what another order of the sequences changes in one process."""
    chance = random.Random(f"layouts {family}")
    own = losses_of(worker_pool, alone(family, precision), tmp_path / "alone", range(STEPS))
    assert own[-1] < 0.8 * own[0]
    walked: list[float] = []
    each = STEPS // LAYOUTS
    for first in range(0, STEPS, each):
        plan = layout(chance, family, precision)
        walked += losses_of(worker_pool, plan, tmp_path / "walk", range(first, first + each))
    if precision is Precision.FP64:
        assert walked == pytest.approx(own, rel=1e-10)
        return
    turned = losses_of(worker_pool, alone(family, precision), tmp_path / "turned", range(STEPS), is_reversed=True)
    usual = max(abs(a - b) for a, b in zip(turned, own, strict=True))
    assert max(abs(a - b) for a, b in zip(walked, own, strict=True)) <= 5 * usual
