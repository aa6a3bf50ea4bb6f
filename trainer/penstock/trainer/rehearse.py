"""The third interpreter of a Program: real ranks, real messages of the real sizes, and waiting instead of computing.

It shows a plan for many devices on a machine with few: what deadlocks, how messages and waits interlock, what the
predicted timeline leaves out.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.program import Instruction, Program, RankProgram
from penstock.core.run.rank_status import Cursor
from penstock.core.schedule import Group, parse_action
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.trainer.comm import Mesh, Transport
from penstock.trainer.interpreter import Interpreter, Operation, nothing
from penstock.trainer.recorder import HostRecorder, gather_times, merge

SPIN_NS = 150_000
"""The end of every wait is spun, since a sleeping process wakes late; short, because many ranks share few cores."""

Wait = Callable[[int], None]
"""Lets some nanoseconds pass."""


def wait(duration_ns: int) -> None:
    """Sleep, then spin for the rest."""
    deadline = time.perf_counter_ns() + duration_ns
    asleep = duration_ns - SPIN_NS
    if asleep > 0:
        time.sleep(asleep / 1e9)
    while time.perf_counter_ns() < deadline:
        pass


def predicted_ns(predicted: Timeline, pipeline_rank: int) -> dict[str, int]:
    """Nanoseconds of every action of a rank that a prediction gives a length: compute, reductions and step.

    A reduction is predicted from when its rank comes to it. What the rank waits for the others of its pipeline is left
    out, since it waits for them by meeting them: who comes last tells how long the rest takes.
    """
    timed = (Activity.COMPUTE, Activity.REDUCE, Activity.STEP)
    own = [event for event in predicted.events if event.rank == pipeline_rank and event.activity in timed]
    return {event.action: _without_the_wait(event, predicted) for event in own}


def _without_the_wait(event: Event, predicted: Timeline) -> int:
    group = _group(event)
    if group is None or group.is_of_peers:
        return event.duration_ns
    return min(other.duration_ns for other in predicted.events if _group(other) is group)


def _group(event: Event) -> Group | None:
    return parse_action(event.action).group if event.activity is Activity.REDUCE else None


class WaitingExecutor:
    """`penstock.trainer.interpreter.Executor` that waits ``durations_ns`` by an action's text, 0 where not named.

    Messages have the slots' sizes and no meaning, so one piece of memory serves all. A reduction meets the group's
    ranks over one element, then waits.
    """

    def __init__(
        self,
        program: RankProgram,
        durations_ns: Mapping[str, int],
        transport: Transport,
        wait: Wait = wait,
    ) -> None:
        self._slots, self._durations_ns = program.slots, durations_ns
        self._transport, self._wait = transport, wait
        self._memory = torch.zeros(max(slot.num_bytes for slot in program.slots), dtype=torch.uint8)
        self._one = torch.ones(1)

    def compute(self, instruction: Instruction) -> Operation:
        """See `penstock.trainer.interpreter.Executor`."""
        return self._waiting(instruction)

    def message(self, slot: int) -> Tensor:
        """See `penstock.trainer.interpreter.Executor`."""
        return self._memory[: self._slots[slot].num_bytes]

    def free(self, instruction: Instruction) -> Operation:
        """Nothing."""
        return nothing

    def reduce(self, instruction: Instruction) -> Operation:
        """See `penstock.trainer.interpreter.Executor`."""
        pause, group = self._waiting(instruction), instruction.action.group
        assert group is not None, "a REDUCE names its group"

        def reduce() -> None:
            self._transport.all_reduce(group, self._one)
            pause()

        return reduce

    def step(self, instruction: Instruction) -> Operation:
        """See `penstock.trainer.interpreter.Executor`."""
        return self._waiting(instruction)

    def _waiting(self, instruction: Instruction) -> Operation:
        duration_ns, wait = self._durations_ns.get(str(instruction.action), 0), self._wait
        return lambda: wait(duration_ns)


def rehearse(
    program: Program,
    mesh: Mesh,
    rank: int,
    predicted: Timeline,
    *,
    num_steps: int,
    transport: Transport,
    group: dist.ProcessGroup,
    cursor: Cursor | None = None,
) -> Timeline:
    """Run ``num_steps`` steps and give the one of median length; collective over ``group``, all ranks of the run.

    ``predicted`` is a simulated step of one replica. Raises `RunError` naming the action that failed.
    """
    own = program.ranks[mesh.pipeline_rank(rank)]
    interpreter = Interpreter(
        enumerate(own.instructions),
        rank=rank,
        executor=WaitingExecutor(own, predicted_ns(predicted, own.rank), transport),
        transport=transport,
        cursor=array("q", (0, 0)) if cursor is None else cursor,
    )
    timelines = []
    recorder = HostRecorder(len(own.instructions))
    for step in range(num_steps):
        interpreter.run(step, recorder)
        times_ns = gather_times(recorder.times_ns(), program, mesh, group)
        timelines.append(merge(program, mesh, times_ns, source=Source.REHEARSED, step=step))
    return sorted(timelines, key=lambda timeline: timeline.step_ns)[num_steps // 2]
