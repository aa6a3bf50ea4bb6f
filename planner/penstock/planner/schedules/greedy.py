"""List scheduling of a split backward, compiled: every rank, whenever it is free, takes the best of what it could do.

Forwards and input gradients alternate while both are there, since each feeds another rank; a weight gradient fills a
wait, or makes room in the stash for one of them. Times follow the simulator's rules for messages (first-in first-out,
`receive_ahead` of them under way), so an order made here cannot get stuck there. What a neighbour is running is known,
so a rank knows how long it will wait for its message and can leave a wait alone that is too short.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from penstock.planner.clock import Clock, never, next_cell, next_time, set_time, time_of

Ints = npt.NDArray[np.int64]

NEVER = 1 << 60
"""A time that is not known; above all that are."""

# Columns of `costs` [rank, slice]: nanoseconds of F, I, W and of their messages, changes in stash by F, I, W.
F_NS, I_NS, W_NS, TO_NEXT_NS, TO_PREVIOUS_NS, F_STASH, I_STASH, W_STASH = range(8)

# Columns of `ranks`: limits of the stash for any action and for F, of units between F and I, and between I and W;
# units begun of F, I and W; the last of F and I; stash in use; whether the rank waits; messages into the rank whose
# arrival is known, and when their channels are free; when its last action ends.
CAP, F_CAP, DEPTH, LAG, NEXT_F, NEXT_I, NEXT_W, LAST, STASH, WAITS, KNOWN_F, KNOWN_I, FREE_F, FREE_I, FINISH = range(15)

# Planes of `messages` [plane, direction, receiver, number mod receive_ahead]: when it was sent and its receive posted,
# and how long it takes.
SENT_AT, POSTED_AT, DURATION = range(3)

# What a rank can do.
F, I, W, NOTHING = range(4)  # noqa: E741  the field's own name for the input-gradient pass


@numba.njit(cache=True, nogil=True)
def run(
    costs: Ints,
    ranks: Ints,
    clock: Clock,
    arrivals: Ints,
    messages: Ints,
    choices: npt.NDArray[np.int8],
    patience: int,
) -> None:
    """Fill ``choices`` [rank, step] with F, I or W.

    ``arrivals`` [direction, rank, unit] is when the input of every F and I is there, `NEVER` if unknown; it comes with
    those filled in that need no message. A wait is filled with W if it is at least ``patience`` percent of W's time.
    """
    now = next_time(clock)
    while now < never(clock):
        rank = next_cell(clock)
        choice, until = _choose(costs, ranks, arrivals, messages.shape[3], rank, now, patience)
        ranks[rank, WAITS] = choice == NOTHING
        if choice == NOTHING:
            set_time(clock, rank, min(until, never(clock)))
        else:
            step = ranks[rank, NEXT_F] + ranks[rank, NEXT_I] + ranks[rank, NEXT_W]
            choices[rank, step] = choice
            over = _start(costs, ranks, clock, arrivals, messages, rank, now, choice)
            ranks[rank, FINISH] = over
            set_time(clock, rank, over if step + 1 < choices.shape[1] else never(clock))
        now = next_time(clock)


@numba.njit(cache=True, nogil=True)
def _choose(
    costs: Ints, ranks: Ints, arrivals: Ints, receive_ahead: int, rank: int, now: int, patience: int
) -> tuple[int, int]:
    """What ``rank`` does now, or that it waits and until when."""
    num_slices = costs.shape[1]
    forward_at = _ready(ranks, arrivals, receive_ahead, num_slices, rank, F)
    gradient_at = _ready(ranks, arrivals, receive_ahead, num_slices, rank, I)
    weight = num_slices - 1 - ranks[rank, NEXT_W] % num_slices
    has_weight = ranks[rank, NEXT_W] < ranks[rank, NEXT_I]
    soonest = min(forward_at, gradient_at)
    if ranks[rank, NEXT_I] - ranks[rank, NEXT_W] > ranks[rank, LAG]:
        choice = W
    elif soonest <= now:
        forward_first = gradient_at > now or (forward_at <= now and ranks[rank, LAST] == I)
        choice = F if forward_first else I
        if not _has_room(costs, ranks, rank, choice):
            choice = W if has_weight else (I if forward_first and gradient_at <= now else NOTHING)
            soonest = gradient_at
    elif has_weight and (soonest == NEVER or 100 * (soonest - now) >= patience * costs[rank, weight, W_NS]):
        choice = W
    else:
        choice = NOTHING
    return choice, soonest


@numba.njit(cache=True, nogil=True)
def _ready(ranks: Ints, arrivals: Ints, receive_ahead: int, num_slices: int, rank: int, kind: int) -> int:
    """When the next F or I could start as far as is known: its input is there and its message will have a receive."""
    unit = ranks[rank, NEXT_F + kind]
    neighbour = rank + 1 if kind == F else rank - 1
    ready: int = NEVER
    if unit < arrivals.shape[2]:
        ready = arrivals[kind, rank, unit]
        if 0 <= neighbour < len(ranks) and unit >= receive_ahead:
            ready = max(ready, arrivals[kind, neighbour, unit - receive_ahead])
        if kind == F and unit - ranks[rank, NEXT_I] >= ranks[rank, DEPTH]:
            ready = NEVER
        if kind == I and rank == len(ranks) - 1 and ranks[rank, NEXT_F] < (unit // num_slices + 1) * num_slices:
            ready = NEVER
    return ready


@numba.njit(cache=True, nogil=True)
def _has_room(costs: Ints, ranks: Ints, rank: int, kind: int) -> bool:
    part = ranks[rank, NEXT_F + kind] % costs.shape[1]
    if kind == F:
        room: int = ranks[rank, F_CAP] - ranks[rank, STASH] - costs[rank, part, F_STASH]
    else:
        room = ranks[rank, CAP] - ranks[rank, STASH] - costs[rank, costs.shape[1] - 1 - part, I_STASH]
    return room >= 0


@numba.njit(cache=True, nogil=True)
def _start(
    costs: Ints, ranks: Ints, clock: Clock, arrivals: Ints, messages: Ints, rank: int, now: int, kind: int
) -> int:
    """Run the next unit of that kind: post the receive after its own, send its message. Its end is known at once."""
    num_slices, num_units, receive_ahead = costs.shape[1], arrivals.shape[2], messages.shape[3]
    unit = ranks[rank, NEXT_F + kind]
    part = unit % num_slices if kind == F else num_slices - 1 - unit % num_slices
    over: int = now + costs[rank, part, F_NS + kind]
    ranks[rank, NEXT_F + kind] += 1
    ranks[rank, STASH] += costs[rank, part, F_STASH + kind]
    if kind != W:
        ranks[rank, LAST] = kind
        place = unit % receive_ahead
        if unit + receive_ahead < num_units:
            messages[POSTED_AT, kind, rank, place] = now
            _deliver(ranks, clock, arrivals, messages, rank, kind)
        neighbour = rank + 1 if kind == F else rank - 1
        if 0 <= neighbour < len(ranks):
            messages[SENT_AT, kind, neighbour, place] = over
            messages[DURATION, kind, neighbour, place] = costs[rank, part, TO_NEXT_NS + kind]
            _deliver(ranks, clock, arrivals, messages, neighbour, kind)
    return over


@numba.njit(cache=True, nogil=True)
def _deliver(ranks: Ints, clock: Clock, arrivals: Ints, messages: Ints, rank: int, kind: int) -> None:
    """Date the arrivals of messages into ``rank`` that are now both sent and posted, and tell both ends."""
    receive_ahead = messages.shape[3]
    sender = rank - 1 if kind == F else rank + 1
    if 0 <= sender < len(ranks):
        number = ranks[rank, KNOWN_F + kind]
        while number < min(ranks[sender, NEXT_F + kind], ranks[rank, NEXT_F + kind] + receive_ahead):
            place = number % receive_ahead
            begin = max(messages[SENT_AT, kind, rank, place], messages[POSTED_AT, kind, rank, place])
            arrival = max(begin, ranks[rank, FREE_F + kind]) + messages[DURATION, kind, rank, place]
            arrivals[kind, rank, number] = arrival
            ranks[rank, FREE_F + kind] = arrival
            for end in (sender, rank):
                if ranks[end, WAITS] and arrival < time_of(clock, end):
                    set_time(clock, end, arrival)
            number += 1
        ranks[rank, KNOWN_F + kind] = number
