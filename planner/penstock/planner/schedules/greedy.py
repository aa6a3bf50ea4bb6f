"""List scheduling of a split backward, compiled: whenever a rank is free, it starts the best action that it can.

Problem. With the backward split into I and W, only F and I have to meet other ranks, and W can fill waits (zero-bubble
schedules, arXiv 2401.10241). The order of all actions of all ranks is a job-shop problem with memory limits, which is
NP-hard. Published orders are formulas for equal stages and slices. Ours differ in time, and so do slices.

Idea. Simulate the pipeline and choose at every time at which a rank is free. Forwards and input gradients alternate
while both are ready, since each feeds another rank. Among a rank's stages the one furthest along goes first: the
deepest forward, the gradient nearest to stage 0. A weight gradient fills a wait, or frees stash for a forward or input
gradient. The running action of a neighbour is known, so a rank knows how long it will wait for its message and can
leave waits shorter than ``patience`` unfilled. The stash of a rank never exceeds its cap. F leaves the stash free that
I and W of the started micro-batches may add, so no rank is stuck.

Example: two ranks, four micro-batches, F, I and W take 1 each, messages take no time, and a rank may hold two
micro-batches from F to W.

    time     0   1   2   3   4   5   6   7   8   9   10  11  12
    rank 0   F0  F1  .   I0  W0  F2  I1  W1  F3  I2  W2  I3  W3
    rank 1   .   F0  I0  F1  I1  W0  F2  I2  W1  F3  I3  W2  W3

At 2 rank 0 holds two micro-batches and has no gradient yet, so it waits. At 4 the stash is full and F2 is ready: W0
comes first. At 5 rank 1 has to wait for F2 until 6, and fills the wait with W0. The step of 13 is the shortest
possible, since rank 1 cannot start before 1 and has 12 actions.

Times follow the simulator's rules for messages (first-in first-out, at most `receive_ahead` under way), so the
simulator can run the order without a deadlock; late receives count as posted at their earliest possible time.

Complexity. Every action is chosen once, from the stages of its rank, and every message wakes its two ranks once, in a
tree of the ranks' next times: A (V + log K) for A actions and V stages on each of K ranks.

Not optimal: a choice is never revised. Alone, these orders are 1.3 % slower on average than the best of all seeds, so
they are only one of the seeds, and all are refined (`penstock.planner.schedules.variants`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.planner.clock import Clock, never, next_cell, next_time, set_time, time_of
from penstock.planner.compiled import compiled

Ints = npt.NDArray[np.int64]

NEVER = 1 << 60
"""An unknown time; larger than all known ones."""

# Columns of `costs` [stage, slice]: nanoseconds of F, I, W and of their messages, changes in stash by F, I, W.
F_NS, I_NS, W_NS, TO_NEXT_NS, TO_PREVIOUS_NS, F_STASH, I_STASH, W_STASH = range(8)

# Columns of `stages`: its rank; limits of units between F and I, and between I and W; units begun of F, I and W;
# messages into the stage whose arrival is known, and the times at which their channels are free.
RANK, DEPTH, LAG, NEXT_F, NEXT_I, NEXT_W, KNOWN_F, KNOWN_I, FREE_F, FREE_I = range(10)

# Columns of `ranks`: limits of the stash for any action and for F; stash in use; actions begun; the last of F and I;
# whether the rank waits.
CAP, F_CAP, STASH, STEP, LAST, WAITS = range(6)

# Planes of `messages` [plane, direction, receiver, number mod receive_ahead]: when it was sent and its receive posted,
# and how long it takes.
SENT_AT, POSTED_AT, DURATION = range(3)

# Actions of a stage.
F, I, W, NOTHING = range(4)  # noqa: E741  the field's own name for the input-gradient pass


@compiled
def run(
    costs: Ints,
    stages: Ints,
    ranks: Ints,
    owned: Ints,
    clock: Clock,
    arrivals: Ints,
    messages: Ints,
    choices: npt.NDArray[np.int8],
    patience: int,
) -> None:
    """Fill ``choices`` [rank, step, 2] with F, I or W, and the index of its stage in ``owned`` [rank, place].

    Rows of ``owned`` ascend. ``arrivals`` [direction, stage, unit] is the time at which the input of every F and I
    arrives, `NEVER` if unknown; on entry those that need no message are filled in. A wait is filled with W if it is at
    least ``patience`` percent of W's time.
    """
    now = next_time(clock)
    while now < never(clock):
        rank = next_cell(clock)
        kind, place, until = _choose(costs, stages, ranks, owned, arrivals, messages.shape[3], rank, now, patience)
        ranks[rank, WAITS] = kind == NOTHING
        if kind == NOTHING:
            set_time(clock, rank, min(until, never(clock)))
        else:
            choices[rank, ranks[rank, STEP], 0] = kind
            choices[rank, ranks[rank, STEP], 1] = place
            ranks[rank, STEP] += 1
            end = _start(costs, stages, ranks, clock, arrivals, messages, owned[rank, place], now, kind)
            set_time(clock, rank, end if ranks[rank, STEP] < choices.shape[1] else never(clock))
        now = next_time(clock)


@compiled
def _choose(
    costs: Ints,
    stages: Ints,
    ranks: Ints,
    owned: Ints,
    arrivals: Ints,
    receive_ahead: int,
    rank: int,
    now: int,
    patience: int,
) -> tuple[int, int, int]:
    """The next action of ``rank`` and the index of its stage, or `NOTHING` and the time until which it waits."""
    own_stages = owned[rank]
    forward, forward_at = _furthest(stages, arrivals, receive_ahead, costs.shape[1], own_stages, now, F)
    gradient, gradient_at = _furthest(stages, arrivals, receive_ahead, costs.shape[1], own_stages, now, I)
    weight, is_overdue = _oldest_weight(stages, own_stages)
    soonest = min(forward_at, gradient_at)
    kind, place = NOTHING, 0
    if is_overdue:
        kind, place = W, weight
    elif soonest <= now:
        forward_first = gradient_at > now or (forward_at <= now and ranks[rank, LAST] == I)
        kind, place = (F, forward) if forward_first else (I, gradient)
        if not _has_capacity(costs, stages, ranks, own_stages[place], kind):
            if weight >= 0:
                kind, place = W, weight
            elif forward_first and gradient_at <= now:
                kind, place = I, gradient
            else:
                kind = NOTHING
                soonest = _soonest_after(stages, arrivals, receive_ahead, costs.shape[1], own_stages, now)
    elif weight >= 0 and (
        soonest == NEVER or 100 * (soonest - now) >= patience * _weight_ns(costs, stages, own_stages[weight])
    ):
        kind, place = W, weight
    return kind, place, soonest


@compiled
def _furthest(
    stages: Ints, arrivals: Ints, receive_ahead: int, num_slices: int, own_stages: Ints, now: int, kind: int
) -> tuple[int, int]:
    """Index of the stage whose F or I goes first, and its earliest start: the one furthest along if any is ready."""
    best, best_at = 0, NEVER
    for number in range(len(own_stages)):
        place = len(own_stages) - 1 - number if kind == F else number
        at = _ready(stages, arrivals, receive_ahead, num_slices, own_stages[place], kind)
        if at < best_at and best_at > now:
            best, best_at = place, at
    return best, best_at


@compiled
def _soonest_after(
    stages: Ints, arrivals: Ints, receive_ahead: int, num_slices: int, own_stages: Ints, now: int
) -> int:
    """The time at which the next F or I that is not ready yet becomes ready."""
    soonest = NEVER
    for stage in own_stages:
        for kind in (F, I):
            at = _ready(stages, arrivals, receive_ahead, num_slices, stage, kind)
            if now < at < soonest:
                soonest = at
    return soonest


@compiled
def _oldest_weight(stages: Ints, own_stages: Ints) -> tuple[int, bool]:
    """The index of the stage whose W is next, -1 if none, and whether a stage lags too far behind to wait."""
    best, is_overdue = -1, False
    for number in range(len(own_stages)):
        place = len(own_stages) - 1 - number
        stage = own_stages[place]
        lag = stages[stage, NEXT_I] - stages[stage, NEXT_W]
        late = lag > stages[stage, LAG]
        older = best < 0 or stages[stage, NEXT_W] < stages[own_stages[best], NEXT_W]
        if lag > 0 and (late > is_overdue or (late == is_overdue and older)):
            best, is_overdue = place, late
    return best, is_overdue


@compiled
def _weight_ns(costs: Ints, stages: Ints, stage: int) -> int:
    num_slices = costs.shape[1]
    duration: int = costs[stage, num_slices - 1 - stages[stage, NEXT_W] % num_slices, W_NS]
    return duration


@compiled
def _ready(stages: Ints, arrivals: Ints, receive_ahead: int, num_slices: int, stage: int, kind: int) -> int:
    """The earliest known start of the next F or I: its input has arrived and its own message will have a receive."""
    unit = stages[stage, NEXT_F + kind]
    neighbour = stage + 1 if kind == F else stage - 1
    ready: int = NEVER
    if unit < arrivals.shape[2]:
        ready = arrivals[kind, stage, unit]
        if unit >= receive_ahead and _is_remote(stages, stage, neighbour):
            ready = max(ready, arrivals[kind, neighbour, unit - receive_ahead])
        if kind == F and unit - stages[stage, NEXT_I] >= stages[stage, DEPTH]:
            ready = NEVER
        if kind == I and stage == len(stages) - 1 and stages[stage, NEXT_F] < (unit // num_slices + 1) * num_slices:
            ready = NEVER
    return ready


@compiled
def _is_remote(stages: Ints, stage: int, neighbour: int) -> bool:
    """Whether the neighbour exists and is on another rank."""
    remote: bool = 0 <= neighbour < len(stages) and stages[neighbour, RANK] != stages[stage, RANK]
    return remote


@compiled
def _has_capacity(costs: Ints, stages: Ints, ranks: Ints, stage: int, kind: int) -> bool:
    part, rank = stages[stage, NEXT_F + kind] % costs.shape[1], stages[stage, RANK]
    if kind == F:
        added = costs[stage, part, F_STASH]
        free_stash: int = ranks[rank, F_CAP] - ranks[rank, STASH] - added
    else:
        added = costs[stage, costs.shape[1] - 1 - part, I_STASH]
        free_stash = ranks[rank, CAP] - ranks[rank, STASH] - added
    return added <= 0 or free_stash >= 0


@compiled
def _start(
    costs: Ints,
    stages: Ints,
    ranks: Ints,
    clock: Clock,
    arrivals: Ints,
    messages: Ints,
    stage: int,
    now: int,
    kind: int,
) -> int:
    """Run the stage's next unit of that kind: post the next receive, send its message. Returns the time at which it
    ends.
    """
    num_slices, num_units, receive_ahead = costs.shape[1], arrivals.shape[2], messages.shape[3]
    unit, rank = stages[stage, NEXT_F + kind], stages[stage, RANK]
    part = unit % num_slices if kind == F else num_slices - 1 - unit % num_slices
    end: int = now + costs[stage, part, F_NS + kind]
    stages[stage, NEXT_F + kind] += 1
    ranks[rank, STASH] += costs[stage, part, F_STASH + kind]
    if kind != W:
        ranks[rank, LAST] = kind
        place = unit % receive_ahead
        neighbour, source = (stage + 1, stage - 1) if kind == F else (stage - 1, stage + 1)
        if unit + receive_ahead < num_units and _is_remote(stages, stage, source):
            messages[POSTED_AT, kind, stage, place] = now
            _deliver(stages, ranks, clock, arrivals, messages, stage, kind)
        if _is_remote(stages, stage, neighbour):
            messages[SENT_AT, kind, neighbour, place] = end
            messages[DURATION, kind, neighbour, place] = costs[stage, part, TO_NEXT_NS + kind]
            _deliver(stages, ranks, clock, arrivals, messages, neighbour, kind)
        elif 0 <= neighbour < len(stages):
            arrivals[kind, neighbour, unit] = end
    return end


@compiled
def _deliver(stages: Ints, ranks: Ints, clock: Clock, arrivals: Ints, messages: Ints, stage: int, kind: int) -> None:
    """Set the arrival times of messages into ``stage`` that are both sent and posted now, and wake both ends."""
    receive_ahead = messages.shape[3]
    sender = stage - 1 if kind == F else stage + 1
    number = stages[stage, KNOWN_F + kind]
    while number < min(stages[sender, NEXT_F + kind], stages[stage, NEXT_F + kind] + receive_ahead):
        place = number % receive_ahead
        begin = max(messages[SENT_AT, kind, stage, place], messages[POSTED_AT, kind, stage, place])
        arrival = max(begin, stages[stage, FREE_F + kind]) + messages[DURATION, kind, stage, place]
        arrivals[kind, stage, number] = arrival
        stages[stage, FREE_F + kind] = arrival
        for end in (stages[sender, RANK], stages[stage, RANK]):
            if ranks[end, WAITS] and arrival < time_of(clock, end):
                set_time(clock, end, arrival)
        number += 1
    stages[stage, KNOWN_F + kind] = number
