"""Who sends what to whom: the channels of an order, and the number of every message on its channel.

A channel is first-in first-out, so a message's number is its sender's count; a receiver that consumes in another order
waits for the number of the message it needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.planner.order import BACKWARD, FORWARD, INPUT_GRADIENT, KINDS, Order
from penstock.planner.simulate.costs import TO_NEXT, TO_PREVIOUS

Numbers = npt.NDArray[np.int64]

LOST = np.iinfo(np.int32).max

DIRECTIONS = np.full(len(KINDS), -1, dtype=np.int64)
"""The direction of the message that an action of each kind sends (and needs), -1 for none."""
DIRECTIONS[FORWARD] = TO_NEXT
DIRECTIONS[[BACKWARD, INPUT_GRADIENT]] = TO_PREVIOUS


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Channels:
    """Channels in the order of `core.program.Program.channels`, by number.

    ``sends`` and ``receives`` [direction, stage] name the channel that a stage's messages leave and reach it
    by, -1 for none; ``counts`` the messages of every channel; ``needs`` [actions] the number of the message that
    an action waits for (-1: none; `LOST`: one that nobody sends).
    """

    sources: Numbers
    targets: Numbers
    sends: Numbers
    receives: Numbers
    counts: Numbers
    needs: Numbers


def channels_of(order: Order) -> Channels:
    """The channels of an order; neighbouring stages on one rank need none."""
    owners = order.stage_ranks.tolist()
    hops = [(owners[s], owners[s + 1], "F", TO_NEXT, s, s + 1) for s in range(order.num_stages - 1)]
    hops += [(owners[s + 1], owners[s], "B", TO_PREVIOUS, s + 1, s) for s in range(order.num_stages - 1)]
    hops = [hop for hop in hops if hop[0] != hop[1]]
    names = sorted({hop[:3] for hop in hops})
    sends = np.full((2, order.num_stages), -1, dtype=np.int64)
    receives = sends.copy()
    for *name, direction, sender, receiver in hops:
        sends[direction, sender] = receives[direction, receiver] = names.index(tuple(name))
    counts, needs = _number_messages(order, sends, receives, len(names))
    return Channels(
        sources=np.array([name[0] for name in names], dtype=np.int64),
        targets=np.array([name[1] for name in names], dtype=np.int64),
        sends=sends,
        receives=receives,
        counts=counts,
        needs=needs,
    )


def _number_messages(order: Order, sends: Numbers, receives: Numbers, num_channels: int) -> tuple[Numbers, Numbers]:
    directions = DIRECTIONS[order.kinds]
    moves = directions >= 0
    sent_by = np.where(moves, sends[directions, order.stages], -1)
    counts = np.bincount(sent_by + 1, minlength=num_channels + 1)[1:]
    senders = np.argsort(sent_by.astype(np.int16), kind="stable")[len(sent_by) - counts.sum() :]
    firsts = np.cumsum(counts) - counts
    shape = (2, order.num_stages, order.num_microbatches, order.num_slices)
    numbers = np.full(shape, LOST, dtype=np.int64)
    sender_key = (directions[senders], order.stages[senders], order.microbatches[senders], order.slices[senders])
    numbers[sender_key] = np.arange(len(senders)) - firsts[sent_by[senders]]
    needed = moves & (receives[directions, order.stages] >= 0)
    origin = order.stages + np.where(directions == TO_NEXT, -1, 1)
    needs = np.full(order.num_actions, -1, dtype=np.int64)
    needs[needed] = numbers[directions[needed], origin[needed], order.microbatches[needed], order.slices[needed]]
    return counts, needs
