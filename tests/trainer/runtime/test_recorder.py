"""Timelines of real steps: one clock, no overlap on a rank, the Program's order, and the Program's dependencies."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest
import torch

from penstock.core.mesh import Mesh
from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.core.schedule import Kind, parse_action
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.planner.compile import program_of
from penstock.trainer.comm import ProcessGroupTransport, everyone
from penstock.trainer.recorder import (
    HostRecorder,
    HostWaits,
    clock_offset_ns,
    gather_marks,
    gather_times,
    make_recorder,
    merge,
    waits_on,
)
from penstock.trainer.runtime import Batch, Runtime
from penstock.trainer.shards import AllOf
from penstock.trainer.stages import build_stages
from tests.support.pipeline_ranks import SEED, GradientKeeper, sample
from tests.support.small_plans import small_plan
from tests.support.worker_pool import CPU, PoolRank, WorkerPool

POOLED = pytest.mark.xdist_group("worker-pool")


def test_marks_are_kept_by_position_and_overwritten_by_the_next_step() -> None:
    ticks = itertools.count(100, 10)
    recorder = HostRecorder(3, clock=lambda: next(ticks))
    for _ in range(2):
        for position in range(4):
            recorder.mark(position)
    assert recorder.times_ns().tolist() == [140, 150, 160, 170]
    assert recorder.times_ns().dtype == torch.int64


def test_the_cpu_has_the_host_recorder() -> None:
    assert isinstance(make_recorder(5, waits_on(CPU)), HostRecorder)


def test_merge_puts_all_ranks_on_one_axis() -> None:
    """Both replicas run the same Program; replica 1 begins 50 ns earlier."""
    program = program_of(small_plan(pp=1, dp=2, slices=(4,)))
    (own,) = program.ranks
    num_marks = len(own.instructions) + 1
    late = [1050 + 10 * position for position in range(num_marks)]
    early = [1000 + 10 * position for position in range(num_marks)]
    timeline = merge(program, Mesh(dp=2, pp=1), [late, early], source=Source.MEASURED, step=4, peak_bytes=(7, 8))
    assert (timeline.num_ranks, timeline.step, timeline.peak_bytes) == (2, 4, (7, 8))
    assert timeline.step_ns == 50 + 10 * (num_marks - 1)
    first = {rank: next(e for e in timeline.events if e.rank == rank) for rank in (0, 1)}
    assert first[0] == Event(0, Activity.COMPUTE, "0F0.0", 50, 60)
    assert first[1] == Event(1, Activity.COMPUTE, "0F0.0", 0, 10)
    kept = [i for i in own.instructions if i.action.kind is not Kind.FREE]
    assert len(timeline.events) == 2 * len(kept)
    assert Timeline.from_manifest(timeline.to_manifest()) == timeline


def test_waits_for_shards_belong_to_the_action_between_two_marks() -> None:
    """Only compute actions have collective times, which are no longer than the actions."""
    program = program_of(small_plan(pp=1, slices=(4,)))
    (own,) = program.ranks
    ticks, waits = itertools.count(0, 10), HostWaits(itertools.count(0, 4).__next__)
    recorder = HostRecorder(len(own.instructions), lambda: next(ticks), waits)
    for position in range(len(own.instructions) + 1):
        recorder.mark(position)
        waits.wait(AllOf([]))
    marks = [[each.tolist()] for each in (recorder.times_ns(), recorder.waits_ns())]
    timeline = merge(program, Mesh(dp=1, pp=1), marks[0], source=Source.MEASURED, waits_ns=marks[1])
    computes = [event for event in timeline.events if event.activity is Activity.COMPUTE]
    assert [event.collective_ns for event in computes] == [4] * len(computes)
    assert not any(event.collective_ns for event in timeline.events if event.activity is not Activity.COMPUTE)
    assert timeline.collectives is not None
    assert timeline.waited_ns(0) == 4 * len(computes)
    assert merge(program, Mesh(dp=1, pp=1), marks[0], source=Source.MEASURED).collectives is None


def record_step(me: PoolRank, plan: Plan, program: Program) -> Timeline:
    """One real training step, recorded and merged."""
    mesh = plan.mesh
    own = program.ranks[mesh.pipeline_rank(me.rank)]
    stages = build_stages(plan, own, shard=mesh.shard(me.rank), device=CPU, seed=SEED)
    runtime = Runtime(
        plan,
        program,
        me.rank,
        stages=stages,
        optimizers={number: GradientKeeper(stage.parameters) for number, stage in stages.items()},
        transport=ProcessGroupTransport(me.groups, program, mesh, me.rank),
        device=CPU,
    )
    share = plan.global_batch // plan.dp
    ids, labels = sample(plan.model.vocab, share, plan.sequence_length)
    recorder = make_recorder(len(own.instructions), runtime.waits)
    totals = runtime.train_step(3, Batch(token_ids=ids, labels=labels, num_valid_tokens=10), recorder)
    group = me.groups[everyone(mesh)]
    times_ns = gather_times(recorder.times_ns(), program, mesh, group)
    waits_ns = gather_marks(recorder.waits_ns(), program, mesh, group)
    peak_bytes = totals.peak_bytes
    return merge(program, mesh, times_ns, source=Source.MEASURED, step=3, peak_bytes=peak_bytes, waits_ns=waits_ns)


@POOLED
@pytest.mark.parametrize(("pp", "dp"), [(4, 1), (2, 2)])
def test_recorded_steps_are_consistent(worker_pool: WorkerPool, pp: int, dp: int) -> None:
    plan = small_plan(schedule="zb", pp=pp, dp=dp, num_microbatches=3, slices=(5, 1, 6))
    program = program_of(plan)
    worker_pool.connect(plan, program)
    first, *others = worker_pool.run(record_step, plan, program, num_ranks=plan.num_ranks)
    assert all(other == first for other in others), "every rank has the same timeline"
    check_order(first, program, Mesh(dp=dp, pp=pp))
    check_dependencies(first, Mesh(dp=dp, pp=pp), plan)
    assert len(first.peak_bytes) == plan.num_ranks
    assert 0 < first.bubble.mean < 1


@POOLED
def test_recorded_steps_have_the_time_that_ranks_wait_for_their_shards(worker_pool: WorkerPool) -> None:
    """Every F, I and W of a block has collectives; other instructions have none."""
    plan = dataclasses.replace(small_plan(schedule="zb-h1", pp=2, num_microbatches=2, slices=(5, 7)), tp=2)
    program = program_of(plan)
    worker_pool.connect(plan, program)
    first, *_ = worker_pool.run(record_step, plan, program, num_ranks=plan.num_ranks)
    computes = [event for event in first.events if event.activity is Activity.COMPUTE]
    assert all(0 < event.collective_ns <= event.duration_ns for event in computes)
    assert sum(event.collective_ns for event in first.events) == sum(event.collective_ns for event in computes)


def check_order(timeline: Timeline, program: Program, mesh: Mesh) -> None:
    """On every rank: no overlap, and the Program's order."""
    for rank in range(mesh.num_ranks):
        events = [event for event in timeline.events if event.rank == rank]
        expected = [str(i.action) for i in program.ranks[mesh.pipeline_rank(rank)].instructions]
        assert [event.action for event in events] == [text for text in expected if "FREE" not in text]
        assert all(before.stop_ns <= after.start_ns for before, after in itertools.pairwise(events))
        assert events[-1].stop_ns <= timeline.step_ns


def check_dependencies(timeline: Timeline, mesh: Mesh, plan: Plan) -> None:
    """A stage's F begins after the previous stage's has ended, an I after the next stage's: clocks agree that well."""
    spans = {
        (mesh.replica(event.rank), event.action): event
        for event in timeline.events
        if event.activity is Activity.COMPUTE
    }
    num_checked = 0
    for (replica, text), event in spans.items():
        action = parse_action(text)
        step = {Kind.F: -1, Kind.I: 1, Kind.B: 1}.get(action.kind, 0)
        source = action.stage + step
        if step and 0 <= source < len(plan.stages):
            texts = [f"{source}{kind}{action.microbatch}.{action.slice}" for kind in _PRODUCERS[action.kind]]
            (producer,) = [spans[replica, each] for each in texts if (replica, each) in spans]
            assert producer.stop_ns <= event.start_ns
            num_checked += 1
    assert num_checked == 2 * (plan.pp - 1) * plan.dp * plan.num_microbatches * len(plan.slices)


_PRODUCERS = {Kind.F: "F", Kind.I: "IB", Kind.B: "IB"}


def estimate_offset(me: PoolRank, plan: Plan, skew_ns: int, machines: int) -> int:
    """Return the estimated clock offset of the rank; ranks run on several machines with different clocks."""
    machine = me.rank % machines
    group = me.groups[everyone(Mesh(dp=plan.dp, pp=plan.pp))]
    return clock_offset_ns(group, clock=lambda: time.perf_counter_ns() + machine * skew_ns, machine=f"boot-{machine}")


@POOLED
def test_clocks_of_other_machines_are_estimated(worker_pool: WorkerPool) -> None:
    """Clocks an hour apart; the error is below half of the fastest round trip, which takes far less than a second."""
    plan = small_plan(pp=4)
    worker_pool.connect(plan, program_of(plan))
    hour_ns = 3600 * 10**9
    found = worker_pool.run(estimate_offset, plan, hour_ns, 3, num_ranks=4)
    assert found[0] == found[3] == 0
    assert found[1] == pytest.approx(hour_ns, abs=10**9)
    assert found[2] == pytest.approx(2 * hour_ns, abs=10**9)


@POOLED
def test_ranks_of_one_machine_share_their_clock(worker_pool: WorkerPool) -> None:
    plan = small_plan(pp=4)
    worker_pool.connect(plan, program_of(plan))
    assert worker_pool.run(estimate_offset, plan, 12345, 1, num_ranks=4) == [0, 0, 0, 0]
