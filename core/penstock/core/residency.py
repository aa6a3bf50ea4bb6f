"""The most communication kernels that may run on a rank's device at once, at any speeds.

On CUDA a transfer is two NCCL kernels, one on each device. The model:

- Kernels are launched in program order: SEND and POST_RECV launch one, on the stream of their channel, which is that of
  one communicator. START_REDUCE and START_GATHER launch one on the stream of their group. A WAIT makes the compute
  stream wait for one.
- A kernel can start once the compute before its launch and the kernel before it on its stream have ended. Then it
  *spins*: it occupies multiprocessors until its peer's kernel also runs, and the transfer ends for both.
- A device has ``K`` places for such kernels. If several kernels can start, the device chooses which takes a free place.

A kernel that can start but finds no place waits for others to end, and those may be waiting for it. The rule that
excludes this, for every choice of the device, is that every kernel finds a place: no execution has more than K kernels
on one rank that are launched, can start, and have not ended. A stream lets one kernel start at a time, so these are the
channels with a message and the groups with a reduction under way.

Their number is exact and takes one pass. Let ``known(p)`` be the messages and reductions that must have ended when a
rank passes position p: those it waited for, and all that any end of them knew at its launch (a vector clock: Fidge
1988, Mattern 1989). An execution in which nothing else happened before p is possible. In it, a stream with a launch
before p that is not known to have ended has a kernel that can start and has not ended. Every other execution has ended
at least these at p. So the largest number over all executions is the maximum over p of the number of streams launched
on and not known to have ended; it only grows at a launch. Cost: instructions times streams of a rank and its
neighbours.

Example, one micro-batch and slice, two ranks. Rank 0 posts the receive of its gradient, then sends its activations: two
kernels. With one place the device hangs, since the posted receive holds it and its message needs the activations. If
the receive is launched after the activations are known to have arrived, one place is enough.

``NUM_PLACES`` is K. `penstock.trainer.comm` limits the thread blocks of the kernels of channels and shards so that K of
them fit. Reductions over replicas have NCCL's own number.

Shards of a rank (`penstock.core.sharding`) also meet in collectives in the middle of actions, which are kernels that
spin until all shards have theirs. They do not change the numbers, for two reasons:

- Nothing more is known through them. Take a chain of waits, over messages and collectives, from an event on one shard
  to position p of another. Ignore the shard of each event: a message stays a message of the Program, and a collective
  leads from an action to itself. So the chain is one of the Program alone, and a rank's knowledge of its own streams is
  ``known(p)``, as if it had no shards. The kernels of channels and reductions that spin at once are at most those
  counted here.
- They take no place. All collectives of a rank's shards use one communicator, hence one stream, on which one kernel can
  start at a time. `penstock.trainer.comm` also limits its thread blocks, so that a device has multiprocessors for them
  next to K others that spin: 32 and 8 x 4 of 108 or more. Compute that occupies some of these meanwhile waits for
  nothing and ends.

An overlapped pair has up to two collectives launched at once, one of each child. They are also on that one stream, and
the second starts when the first has ended.

So no kernel that can start ever waits for one that spins, and the proof that all shards end
(`penstock.core.invariants`), in which kernels have places, holds on devices.

Considered instead: to let kernels start only in the order of their launch. That is one deterministic run for any K, but
the hardware does not guarantee it: it serves streams from several queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.core.program import Channel, Instruction, Program, RankProgram
from penstock.core.schedule import Action, Group, Kind, Part

NUM_PLACES = 8
"""K: every generator's schedules need at most 8, on a rank in the middle of a V (`zbv`: four channels to each side).

That is with receives posted at the start of a step. Posted late, as in plans for CUDA, they need at most 6.
"""

_SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
_LAUNCHES = _SENDS | {Kind.POST_RECV_F, Kind.POST_RECV_B}
_WAITS = frozenset({Kind.WAIT_SEND_F, Kind.WAIT_SEND_B, Kind.WAIT_RECV_F, Kind.WAIT_RECV_B})

_STARTS = frozenset({Kind.START_REDUCE, Kind.START_GATHER})
_ENDS = frozenset({Kind.WAIT_REDUCE, Kind.WAIT_GATHER})

_Stream = Channel | tuple[Group, int]
"""A channel, or a group on one of its ranks."""

_Known = dict[_Stream, int]
"""Per stream the number of messages or reductions that have ended."""


@dataclass(frozen=True, slots=True)
class Residency:
    """The most kernels that may be on a rank's device at once, and the first instruction at which they are."""

    num_kernels: int
    position: int


@dataclass(slots=True)
class _Rank:
    program: RankProgram
    position: int = 0
    known: _Known = field(default_factory=dict)
    launched: _Known = field(default_factory=dict)
    reductions: dict[tuple[Group, int, Part | None], int] = field(default_factory=dict)
    most: Residency = Residency(0, 0)

    @property
    def pending(self) -> Instruction | None:
        instructions = self.program.instructions
        return instructions[self.position] if self.position < len(instructions) else None

    def launch(self, stream: _Stream, number: int) -> None:
        """Launch kernel ``number`` (from 1) of a stream and count those that may run."""
        self.launched[stream] = number
        under_way = sum(last > self.known.get(other, 0) for other, last in self.launched.items())
        if under_way > self.most.num_kernels:
            self.most = Residency(under_way, self.position)


class _Devices:
    """All ranks' devices, advanced through a Program that is proved to end."""

    def __init__(self, program: Program) -> None:
        self.ranks = [_Rank(rank) for rank in program.ranks]
        self._members = {reduction.group: reduction.ranks for reduction in program.reductions}
        self._arrived: dict[Group, dict[int, _Known]] = {group: {} for group in self._members}
        self._launches: dict[tuple[Channel, int, bool], _Known] = {}
        self._ended: dict[tuple[Channel, int], _Known] = {}

    def advance(self, rank: _Rank) -> None:
        """Advance ``rank`` until it ends or has to wait for another one."""
        while (instruction := rank.pending) is not None:
            kind, channel = instruction.action.kind, instruction.channel
            if kind in _STARTS:
                self._start_reduction(rank, instruction.action)
            elif kind in _ENDS:
                if not self._reduced(rank, instruction.action):
                    return
            elif channel is not None and kind in _LAUNCHES:
                rank.launch(channel, instruction.sequence + 1)
                self._launches[channel, instruction.sequence, kind in _SENDS] = dict(rank.known)
            elif channel is not None and kind in _WAITS:
                ended = self._end(channel, instruction.sequence)
                if ended is None:
                    return
                _learn(rank.known, ended)
            rank.position += 1

    def _end(self, channel: Channel, sequence: int) -> _Known | None:
        """The knowledge once a message has ended; None while an end of it is not launched."""
        if (channel, sequence) not in self._ended:
            sent, posted = (self._launches.get((channel, sequence, is_send)) for is_send in (True, False))
            if sent is None or posted is None:
                return None
            known = {**sent, channel: sequence + 1}
            _learn(known, posted)
            if sequence and (earlier := self._end(channel, sequence - 1)) is not None:
                _learn(known, earlier)
            self._ended[channel, sequence] = known
        return self._ended[channel, sequence]

    def _start_reduction(self, rank: _Rank, action: Action) -> None:
        group = _group(action)
        stream = (group, rank.program.rank)
        number = 1 + rank.launched.get(stream, 0)
        rank.reductions[group, action.stage, action.part] = number
        self._arrived[group][rank.program.rank] = dict(rank.known)
        rank.launch(stream, number)

    def _reduced(self, rank: _Rank, action: Action) -> bool:
        """Whether all ranks of the group have started; then each learns what all of them knew there.

        Peers in other replicas know nothing of this one, other shards nothing of this device that it does not know.
        """
        group = _group(action)
        arrived = self._arrived[group]
        if not group.is_of_peers:
            if len(arrived) < len(self._members[group]):
                return False
            for known in arrived.values():
                _learn(rank.known, known)
        _learn(rank.known, {(group, rank.program.rank): rank.reductions[group, action.stage, action.part]})
        return True


def _group(action: Action) -> Group:
    assert action.group is not None, f"{action} is no proved reduction"
    return action.group


def _learn(known: _Known, more: Mapping[_Stream, int]) -> None:
    for stream, number in more.items():
        if number > known.get(stream, 0):
            known[stream] = number


def resident_kernels(program: Program) -> tuple[Residency, ...]:
    """Per rank the most communication kernels that any execution of a proved ``program`` has on its device at once."""
    devices = _Devices(program)
    moved = True
    while moved:
        positions_before = [rank.position for rank in devices.ranks]
        for rank in devices.ranks:
            devices.advance(rank)
        moved = positions_before != [rank.position for rank in devices.ranks]
    assert all(rank.pending is None for rank in devices.ranks), "the Program is not proved to end"
    return tuple(rank.most for rank in devices.ranks)
