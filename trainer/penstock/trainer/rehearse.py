"""Rehearsal: runs a Program with real ranks and real messages of the real sizes, but waits instead of computing.

A rehearsal tries a plan for many devices on a machine with few. It shows deadlocks, how messages and waits interlock,
and effects that the predicted timeline leaves out.

One process stands for all shards of a pipeline rank (`penstock.core.sharding`). The time of an action includes the
shards' collectives, and otherwise the shards do the same.

Many ranks share few cores here, unlike the devices of the plan. A rank wakes late and needs long to start a message:
0.1 ms each, for 16 ranks on two cores. If each action waited for its full duration, these delays would add up over the
step, to 2 % with actions of 10 ms. So a rank keeps a pace (`Pace`). An action starts, for the pace, at the time at
which the previous one should have ended. If the rank had to wait for a message in between, the action starts when the
message arrived. For example, with actions of 10 ms that each end 0.2 ms late, the second waits only 9.8 ms and ends
20.2 ms after the start, not 20.4 ms. Predictions include the time to start messages in the time of an action, too
(``action_overhead_seconds``). The pace never compensates for the time that a message travels.
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

from penstock.core.mesh import Mesh
from penstock.core.program import Channel, Instruction, Program, RankProgram
from penstock.core.run.rank_status import Cursor
from penstock.core.schedule import Group, Kind, parse_action
from penstock.core.timeline import Activity, Source, Timeline
from penstock.trainer.comm import Transport, tied_peers
from penstock.trainer.interpreter import Interpreter, Operation, nothing
from penstock.trainer.recorder import Clock, HostRecorder, gather_times, merge
from penstock.trainer.shards import AllOf, in_turn
from penstock.trainer.units.collectives import Work

SPIN_NS = 150_000
"""A wait spins for its last nanoseconds, since a sleeping process wakes late. Few, because many ranks share few cores.
"""

BLOCKED_NS = 50_000
"""A longer wait for a message means that it had not arrived: otherwise the call takes 10 to 20 microseconds."""

Wait = Callable[[int], None]
"""Blocks for this many nanoseconds."""


def wait(duration_ns: int) -> None:
    """Block for ``duration_ns``: sleep first, then spin."""
    deadline = time.perf_counter_ns() + duration_ns
    asleep = duration_ns - SPIN_NS
    if asleep > 0:
        time.sleep(asleep / 1e9)
    while time.perf_counter_ns() < deadline:
        pass


def predicted_ns(predicted: Timeline, pipeline_rank: int) -> dict[str, int]:
    """Predicted nanoseconds of a rank's compute actions, reductions, optimizer step and gathers, by action name.

    A reduction or gather is named by its start action and lasts until it has ended. The time that the rank waits for
    other ranks of its pipeline is left out, since the rehearsal really waits for them.
    """
    own = [event for event in predicted.events if event.rank == pipeline_rank]
    timed = [event for event in own if event.activity in (Activity.COMPUTE, Activity.STEP)]
    starts = (Kind.START_REDUCE, Kind.START_GATHER)
    timed += [event for event in own if parse_action(event.action).kind in starts]
    return {event.action: event.duration_ns for event in timed}


class Pace:
    """The time at which one rank is free for its next action. The first action of a step starts when it comes."""

    def __init__(self, wait: Wait = wait, clock: Clock = time.perf_counter_ns) -> None:
        self._wait, self.clock = wait, clock
        self._free_at_ns: int | None = None

    def begin_step(self) -> None:
        """Let the first action start when it comes."""
        self._free_at_ns = None

    def restart(self) -> None:
        """Set the rank free now."""
        self._free_at_ns = self.clock()

    def spend(self, duration_ns: int) -> None:
        """Run an action of ``duration_ns``, which starts when the rank was free: block until it should end."""
        now_ns = self.clock()
        self._free_at_ns = duration_ns + (now_ns if self._free_at_ns is None else self._free_at_ns)
        self._wait(max(self._free_at_ns - now_ns, 0))

    def wait_for(self, work: Work) -> None:
        """Wait for a message. If it had not arrived yet, the rank is free from its arrival on."""
        begin_ns = self.clock()
        work.wait()
        if self.clock() - begin_ns > BLOCKED_NS:
            self.restart()


@dataclass(frozen=True, slots=True)
class _Message:
    """A transfer whose wait updates the rank's pace."""

    work: Work
    pace: Pace

    def wait(self) -> None:
        self.pace.wait_for(self.work)


@dataclass(frozen=True, slots=True)
class PacedTransport:
    """Transport of a rank that keeps ``pace``: waits for messages update the pace, reductions pass through."""

    transport: Transport
    pace: Pace

    def post_recv(self, channel: Channel, tensor: Tensor) -> Work:
        """Receive over the transport, with a wait that updates the pace."""
        return _Message(self.transport.post_recv(channel, tensor), self.pace)

    def send(self, channel: Channel, tensor: Tensor) -> Work:
        """Send over the transport, with a wait that updates the pace."""
        return _Message(self.transport.send(channel, tensor), self.pace)

    def all_reduce(self, group: Group, tensor: Tensor) -> Work:
        """All-reduce over the transport."""
        return self.transport.all_reduce(group, tensor)

    def reduce_scatter(self, tensor: Tensor) -> Work:
        """Reduce-scatter over the transport."""
        return self.transport.reduce_scatter(tensor)

    def all_gather(self, tensor: Tensor) -> Work:
        """All-gather over the transport."""
        return self.transport.all_gather(tensor)

    def sum_tied(self, pipeline_rank: int, tensor: Tensor) -> Work:
        """Sum the tied gradient over the transport."""
        return self.transport.sum_tied(pipeline_rank, tensor)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A reduction that ends once all its ranks have joined and its duration has passed."""

    met: Work
    rest: Callable[[], None]

    def wait(self) -> None:
        self.met.wait()
        self.rest()


class WaitingExecutor:
    """`penstock.trainer.interpreter.Executor` that waits for ``durations_ns`` of an action, 0 where it has no entry.

    It keeps the pace of ``transport``. Messages have the sizes of the slots but no content, so all share one buffer.

    A reduction sums one element over the group, to synchronise its ranks. TIE sums over the ranks of ``tied`` one after
    the other, as in training. TP communicates nothing. The duration of a reduction over peers counts from its start, or
    from the end of the previous one. That of a reduction over ranks of the pipeline counts from the time when all have
    joined.
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
        """Do nothing."""
        return nothing

    def reduction(self, instruction: Instruction) -> Callable[[], Work]:
        """Return a function that synchronises the ranks of the group and lets the reduction's duration pass."""
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
        """Wait for the rest of a reduction from now on."""
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
    """Run ``num_steps`` steps and return the timeline of the median one. Collective over ``group``, all ranks.

    ``predicted`` is a simulated step of one replica. Raises `RunError` that names the failed action.
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
        dist.barrier(group)  # a step counts from the start of its first rank, so all start at the same time
        paced.pace.begin_step()
        interpreter.run(step, recorder)
        marks.append(recorder.times_ns())
    timelines = [
        merge(program, mesh, gather_times(times_ns, program, mesh, group), source=Source.REHEARSED, step=step)
        for step, times_ns in enumerate(marks)
    ]
    return sorted(timelines, key=lambda timeline: timeline.step_ns)[num_steps // 2]
