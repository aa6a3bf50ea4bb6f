"""The event loop of the simulator, compiled: ranks and channels, and the next event time of each.

At every instant ranks advance and transfers complete and start, until nothing changes. The result does not depend on
the order in which they are processed, so it is a function of the inputs alone.

An action of a rank has these steps; each may take time, and the starred ones may wait for a message to arrive:

    the POST_RECVs that `link` placed here, WAIT_RECV* of its message (and of earlier ones of that channel), each with
    the POST_RECVs that it allows, WAIT_GATHER of its parameters, compute, the WAIT_SENDs* that `link` placed here, SEND

The two actions of a pair are consecutive rows. Both actions receive first. Then the second row computes the work of
both, and both send in order.

While n ranks of a host compute, each runs at 1 / c(n) of the speed that it has when it computes alone. The remaining
work is kept in millionths of a nanosecond and the speed in whole millionths, so that splitting a span changes nothing.

If transfers block, both ranks are busy during a transfer. A receiver that was still computing for a part of that time
adds this part when it receives.

A transfer starts when it is sent and posted and its channel is idle. Transfers of different channels share their cards,
as connections do: a link needs a part of each of its two cards, and each card gives each of n transfers one n-th of
itself, or the share that the others leave unused, if that is larger (`_share`).

All state is in a few integer tables whose columns are named below. They are few because numba counts references to
every array at every call: with one array per quantity that took ten times as long as the work itself, to run and to
compile. Small functions are inlined, which saves a fifth; inlining all takes half a minute to compile for 5 % more. No
function here allocates an array, so no references need to be counted at all (`penstock.planner.compiled`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.planner.clock import Clock, never, next_cell, next_time, set_time
from penstock.planner.compiled import compiled, inlined
from penstock.planner.simulate.link import (
    AWAITED,
    NEEDS_CHANNEL,
    NEEDS_NUMBER,
    NUM_ACTION_COLUMNS,
    POSTED,
    SENDER,
    SENDS_CHANNEL,
    STOP_POST,
    STOP_WAIT,
)

Ints = npt.NDArray[np.int64]

MILLION = 1_000_000

# Columns of `actions` after those of `link`.
#
#     WORK          nanoseconds alone on its host
#     SLOWDOWN_PPM  slowdown in millionths while all ranks of the host compute
#     SENDS_NS      duration of the message that is sent
#     PAUSE_NS      wait of the rank for a reduction over shards where the next one starts
#     COMPLETES     row of `cells` of the gradients that are reduced after that; -1: none
#     JOINS         whether it is the first or the second action of a pair
#     GATHERED_AT   time at which the parameters that it needs are gathered
#     MISSING_NS    how much later that is than the time at which it could begin otherwise; negative: earlier
#
# With a trace, the times of an action follow; -1: never.
#
#     REACHED, RECEIVED   WAIT_RECV began and ended
#     START, STOP         compute began and ended
#     RELEASED            WAIT_SEND ended
#     DEPARTED, ARRIVED   the transfer of its message began and ended
WORK, SLOWDOWN_PPM, SENDS_NS, PAUSE_NS, COMPLETES, JOINS, GATHERED_AT, MISSING_NS = range(
    NUM_ACTION_COLUMNS, NUM_ACTION_COLUMNS + 8
)
REACHED, RECEIVED, START, STOP, RELEASED, DEPARTED, ARRIVED = range(MISSING_NS + 1, MISSING_NS + 8)

# Columns of `messages` after those of `link`.
SENT_AT, POSTED_AT = range(AWAITED + 1, AWAITED + 3)

# Columns of `cells` in the rows of ranks, which come first: constants, then state. A host's ranks form a ring.
STOP_AT, LAST_WAIT, RESIDENTS, NEIGHBOUR, POSITION, NEXT_WAIT, STEP, CHANNEL, NUMBER = range(9)
SINCE, LEFT, COMPUTING, BUSY, BUBBLE, FINISH, NEXT_POST, BEGAN = range(9, 17)

# In the rows of channels, which follow: constants, then state. For the two cards, the sender's and the receiver's: its
# row, the millionths of it that the link uses by itself (0 without a card), and the next of the channels that share it,
# which form a ring.
SOURCE, TARGET, FIRST, COUNT, CARD, NEEDED, SHARING = 0, 1, 2, 3, 4, 6, 8
NUM_SENT, NUM_POSTED, NUM_ARRIVED, NUM_RECEIVED, NUM_RELEASED, CARRYING, MOVED_AT, TO_MOVE, SPEED = range(10, 19)

# In the rows of cards, one per direction: the number of transfers it carries, and the sum of what they need.
NUM_CARRIED, ALL_NEEDED = range(2)

# In the rows of gradients, which come last, a stage's or a bucket's: the start of their reduction, if that precedes
# their rank's last action.
STARTED = 0

WIDTH = SPEED + 1
"""Columns of `cells`."""

# Entries of `settings`.
POST_NS, WAIT_RECEIVE_NS, SEND_NS, WAIT_SEND_NS, RECEIVE_AHEAD, REPLICAS, CONTENDED, TRACED = range(8)
NUM_RANKS, NUM_CHANNELS, BLOCKING, BARRIER = range(8, 12)

# Entries of JOINS: an action by itself, and the two of a pair.
ALONE, FIRST_OF_PAIR, SECOND_OF_PAIR = range(3)

# Steps of a rank.
POST, POSTING, RECEIVE, COMPUTE, COMPUTED, RELEASE, SENT = range(7)

# Results of a step other than nanoseconds until the next one: another event will wake the rank, or set its time.
BLOCKED, TIMED = -1, -2


@compiled
def run(actions: Ints, cells: Ints, messages: Ints, clock: Clock, settings: Ints) -> None:
    """Simulate until no event is due."""
    now = next_time(clock)
    while now < never(clock):
        cell = next_cell(clock)
        if cell < settings[NUM_RANKS]:
            _advance(actions, cells, messages, clock, settings, cell, now)
        else:
            _arrive(actions, cells, messages, clock, settings, cell, now)
        now = next_time(clock)


@compiled
def _advance(actions: Ints, cells: Ints, messages: Ints, clock: Clock, settings: Ints, rank: int, now: int) -> None:
    """Run ``rank`` until it computes or waits."""
    duration = 0
    while duration == 0:
        step = cells[rank, STEP]
        if cells[rank, POSITION] == cells[rank, STOP_AT]:
            duration = _release(cells, messages, settings, rank, now, cells[rank, LAST_WAIT])
        elif step <= RECEIVE:
            duration = _receive(actions, cells, messages, clock, settings, rank, now)
        elif step <= COMPUTED:
            duration = _compute(actions, cells, clock, settings, rank, now)
        else:
            duration = _send(actions, cells, messages, clock, settings, rank, now)
    if duration != TIMED:
        set_time(clock, rank, now + duration if duration > 0 else never(clock))


@inlined
def _receive(actions: Ints, cells: Ints, messages: Ints, clock: Clock, settings: Ints, rank: int, now: int) -> int:
    index = cells[rank, POSITION]
    channel = settings[NUM_RANKS] + actions[index, NEEDS_CHANNEL]
    duration = 0
    if cells[rank, STEP] == POSTING:
        _post(actions, cells, messages, clock, settings, rank, now)
        cells[rank, STEP] = POST
    elif cells[rank, STEP] == POST:
        may_post = cells[rank, NEXT_POST] < actions[index, STOP_POST] and _is_allowed(cells, messages, settings, rank)
        cells[rank, STEP] = POSTING if may_post else RECEIVE
        duration = settings[POST_NS] if may_post else 0
    elif actions[index, NEEDS_CHANNEL] < 0 or cells[channel, NUM_RECEIVED] > actions[index, NEEDS_NUMBER]:
        if actions[index, JOINS] == FIRST_OF_PAIR:
            cells[rank, POSITION] += 1
            cells[rank, STEP] = POST
        else:
            cells[rank, STEP] = COMPUTE
            actions[index, MISSING_NS] = actions[index, GATHERED_AT] - now
            duration = max(actions[index, MISSING_NS], 0) * settings[BARRIER]
    else:
        if settings[TRACED] and actions[index, REACHED] < 0:
            actions[index, REACHED] = now
        if cells[channel, NUM_ARRIVED] <= cells[channel, NUM_RECEIVED]:
            duration = _block(cells, rank, now, channel, cells[channel, NUM_RECEIVED])
        else:
            if settings[TRACED]:
                actions[index, RECEIVED] = now
            duration = settings[WAIT_RECEIVE_NS]
            if settings[BLOCKING]:
                duration += _missed(actions, cells, messages, rank, channel, now)
            cells[rank, NUMBER] = -1
            cells[channel, NUM_RECEIVED] += 1
            cells[rank, STEP] = POST
    return duration


@inlined
def _missed(actions: Ints, cells: Ints, messages: Ints, rank: int, channel: int, now: int) -> int:
    """The part of its next message's transfer that had passed before the rank came to receive it."""
    message = cells[channel, FIRST] + cells[channel, NUM_RECEIVED]
    came_at = cells[rank, SINCE] if cells[rank, NUMBER] >= 0 else now
    passed = now - max(messages[message, SENT_AT], came_at)
    missed: int = max(actions[messages[message, SENDER], SENDS_NS] - passed, 0)
    return missed


@inlined
def _is_allowed(cells: Ints, messages: Ints, settings: Ints, rank: int) -> bool:
    """Whether the rank's next POST_RECV is within `receive_ahead`; else it follows a later WAIT_RECV."""
    channel = settings[NUM_RANKS] + messages[cells[rank, NEXT_POST], POSTED]
    allowed: bool = cells[channel, NUM_POSTED] < cells[channel, NUM_RECEIVED] + settings[RECEIVE_AHEAD]
    return allowed


@inlined
def _block(cells: Ints, rank: int, now: int, channel: int, number: int) -> int:
    """Wait for a message; `_arrive` makes the rank try its step again."""
    cells[rank, CHANNEL] = channel
    cells[rank, NUMBER] = number
    cells[rank, SINCE] = now
    return BLOCKED


@inlined
def _compute(actions: Ints, cells: Ints, clock: Clock, settings: Ints, rank: int, now: int) -> int:
    index = cells[rank, POSITION]
    begins = cells[rank, STEP] == COMPUTE
    cells[rank, COMPUTING] = begins
    duration = 0
    if begins:
        if settings[TRACED]:
            actions[index, START] = now
        if cells[rank, BUSY] == 0:
            cells[rank, BEGAN] = now
        cells[rank, BUSY] -= now
        cells[rank, STEP] = COMPUTED
        cells[rank, LEFT] = actions[index, WORK] * MILLION
        cells[rank, SINCE] = now
        duration = TIMED if settings[CONTENDED] else actions[index, WORK]
    else:
        if settings[TRACED]:
            actions[index, STOP] = now
        cells[rank, BUSY] += now
        cells[rank, STEP] = RELEASE
        cells[rank, POSITION] -= actions[index, JOINS] == SECOND_OF_PAIR
    if settings[CONTENDED]:
        _retime(actions, cells, clock, settings, rank, now)
    return duration


@compiled
def _retime(actions: Ints, cells: Ints, clock: Clock, settings: Ints, rank: int, now: int) -> None:
    """Update the speeds of the ranks on the host of ``rank``, which has just begun or ended computing."""
    num_computing = cells[rank, COMPUTING]
    other = cells[rank, NEIGHBOUR]
    while other != rank:
        num_computing += cells[other, COMPUTING]
        other = cells[other, NEIGHBOUR]
    before = num_computing + 1 - 2 * cells[rank, COMPUTING]
    residents = cells[rank, RESIDENTS] * settings[REPLICAS]
    for _ in range(cells[rank, RESIDENTS]):
        if cells[other, COMPUTING]:
            factor = actions[cells[other, POSITION], SLOWDOWN_PPM]
            worked = (now - cells[other, SINCE]) * _speed(factor, before * settings[REPLICAS], residents)
            cells[other, LEFT] -= worked
            cells[other, SINCE] = now
            speed = _speed(factor, num_computing * settings[REPLICAS], residents)
            set_time(clock, other, now - min(-cells[other, LEFT], 0) // speed)
        other = cells[other, NEIGHBOUR]


@inlined
def _speed(factor_ppm: int, num_computing: int, num_residents: int) -> int:
    """Millionths of a nanosecond of work done per nanosecond."""
    if num_residents <= 1 or num_computing < 1:
        return MILLION
    slowdown = MILLION + (factor_ppm - MILLION) * (num_computing - 1) // (num_residents - 1)
    return MILLION * MILLION // slowdown


@inlined
def _send(actions: Ints, cells: Ints, messages: Ints, clock: Clock, settings: Ints, rank: int, now: int) -> int:
    index = cells[rank, POSITION]
    duration = 0
    if cells[rank, STEP] == RELEASE and cells[rank, NEXT_WAIT] < actions[index, STOP_WAIT]:
        duration = _release(cells, messages, settings, rank, now, actions[index, STOP_WAIT])
        if settings[TRACED]:
            actions[index, RELEASED] = now
    elif cells[rank, STEP] == RELEASE and actions[index, SENDS_CHANNEL] >= 0:
        cells[rank, STEP] = SENT
        duration = settings[SEND_NS]
    else:
        if cells[rank, STEP] == SENT:
            channel = settings[NUM_RANKS] + actions[index, SENDS_CHANNEL]
            messages[cells[channel, FIRST] + cells[channel, NUM_SENT], SENT_AT] = now
            cells[channel, NUM_SENT] += 1
            _depart(actions, cells, messages, clock, settings, channel, now)
            if settings[BLOCKING]:
                duration = actions[index, SENDS_NS]
        if actions[index, COMPLETES] >= 0:
            duration += actions[index, PAUSE_NS]
            cells[actions[index, COMPLETES], STARTED] = now + duration
        cells[rank, STEP] = RELEASE if actions[index, JOINS] == FIRST_OF_PAIR else POST
        cells[rank, POSITION] += 1
    return duration


@inlined
def _release(cells: Ints, messages: Ints, settings: Ints, rank: int, now: int, stop: int) -> int:
    """Run the rank's next WAIT_SEND, if it comes before number ``stop``; otherwise the rank has finished."""
    duration = BLOCKED
    if cells[rank, NEXT_WAIT] == stop:
        cells[rank, FINISH] = now
    else:
        channel = settings[NUM_RANKS] + messages[cells[rank, NEXT_WAIT], AWAITED]
        if cells[channel, NUM_ARRIVED] <= cells[channel, NUM_RELEASED]:
            duration = _block(cells, rank, now, channel, cells[channel, NUM_RELEASED])
        else:
            cells[rank, NUMBER] = -1
            cells[channel, NUM_RELEASED] += 1
            cells[rank, NEXT_WAIT] += 1
            duration = settings[WAIT_SEND_NS]
    return duration


@inlined
def _post(actions: Ints, cells: Ints, messages: Ints, clock: Clock, settings: Ints, rank: int, now: int) -> None:
    """End the rank's next POST_RECV."""
    channel = settings[NUM_RANKS] + messages[cells[rank, NEXT_POST], POSTED]
    cells[rank, NEXT_POST] += 1
    messages[cells[channel, FIRST] + cells[channel, NUM_POSTED], POSTED_AT] = now
    cells[channel, NUM_POSTED] += 1
    _depart(actions, cells, messages, clock, settings, channel, now)


@inlined
def _depart(actions: Ints, cells: Ints, messages: Ints, clock: Clock, settings: Ints, channel: int, now: int) -> None:
    """Start the channel's next transfer if it is sent and posted and the channel is idle."""
    number = cells[channel, NUM_ARRIVED]
    if cells[channel, CARRYING] or min(cells[channel, NUM_SENT], cells[channel, NUM_POSTED]) <= number:
        return
    sender = messages[cells[channel, FIRST] + number, SENDER]
    if settings[TRACED]:
        actions[sender, DEPARTED] = now
    cells[channel, CARRYING] = 1
    cells[channel, TO_MOVE] = actions[sender, SENDS_NS] * MILLION
    cells[channel, MOVED_AT] = now
    cells[channel, SPEED] = 0
    _share_cards(cells, clock, channel, now)


@compiled
def _share_cards(cells: Ints, clock: Clock, channel: int, now: int) -> None:
    """Update the speeds of channels that share the cards of ``channel``, which has just begun or ended a transfer."""
    change = 2 * cells[channel, CARRYING] - 1
    for side in range(2):
        card = cells[channel, CARD + side]
        cells[card, NUM_CARRIED] += change
        cells[card, ALL_NEEDED] += change * cells[channel, NEEDED + side]
    for side in range(2):
        other = cells[channel, SHARING + side]
        while other != channel:
            if cells[other, CARRYING]:
                _move(cells, clock, other, now)
            other = cells[other, SHARING + side]
    if cells[channel, CARRYING]:
        _move(cells, clock, channel, now)
    else:
        set_time(clock, channel, never(clock))


@inlined
def _move(cells: Ints, clock: Clock, channel: int, now: int) -> None:
    """Advance the transfer at its old speed until now, and set the speed that its cards allow."""
    speed = min(_share(cells, channel, 0), _share(cells, channel, 1))
    if speed != cells[channel, SPEED]:
        cells[channel, TO_MOVE] -= (now - cells[channel, MOVED_AT]) * cells[channel, SPEED]
        cells[channel, MOVED_AT] = now
        cells[channel, SPEED] = speed
        set_time(clock, channel, now - min(-cells[channel, TO_MOVE], 0) // speed)


@inlined
def _share(cells: Ints, channel: int, side: int) -> int:
    """The speed of the channel that its card on this side allows, in millionths of its full speed."""
    needed = cells[channel, NEEDED + side]
    card = cells[channel, CARD + side]
    speed = MILLION
    if needed > 0 and cells[card, ALL_NEEDED] > MILLION:
        left = MILLION - (cells[card, ALL_NEEDED] - needed)
        speed = min(MILLION, max(left, MILLION // cells[card, NUM_CARRIED]) * MILLION // needed)
    return speed


@compiled
def _arrive(actions: Ints, cells: Ints, messages: Ints, clock: Clock, settings: Ints, channel: int, now: int) -> None:
    """End a transfer: the channel is idle, and the ranks that wait for it continue."""
    number = cells[channel, NUM_ARRIVED]
    message = cells[channel, FIRST] + number
    ready = max(messages[message, SENT_AT], messages[message, POSTED_AT])
    if settings[TRACED]:
        actions[messages[message, SENDER], ARRIVED] = now
    cells[channel, NUM_ARRIVED] += 1
    cells[channel, CARRYING] = 0
    _share_cards(cells, clock, channel, now)
    _depart(actions, cells, messages, clock, settings, channel, now)
    for side in range(SOURCE, TARGET + 1):
        rank = cells[channel, side]
        if cells[rank, CHANNEL] == channel and cells[rank, NUMBER] == number:
            cells[rank, BUBBLE] += max(ready - cells[rank, SINCE], 0)
            cells[rank, CHANNEL] = -1
            _advance(actions, cells, messages, clock, settings, rank, now)
