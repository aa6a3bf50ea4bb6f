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
from penstock.planner.compile import program_of
from tests.support.layout_ranks import STEPS, train_some
from tests.support.small_plans import parts_alone, small_plan
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.xdist_group("worker-pool")

LAYOUTS = 10
NUM_SEQUENCES = 4
SLICES = ((12,), (4, 4, 4), (5, 1, 6), (7, 5))
SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zbv", "interleaved-1f1b")
VIRTUAL = {"zbv": 2, "interleaved-1f1b": 2}
"""Stages per rank; one where not named."""
MESHES = ((1, 2, 2), (1, 4, 1), (2, 2, 2), (1, 4, 2), (2, 1, 2), (4, 2, 1), (1, 2, 4), (2, 4, 2), (1, 1, 3), (1, 4, 4))
"""dp, tp and pp of all layouts of a walk, on 16 ranks at most."""

HEAD_PARTS = (1, 1, 2, 2, 2, 3, 3, 4, 5, 5)


def walk(family: Family, precision: Precision) -> list[Plan]:
    """Layouts in random order, each mesh and number of parts of the head with any other choices."""
    chance = random.Random(f"layouts of {family}")
    meshes, parts = chance.sample(MESHES, LAYOUTS), chance.sample(HEAD_PARTS, LAYOUTS)
    return [layout(chance, family, precision, *drawn) for drawn in zip(meshes, parts, strict=True)]


def layout(
    chance: random.Random, family: Family, precision: Precision, mesh: tuple[int, int, int], head_parts: int
) -> Plan:
    """One on this mesh."""
    dp, tp, pp = mesh
    microbatch = chance.choice([size for size in (1, 2) if NUM_SEQUENCES // dp % size == 0])
    schedule = chance.choice(SCHEDULES)
    plan = small_plan(
        family=family,
        schedule=schedule,
        slices=chance.choice(SLICES),
        dp=dp,
        pp=pp,
        num_stages=pp * VIRTUAL.get(schedule, 1),
        head_parts=head_parts,
        microbatch=microbatch,
        num_microbatches=NUM_SEQUENCES // dp // microbatch,
        precision=precision,
        layers=4,
    )
    stages = parts_alone(plan) if head_parts > 1 and chance.random() < 0.5 else plan.stages
    return replace(plan, stages=stages, tp=tp, sequence_parallel=chance.random() < 0.7)


@pytest.mark.parametrize("family", Family)
def test_a_walk_has_heads_in_parts_on_every_kind_of_mesh(family: Family) -> None:
    plans = walk(family, Precision.FP64)
    assert len(plans) == LAYOUTS
    divided = [plan for plan in plans if plan.head_parts > 1]
    assert {plan.tp for plan in divided} == {1, 2, 4}
    assert any(plan.dp > 1 for plan in divided)
    assert any(plan.tp == 4 and plan.pp > 1 for plan in divided)
    assert any(plan.tp > 1 and not plan.sequence_parallel for plan in plans)
    assert any(plan.stages[-1][0] == plan.model.num_units - 1 for plan in divided), "a part alone in its stage"


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


@pytest.mark.parametrize("family", [Family.GPT2, pytest.param(Family.LLAMA, marks=pytest.mark.long)])
@pytest.mark.parametrize("precision", [Precision.FP64, pytest.param(Precision.FP32, marks=pytest.mark.long)])
def test_ten_layouts_learn_what_one_process_learns(
    worker_pool: WorkerPool, tmp_path: Path, family: Family, precision: Precision
) -> None:
    """In fp64 to 1e-10; in fp32 to five times what another order of the sequences changes in one process."""
    own = losses_of(worker_pool, alone(family, precision), tmp_path / "alone", range(STEPS))
    assert own[-1] < 0.8 * own[0]
    walked: list[float] = []
    per_layout = STEPS // LAYOUTS
    for first, plan in zip(range(0, STEPS, per_layout), walk(family, precision), strict=True):
        walked += losses_of(worker_pool, plan, tmp_path / "walk", range(first, first + per_layout))
    if precision is Precision.FP64:
        assert walked == pytest.approx(own, rel=1e-10)
        return
    turned = losses_of(worker_pool, alone(family, precision), tmp_path / "turned", range(STEPS), is_reversed=True)
    usual = max(abs(a - b) for a, b in zip(turned, own, strict=True))
    assert max(abs(a - b) for a, b in zip(walked, own, strict=True)) <= 5 * usual
