"""torch's own schedules, as torch itself writes them: they are read, proved, and give the right gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.core.mesh import Mesh
from penstock.core.model import Family
from penstock.core.schedule import Kind, flatten, import_spec, parse_schedule
from penstock.planner.compile import program_of
from penstock.trainer.comm import everyone
from penstock.trainer.runtime import Batch, Runtime
from tests.support.pipeline_ranks import GradientKeeper, expected, sample
from tests.support.small_plans import small_plan
from tests.support.stage_pipeline import gradient_error
from tests.support.threaded_run import ThreadedRun
from tests.support.worker_pool import CPU, PoolRank, WorkerPool

NUM_RANKS, NUM_STAGES, NUM_MICROBATCHES, LENGTH = 4, 8, 8, 12
LOOPED, V_SHAPED = (0, 4), (0, 7)
"""The stages of the first rank."""

SCHEDULES = {
    "LoopedBFS": LOOPED,
    "Interleaved1F1B": LOOPED,
    "InterleavedZeroBubble": LOOPED,
    "ZBVZeroBubble": V_SHAPED,
    "DualPipeV": V_SHAPED,
}
COMPUTE_ONLY, WITH_COMMUNICATION = "compute_only", "compute_comms"
"""The forms in which torch writes a schedule."""


def dump_rank(me: PoolRank, name: str, own: tuple[int, ...], form: str, path: Path) -> None:
    """Have torch make the schedule and write it."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    group = me.groups[everyone(Mesh(dp=1, pp=NUM_RANKS))]
    stages = [PipelineStage(torch.nn.Identity(), number, NUM_STAGES, CPU, group=group) for number in own]
    schedule: Any = get_schedule_class(name)(stages, NUM_MICROBATCHES)
    schedule._dump_csv(path, form)


def dumped(pool: WorkerPool, name: str, form: str, path: Path) -> str:
    plan = small_plan(pp=NUM_RANKS)
    pool.connect(plan, program_of(plan))
    pool.run(dump_rank, name, SCHEDULES[name], form, path, num_ranks=1)
    return path.read_text()


@pytest.mark.xdist_group("worker-pool")
@pytest.mark.parametrize("form", [COMPUTE_ONLY, WITH_COMMUNICATION])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_torch_run(worker_pool: WorkerPool, tmp_path: Path, name: str, form: str) -> None:
    text = dumped(worker_pool, name, form, tmp_path / "schedule.csv")
    schedule, warnings = parse_schedule(text)
    assert (len(schedule.ranks), schedule.num_stages) == (NUM_RANKS, NUM_STAGES)
    assert (schedule.num_microbatches, schedule.num_slices) == (NUM_MICROBATCHES, 1)
    assert [stage for stage, rank in enumerate(schedule.stage_ranks) if rank == 0] == list(SCHEDULES[name])
    forwards = [action for own in schedule.ranks for action in flatten(own) if action.kind is Kind.F]
    assert len(set(forwards)) == len(forwards) == NUM_STAGES * NUM_MICROBATCHES
    dropped = {warning.split()[0] for warning in warnings}
    assert dropped == (set() if form == COMPUTE_ONLY else {"UNSHARD", "RESHARD", "REDUCE_GRAD"})
    gradients_are_right(text)


@pytest.mark.xdist_group("worker-pool")
def test_overlaps_are_among_them(worker_pool: WorkerPool, tmp_path: Path) -> None:
    schedule, _ = parse_schedule(dumped(worker_pool, "DualPipeV", COMPUTE_ONLY, tmp_path / "schedule.csv"))
    assert any(action.kind is Kind.OVERLAP for own in schedule.ranks for action in own)


def gradients_are_right(text: str) -> None:
    recipe, _ = import_spec(text, "schedule.csv")
    plan = small_plan(
        family=Family.LLAMA,
        schedule=recipe,
        pp=NUM_RANKS,
        num_stages=NUM_STAGES,
        num_microbatches=NUM_MICROBATCHES,
        slices=(LENGTH,),
        microbatch=1,
    )
    run = ThreadedRun(plan)
    ids, labels = sample(plan.model.vocab, plan.global_batch, LENGTH)
    batch = Batch(token_ids=ids, labels=labels, num_valid_tokens=int((labels >= 0).sum()))

    def step(_: int, runtime: Runtime) -> float:
        return runtime.train_step(0, batch).loss_sum

    wanted = expected(plan.model, plan.global_batch, LENGTH)
    assert run.on_every_rank(step) == pytest.approx([wanted.loss] * plan.pp, rel=1e-12)
    found: dict[str, torch.Tensor] = {}
    for keepers in run.optimizers:
        for keeper in keepers.values():
            assert isinstance(keeper, GradientKeeper)
            found |= keeper.kept
    assert gradient_error(found, wanted.gradients) < 1e-10
