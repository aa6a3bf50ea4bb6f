"""Pass 2, transfers: who sends what to whom, and where every rank posts, sends and waits.

Messages are numbered per channel in the sender's order. SEND stands directly after its producer. WAIT_RECV stands
directly before its consumer; a consumer that takes messages in another order than they were sent first waits for all
earlier ones, which then lie in their slots until they are used. The first ``receive_ahead`` POST_RECVs of a channel
stand at the program's start, POST_RECV k + receive_ahead directly after WAIT_RECV k. WAIT_SEND k stands directly before
SEND k + receive_ahead, or later where it could block there: after the first action whose round is no earlier than the
round of POST_RECV k. Those left over stand after the last action.

Thus no order that passed pass 1 can deadlock. Give every instruction a time: (round of its action, 0) to WAIT_RECV and
POST_RECV, (round, 1) to the action, (round, 2) to WAIT_SEND and SEND. Program order never goes back in time, and what
is waited for comes earlier: SEND k has its producer's round, which is below that of every consumer from k on, hence
below WAIT_RECV k's; POST_RECV k has at most the round of WAIT_SEND k, and 0 is before 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from penstock.core.program import Channel
from penstock.core.roles import Cell
from penstock.core.schedule import Action, Kind
from penstock.planner.passes.draft import Draft
from penstock.planner.passes.rounds import Ordered, cell_of

_DIRECTIONS = {Kind.F: ("F", 1), Kind.I: ("B", -1), Kind.B: ("B", -1)}
"""Where the result of an action goes: direction, and the step from its stage to the receiving one."""

_KINDS = {
    "F": (Kind.POST_RECV_F, Kind.WAIT_RECV_F, Kind.SEND_F, Kind.WAIT_SEND_F),
    "B": (Kind.POST_RECV_B, Kind.WAIT_RECV_B, Kind.SEND_B, Kind.WAIT_SEND_B),
}


def add_transfers(ordered: Ordered, receive_ahead: int) -> list[list[Draft]]:
    """The drafts of every rank, compute and transfers."""
    traffic = _Traffic(ordered, receive_ahead)
    return [_Writer(traffic, rank).write(row) for rank, row in enumerate(ordered.rows)]


@dataclass(slots=True)
class _Line:
    """One channel: its messages in the sender's order, each by the cell that it is for, and how far both ends are."""

    channel: Channel
    messages: list[Cell] = field(default_factory=list)
    numbers: dict[Cell, int] = field(default_factory=dict)
    post_rounds: list[int] = field(default_factory=list)
    num_received: int = 0
    num_sent: int = 0
    num_awaited: int = 0

    def add(self, message: Cell) -> None:
        self.numbers[message] = len(self.messages)
        self.messages.append(message)


class _Traffic:
    """All lines, found by direction and receiving stage."""

    def __init__(self, ordered: Ordered, receive_ahead: int) -> None:
        self.ordered = ordered
        self.receive_ahead = receive_ahead
        self.by_channel: dict[Channel, _Line] = {}
        self._by_stage: dict[tuple[str, int], _Line] = {}
        for sender in range(len(ordered.stage_ranks)):
            self._open("F", sender, sender + 1)
            self._open("B", sender, sender - 1)
        for row in ordered.rows:
            for action in row:
                line, message = self.leaving(action)
                if line:
                    line.add(message)
        self._find_post_rounds()

    def _open(self, direction: str, sender: int, receiver: int) -> None:
        ranks = self.ordered.stage_ranks
        if 0 <= receiver < len(ranks) and ranks[sender] != ranks[receiver]:
            channel = Channel(ranks[sender], ranks[receiver], direction)
            self._by_stage[direction, receiver] = self.by_channel.setdefault(channel, _Line(channel))

    def arriving(self, action: Action) -> tuple[_Line | None, Cell]:
        """The line and message that an action takes; no line if there is none from another rank."""
        direction, _ = _DIRECTIONS.get(action.kind, ("", 0))
        return self._by_stage.get((direction, action.stage)), cell_of(action)

    def leaving(self, action: Action) -> tuple[_Line | None, Cell]:
        """The line and message that an action makes; no line if there is none to another rank."""
        direction, step = _DIRECTIONS.get(action.kind, ("", 0))
        stage, microbatch, part = cell_of(action)
        return self._by_stage.get((direction, stage + step)), (stage + step, microbatch, part)

    def _find_post_rounds(self) -> None:
        """Message k is waited for by the first consumer of k or a later one; its wait posts k + receive_ahead."""
        consumer_rounds = {channel: [0] * len(line.messages) for channel, line in self.by_channel.items()}
        for row, rounds in zip(self.ordered.rows, self.ordered.rounds, strict=True):
            for action, at in zip(row, rounds, strict=True):
                line, message = self.arriving(action)
                if line:
                    consumer_rounds[line.channel][line.numbers[message]] = at
        for channel, line in self.by_channel.items():
            wait_rounds = [*accumulate(reversed(consumer_rounds[channel]), min)][::-1]
            line.post_rounds = [0] * self.receive_ahead + wait_rounds


def _line_order(line: _Line) -> tuple[int, int, str]:
    return line.channel.source, line.channel.target, line.channel.direction


class _Writer:
    """Writes one rank's drafts in program order."""

    def __init__(self, traffic: _Traffic, rank: int) -> None:
        lines = sorted(traffic.by_channel.values(), key=_line_order)
        self._traffic = traffic
        self._rounds = traffic.ordered.rounds[rank]
        self._arriving = [line for line in lines if line.channel.target == rank]
        self._leaving = [line for line in lines if line.channel.source == rank]
        self._sent: list[tuple[_Line, int]] = []
        self._drafts: list[Draft] = []

    def write(self, row: tuple[Action, ...]) -> list[Draft]:
        for line in self._arriving:
            for number in range(self._traffic.receive_ahead):
                self._post(line, number)
        for action, at in zip(row, self._rounds, strict=True):
            self._receive(action)
            self._drafts.append(Draft(action))
            self._send(action, at)
        for line, number in self._sent:
            if number >= line.num_awaited:
                self._add_send(3, line, number)
        return self._drafts

    def _receive(self, action: Action) -> None:
        line, message = self._traffic.arriving(action)
        if line is None:
            return
        while line.num_received <= line.numbers[message]:
            self._add_receive(1, line, line.num_received)
            self._post(line, line.num_received + self._traffic.receive_ahead)
            line.num_received += 1

    def _post(self, line: _Line, number: int) -> None:
        if number < len(line.messages):
            self._add_receive(0, line, number)

    def _send(self, action: Action, at: int) -> None:
        line, _ = self._traffic.leaving(action)
        if line:
            line.num_sent += 1
        for other in self._leaving:
            self._await_sends(other, at)
        if line:
            self._sent.append((line, line.num_sent - 1))
            self._add_send(2, line, line.num_sent - 1)

    def _await_sends(self, line: _Line, at: int) -> None:
        last = line.num_sent - self._traffic.receive_ahead
        while line.num_awaited < last and line.post_rounds[line.num_awaited] <= at:
            self._add_send(3, line, line.num_awaited)
            line.num_awaited += 1

    def _add_receive(self, which: int, line: _Line, number: int) -> None:
        action = Action(_KINDS[line.channel.direction][which], *line.messages[number])
        self._drafts.append(Draft(action, line.channel, number))

    def _add_send(self, which: int, line: _Line, number: int) -> None:
        stage, microbatch, part = line.messages[number]
        direction = line.channel.direction
        sender = stage - 1 if direction == "F" else stage + 1
        action = Action(_KINDS[direction][which], sender, microbatch, part)
        self._drafts.append(Draft(action, line.channel, number))
