"""Places of posts and waits for messages, compiled: the arithmetic of `planner.passes.transfers`, on arrays.

`find_rounds` advances all ranks as far as dependencies allow. It gives every action its round (the step at which it
runs if every action takes one and messages take none; both of a pair at once) and every message its number, in the
sender's order. `find_due_rounds` gives the round at which a message is due, and the round from which on its WAIT_SEND
cannot block. `place_posts` puts POST_RECVs before the WAIT_RECVs of the action at which their message is due, or
directly after WAIT_RECV k - receive_ahead. `place_waits` puts WAIT_SEND k after the first action that has sent message
k + receive_ahead and whose round is no earlier than the message's post round.

numba's cache only checks the file of the calling function: after a change to the columns below, touch the files that
import them.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from penstock.planner.compiled import compiled

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

# Columns of `actions`: round; channel and number of the needed message and of the sent one (-1: none); the number of
# POST_RECVs that all ranks up to this one have done before the action, and of WAIT_SENDs up to after it. The kernel
# adds more.
ROUND, NEEDS_CHANNEL, NEEDS_NUMBER, SENDS_CHANNEL, SENDS_NUMBER, STOP_POST, STOP_WAIT = range(7)
NUM_ACTION_COLUMNS = STOP_WAIT + 1

# Columns of `messages`, channel after channel in the order of sending: the action that sends it, the round of its
# WAIT_RECV, its due round and its post round. The last columns are two other lists of that length: the channel of every
# POST_RECV and of every WAIT_SEND, rank after rank in program order, the WAIT_SENDs after a rank's last action in the
# order of their SENDs. The kernel adds more.
SENDER, WAIT_ROUND, DUE_ROUND, POST_ROUND, POSTED, AWAITED = range(6)

# Columns of `codes`; the last is 1 if the action and the next one are a pair.
KIND, STAGE, MICROBATCH, SLICE, JOINED = range(5)


@numba.njit(cache=True, nogil=True)
def find_rounds(
    offsets: Ints, codes: Int32s, directions: Ints, sends: Ints, receives: Ints, producers: Int32s, actions: Ints
) -> int:
    """Fill ``actions`` up to SENDS_NUMBER; returns the first action that can never run, -1 if all can.

    ``directions`` [kind] is the direction of the message that a kind sends and needs, -1 for none; ``sends`` and
    ``receives`` are as in `Channels`; ``producers`` [direction, stage, micro-batch, slice] is filled with -1 on entry.
    """
    num_ranks = len(offsets) - 1
    positions = offsets[:-1].copy()
    counts = np.zeros(sends.size + 1, dtype=np.int64)
    num_left = offsets[-1]
    num_before = num_left + 1
    while num_left < num_before:
        num_before = num_left
        for place in range(2 * num_ranks):
            rank = min(place, 2 * num_ranks - 1 - place)
            index = positions[rank]
            while index < offsets[rank + 1] and _is_ready(codes, directions, producers, index):
                stop = index + 1 + codes[index, JOINED]
                if stop > index + 1 and not _is_ready(codes, directions, producers, stop - 1):
                    break
                last_round = actions[index - 1, ROUND] if index > offsets[rank] else 0
                for action in range(index, stop):
                    last_round = max(last_round, _producer_round(codes, directions, producers, actions, action))
                for action in range(index, stop):
                    _run(codes, directions, sends, receives, producers, counts, actions, action, last_round)
                index = stop
            num_left -= index - positions[rank]
            positions[rank] = index
    stuck_action: int = -1
    for rank in range(num_ranks):
        if stuck_action < 0 and positions[rank] < offsets[rank + 1]:
            stuck_action = positions[rank]
    return stuck_action


@compiled
def _origin(codes: Int32s, directions: Ints, index: int) -> int:
    """The other stage whose result the action needs."""
    return int(codes[index, STAGE]) + (-1 if directions[codes[index, KIND]] == 0 else 1)


@compiled
def _is_ready(codes: Int32s, directions: Ints, producers: Int32s, index: int) -> bool:
    direction = directions[codes[index, KIND]]
    origin = _origin(codes, directions, index)
    ready: bool = direction < 0 or origin < 0 or origin == producers.shape[1]
    return ready or producers[direction, origin, codes[index, MICROBATCH], codes[index, SLICE]] >= 0


@compiled
def _producer_round(codes: Int32s, directions: Ints, producers: Int32s, actions: Ints, index: int) -> int:
    """The round of the action of another stage whose result this one needs; 0 if there is none."""
    direction = directions[codes[index, KIND]]
    origin = _origin(codes, directions, index)
    producer_round = 0
    if direction >= 0 and 0 <= origin < producers.shape[1]:
        producer_round = actions[producers[direction, origin, codes[index, MICROBATCH], codes[index, SLICE]], ROUND]
    return producer_round


@compiled
def _run(
    codes: Int32s,
    directions: Ints,
    sends: Ints,
    receives: Ints,
    producers: Int32s,
    counts: Ints,
    actions: Ints,
    index: int,
    last_round: int,
) -> None:
    direction = directions[codes[index, KIND]]
    if direction >= 0:
        stage, microbatch, part = codes[index, STAGE], codes[index, MICROBATCH], codes[index, SLICE]
        origin = _origin(codes, directions, index)
        if 0 <= origin < producers.shape[1]:
            producer = producers[direction, origin, microbatch, part]
            actions[index, NEEDS_CHANNEL] = receives[direction, stage]
            actions[index, NEEDS_NUMBER] = actions[producer, SENDS_NUMBER]
        producers[direction, stage, microbatch, part] = index
        channel = sends[direction, stage]
        actions[index, SENDS_CHANNEL] = channel
        actions[index, SENDS_NUMBER] = counts[channel]
        counts[channel] += 1
    actions[index, ROUND] = last_round + 1


@compiled
def find_due_rounds(
    offsets: Ints, targets: Ints, receive_ahead: int, late: bool, actions: Ints, first_messages: Ints, messages: Ints
) -> None:
    """Fill ``messages`` up to POST_ROUND; ``first_messages`` [channels + 1] are the first messages of the channels."""
    _join_ends(actions, first_messages, messages)
    for channel in range(len(targets)):
        first_action = offsets[targets[channel]]
        due_action, consumer = first_action, first_action
        for message in range(first_messages[channel], first_messages[channel + 1]):
            while actions[consumer, ROUND] < messages[message, WAIT_ROUND]:
                consumer += 1
            messages[message, DUE_ROUND] = _round_before(actions, first_action, consumer) if late else 0
            while actions[due_action, ROUND] < messages[message, DUE_ROUND]:
                due_action += 1
            messages[message, POST_ROUND] = _round_before(actions, first_action, due_action) + 1
            allowed_by = message - receive_ahead
            if allowed_by >= first_messages[channel]:
                messages[message, POST_ROUND] = max(messages[message, POST_ROUND], messages[allowed_by, WAIT_ROUND])


@compiled
def _round_before(actions: Ints, first: int, index: int) -> int:
    """The round before that of ``index`` on the rank whose actions begin with ``first``; 0 if there is none. The
    actions of a pair have the same.
    """
    earlier = index - 1
    while earlier > first and actions[earlier, ROUND] == actions[index, ROUND]:
        earlier -= 1
    before: int = actions[earlier, ROUND] if earlier >= first and actions[earlier, ROUND] < actions[index, ROUND] else 0
    return before


@numba.njit(cache=True, nogil=True)
def place_posts(
    offsets: Ints, targets: Ints, receive_ahead: int, actions: Ints, first_messages: Ints, messages: Ints
) -> None:
    """Fill STOP_POST and POSTED."""
    incoming = np.argsort(targets, kind="mergesort")
    first_incoming = np.searchsorted(targets[incoming], np.arange(len(offsets)))
    num_posted = np.zeros(len(targets), dtype=np.int64)
    num_received = np.zeros(len(targets), dtype=np.int64)
    stop = 0
    for rank in range(len(offsets) - 1):
        for index in range(offsets[rank], offsets[rank + 1]):
            action_round = actions[index, ROUND]
            for channel in incoming[first_incoming[rank] : first_incoming[rank + 1]]:
                stop = _post_due(
                    first_messages,
                    messages,
                    num_posted,
                    num_received[channel] + receive_ahead,
                    channel,
                    action_round,
                    stop,
                )
            channel = actions[index, NEEDS_CHANNEL]
            while channel >= 0 and num_received[channel] <= actions[index, NEEDS_NUMBER]:
                num_received[channel] += 1
                stop = _post_due(
                    first_messages,
                    messages,
                    num_posted,
                    num_received[channel] + receive_ahead,
                    channel,
                    action_round,
                    stop,
                )
            actions[index, STOP_POST] = stop


@compiled
def _post_due(
    first_messages: Ints, messages: Ints, num_posted: Ints, num_allowed: int, channel: int, at: int, stop: int
) -> int:
    """Post the messages that are due on the channel at an action of round ``at``, up to ``num_allowed``; the new end of
    the list.
    """
    first = first_messages[channel]
    num_allowed = min(num_allowed, first_messages[channel + 1] - first)
    while num_posted[channel] < num_allowed and messages[first + num_posted[channel], DUE_ROUND] <= at:
        messages[stop, POSTED] = channel
        num_posted[channel] += 1
        stop += 1
    return stop


@numba.njit(cache=True, nogil=True)
def place_waits(
    offsets: Ints, sources: Ints, receive_ahead: int, actions: Ints, first_messages: Ints, messages: Ints
) -> None:
    """Fill STOP_WAIT and AWAITED."""
    num_sent = np.zeros(len(sources), dtype=np.int64)
    num_awaited = np.zeros(len(sources), dtype=np.int64)
    stop = 0
    for rank in range(len(offsets) - 1):
        channels = range(np.searchsorted(sources, rank), np.searchsorted(sources, rank + 1))
        for index in range(offsets[rank], offsets[rank + 1]):
            if actions[index, SENDS_CHANNEL] >= 0:
                num_sent[actions[index, SENDS_CHANNEL]] += 1
            for channel in channels:
                first = first_messages[channel]
                while (
                    num_awaited[channel] + receive_ahead < num_sent[channel]
                    and messages[first + num_awaited[channel], POST_ROUND] <= actions[index, ROUND]
                ):
                    messages[stop, AWAITED] = channel
                    stop += 1
                    num_awaited[channel] += 1
            actions[index, STOP_WAIT] = stop
        for index in range(offsets[rank], offsets[rank + 1]):
            channel = actions[index, SENDS_CHANNEL]
            if channel >= 0 and actions[index, SENDS_NUMBER] >= num_awaited[channel]:
                messages[stop, AWAITED] = channel
                stop += 1


@compiled
def _join_ends(actions: Ints, first_messages: Ints, messages: Ints) -> None:
    """Set every message's sender, and the round of its WAIT_RECV: that of its first consumer or a later message's."""
    for index in range(len(actions)):
        sent, needed = actions[index, SENDS_CHANNEL], actions[index, NEEDS_CHANNEL]
        if sent >= 0:
            messages[first_messages[sent] + actions[index, SENDS_NUMBER], SENDER] = index
        if needed >= 0:
            messages[first_messages[needed] + actions[index, NEEDS_NUMBER], WAIT_ROUND] = actions[index, ROUND]
    for channel in range(len(first_messages) - 1):
        for message in range(first_messages[channel + 1] - 2, first_messages[channel] - 1, -1):
            messages[message, WAIT_ROUND] = min(messages[message, WAIT_ROUND], messages[message + 1, WAIT_ROUND])
