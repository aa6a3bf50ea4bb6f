"""The third interpreter of a Program: real ranks, real messages of the real sizes, and waiting instead of computing.

It shows a plan for many devices on a machine with few: what deadlocks, how messages and waits interlock, what the
predicted timeline leaves out.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.program import Instruction, Program, RankProgram
from penstock.core.run.rank_status import Cursor
from penstock.core.schedule import Group, Kind, parse_action
from penstock.core.timeline import Activity, Source, Timeline
from penstock.trainer.comm import Mesh, Transport, Work
from penstock.trainer.interpreter import Interpreter, Operation, nothing
from penstock.trainer.recorder import Clock, HostRecorder, gather_times, merge

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

    A reduction lasts as long as it is under way, by the text of its start. What the rank waits for the others of its
    pipeline is left out, since it waits for them by meeting them.
    """
    own = [event for event in predicted.events if event.rank == pipeline_rank]
    timed = [event for event in own if event.activity in (Activity.COMPUTE, Activity.STEP)]
    timed += [event for event in own if parse_action(event.action).kind is Kind.START_REDUCE]
    return {event.action: event.duration_ns for event in timed}


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A reduction that is over once its ranks have met and its time has passed."""

    met: Work
    rest: Callable[[], None]

    def wait(self) -> None:
        self.met.wait()
        self.rest()


class WaitingExecutor:
    """`penstock.trainer.interpreter.Executor` that waits ``durations_ns`` by an action's text, 0 where not named.

    Messages have the slots' sizes and no meaning, so one piece of memory serves all. A reduction meets the group's
    ranks over one element. Over replicas it is under way for its time from its start, or from the end of the one
    before; over ranks of the pipeline, which it waits for, from when all are there.
    """

    def __init__(
        self,
        program: RankProgram,
        durations_ns: Mapping[str, int],
        transport: Transport,
        wait: Wait = wait,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        self._slots, self._durations_ns = program.slots, durations_ns
        self._transport, self._wait, self._clock = transport, wait, clock
        self._free_at_ns: dict[Group, int] = {}
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

    def reduction(self, instruction: Instruction) -> Callable[[], Work]:
        """What meets the group's ranks and lets the reduction's time pass."""
        duration_ns, group = self._durations_ns.get(str(instruction.action), 0), instruction.action.group
        assert group is not None, "a reduction names its group"

        def start() -> Work:
            met = self._transport.all_reduce(group, self._one)
            if not group.is_of_peers:
                return _Waiting(met, lambda: self._wait(duration_ns))
            end_ns = max(self._clock(), self._free_at_ns.get(group, 0)) + duration_ns
            self._free_at_ns[group] = end_ns
            return _Waiting(met, lambda: self._wait(max(end_ns - self._clock(), 0)))

        return start

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
