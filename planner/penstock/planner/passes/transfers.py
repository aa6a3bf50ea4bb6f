"""Pass 2, transfers: the messages between ranks, and the places where every rank posts, sends and waits.

Messages are numbered per channel in the sender's order. SEND directly follows its producer, those of an overlapped pair
follow the pair. WAIT_RECV directly precedes its consumer, those of an overlapped pair precede the pair. A consumer that
needs messages in another order than they were sent first waits for all earlier ones, which stay in their slots until
they are used.

A message is *due* at an action of its receiver. POST_RECV k precedes that action's WAIT_RECVs, or directly follows
WAIT_RECV k - receive_ahead if that comes later, so that no channel has more than ``receive_ahead`` receives posted.

- On the host a posted receive only costs memory, so every message is due at its receiver's first action: the first
  ``receive_ahead`` are posted at the start of the step, k + receive_ahead directly after WAIT_RECV k.
- With ``late_receives``, for NCCL, message k is due at the action before the one that waits for it (at that one if it
  is the rank's first). The two ends of a transfer are kernels there, and the one that starts first spins on its device
  until the other starts. Posted at the start of the step, the receives of gradients would spin through the warm-up.
  Posted directly before its WAIT_RECV, a receive would leave the kernel of its SEND to spin, and the transfer would
  overlap nothing.

So a receive spins next to at most one action; otherwise its rank waits for the message. A SEND spins from the end of
its producer to the action at which its message is due, which is short if consumers follow producers. In simulated steps
of 8 equal ranks, 16 micro-batches of 4 slices, and ``receive_ahead`` 4, the average number of kernels that spun next to
compute, of receives and sends:

                     gpipe        1f1b         zb-h1        zbv
    from the start   1.04 + 0     1.61 + 0     1.54 + 0     3.23 + 0
    late             0.75 + 0     0.80 + 0     0.32 + 0     0.42 + 0.12

No step took longer. Posting in the round after the producer's, if that is earlier, was tried: it only changes zbv, to
0.46 + 0.05, and makes the place of a receive depend on another rank.

Example, 1F1B on two ranks, rounds above the actions. 0B0 waits for rank 0's first gradient, and 0F1 is the action
before, so 0POST_RECV_B0 directly precedes 0F1. At the start it would have spun during 0F0 too.

    round    1    2    3    4    5    6
    rank 0   0F0  0F1  .    0B0  .    0B1
    rank 1   .    1F0  1B0  1F1  1B1

WAIT_SEND k directly precedes SEND k + receive_ahead, or is later if it could block there: after the first action whose
round is no earlier than the *post round* of k. That is the round after the last action before the one at which k is due
(1 if there is none), or the round of WAIT_RECV k - receive_ahead if that is later. Remaining WAIT_SENDs follow the last
action.

Thus no order that passed pass 1 can deadlock. Give every instruction a time: (round of its action, 0) to WAIT_RECV,
(round, 1) to the action, (round, 2) to WAIT_SEND and SEND. A POST_RECV before an action's WAIT_RECVs has the time
(round of the action before, 3), one after a WAIT_RECV has the time of that. Remaining WAIT_SENDs come after all actions
of all ranks. Program order never goes back in time, and every instruction that is waited for comes earlier. SEND k has
its producer's round, which is below that of every consumer from k on, hence below WAIT_RECV k's. POST_RECV k is before
WAIT_SEND k: it has either the round before the post round, or the post round itself and 0, which is before 2. This
holds for any due actions, if messages are due in their order and no later than at the action that waits for them.

No receive is earlier with ``late_receives`` than without, so receivers hold no more memory. A sender may hold its
message longer, since its WAIT_SEND may come later.

The pass is linear in the number of actions, times the few channels of a rank, with one bisection per message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from penstock.core.program import Channel
from penstock.core.roles import Cell
from penstock.core.schedule import Action, Kind, flatten
from penstock.planner.passes.draft import Draft
from penstock.planner.passes.rounds import Ordered, cell_of

_DIRECTIONS = {Kind.F: ("F", 1), Kind.I: ("B", -1), Kind.B: ("B", -1)}
"""The message of an action's result: direction, and the offset from its stage to the receiving one."""

_KINDS = {
    "F": (Kind.POST_RECV_F, Kind.WAIT_RECV_F, Kind.SEND_F, Kind.WAIT_SEND_F),
    "B": (Kind.POST_RECV_B, Kind.WAIT_RECV_B, Kind.SEND_B, Kind.WAIT_SEND_B),
}


def add_transfers(ordered: Ordered, receive_ahead: int, late_receives: bool = False) -> list[list[Draft]]:
    """The drafts of every rank, with compute and transfers."""
    traffic = _Traffic(ordered, receive_ahead, late_receives)
    return [_Writer(traffic, rank).write(row) for rank, row in enumerate(ordered.rows)]


@dataclass(slots=True)
class _Line:
    """One channel: its messages in the sender's order, each by the cell that it is for, and the progress of both ends.

    A message is due at the first action of its receiver whose round is no earlier than its due round.
    """

    channel: Channel
    messages: list[Cell] = field(default_factory=list)
    numbers: dict[Cell, int] = field(default_factory=dict)
    due_rounds: list[int] = field(default_factory=list)
    post_rounds: list[int] = field(default_factory=list)
    num_posted: int = 0
    num_received: int = 0
    num_sent: int = 0
    num_awaited: int = 0

    def add(self, message: Cell) -> None:
        self.numbers[message] = len(self.messages)
        self.messages.append(message)


class _Traffic:
    """All channels, by direction and receiving stage."""

    def __init__(self, ordered: Ordered, receive_ahead: int, late_receives: bool) -> None:
        self.ordered = ordered
        self.receive_ahead = receive_ahead
        self.late_receives = late_receives
        self.by_channel: dict[Channel, _Line] = {}
        self._by_stage: dict[tuple[str, int], _Line] = {}
        for sender in range(len(ordered.stage_ranks)):
            self._open("F", sender, sender + 1)
            self._open("B", sender, sender - 1)
        for row in ordered.rows:
            for action in flatten(row):
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
        """The line and message that an action receives; no line if none comes from another rank."""
        direction, _ = _DIRECTIONS.get(action.kind, ("", 0))
        return self._by_stage.get((direction, action.stage)), cell_of(action)

    def leaving(self, action: Action) -> tuple[_Line | None, Cell]:
        """The line and message that an action sends; no line if none goes to another rank."""
        direction, step = _DIRECTIONS.get(action.kind, ("", 0))
        stage, microbatch, part = cell_of(action)
        return self._by_stage.get((direction, stage + step)), (stage + step, microbatch, part)

    def _find_post_rounds(self) -> None:
        """Set the due and post rounds. Message k is waited for by the first consumer of k or a later one; its wait
        allows k + receive_ahead.
        """
        consumer_rounds = {channel: [0] * len(line.messages) for channel, line in self.by_channel.items()}
        for row, rounds in zip(self.ordered.rows, self.ordered.rounds, strict=True):
            for action, action_round in zip(row, rounds, strict=True):
                for child in flatten((action,)):
                    line, message = self.arriving(child)
                    if line:
                        consumer_rounds[line.channel][line.numbers[message]] = action_round
        for channel, line in self.by_channel.items():
            rounds = self.ordered.rounds[channel.target]
            wait_rounds = [*accumulate(reversed(consumer_rounds[channel]), min)][::-1]
            line.due_rounds = [_round_before(rounds, at) if self.late_receives else 0 for at in wait_rounds]
            allowed_rounds = [0] * self.receive_ahead + wait_rounds
            due = zip(line.due_rounds, allowed_rounds, strict=False)
            line.post_rounds = [max(_round_before(rounds, at) + 1, allowed) for at, allowed in due]


def _round_before(rounds: Sequence[int], at: int) -> int:
    """The latest of a rank's rounds before ``at``; 0 if there is none."""
    place = bisect_left(rounds, at)
    return rounds[place - 1] if place else 0


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
        for action, at in zip(row, self._rounds, strict=True):
            for line in self._arriving:
                self._post_due(line, at)
            children = tuple(flatten((action,)))
            for child in children:
                self._receive(child, at)
            self._drafts.append(Draft(action))
            for child in children:
                self._send(child, at)
        for line, number in self._sent:
            if number >= line.num_awaited:
                self._add_send(3, line, number)
        return self._drafts

    def _receive(self, action: Action, at: int) -> None:
        line, message = self._traffic.arriving(action)
        if line is None:
            return
        while line.num_received <= line.numbers[message]:
            self._add_receive(1, line, line.num_received)
            line.num_received += 1
            self._post_due(line, at)

    def _post_due(self, line: _Line, at: int) -> None:
        """Post the messages that are due at an action of round ``at``, as far as ``receive_ahead`` allows."""
        stop = min(line.num_received + self._traffic.receive_ahead, len(line.messages))
        while line.num_posted < stop and line.due_rounds[line.num_posted] <= at:
            self._add_receive(0, line, line.num_posted)
            line.num_posted += 1

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
