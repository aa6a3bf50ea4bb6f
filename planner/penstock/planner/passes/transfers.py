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

from collections import defaultdict
from itertools import accumulate

from penstock.core.program import Channel
from penstock.core.schedule import Action, Kind
from penstock.planner.passes.draft import Draft
from penstock.planner.passes.order import Ordered, cell_of

Message = tuple[str, int, int, int]
"""Direction, receiving stage, micro-batch, slice."""

_KINDS = {
    "F": (Kind.POST_RECV_F, Kind.WAIT_RECV_F, Kind.SEND_F, Kind.WAIT_SEND_F),
    "B": (Kind.POST_RECV_B, Kind.WAIT_RECV_B, Kind.SEND_B, Kind.WAIT_SEND_B),
}


def add_transfers(ordered: Ordered, receive_ahead: int) -> list[list[Draft]]:
    """The drafts of every rank, compute and transfers."""
    traffic = _Traffic(ordered, receive_ahead)
    return [_Writer(ordered, traffic, rank).write() for rank in range(len(ordered.rows))]


def _consumed(action: Action) -> Message | None:
    """The message that a compute action takes if it comes from another rank."""
    direction = {Kind.F: "F", Kind.I: "B", Kind.B: "B"}.get(action.kind)
    return _message(direction, action.stage, action) if direction else None


def _produced(action: Action) -> Message | None:
    """The message that a compute action makes if it goes to another rank."""
    direction = {Kind.F: "F", Kind.I: "B", Kind.B: "B"}.get(action.kind)
    return _message(direction, action.stage + (1 if direction == "F" else -1), action) if direction else None


def _message(direction: str, stage: int, action: Action) -> Message:
    _, microbatch, part = cell_of(action)
    return direction, stage, microbatch, part


class _Traffic:
    """The messages of every channel in the sender's order, and the rounds at which their receives are posted."""

    def __init__(self, ordered: Ordered, receive_ahead: int) -> None:
        self.receive_ahead = receive_ahead
        self.messages: defaultdict[Channel, list[Message]] = defaultdict(list)
        self.numbers: dict[Message, tuple[Channel, int]] = {}
        for rank, row in enumerate(ordered.rows):
            for action in row:
                self._add(ordered, rank, _produced(action))
        rounds = {
            _consumed(action): at
            for row, ats in zip(ordered.rows, ordered.rounds, strict=True)
            for action, at in zip(row, ats, strict=True)
        }
        self.post_rounds = {
            channel: self._post_rounds([rounds[message] for message in messages])
            for channel, messages in self.messages.items()
        }

    def _add(self, ordered: Ordered, rank: int, message: Message | None) -> None:
        if message is None or not 0 <= message[1] < len(ordered.stage_ranks):
            return
        target = ordered.stage_ranks[message[1]]
        if target != rank:
            channel = Channel(rank, target, message[0])
            self.numbers[message] = (channel, len(self.messages[channel]))
            self.messages[channel].append(message)

    def _post_rounds(self, consumer_rounds: list[int]) -> list[int]:
        """Message k is waited for by the first consumer of k or a later one; its wait posts k + receive_ahead."""
        wait_rounds = list(accumulate(reversed(consumer_rounds), min))[::-1]
        return [0] * min(self.receive_ahead, len(wait_rounds)) + wait_rounds[: -self.receive_ahead]


class _Writer:
    """Writes one rank's drafts in program order."""

    def __init__(self, ordered: Ordered, traffic: _Traffic, rank: int) -> None:
        self._actions = list(zip(ordered.rows[rank], ordered.rounds[rank], strict=True))
        self._traffic = traffic
        channels = sorted(traffic.messages, key=lambda channel: (channel.source, channel.target, channel.direction))
        self._num_received = {channel: 0 for channel in channels if channel.target == rank}
        self._num_sent = {channel: 0 for channel in channels if channel.source == rank}
        self._num_awaited = dict(self._num_sent)
        self._sent: list[tuple[Channel, int]] = []
        self._drafts: list[Draft] = []

    def write(self) -> list[Draft]:
        for channel in self._num_received:
            for number in range(self._traffic.receive_ahead):
                self._post(channel, number)
        for action, at in self._actions:
            self._receive(action)
            self._drafts.append(Draft(action))
            self._send(action, at)
        for channel, number in self._sent:
            if number >= self._num_awaited[channel]:
                self._add(3, channel, number)
        return self._drafts

    def _receive(self, action: Action) -> None:
        message = _consumed(action)
        if message not in self._traffic.numbers:
            return
        channel, last = self._traffic.numbers[message]
        for number in range(self._num_received[channel], last + 1):
            self._add(1, channel, number)
            self._post(channel, number + self._traffic.receive_ahead)
        self._num_received[channel] = max(last + 1, self._num_received[channel])

    def _post(self, channel: Channel, number: int) -> None:
        if number < len(self._traffic.messages[channel]):
            self._add(0, channel, number)

    def _send(self, action: Action, at: int) -> None:
        message = _produced(action)
        sent = self._traffic.numbers.get(message) if message else None
        if sent:
            self._num_sent[sent[0]] += 1
            self._sent.append(sent)
        for channel in self._num_sent:
            self._await_sends(channel, at)
        if sent:
            self._add(2, *sent)

    def _await_sends(self, channel: Channel, at: int) -> None:
        post_rounds = self._traffic.post_rounds[channel]
        number = self._num_awaited[channel]
        while number + self._traffic.receive_ahead < self._num_sent[channel] and post_rounds[number] <= at:
            self._add(3, channel, number)
            number += 1
        self._num_awaited[channel] = number

    def _add(self, which: int, channel: Channel, number: int) -> None:
        direction, receiver, microbatch, part = self._traffic.messages[channel][number]
        sender = receiver + (-1 if direction == "F" else 1)
        stage = receiver if which < 2 else sender
        action = Action(_KINDS[direction][which], stage, microbatch, part)
        self._drafts.append(Draft(action, channel, number))
