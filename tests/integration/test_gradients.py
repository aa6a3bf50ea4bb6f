"""The gradients of every parameter, from real processes, against the unsliced model in one process."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.core.schedule import CSV, ScheduleSpec
from penstock.planner.compile import program_of
from penstock.planner.schedules.blocks import Block
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.recorded import record
from penstock.planner.schedules.registry import BUILT_IN
from penstock.planner.schedules.seeds import ONE_BY_ONE
from penstock.planner.schedules.v_shape import HALF, MINIMUM, ZBV
from tests.support.pipeline_ranks import RankResult, expected, train_rank
from tests.support.small_plans import looped_schedule, remade_units, small_plan, with_stages
from tests.support.stage_pipeline import gradient_error
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.xdist_group("worker-pool")

TOLERANCE = 1e-10
SLICES = {"equal": (2, 2, 2), "unequal": (3, 1, 2), "tokens": (1, 1, 1, 1, 1, 1)}


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb", "zbv"])
@pytest.mark.parametrize("slicing", SLICES)
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_planned_schedules(
    worker_pool: WorkerPool, family: Family, schedule: str, slicing: str, pp: int, dp: int, num_microbatches: int
) -> None:
    plan = small_plan(
        family=family,
        schedule=schedule,
        slices=SLICES[slicing],
        pp=pp,
        dp=dp,
        num_microbatches=num_microbatches,
    )
    check(worker_pool, plan)


VIRTUAL = {
    "eager-1f1b": 1,
    "interleaved-1f1b": 3,
    "interleaved-zb": 3,
    "v-half": 2,
    "v-min": 2,
    "zbv": 3,
}
"""Stages per rank."""


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("schedule", VIRTUAL)
@pytest.mark.parametrize("slicing", ["equal", "unequal"])
@pytest.mark.parametrize(("pp", "dp", "num_microbatches"), [(2, 1, 3), (2, 2, 5), (3, 1, 2), (4, 1, 5)])
def test_schedules_of_several_stages_per_rank(
    worker_pool: WorkerPool, family: Family, schedule: str, slicing: str, pp: int, dp: int, num_microbatches: int
) -> None:
    plan = small_plan(
        family=family,
        schedule=schedule,
        slices=SLICES[slicing],
        pp=pp,
        dp=dp,
        num_stages=pp * VIRTUAL[schedule],
        num_microbatches=num_microbatches,
        layers=6,
    )
    check(worker_pool, plan)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("schedule", BUILT_IN)
@pytest.mark.parametrize(("pp", "dp", "num_microbatches"), [(2, 2, 3), (4, 1, 5)])
def test_every_schedule_without_slices(
    worker_pool: WorkerPool, family: Family, schedule: str, pp: int, dp: int, num_microbatches: int
) -> None:
    plan = small_plan(
        family=family,
        schedule=schedule,
        slices=(6,),
        pp=pp,
        dp=dp,
        num_stages=pp * VIRTUAL.get(schedule, 1),
        num_microbatches=num_microbatches,
        layers=6,
    )
    check(worker_pool, plan)


REMAINDERS = {"fewer": (4, 2), "one": (6,), "as many": (1, 2, 3)}
"""Slices of a last micro-batch of one sequence, where the others have two."""


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("schedule", BUILT_IN)
@pytest.mark.parametrize("slicing", REMAINDERS)
@pytest.mark.parametrize(("pp", "dp", "num_microbatches"), [(2, 2, 2), (4, 1, 5)])
def test_a_smaller_last_micro_batch_with_slices_of_its_own(
    worker_pool: WorkerPool, family: Family, schedule: str, slicing: str, pp: int, dp: int, num_microbatches: int
) -> None:
    plan = small_plan(
        family=family,
        schedule=schedule,
        slices=(3, 1, 2),
        pp=pp,
        dp=dp,
        num_stages=pp * VIRTUAL.get(schedule, 1),
        num_microbatches=num_microbatches,
        layers=6,
        remainder=1,
        remainder_slices=REMAINDERS[slicing],
    )
    check(worker_pool, plan)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_smaller_last_micro_batch_of_an_imported_schedule(worker_pool: WorkerPool, recompute: bool) -> None:
    schedule = looped_schedule(num_ranks=2, num_stages=4, num_microbatches=3, num_slices=3, recompute=recompute)
    plan = small_plan(
        schedule=schedule,
        slices=(3, 1, 2),
        num_stages=4,
        num_microbatches=3,
        microbatch=3,
        remainder=2,
        remainder_slices=(5, 1),
    )
    check(worker_pool, plan)


BLOCKS = {
    "V-Min": MINIMUM,
    "V-Half": HALF,
    "ZB-V": Block(in_slots=True, down=100, up=100, is_fused=False),
    "fused": Block(in_slots=False, down=100, up=0, is_fused=True),
    "stretched": Block(in_slots=False, down=0, up=0, is_fused=False, stretch=150),
    "whole": Block(in_slots=False, down=100, up=0, is_fused=False, is_whole=True),
    "one by one": ONE_BY_ONE,
}


@pytest.mark.parametrize("slices", [(6,), (3, 1, 2)])
@pytest.mark.parametrize("block", BLOCKS)
def test_building_blocks_along_a_v(worker_pool: WorkerPool, block: str, slices: tuple[int, ...]) -> None:
    """Repeated and refined, each of its own: by costs a generator would choose one."""
    inputs = ScheduleInputs(num_ranks=4, num_microbatches=5, num_slices=len(slices), stages_per_rank=2)
    schedule = ScheduleSpec(generator="zbv", version=2, text=record(ZBV.of_block(inputs, BLOCKS[block])))
    plan = small_plan(
        family=Family.LLAMA, schedule=schedule, slices=slices, pp=4, num_stages=8, num_microbatches=5, layers=6
    )
    check(worker_pool, plan)


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("recompute", ["none", "whole", "parts"])
@pytest.mark.parametrize(("pp", "num_stages", "dp"), [(1, 2, 1), (2, 4, 1), (2, 4, 2), (2, 6, 1), (4, 8, 1)])
def test_imported_schedules_with_several_stages_per_rank(
    worker_pool: WorkerPool, family: Family, recompute: str, pp: int, num_stages: int, dp: int
) -> None:
    schedule = looped_schedule(
        num_ranks=pp,
        num_stages=num_stages,
        num_microbatches=2,
        num_slices=3,
        recompute=recompute != "none",
        num_units=remade_units(num_stages) if recompute == "parts" else (),
    )
    plan = small_plan(
        family=family,
        schedule=schedule,
        slices=(3, 1, 2),
        pp=pp,
        dp=dp,
        num_stages=num_stages,
        num_microbatches=2,
    )
    check(worker_pool, plan)


@pytest.mark.parametrize("remade", [0, 1])
@pytest.mark.parametrize("slices", [(1, 5), (5, 1)])
def test_recompute_of_one_slice_before_a_stage_that_keeps_nothing(
    worker_pool: WorkerPool, remade: int, slices: tuple[int, ...]
) -> None:
    """The whole head, whose forward of either slice is as if there were no recompute."""
    text = "0F0.0,1F0.0,0F0.1,1F0.1,1B0.1,0B0.1,1B0.0,0B0.0\n".replace(f"0B0.{remade}", f"0R0.{remade},0B0.{remade}")
    plan = small_plan(schedule=ScheduleSpec(generator=CSV, text=text), slices=slices, pp=1, num_stages=2)
    check(worker_pool, with_stages(plan, ((0, 7), (7, 8))))


def check(pool: WorkerPool, plan: Plan) -> None:
    program = program_of(plan)
    pool.connect(plan, program)
    results = pool.run(train_rank, plan, program, num_ranks=plan.num_ranks)
    wanted = expected(plan.model, plan.global_batch, plan.sequence_length)
    for first in range(0, plan.num_ranks, plan.pp):
        replica = results[first : first + plan.pp]
        assert gradient_error(gradients_of(replica), wanted.gradients) < TOLERANCE
    for result in results:
        assert result.loss == pytest.approx(wanted.loss, rel=1e-12)
        assert result.evaluated_loss == pytest.approx(wanted.loss, rel=1e-12)
        assert result.gradient_norm == pytest.approx(wanted.norm, rel=1e-12)


def gradients_of(replica: Sequence[RankResult]) -> dict[str, torch.Tensor]:
    """All gradients of one replica by global name; the copies of a tied matrix must agree to the last bit."""
    found: dict[str, torch.Tensor] = {}
    for rank in replica:
        for named in rank.gradients.values():
            for name, gradient in named.items():
                tensor = torch.from_numpy(gradient)
                assert torch.equal(found.setdefault(name, tensor), tensor), f"the copies of {name} differ"
    return found
