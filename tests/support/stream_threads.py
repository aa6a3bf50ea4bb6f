"""Communication kernels on streams and in places, step by step: what `penstock.core.residency` proves, by trying.

Three kinds of event: a rank's compute stream passes its next instruction, a kernel takes a place, a transfer or a
reduction ends because all its kernels have places. `most_kernels` follows every order of events with places enough,
`is_stuck_somewhere` every order with ``num_places`` on each device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from penstock.core.program import Channel, Instruction, Program
from penstock.core.schedule import Group, Kind

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
    """A Program's transfers and reductions; compute and FREE take no part."""

    def __init__(self, program: Program) -> None:
        self._rows = [[i for i in rank.instructions if _takes_part(i)] for rank in program.ranks]
        self._streams = [Stream(channel, (channel.source, channel.target)) for channel in program.channels]
        for reduction in program.reductions:
            teams = [(rank,) for rank in reduction.ranks] if reduction.group is Group.DP else [reduction.ranks]
            self._streams += [Stream(reduction.group, ranks) for ranks in teams]
        self._launched = [[self._prefix(rank, stream) for stream in self._streams] for rank in range(len(self._rows))]
        self.start = State(tuple(0 for _ in self._rows), tuple(0 for _ in self._streams))

    def is_over(self, state: State) -> bool:
        return all(at == len(row) for at, row in zip(state.positions, self._rows, strict=True))

    def ready(self, state: State, rank: int) -> list[int]:
        """The streams on which a kernel of the rank can start or has, and has not ended."""
        return [number for number in range(len(self._streams)) if self._is_ready(state, rank, number)]

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
                taken = sum(rank == end[0] for rank, _ in state.placed)
                if end not in state.placed and taken < num_places:
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


def explored(
    program: Program, num_places: int | None, visit: Callable[[StreamThreads, State], None], limit: int
) -> bool:
    """Visit every state that some order of events reaches; whether there were at most ``limit``, else only so many."""
    threads = StreamThreads(program)
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


def most_kernels(program: Program, limit: int = 3_000) -> tuple[int, ...] | None:
    """Per rank the most kernels that can start and have not ended, over all orders; none for too many states."""
    most = [0] * len(program.ranks)

    def visit(threads: StreamThreads, state: State) -> None:
        for rank in range(len(most)):
            most[rank] = max(most[rank], len(threads.ready(state, rank)))

    return tuple(most) if explored(program, None, visit, limit) else None


def is_stuck_somewhere(program: Program, num_places: int, limit: int = 3_000) -> bool:
    """Whether some order of events on devices with ``num_places`` ends before the Program does.

    Of a Program with more than ``limit`` states only so many are tried.
    """
    stuck = False

    def visit(threads: StreamThreads, state: State) -> None:
        nonlocal stuck
        stuck = stuck or (not threads.is_over(state) and next(threads.moves(state, num_places), None) is None)

    explored(program, num_places, visit, limit)
    return stuck
