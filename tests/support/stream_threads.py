"""Communication kernels on streams and in places, step by step: what `penstock.core.residency` proves, by trying.

Three kinds of event: a rank's compute stream passes its next instruction, a kernel takes a place, a transfer or a
reduction ends because all its kernels have places. `most_kernels` follows every order of events with places enough,
`is_stuck_somewhere` every order with ``num_places`` on each device.

`sharded` makes a Program of ranks, all shards of those of another, that meet in every action. Their collectives, and
reductions over tp, are kernels on a stream of their own, which has one place more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from penstock.core.program import Channel, Instruction, Program, RankProgram, Reduction
from penstock.core.schedule import Action, Group, Kind

_SENDS = (Kind.SEND_F, Kind.SEND_B)
_POSTS = (Kind.POST_RECV_F, Kind.POST_RECV_B)
_WAITS = (Kind.WAIT_SEND_F, Kind.WAIT_SEND_B, Kind.WAIT_RECV_F, Kind.WAIT_RECV_B)


@dataclass(frozen=True, slots=True)
class State:
    """How far every compute stream is, how many transfers or reductions of every stream ended, and which kernels have
    places.
    """

    positions: tuple[int, ...]
    ended: tuple[int, ...]
    placed: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Stream:
    """What the kernels of ``ranks`` run on: a channel, or a group with those that start its reductions together."""

    purpose: Channel | Group
    ranks: tuple[int, ...]

    def launches(self, rank: int, instruction: Instruction) -> bool:
        if isinstance(self.purpose, Group):
            return rank in self.ranks and _is(instruction, Kind.START_REDUCE, self.purpose)
        kinds = {self.purpose.source: _SENDS, self.purpose.target: _POSTS}.get(rank, ())
        return instruction.channel == self.purpose and instruction.action.kind in kinds


class StreamThreads:
    """A Program's transfers and reductions, over tp of ``num_shards`` neighbours; compute and FREE take no part."""

    def __init__(self, program: Program, num_shards: int = 1) -> None:
        self._rows = [[i for i in rank.instructions if _takes_part(i)] for rank in program.ranks]
        self._streams = [Stream(channel, (channel.source, channel.target)) for channel in program.channels]
        for reduction in program.reductions:
            team = {Group.DP: 1, Group.TP: num_shards}.get(reduction.group, len(reduction.ranks))
            teams = [reduction.ranks[at : at + team] for at in range(0, len(reduction.ranks), team)]
            self._streams += [Stream(reduction.group, ranks) for ranks in teams]
        self._has_shards = num_shards > 1
        self._launched = [[self._prefix(rank, stream) for stream in self._streams] for rank in range(len(self._rows))]
        self.start = State(tuple(0 for _ in self._rows), tuple(0 for _ in self._streams))

    def is_over(self, state: State) -> bool:
        return all(at == len(row) for at, row in zip(state.positions, self._rows, strict=True))

    def ready(self, state: State, rank: int) -> list[int]:
        """The streams on which a kernel of the rank can start or has, and has not ended; those of shards apart."""
        return [number for number in range(len(self._streams)) if self._counts(number, state, rank)]

    def _counts(self, number: int, state: State, rank: int) -> bool:
        return self._takes_place(number) and self._is_ready(state, rank, number)

    def _takes_place(self, number: int) -> bool:
        """Whether the stream's kernels take one of a device's places."""
        return not self._has_shards or self._streams[number].purpose is not Group.TP

    def _prefix(self, rank: int, stream: Stream) -> list[int]:
        """By position of the rank's compute stream, how many kernels it launched on the stream before."""
        return [0, *accumulate(stream.launches(rank, instruction) for instruction in self._rows[rank])]

    def _is_ready(self, state: State, rank: int, number: int) -> bool:
        return self._launched[rank][number][state.positions[rank]] > state.ended[number]

    def moves(self, state: State, num_places: int | None) -> Iterator[State]:
        """Every next state; without ``num_places`` every kernel has a place at once."""
        for rank in range(len(self._rows)):
            if self._may_pass(state, rank):
                yield replace(state, positions=_plus_one(state.positions, rank))
        for number, stream in enumerate(self._streams):
            ends = [(rank, number) for rank in stream.ranks]
            waiting = [end for end in ends if self._is_ready(state, end[0], number)]
            if num_places is None:
                if len(waiting) == len(ends):
                    yield replace(state, ended=_plus_one(state.ended, number))
                continue
            for end in waiting:
                taken = sum(rank == end[0] and self._takes_place(of) for rank, of in state.placed)
                has_place = taken < num_places or not self._takes_place(number)
                if end not in state.placed and has_place:
                    yield replace(state, placed=state.placed | {end})
            if state.placed.issuperset(ends):
                yield replace(state, ended=_plus_one(state.ended, number), placed=state.placed - set(ends))

    def _may_pass(self, state: State, rank: int) -> bool:
        row, at = self._rows[rank], state.positions[rank]
        if at == len(row):
            return False
        instruction = row[at]
        if instruction.action.kind in _WAITS:
            return state.ended[self._stream(rank, instruction.channel)] > instruction.sequence
        if instruction.action.kind is Kind.WAIT_REDUCE:
            number = self._stream(rank, instruction.action.group)
            start = replace(instruction, action=replace(instruction.action, kind=Kind.START_REDUCE))
            return state.ended[number] > self._launched[rank][number][row.index(start)]
        return True

    def _stream(self, rank: int, purpose: Channel | Group | None) -> int:
        (number,) = [
            number for number, stream in enumerate(self._streams) if stream.purpose == purpose and rank in stream.ranks
        ]
        return number


def _is(instruction: Instruction, kind: Kind, group: Group) -> bool:
    return instruction.action.kind is kind and instruction.action.group is group


def _takes_part(instruction: Instruction) -> bool:
    return instruction.channel is not None or instruction.action.group is not None


def _plus_one(numbers: tuple[int, ...], at: int) -> tuple[int, ...]:
    return (*numbers[:at], numbers[at] + 1, *numbers[at + 1 :])


def sharded(program: Program, num_shards: int) -> Program:
    """``num_shards`` of every rank, each with channels to its like, that meet once in every action.

    A meeting is a reduction over tp of a stage that there is not, so that none has the name of another. Of reductions
    over the pipeline there may be those that join all ranks.
    """
    everyone = tuple(range(len(program.ranks) * num_shards))
    ranks = tuple(
        replace(own, rank=own.rank * num_shards + shard, instructions=tuple(_of_shard(own, num_shards, shard)))
        for own in program.ranks
        for shard in range(num_shards)
    )
    groups = [each.group for each in program.reductions if each.group is not Group.TP]
    return replace(program, ranks=ranks, reductions=tuple(Reduction(group, everyone) for group in (Group.TP, *groups)))


def _of_shard(own: RankProgram, num_shards: int, shard: int) -> Iterator[Instruction]:
    for number, instruction in enumerate(own.instructions):
        channel = instruction.channel
        if instruction.action.is_compute:
            for kind in (Kind.START_REDUCE, Kind.WAIT_REDUCE):
                yield Instruction(Action(kind, 1_000 + number, group=Group.TP))
        elif channel is None:
            yield instruction
        else:
            source, target = channel.source * num_shards + shard, channel.target * num_shards + shard
            yield replace(instruction, channel=Channel(source, target, channel.direction))


def explored(
    program: Program,
    num_places: int | None,
    visit: Callable[[StreamThreads, State], None],
    limit: int,
    num_shards: int = 1,
) -> bool:
    """Visit every state that some order of events reaches; whether there were at most ``limit``, else only so many."""
    threads = StreamThreads(program, num_shards)
    known, pending = {threads.start}, [threads.start]
    while pending:
        state = pending.pop()
        visit(threads, state)
        for later in threads.moves(state, num_places):
            if later not in known:
                known.add(later)
                pending.append(later)
        if len(known) > limit:
            return False
    return True


def most_kernels(program: Program, limit: int = 3_000, num_shards: int = 1) -> tuple[int, ...] | None:
    """Per rank the most kernels that can start and have not ended, over all orders; none for too many states."""
    most = [0] * len(program.ranks)

    def visit(threads: StreamThreads, state: State) -> None:
        for rank in range(len(most)):
            most[rank] = max(most[rank], len(threads.ready(state, rank)))

    return tuple(most) if explored(program, None, visit, limit, num_shards) else None


def is_stuck_somewhere(program: Program, num_places: int, limit: int = 3_000, num_shards: int = 1) -> bool:
    """Whether some order of events on devices with ``num_places`` ends before the Program does.

    Of a Program with more than ``limit`` states only so many are tried.
    """
    stuck = False

    def visit(threads: StreamThreads, state: State) -> None:
        nonlocal stuck
        stuck = stuck or (not threads.is_over(state) and next(threads.moves(state, num_places), None) is None)

    explored(program, num_places, visit, limit, num_shards)
    return stuck
