"""The third interpreter of a Program: real ranks, real messages of the real sizes, and waiting instead of computing.

It shows a plan for many devices on a machine with few: what deadlocks, how messages and waits interlock, what the
predicted timeline leaves out.

One process stands for all shards of a pipeline rank (`penstock.core.sharding`): their collectives are within the time
of an action, and for the rest they do the same.

Many ranks share few cores here, which the devices of the plan do not. A rank wakes late, and takes long to start a
message: 0.1 ms each, on 16 ranks over two cores. If each action waited for its time from where the one before it ended,
these would add up over the step, to 2 % with actions of 10 ms. So a rank keeps a pace (`Pace`). It is free again at the
time at which its action should have ended, and the next one lasts from then on, unless the rank had to wait for a
message in between: then from the time at which that came. The start of messages is within the time of an action in
what is predicted too (``action_overhead_seconds``). What messages take on their way is not caught up with.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.program import Channel, Instruction, Program, RankProgram
from penstock.core.run.rank_status import Cursor
from penstock.core.schedule import Group, Kind, parse_action
from penstock.core.timeline import Activity, Source, Timeline
from penstock.trainer.comm import Mesh, Transport, tied_peers
from penstock.trainer.interpreter import Interpreter, Operation, nothing
from penstock.trainer.recorder import Clock, HostRecorder, gather_times, merge
from penstock.trainer.shards import AllOf, in_turn
from penstock.trainer.units.collectives import Work

SPIN_NS = 150_000
"""The end of every wait is spun, since a sleeping process wakes late; short, because many ranks share few cores."""

BLOCKED_NS = 50_000
"""A wait for a message that takes longer had to wait: one for a message that is there takes 10 to 20 microseconds."""

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
    """Nanoseconds of every action of a rank that a prediction gives a length: compute, reductions, step and gathers.

    A reduction or gather lasts as long as it is under way, by the text of its start. What the rank waits for the others
    of its pipeline is left out, since it waits for them by meeting them.
    """
    own = [event for event in predicted.events if event.rank == pipeline_rank]
    timed = [event for event in own if event.activity in (Activity.COMPUTE, Activity.STEP)]
    starts = (Kind.START_REDUCE, Kind.START_GATHER)
    timed += [event for event in own if parse_action(event.action).kind in starts]
    return {event.action: event.duration_ns for event in timed}


class Pace:
    """The time at which one rank is free for its next action; the first of a step takes it as it is."""

    def __init__(self, wait: Wait = wait, clock: Clock = time.perf_counter_ns) -> None:
        self._wait, self.clock = wait, clock
        self._free_at_ns: int | None = None

    def begin_step(self) -> None:
        """The rank is free whenever its first action comes."""
        self._free_at_ns = None

    def restart(self) -> None:
        """The rank is free now."""
        self._free_at_ns = self.clock()

    def spend(self, duration_ns: int) -> None:
        """An action of so many nanoseconds, from when the rank was free."""
        now_ns = self.clock()
        self._free_at_ns = duration_ns + (now_ns if self._free_at_ns is None else self._free_at_ns)
        self._wait(max(self._free_at_ns - now_ns, 0))

    def wait_for(self, work: Work) -> None:
        """Wait for a message, and be free from when it came if it was not there."""
        begin_ns = self.clock()
        work.wait()
        if self.clock() - begin_ns > BLOCKED_NS:
            self.restart()


@dataclass(frozen=True, slots=True)
class _Message:
    """A transfer whose wait counts for the rank's pace."""

    work: Work
    pace: Pace

    def wait(self) -> None:
        self.pace.wait_for(self.work)


@dataclass(frozen=True, slots=True)
class PacedTransport:
    """`penstock.trainer.comm.Messages` of a rank that keeps ``pace``, and its reductions."""

    transport: Transport
    pace: Pace

    def post_recv(self, channel: Channel, tensor: Tensor) -> Work:
        """Receive over the transport."""
        return _Message(self.transport.post_recv(channel, tensor), self.pace)

    def send(self, channel: Channel, tensor: Tensor) -> Work:
        """Send over the transport."""
        return _Message(self.transport.send(channel, tensor), self.pace)

    def all_reduce(self, group: Group, tensor: Tensor) -> Work:
        """Sum over the transport."""
        return self.transport.all_reduce(group, tensor)

    def reduce_scatter(self, tensor: Tensor) -> Work:
        """Sum over the transport."""
        return self.transport.reduce_scatter(tensor)

    def all_gather(self, tensor: Tensor) -> Work:
        """Gather over the transport."""
        return self.transport.all_gather(tensor)

    def sum_tied(self, pipeline_rank: int, tensor: Tensor) -> Work:
        """Sum over the transport."""
        return self.transport.sum_tied(pipeline_rank, tensor)


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

    It keeps the pace of ``transport``. Messages have the slots' sizes and no meaning, so one piece of memory serves
    all. A reduction meets the group's ranks over one element; over tie the ranks of ``tied`` in turn, as in training,
    and over shards nobody. Over peers it is under way for its time from its start, or from the end of the one before;
    over ranks of the pipeline, which it waits for, from when all are there.
    """

    def __init__(
        self,
        program: RankProgram,
        durations_ns: Mapping[str, int],
        transport: PacedTransport,
        tied: Sequence[int] = (),
    ) -> None:
        self._slots, self._durations_ns = program.slots, durations_ns
        self._transport, self._pace, self._tied = transport, transport.pace, tied
        self._reduced_at_ns: dict[Group, int] = {}
        self._memory = torch.zeros(max(slot.num_bytes for slot in program.slots), dtype=torch.uint8)
        self._one = torch.ones(1)

    def compute(self, instruction: Instruction) -> Operation:
        return self._waiting(instruction)

    def message(self, slot: int) -> Tensor:
        return self._memory[: self._slots[slot].num_bytes]

    def free(self, instruction: Instruction) -> Operation:
        """Nothing."""
        return nothing

    def reduction(self, instruction: Instruction) -> Callable[[], Work]:
        """What meets the group's ranks and lets the reduction's time pass."""
        duration_ns, group = self._durations_ns.get(str(instruction.action), 0), instruction.action.group
        assert group is not None, "a reduction names its group"
        clock = self._pace.clock

        def start() -> Work:
            met = self._meet(group)
            if not group.is_of_peers:
                return _Waiting(met, lambda: self._rest(duration_ns))
            end_ns = max(clock(), self._reduced_at_ns.get(group, 0)) + duration_ns
            self._reduced_at_ns[group] = end_ns
            return _Waiting(met, lambda: self._rest(max(end_ns - clock(), 0)))

        return start

    def _meet(self, group: Group) -> Work:
        if group is Group.TP or (group is Group.TIE and not self._tied):
            return AllOf([])
        if group is Group.TIE:
            return in_turn([partial(self._transport.sum_tied, rank, torch.ones(1)) for rank in self._tied])
        return self._transport.all_reduce(group, self._one)

    def _rest(self, duration_ns: int) -> None:
        """What is left of a reduction that the rank waits for, from now on."""
        self._pace.restart()
        self._pace.spend(duration_ns)

    def step(self, instruction: Instruction) -> Operation:
        return self._waiting(instruction)

    def gather(self, instruction: Instruction) -> Callable[[], Work]:
        return self.reduction(instruction)

    def _waiting(self, instruction: Instruction) -> Operation:
        duration_ns, pace = self._durations_ns.get(str(instruction.action), 0), self._pace
        return lambda: pace.spend(duration_ns)


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
    paced = PacedTransport(transport, Pace())
    interpreter = Interpreter(
        enumerate(own.instructions),
        rank=rank,
        executor=WaitingExecutor(own, predicted_ns(predicted, own.rank), paced, tuple(tied_peers(program, own.rank))),
        transport=paced,
        cursor=array("q", (0, 0)) if cursor is None else cursor,
    )
    recorder = HostRecorder(len(own.instructions))
    marks = []
    for step in range(num_steps):
        dist.barrier(group)  # a step is as long as from its first rank's begin: all begin together
        paced.pace.begin_step()
        interpreter.run(step, recorder)
        marks.append(recorder.times_ns())
    timelines = [
        merge(program, mesh, gather_times(times_ns, program, mesh, group), source=Source.REHEARSED, step=step)
        for step, times_ns in enumerate(marks)
    ]
    return sorted(timelines, key=lambda timeline: timeline.step_ns)[num_steps // 2]
