"""The event loop of the simulator, compiled: ranks and channels, and the next time at which each of them moves.

At every instant, in rounds until nothing moves: first all ranks run on and all transfers that are over complete; then
transfers start, those that could start in an earlier round first, then by channel number, each as soon as its channel
and both its network cards are idle. Within a round nothing depends on the order in which ranks are taken, so the
result is a function of the inputs alone.

An action of a rank is these steps; each may take time, and the starred ones may wait for a message to arrive:

    WAIT_RECV*,  POST_RECV of the message receive_ahead later,  compute,
    WAIT_SEND* of the message receive_ahead before,  SEND

A computing rank advances at 1 / c(n) of its speed alone while n ranks of its host compute. Work left is kept in
millionths of a nanosecond and speed in whole millionths, so that splitting a span changes nothing.

Everything lies in four integer tables whose columns are named below. Few tables, because numba counts references to
every array at every call: with one array per quantity that took ten times as long as the work itself, to run and to
compile.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MILLION = 1_000_000

# Columns of `actions`: work alone, its factor together, channel (a row of `cells`, -1 for none) and number of the message
# it needs, channel and duration of the one it sends; then, where a trace is wanted, when WAIT_RECV began and ended,
# compute began and ended, WAIT_SEND ended and the message's transfer began and ended (-1: never).
WORK, TOGETHER, NEEDS_CHANNEL, NEEDS_NUMBER, SENDS_CHANNEL, SENDS_NS = range(6)
REACHED, RECEIVED, START, STOP, RELEASED, DEPARTED, ARRIVED = range(6, 13)

# Columns of `cells` in the rows of ranks, which come first: constants, then state. A host's ranks form a ring.
STOP_AT, RESIDENTS, NEIGHBOUR, POSITION, STEP, CHANNEL, NUMBER, SINCE, LEFT, COMPUTING, BUSY, BUBBLE, FINISH = range(13)

# In the rows of channels, which follow: constants, then state, then for each of the receive_ahead messages that may be
# under way SENT_AT, POSTED_AT, DURATION and SENDER.
SOURCE, TARGET, COUNT, OUT_CARD, IN_CARD, NUM_SENT, NUM_POSTED, NUM_ARRIVED, NUM_RELEASED, CARRYING, ROUND, RING = (
    range(12)
)
SENT_AT, POSTED_AT, DURATION, SENDER = range(4)
RING_WIDTH = 4

# In the rows of cards, which come last: when the card is free to send and to receive.
OUT_FREE, IN_FREE = range(2)

# Entries of `settings`: constants, state, and the queue of channels whose next message waits for a card.
POST_NS, WAIT_RECEIVE_NS, SEND_NS, WAIT_SEND_NS, RECEIVE_AHEAD, REPLICAS, CONTENDED = range(7)
NUM_RANKS, NUM_CHANNELS, KEY_BITS, ROUND_NOW, NUM_QUEUED, QUEUE = range(7, 13)

# Steps of a rank.
OPEN, OPENED, RECEIVE, REPOST, REPOSTED, COMPUTE, COMPUTED, RELEASE, SEND, SENT = range(10)

# What a step returns: nanoseconds until the next one, or that something else will say when.
BLOCKED, TIMED = -1, -2


@numba.njit(cache=True, nogil=True)
def run(actions: Ints, cells: Ints, keys: Ints, settings: Ints) -> None:
    """Simulate until nothing moves; ranks that could not finish keep -1 in the column FINISH.

    ``keys`` is a tree of minima whose leaves are the next times of ranks and channels; a key is the time with the
    cell's number in its lowest KEY_BITS, negative for never... see `_set_key`.
    """
    never = _never(settings)
    now = keys[1] >> settings[KEY_BITS]
    while now < never:
        while keys[1] >> settings[KEY_BITS] == now:
            cell = keys[1] & ((1 << settings[KEY_BITS]) - 1)
            if cell < settings[NUM_RANKS]:
                _advance(actions, cells, keys, settings, cell, now)
            else:
                _set_time(keys, settings, cell, never)
                _arrive(actions, cells, keys, settings, cell, now)
        _depart(actions, cells, keys, settings, now)
        settings[ROUND_NOW] += 1
        now = keys[1] >> settings[KEY_BITS]


@numba.njit(cache=True, nogil=True)
def _never(settings: Ints) -> int:
    return np.int64(1) << (62 - settings[KEY_BITS])


@numba.njit(cache=True, nogil=True)
def _set_time(keys: Ints, settings: Ints, cell: int, time: int) -> None:
    node = cell + len(keys) // 2
    keys[node] = time << settings[KEY_BITS] | cell
    while node > 1:
        node >>= 1
        keys[node] = min(keys[2 * node], keys[2 * node + 1])


@numba.njit(cache=True, nogil=True)
def _advance(actions: Ints, cells: Ints, keys: Ints, settings: Ints, rank: int, now: int) -> None:
    """Run ``rank`` until it computes or waits."""
    duration = np.int64(0)
    while duration == 0:
        step = cells[rank, STEP]
        if step <= OPENED:
            duration = _open(cells, settings, rank, now)
        elif cells[rank, POSITION] == cells[rank, STOP_AT]:
            duration = _drain(cells, settings, rank, now)
        elif step <= REPOSTED:
            duration = _receive(actions, cells, settings, rank, now)
        elif step <= COMPUTED:
            duration = _compute(actions, cells, keys, settings, rank, now)
        else:
            duration = _send(actions, cells, settings, rank, now)
    if duration != TIMED:
        _set_time(keys, settings, rank, now + duration if duration > 0 else _never(settings))


@numba.njit(cache=True, nogil=True)
def _open(cells: Ints, settings: Ints, rank: int, now: int) -> int:
    """The first POST_RECVs of every channel into the rank."""
    if cells[rank, STEP] == OPENED:
        _post(cells, settings, cells[rank, CHANNEL], now)
    cells[rank, STEP] = RECEIVE
    cells[rank, CHANNEL] = -1
    for channel in range(settings[NUM_RANKS] + settings[NUM_CHANNELS] - 1, settings[NUM_RANKS] - 1, -1):
        first = min(settings[RECEIVE_AHEAD], cells[channel, COUNT])
        if cells[channel, TARGET] == rank and cells[channel, NUM_POSTED] < first:
            cells[rank, STEP] = OPENED
            cells[rank, CHANNEL] = channel
    return settings[POST_NS] if cells[rank, STEP] == OPENED else 0


@numba.njit(cache=True, nogil=True)
def _receive(actions: Ints, cells: Ints, settings: Ints, rank: int, now: int) -> int:
    index = cells[rank, POSITION]
    channel = actions[index, NEEDS_CHANNEL]
    step = cells[rank, STEP]
    cells[rank, STEP] = COMPUTE
    duration = np.int64(0)
    if channel >= 0:
        if step == RECEIVE:
            _trace(actions, index, np.int64(REACHED), now)
            if cells[channel, NUM_ARRIVED] <= actions[index, NEEDS_NUMBER]:
                duration = _block(cells, rank, now, step, channel, actions[index, NEEDS_NUMBER])
            else:
                _trace(actions, index, np.int64(RECEIVED), now)
                cells[rank, STEP] = REPOST
                duration = settings[WAIT_RECEIVE_NS]
        elif step == REPOSTED:
            _post(cells, settings, channel, now)
        elif cells[channel, NUM_POSTED] < cells[channel, COUNT]:
            cells[rank, STEP] = REPOSTED
            duration = settings[POST_NS]
    return duration


@numba.njit(cache=True, nogil=True)
def _block(cells: Ints, rank: int, now: int, step: int, channel: int, number: int) -> int:
    """Wait for a message; `_arrive` lets the rank try ``step`` again."""
    cells[rank, STEP] = step
    cells[rank, CHANNEL] = channel
    cells[rank, NUMBER] = number
    cells[rank, SINCE] = now
    return BLOCKED


@numba.njit(cache=True, nogil=True)
def _trace(actions: Ints, index: int, column: int, now: int) -> None:
    if actions.shape[1] > column and actions[index, column] < 0:
        actions[index, column] = now


@numba.njit(cache=True, nogil=True)
def _compute(actions: Ints, cells: Ints, keys: Ints, settings: Ints, rank: int, now: int) -> int:
    index = cells[rank, POSITION]
    begins = cells[rank, STEP] == COMPUTE
    cells[rank, COMPUTING] = begins
    if begins:
        _trace(actions, index, np.int64(START), now)
        cells[rank, BUSY] -= now
        cells[rank, STEP] = COMPUTED
        cells[rank, LEFT] = actions[index, WORK] * MILLION
        cells[rank, SINCE] = now
    else:
        _trace(actions, index, np.int64(STOP), now)
        cells[rank, BUSY] += now
        sends = actions[index, SENDS_CHANNEL] >= 0
        cells[rank, STEP] = RELEASE if sends else RECEIVE
        cells[rank, POSITION] += not sends
    if settings[CONTENDED]:
        _retime(actions, cells, keys, settings, rank, now)
        return TIMED if begins else 0
    return actions[index, WORK] if begins else 0


@numba.njit(cache=True, nogil=True)
def _retime(actions: Ints, cells: Ints, keys: Ints, settings: Ints, rank: int, now: int) -> None:
    """``rank`` has just begun or ended computing: its host's ranks worked at their old speeds, and go on at new ones."""
    num_computing = cells[rank, COMPUTING]
    other = cells[rank, NEIGHBOUR]
    while other != rank:
        num_computing += cells[other, COMPUTING]
        other = cells[other, NEIGHBOUR]
    before = num_computing + 1 - 2 * cells[rank, COMPUTING]
    residents = cells[rank, RESIDENTS] * settings[REPLICAS]
    for _ in range(cells[rank, RESIDENTS]):
        if cells[other, COMPUTING]:
            factor = actions[cells[other, POSITION], TOGETHER]
            worked = (now - cells[other, SINCE]) * _speed(factor, before * settings[REPLICAS], residents)
            cells[other, LEFT] -= worked
            cells[other, SINCE] = now
            speed = _speed(factor, num_computing * settings[REPLICAS], residents)
            _set_time(keys, settings, other, now - (-cells[other, LEFT]) // speed)
        other = cells[other, NEIGHBOUR]


@numba.njit(cache=True, nogil=True)
def _speed(factor_ppm: int, num_computing: int, num_residents: int) -> int:
    """Millionths of a nanosecond of work done per nanosecond."""
    if num_residents <= 1 or num_computing < 1:
        return MILLION
    slowdown = MILLION + (factor_ppm - MILLION) * (num_computing - 1) // (num_residents - 1)
    return MILLION * MILLION // slowdown


@numba.njit(cache=True, nogil=True)
def _send(actions: Ints, cells: Ints, settings: Ints, rank: int, now: int) -> int:
    index = cells[rank, POSITION]
    channel = actions[index, SENDS_CHANNEL]
    step = cells[rank, STEP]
    number = cells[channel, NUM_SENT] - settings[RECEIVE_AHEAD]
    if step == RELEASE and number >= 0:
        if cells[channel, NUM_ARRIVED] <= number:
            duration = _block(cells, rank, now, step, channel, number)
        else:
            _trace(actions, index, np.int64(RELEASED), now)
            cells[channel, NUM_RELEASED] += 1
            cells[rank, STEP] = SEND
            duration = settings[WAIT_SEND_NS]
    elif step != SENT:
        cells[rank, STEP] = SENT
        duration = settings[SEND_NS]
    else:
        place = RING + cells[channel, NUM_SENT] % settings[RECEIVE_AHEAD] * RING_WIDTH
        cells[channel, place + SENT_AT] = now
        cells[channel, place + DURATION] = actions[index, SENDS_NS]
        cells[channel, place + SENDER] = index
        cells[channel, NUM_SENT] += 1
        _request(cells, settings, channel)
        cells[rank, STEP] = RECEIVE
        cells[rank, POSITION] += 1
        duration = 0
    return duration


@numba.njit(cache=True, nogil=True)
def _drain(cells: Ints, settings: Ints, rank: int, now: int) -> int:
    """The WAIT_SENDs that are left when the last action is done."""
    left = np.int64(-1)
    for channel in range(settings[NUM_RANKS] + settings[NUM_CHANNELS] - 1, settings[NUM_RANKS] - 1, -1):
        if cells[channel, SOURCE] == rank and cells[channel, NUM_RELEASED] < cells[channel, NUM_SENT]:
            left = channel
    if left < 0:
        cells[rank, FINISH] = now
        duration = np.int64(BLOCKED)
    elif cells[left, NUM_ARRIVED] <= cells[left, NUM_RELEASED]:
        duration = _block(cells, rank, now, cells[rank, STEP], left, cells[left, NUM_RELEASED])
    else:
        cells[left, NUM_RELEASED] += 1
        duration = settings[WAIT_SEND_NS]
    return duration


@numba.njit(cache=True, nogil=True)
def _post(cells: Ints, settings: Ints, channel: int, now: int) -> None:
    place = RING + cells[channel, NUM_POSTED] % settings[RECEIVE_AHEAD] * RING_WIDTH
    cells[channel, place + POSTED_AT] = now
    cells[channel, NUM_POSTED] += 1
    _request(cells, settings, channel)


@numba.njit(cache=True, nogil=True)
def _request(cells: Ints, settings: Ints, channel: int) -> None:
    """Queue the channel's next message if it is sent and posted and the channel is idle."""
    ready = min(cells[channel, NUM_SENT], cells[channel, NUM_POSTED]) > cells[channel, NUM_ARRIVED]
    if ready and not cells[channel, CARRYING]:
        cells[channel, CARRYING] = 1
        cells[channel, ROUND] = settings[ROUND_NOW]
        place = QUEUE + settings[NUM_QUEUED]
        while place > QUEUE and _is_behind(cells, settings[place - 1], channel):
            settings[place] = settings[place - 1]
            place -= 1
        settings[place] = channel
        settings[NUM_QUEUED] += 1


@numba.njit(cache=True, nogil=True)
def _is_behind(cells: Ints, channel: int, other: int) -> bool:
    return cells[channel, ROUND] == cells[other, ROUND] and channel > other


@numba.njit(cache=True, nogil=True)
def _depart(actions: Ints, cells: Ints, keys: Ints, settings: Ints, now: int) -> None:
    """Start every queued transfer whose cards are free. The first card stands for none and is never busy."""
    unlimited = settings[NUM_RANKS] + settings[NUM_CHANNELS]
    kept = 0
    for queued in range(settings[NUM_QUEUED]):
        channel = settings[QUEUE + queued]
        out_card, in_card = cells[channel, OUT_CARD], cells[channel, IN_CARD]
        if cells[out_card, OUT_FREE] > now or cells[in_card, IN_FREE] > now:
            settings[QUEUE + kept] = channel
            kept += 1
        else:
            place = RING + cells[channel, NUM_ARRIVED] % settings[RECEIVE_AHEAD] * RING_WIDTH
            over = now + cells[channel, place + DURATION]
            cells[out_card, OUT_FREE] = over
            cells[in_card, IN_FREE] = over
            cells[unlimited, OUT_FREE] = 0
            cells[unlimited, IN_FREE] = 0
            _trace(actions, cells[channel, place + SENDER], np.int64(DEPARTED), now)
            _set_time(keys, settings, channel, over)
    settings[NUM_QUEUED] = kept


@numba.njit(cache=True, nogil=True)
def _arrive(actions: Ints, cells: Ints, keys: Ints, settings: Ints, channel: int, now: int) -> None:
    """A transfer is over: the channel is idle, and whoever waits for it goes on."""
    number = cells[channel, NUM_ARRIVED]
    place = RING + number % settings[RECEIVE_AHEAD] * RING_WIDTH
    _trace(actions, cells[channel, place + SENDER], np.int64(ARRIVED), now)
    ready = max(cells[channel, place + SENT_AT], cells[channel, place + POSTED_AT])
    cells[channel, NUM_ARRIVED] += 1
    cells[channel, CARRYING] = 0
    _request(cells, settings, channel)
    for side in range(SOURCE, TARGET + 1):
        rank = cells[channel, side]
        if cells[rank, CHANNEL] == channel and cells[rank, NUMBER] == number:
            cells[rank, BUBBLE] += max(ready - cells[rank, SINCE], 0)
            cells[rank, CHANNEL] = -1
            _advance(actions, cells, keys, settings, rank, now)
