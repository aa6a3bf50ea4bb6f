"""Rehearsals: real messages between many ranks, and waiting instead of computing."""

from __future__ import annotations

import itertools
import json
import time
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.agent.launch import LaunchSpec, Outcome, launch
from penstock.core.mesh import Mesh
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.core.run.folder import RunDir
from penstock.core.schedule import Kind
from penstock.core.serialization import yamltext
from penstock.core.serialization.files import write_json
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.planner.compile import program_of
from penstock.planner.schedules.registry import BUILT_IN
from penstock.trainer.comm import ProcessGroupTransport, everyone, tied_peers
from penstock.trainer.interpreter import Interpreter
from penstock.trainer.local_transport import Fabric
from penstock.trainer.rehearse import (
    BLOCKED_NS,
    SPIN_NS,
    Pace,
    PacedTransport,
    WaitingExecutor,
    predicted_ns,
    rehearse,
    wait,
)
from tests.support.small_plans import looped_schedule, small_plan
from tests.support.worker_pool import PoolRank, WorkerPool

POOLED = pytest.mark.xdist_group("worker-pool")
ACTION_NS = 100_000


def prediction(program: Program) -> Timeline:
    """A simulated step in which every action takes as long, one after another."""
    events = [
        Event(own.rank, Activity.COMPUTE, str(instruction.action), ACTION_NS * index, ACTION_NS * (index + 1))
        for own in program.ranks
        for index, instruction in enumerate(own.instructions)
        if instruction.action.is_compute
    ]
    return Timeline(source=Source.SIMULATED, num_ranks=len(program.ranks), step_ns=0, events=tuple(events))


def test_the_prediction_of_a_rank() -> None:
    events = (
        Event(0, Activity.COMPUTE, "0F0.0", 0, 5),
        Event(1, Activity.WAIT, "1WAIT_RECV_F0.0", 0, 6),
        Event(1, Activity.TRANSFER, "1SEND_B0.0", 0, 7),
        Event(1, Activity.COMPUTE, "1F0.0", 10, 30),
        Event(1, Activity.TRANSFER, "1START_REDUCE(norm)", 30, 33),
        Event(1, Activity.REDUCE, "1WAIT_REDUCE(norm)", 30, 33),
        Event(1, Activity.STEP, "1STEP", 33, 37),
    )
    timeline = Timeline(source=Source.SIMULATED, num_ranks=2, step_ns=37, events=events)
    assert predicted_ns(timeline, 1) == {"1F0.0": 20, "1START_REDUCE(norm)": 3, "1STEP": 4}


def test_what_is_waited_for_others_at_a_reduction_is_no_part_of_it() -> None:
    """Rank 0 waits for the norm from 30 on, and it is under way from 65."""
    events = (
        Event(0, Activity.TRANSFER, "0START_REDUCE(dp)", 10, 30),
        Event(0, Activity.REDUCE, "0WAIT_REDUCE(dp)", 25, 30),
        Event(0, Activity.TRANSFER, "0START_REDUCE(norm)", 65, 68),
        Event(0, Activity.REDUCE, "0WAIT_REDUCE(norm)", 30, 68),
    )
    timeline = Timeline(source=Source.SIMULATED, num_ranks=1, step_ns=68, events=events)
    assert predicted_ns(timeline, 0) == {"0START_REDUCE(dp)": 20, "0START_REDUCE(norm)": 3}


def test_a_rehearsed_reduction_over_replicas_passes_its_time_next_to_compute() -> None:
    """Two of 10 each, one after the other; 12 of the 20 have passed once they are waited for."""
    program = program_of(
        small_plan(
            pp=1,
            num_stages=2,
            schedule=looped_schedule(num_ranks=1, num_stages=2, num_microbatches=1, num_slices=3),
            dp=2,
        )
    )
    time = FakeTime()
    transport = PacedTransport(Fabric(program, Mesh(dp=1, pp=1)).transport(0), time.pace())
    executor = WaitingExecutor(program.ranks[0], {"0START_REDUCE(dp)": 10, "1START_REDUCE(dp)": 10}, transport)
    starts = [i for i in program.ranks[0].instructions if i.action.kind is Kind.START_REDUCE][:2]
    works = [executor.reduction(instruction)() for instruction in starts]
    time.now_ns = 12
    for work in works:
        work.wait()
    assert time.waited == [0, 8]


class FakeTime:
    """A clock that advances during waits."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.waited: list[int] = []

    def pace(self) -> Pace:
        return Pace(self.wait, lambda: self.now_ns)

    def wait(self, duration_ns: int) -> None:
        self.waited.append(duration_ns)
        self.now_ns += duration_ns


class Arriving:
    """A message that is there after so long."""

    def __init__(self, time: FakeTime, after_ns: int) -> None:
        self._time, self._after_ns = time, after_ns

    def wait(self) -> None:
        self._time.now_ns += self._after_ns


def test_a_late_rank_catches_up() -> None:
    """It woke 3 late from its first action, and starting a message took it 4."""
    time = FakeTime()
    pace = time.pace()
    pace.spend(10)
    time.now_ns += 3 + 4
    pace.spend(10)
    assert time.waited == [10, 3]
    time.now_ns += 15
    pace.spend(10)
    assert time.waited == [10, 3, 0]


def test_a_message_that_was_waited_for_is_not_caught_up_with() -> None:
    time = FakeTime()
    pace = time.pace()
    pace.spend(10)
    pace.wait_for(Arriving(time, BLOCKED_NS + 1))
    pace.spend(10)
    assert time.waited == [10, 10]


def test_a_message_that_has_arrived_takes_no_time() -> None:
    time = FakeTime()
    pace = time.pace()
    pace.spend(10)
    pace.wait_for(Arriving(time, 7))
    pace.spend(10)
    assert time.waited == [10, 3]


@pytest.mark.parametrize("duration_ns", [0, SPIN_NS // 2, 3 * SPIN_NS])
def test_a_wait_is_never_short(duration_ns: int) -> None:
    """The one thing a busy machine cannot break."""
    start = time.perf_counter_ns()
    wait(duration_ns)
    assert time.perf_counter_ns() - start >= duration_ns


def test_every_action_takes_its_duration_and_messages_have_their_size() -> None:
    program = program_of(small_plan(pp=1, slices=(3, 1, 2)))
    (own,) = program.ranks
    time = FakeTime()
    transport = PacedTransport(Fabric(program, Mesh(dp=1, pp=1)).transport(0), time.pace())
    durations = {"0F0.0": 5, "0B0.2": 9, "0START_REDUCE(norm)": 3, "0STEP": 1}
    executor = WaitingExecutor(own, durations, transport)
    Interpreter(
        enumerate(own.instructions), rank=0, executor=executor, transport=transport, cursor=array("q", (0, 0))
    ).run(0)
    assert [duration for duration in time.waited if duration] == [5, 9, 3, 1]
    for index, slot in enumerate(own.slots):
        message = executor.message(index)
        assert (message.numel(), message.dtype) == (slot.num_bytes, torch.uint8)


def rehearse_rank(me: PoolRank, plan: Plan, program: Program, num_steps: int) -> Timeline:
    mesh = Mesh(dp=plan.dp, pp=plan.pp)
    return rehearse(
        program,
        mesh,
        me.rank,
        prediction(program),
        num_steps=num_steps,
        transport=ProcessGroupTransport(me.groups, program, mesh, me.rank),
        group=me.groups[everyone(mesh)],
    )


@POOLED
@pytest.mark.parametrize("schedule", BUILT_IN)
@pytest.mark.parametrize("slices", [(12,), (5, 1, 6)])
def test_every_schedule_finishes_on_sixteen_ranks(
    worker_pool: WorkerPool, schedule: str, slices: tuple[int, ...]
) -> None:
    check(
        worker_pool,
        small_plan(family=Family.GPT2, schedule=schedule, pp=16, layers=16, num_microbatches=3, slices=slices),
    )


@POOLED
def test_replicas_and_stages_that_share_ranks_finish(worker_pool: WorkerPool) -> None:
    schedule = looped_schedule(num_ranks=4, num_stages=8, num_microbatches=2, num_slices=3, recompute=True)
    check(
        worker_pool,
        small_plan(schedule=schedule, dp=4, pp=4, num_stages=8, layers=8, num_microbatches=2, slices=(4, 4, 4)),
    )


@POOLED
def test_replicas_that_divide_the_state_of_the_optimizer_gather_parameters(worker_pool: WorkerPool) -> None:
    """Copies of a tied matrix on one rank need no message."""
    plan = small_plan(family=Family.GPT2, schedule="zbv", dp=2, pp=2, zero=1, num_microbatches=2)
    program = program_of(plan)
    assert {str(i.action) for rank in program.ranks for i in rank.instructions} > {
        "0START_REDUCE(tie)",
        "3WAIT_GATHER(dp)",
    }
    check(worker_pool, plan, program)


@POOLED
def test_pairs_are_waited_for_as_one_action(worker_pool: WorkerPool) -> None:
    """Each process stands for two shards."""
    plan = small_plan(schedule="braided-1f1b", pp=4, layers=4, num_microbatches=9, slices=(12,))
    program = program_of(replace(plan, tp=2))
    kinds = Counter(instruction.action.kind for rank in program.ranks for instruction in rank.instructions)
    assert kinds[Kind.OVERLAP] == (9 - 1) + (9 - 3) + (9 - 5) + (9 - 7)
    check(worker_pool, plan, program)


@POOLED
def test_rows_tied_to_parts_on_several_ranks_are_met_rank_by_rank(worker_pool: WorkerPool) -> None:
    plan = small_plan(family=Family.GPT2, schedule="1f1b", pp=3, layers=1, num_microbatches=2, head_parts=3)
    program = program_of(plan)
    assert [tuple(tied_peers(program, rank)) for rank in range(3)] == [(1, 2), (0,), (0,)]
    check(worker_pool, plan, program)


def check(pool: WorkerPool, plan: Plan, program: Program | None = None) -> None:
    program = program_of(plan) if program is None else program
    mesh = pool.connect(plan, program)
    first, *others = pool.run(rehearse_rank, plan, program, 2, num_ranks=plan.num_ranks)
    assert all(other == first for other in others)
    assert (first.source, first.num_ranks) == (Source.REHEARSED, plan.num_ranks)
    for rank in range(plan.num_ranks):
        events = [event for event in first.events if event.rank == rank]
        own = program.ranks[mesh.pipeline_rank(rank)]
        texts = [str(instruction.action) for instruction in own.instructions]
        assert [event.action for event in events] == [text for text in texts if "FREE" not in text]
        assert all(before.stop_ns <= after.start_ns for before, after in itertools.pairwise(events))
        compute = [event for event in events if event.activity is Activity.COMPUTE]
        assert all(event.stop_ns >= ACTION_NS * count for count, event in enumerate(compute, start=1))


def test_a_run_directory_is_rehearsed_by_launched_ranks(tmp_path: Path) -> None:
    plan = small_plan(pp=2, num_microbatches=2)
    predicted = prediction(program_of(plan))
    run = RunDir(tmp_path)
    run.create()
    run.job.write_text(yamltext.dump(JOB))
    write_json(run.plan, plan.to_manifest())
    write_json(tmp_path / "timeline-predicted.json", predicted.to_manifest())
    ranks = launch(
        LaunchSpec(
            module="penstock.trainer",
            arguments=("rehearse", "--run-dir", str(tmp_path)),
            num_ranks=2,
            threads_per_rank=1,
            log_folder=run.logs,
            status_folder=run.status,
        )
    )
    assert ranks.wait(120.0) == Outcome(exit_code=0, failure=None)
    rehearsed = Timeline.from_manifest(json.loads((tmp_path / "timeline-rehearsed.json").read_text()))
    assert (rehearsed.source, rehearsed.num_ranks) == (Source.REHEARSED, 2)
    compute = {event.action for event in rehearsed.events if event.activity is Activity.COMPUTE}
    assert compute == {event.action for event in predicted.events}
    assert rehearsed.step_ns >= ACTION_NS * len(compute) // 2


JOB = {
    "apiVersion": "penstock.dev/v1alpha1",
    "kind": "PipelineJob",
    "metadata": {"name": "rehearsal"},
    "spec": {
        "model": {"family": "llama", "layers": 3, "hidden": 16, "heads": 4, "vocab": 40},
        "data": {"source": "python-stdlib", "sequenceLength": 12},
        "training": {"globalBatch": 4, "steps": 1},
        "resources": {"ranks": 2},
    },
}
