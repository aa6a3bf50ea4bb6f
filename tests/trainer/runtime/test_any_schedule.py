"""Random legal schedules, with overlaps, recompute and shared ranks: right when run, finished when rehearsed."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from penstock.core.mesh import Mesh
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.core.schedule import CSV, Schedule, ScheduleSpec
from penstock.core.timeline import Source, Timeline
from penstock.planner.passes import arena
from penstock.trainer.comm import ProcessGroupTransport, everyone
from penstock.trainer.rehearse import rehearse
from penstock.trainer.runtime import Batch, Runtime
from tests.support.pipeline_ranks import GradientKeeper, expected, sample
from tests.support.small_plans import remade_units, small_plan
from tests.support.stage_pipeline import gradient_error
from tests.support.strategies import Case, cases, in_parts, schedules
from tests.support.threaded_run import ThreadedRun
from tests.support.worker_pool import PoolRank, WorkerPool

LENGTH = 12


@st.composite
def slicings(draw: st.DrawFn, num_slices: int) -> tuple[int, ...]:
    """``LENGTH`` tokens cut anywhere."""
    cuts = draw(st.lists(st.integers(1, LENGTH - 1), min_size=num_slices - 1, max_size=num_slices - 1, unique=True))
    bounds = [0, *sorted(cuts), LENGTH]
    return tuple(stop - start for start, stop in pairwise(bounds))


@given(schedule=schedules(), data=st.data(), family=st.sampled_from(Family))
@settings(max_examples=40)
def test_gradients_are_right(schedule: Schedule, data: st.DataObject, family: Family) -> None:
    assume(schedule.num_stages % len(schedule.ranks) == 0)
    schedule = in_parts(schedule, remade_units(schedule.num_stages), data.draw(st.integers(0, 2**32)))
    plan = small_plan(
        family=family,
        schedule=ScheduleSpec(generator=CSV, text=schedule.to_csv()),
        pp=len(schedule.ranks),
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        slices=data.draw(slicings(schedule.num_slices)),
        microbatch=1,
    )
    receive_ahead, late, by_slice = data.draw(st.integers(1, 3)), data.draw(st.booleans()), data.draw(st.booleans())
    split = data.draw(st.booleans())
    plan = dataclasses.replace(
        plan, receive_ahead=receive_ahead, late_receives=late, prefix_by_slice=by_slice, split_slots=split
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "FAR", 0.0 if split else arena.FAR)
        run = ThreadedRun(plan)
    ids, labels = sample(plan.model.vocab, plan.global_batch, LENGTH)
    batch = Batch(token_ids=ids, labels=labels, num_valid_tokens=int((labels >= 0).sum()))

    def step(_: int, runtime: Runtime) -> float:
        return runtime.train_step(0, batch).loss_sum

    wanted = expected(plan.model, plan.global_batch, LENGTH)
    assert run.on_every_rank(step) == pytest.approx([wanted.loss] * plan.pp, rel=1e-12)
    assert gradient_error(_gradients(run), wanted.gradients) < 1e-10


def _gradients(run: ThreadedRun) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for keepers in run.optimizers:
        for keeper in keepers.values():
            assert isinstance(keeper, GradientKeeper)
            found |= keeper.kept
    return found


def rehearse_rank(me: PoolRank, mesh: Mesh, program: Program) -> Timeline:
    return rehearse(
        program,
        mesh,
        me.rank,
        Timeline(source=Source.SIMULATED, num_ranks=mesh.pp, step_ns=0, events=()),
        num_steps=1,
        transport=ProcessGroupTransport(me.groups, program, mesh, me.rank),
        group=me.groups[everyone(mesh)],
    )


@pytest.mark.xdist_group("worker-pool")
@given(case=cases())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_schedule_that_passes_finishes_when_rehearsed(worker_pool: WorkerPool, case: Case) -> None:
    program = case.lower()
    mesh = Mesh(dp=2 if case.dp else 1, pp=len(program.ranks))
    worker_pool.open(program, mesh)
    timeline, *_ = worker_pool.run(rehearse_rank, mesh, program, num_ranks=mesh.num_ranks)
    num_compute = sum(i.action.is_compute for own in program.ranks for i in own.instructions)
    assert sum(event.activity.value == "compute" for event in timeline.events) == mesh.dp * num_compute


def test_a_plan_has_the_number_of_receives_posted_ahead() -> None:
    """The property above varies it. This test shows that it matters."""
    plans: list[Plan] = [dataclasses.replace(small_plan(num_microbatches=3), receive_ahead=n) for n in (1, 3)]
    arenas = [ThreadedRun(plan).program.ranks[1].arena_bytes for plan in plans]
    assert arenas[0] < arenas[1]
