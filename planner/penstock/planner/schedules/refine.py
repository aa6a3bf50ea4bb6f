"""Improvement of an order by running it: ready actions overtake those that would wait, without holding more memory.

An order that was made for equal passes and free transfers waits where costs differ, and in the warm-up and cool-down
phases it still follows the pattern of the steady state. `refine` repairs both without raising the memory of any rank.

**One pass** (`_run`) executes the order event by event. A rank whose next action is ready runs it. If that action is
not ready, the rank runs the first later action of its word that

1. is the next of its queue and ready now,
2. does not push any prefix sum of the rank's stash above its cap: up to the action's old place everything is held as
   before, plus the action's change,
3. ends before the awaited action is expected, or overshoots that time by at most ``patience`` percent of its own time.

The rest of the word is the word without that action, so it stays a legal order within the caps: no choice can lead to a
deadlock or leave a rank without memory. This replaces the reserves that list schedulers keep free, which cost them most
when memory is tight.

**Passes alternate in direction**, as forward-backward improvement does in project scheduling (Li and Willis, EJOR
1992). The backward pass runs the order from its end, with predecessors as successors and the opposite changes of stash
(the memory profile of the reversed word is the reversed profile). It fills the waits of the cool-down phase as the
forward pass fills those of the warm-up phase, and it sorts actions by their latest start, which the next forward pass
follows. The step converges after one or two rounds.

Example, 8 ranks with two stages each along a V, 24 micro-batches, F, I, W of 4,959, 5,217 and 3,519 us, transfers of
213 us: the repeated V-Half block takes 1.197 of the busiest rank's work, the first pass reduces that to 1.181, the
first round to 1.164, at the same 10 of 16 stages of activations; the second round changes nothing. The authors' own
reordering, which counts slots, ends at 1.171.

**Cost**: an action is visited once, and a wait searches at most ``WINDOW`` places ahead; about 0.1 us per action and
pass. Arrivals of messages follow from their transfer alone: the simulator, which decides on the result, adds the limits
of posted receives and busy channels.

Tried and rejected: overtaking regardless of expected arrivals (every gap draws a long action, each of which delays the
ranks behind it), expected arrivals from the previous pass of the other direction (they are the latest possible ones), W
as filler only (its place in the word is what keeps memory low), and more than one round (below 0.1 %).
"""

from __future__ import annotations

from dataclasses import replace

import numba
import numpy as np
import numpy.typing as npt

from penstock.planner.clock import Clock, never, new_clock, next_cell, next_time, set_time, time_of
from penstock.planner.compiled import compiled
from penstock.planner.schedules.pipeline import TO_PASS, Ints, Pipeline

Word = npt.NDArray[np.int8]
Int32s = npt.NDArray[np.int32]

WINDOW = 160
"""Number of places that a wait searches ahead for an action to run, including the place of the awaited action."""

TRIED_PATIENCES = (0, 25, 50, 100)
MOST_DISTURBED = 0.3
"""The largest fraction by which `improve` lengthens or shortens an action."""

UNKNOWN = 1 << 60
"""An unknown time; larger than all known ones."""


Run = tuple[int, Word, Ints]
"""The length of a step, its word, and the start of every action."""


def refine(
    pipeline: Pipeline, word: Word, caps: Ints, patience: int, num_rounds: int = 1, most_ns: int = UNKNOWN
) -> Run:
    """The shortest step that the passes find within ``caps``; ``word`` itself has to stay within them. Forward passes
    after the first one stop early if their step cannot be below ``most_ns``.
    """
    expected = np.full(len(pipeline.durations), UNKNOWN)
    best = _pass(pipeline, word, caps, patience, expected)
    for _ in range(num_rounds):
        starts = best[2]
        backward = _pass(pipeline, best[1][:, ::-1], caps, patience, expected, is_reversed=True)
        shorter_than = min(best[0], most_ns)
        forward = _pass(pipeline, backward[1][:, ::-1], caps, patience, starts, shorter_than=shorter_than)
        if forward[0] >= best[0]:
            break
        best = forward
    return best


def improve(pipeline: Pipeline, best: Run, caps: Ints, num_trials: int) -> Run:
    """The shortest step of ``num_trials`` trials from the ``best`` of `refine`.

    Each trial runs the best word so far with perturbed durations, and refines the result. A trial with the same step is
    also accepted, so the search walks along plateaus. The perturbations are the same at every call.
    """
    draw = np.random.default_rng(0)
    expected = np.full(len(pipeline.durations), UNKNOWN)
    for _ in range(num_trials):
        most_change = MOST_DISTURBED * draw.random()
        factors = 1 + most_change * (2 * draw.random(len(pipeline.durations)) - 1)
        perturbed = replace(pipeline, durations=(pipeline.durations * factors).astype(np.int64))
        first, second = draw.choice(TRIED_PATIENCES, 2).tolist()
        trial = refine(pipeline, _pass(perturbed, best[1], caps, first, expected)[1], caps, second)
        best = trial if trial[0] <= best[0] else best
    return best


def dated(pipeline: Pipeline, word: Word) -> Run:
    """Start times of the unchanged word: every action starts when its rank is free and its inputs have arrived; caps
    are ignored.
    """
    forwards, backwards = pipeline.links
    starts = np.full(len(pipeline.durations), -1, dtype=np.int64)
    makespan = _date(
        word,
        pipeline.first_actions,
        pipeline.durations,
        pipeline.ranks,
        forwards.successors,
        backwards.successors,
        backwards.delays,
        starts,
    )
    return makespan, word, starts


@numba.njit(cache=True, nogil=True)
def _date(
    word: Word,
    first_actions: Ints,
    durations: Ints,
    ranks: Int32s,
    successors: Int32s,
    predecessors: Int32s,
    delays: Ints,
    starts: Ints,
) -> int:
    """Fill ``starts``: run a rank until it needs a missing message, then the next, and resume it when that is sent."""
    num_ranks, num_steps = word.shape
    heads, free = np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64)
    units = np.zeros(first_actions.shape, dtype=np.int64)
    waiting, is_waiting = np.arange(num_ranks), np.ones(num_ranks, dtype=np.bool_)
    count = num_ranks
    while count > 0:
        count -= 1
        rank = waiting[count]
        is_waiting[rank] = False
        while heads[rank] < num_steps:
            queue = word[rank, heads[rank]]
            action = first_actions[rank, queue] + units[rank, queue]
            start = int(free[rank])
            for column in range(2):
                before = predecessors[action, column]
                if before >= 0 and start >= 0:
                    arrival = starts[before] + durations[before] + delays[action, column]
                    start = -1 if starts[before] < 0 else max(start, arrival)
            if start < 0:
                break
            starts[action] = start
            free[rank] = start + durations[action]
            heads[rank] += 1
            units[rank, queue] += 1
            for column in range(2):
                after = successors[action, column]
                if after >= 0 and not is_waiting[ranks[after]] and ranks[after] != rank:
                    waiting[count] = ranks[after]
                    is_waiting[ranks[after]] = True
                    count += 1
    return int(free.max())


def _pass(
    pipeline: Pipeline,
    word: Word,
    caps: Ints,
    patience: int,
    expected: Ints,
    *,
    is_reversed: bool = False,
    shorter_than: int = UNKNOWN,
) -> Run:
    """One pass; ``expected`` are start times of an earlier one. It stops with an unknown length and incomplete arrays
    once its step must take at least ``shorter_than``. Then it is not known whether it would have deadlocked, so it is
    not repeated with more messages under way.
    """
    if not is_reversed:
        within = _pass_within(pipeline, word, caps, patience, expected, pipeline.most_sent, is_reversed, shorter_than)
        if within[0] >= 0:
            return within
    return _pass_within(pipeline, word, caps, patience, expected, UNKNOWN, is_reversed, shorter_than)


def _pass_within(
    pipeline: Pipeline,
    word: Word,
    caps: Ints,
    patience: int,
    expected: Ints,
    most_sent: int,
    is_reversed: bool,
    shorter_than: int,
) -> Run:
    """The pass with at most ``most_sent`` messages of a channel under way; a negative length if it deadlocked."""
    links = pipeline.links[is_reversed]
    run = np.empty(word.shape, dtype=np.int8)
    starts = np.zeros(len(pipeline.durations), dtype=np.int64)
    num_ranks = pipeline.num_ranks
    makespan = _run(
        np.ascontiguousarray(word),
        pipeline.first_actions,
        pipeline.num_units,
        pipeline.num_passes,
        is_reversed,
        pipeline.durations,
        -pipeline.stash if is_reversed else pipeline.stash,
        pipeline.ranks,
        links.successors,
        links.delays,
        links.num_awaited.copy(),
        caps,
        expected,
        patience,
        most_sent,
        shorter_than,
        new_clock(num_ranks, np.ones(num_ranks, dtype=bool)),
        run,
        starts,
    )
    return makespan, run, starts


@numba.njit(cache=True, nogil=True)
def _run(
    word: Word,
    first_actions: Ints,
    num_units: int,
    num_passes: int,
    is_reversed: bool,
    durations: Ints,
    stash: Ints,
    ranks: Int32s,
    successors: Int32s,
    delays: Ints,
    num_awaited: npt.NDArray[np.int8],
    caps: Ints,
    expected: Ints,
    patience: int,
    most_sent: int,
    shorter_than: int,
    clock: Clock,
    run: Word,
    starts: Ints,
) -> int:
    """Fill ``run`` and ``starts``; returns the length of the step, -1 if it deadlocked, `UNKNOWN` if it stopped.

    Allocates the arrays of `_take_turns`, which counts no references (`penstock.planner.compiled`).
    """
    num_ranks, num_steps = word.shape
    following = np.empty((num_ranks, num_steps), dtype=np.int32)
    following[:] = np.arange(1, num_steps + 1)
    starts[:] = -1
    left_ns = np.zeros(num_ranks, dtype=np.int64)
    for action in range(len(durations)):
        left_ns[ranks[action]] += durations[action]
    length: int = _take_turns(
        word, first_actions, num_units, num_passes, is_reversed, durations, stash, ranks, successors, delays,
        num_awaited, caps.copy(), expected, patience, most_sent, shorter_than, left_ns, clock, run, starts, following,
        np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.int64), np.zeros(num_ranks, dtype=np.bool_),
        np.zeros(first_actions.shape, dtype=np.int64), np.zeros(len(durations), dtype=np.int64),
        np.empty(first_actions.shape[1], dtype=np.int64), np.empty(first_actions.shape[1], dtype=np.bool_),
    )  # fmt: skip
    return length


@compiled
def _take_turns(
    word: Word, first_actions: Ints, num_units: int, num_passes: int, is_reversed: bool, durations: Ints, stash: Ints,
    ranks: Int32s, successors: Int32s, delays: Ints, num_awaited: npt.NDArray[np.int8], free_stash: Ints,
    expected: Ints, patience: int, most_sent: int, shorter_than: int, left_ns: Ints, clock: Clock, run: Word,
    starts: Ints, following: Int32s, heads: Ints, counts: Ints, waits: npt.NDArray[np.bool_], units: Ints, ready: Ints,
    ahead: Ints, matters: npt.NDArray[np.bool_],
) -> int:  # fmt: skip
    """Run every rank's actions as time advances; returns the length of the step, -1 if it deadlocked, and `UNKNOWN` if
    a rank must end at ``shorter_than`` or later. ``left_ns`` [ranks] is the time of the actions that are left.
    """
    num_steps, makespan = word.shape[1], 0
    now = next_time(clock)
    while now < never(clock):
        rank = next_cell(clock)
        step, before, soonest = heads[rank], -1, UNKNOWN
        action = _action(first_actions[rank, word[rank, step]], units[rank, word[rank, step]], num_units, is_reversed)
        is_full = _is_full(action, num_units, most_sent, successors, ranks, starts)
        if num_awaited[action] or ready[action] > now or is_full:
            awaited = max(now, expected[action]) if num_awaited[action] else UNKNOWN if is_full else ready[action]
            step, before, soonest = _overtaking(
                rank, word, following, step, first_actions, units, num_units, is_reversed, ahead,
                matters, durations, stash, num_awaited, ready, free_stash[rank], now, awaited, patience,
                most_sent, successors, ranks, starts,
            )  # fmt: skip
        waits[rank] = step < 0
        if step < 0:
            set_time(clock, rank, never(clock) if soonest == UNKNOWN else soonest)
        else:
            queue = word[rank, step]
            action = _action(first_actions[rank, queue], units[rank, queue], num_units, is_reversed)
            _take(rank, step, before, queue, heads, following, run, counts, units)
            free_stash[rank] -= stash[action]
            starts[action] = now
            end = now + durations[action]
            makespan = max(makespan, end)
            left_ns[rank] -= durations[action]
            if end + left_ns[rank] >= shorter_than:
                return UNKNOWN
            _release(action, end, successors, delays, num_awaited, ready, ranks, waits, clock)
            if most_sent < num_units:
                _wake_sender(action, now, num_units, num_passes, ranks, waits, clock)
            set_time(clock, rank, end if counts[rank] < num_steps else never(clock))
        now = next_time(clock)
    num_taken = 0
    for count in counts:
        num_taken += count
    return makespan if num_taken == len(durations) else -1


@compiled
def _is_full(action: int, num_units: int, most_sent: int, successors: Int32s, ranks: Int32s, starts: Ints) -> bool:
    """Whether the action's message would exceed the number of messages under way."""
    successor = successors[action, TO_PASS]
    if successor < 0 or action % num_units < most_sent or ranks[successor] == ranks[action]:
        return False
    return bool(starts[successor - most_sent] < 0)


@compiled
def _take(
    rank: int,
    step: int,
    before: int,
    queue: int,
    heads: Ints,
    following: npt.NDArray[np.int32],
    run: Word,
    counts: Ints,
    units: Ints,
) -> None:
    """Move the action at ``step``, which follows the one at ``before``, from the rest of the word to ``run``."""
    if before < 0:
        heads[rank] = following[rank, step]
    else:
        following[rank, before] = following[rank, step]
    run[rank, counts[rank]] = queue
    counts[rank] += 1
    units[rank, queue] += 1


@compiled
def _wake_sender(
    action: int, now: int, num_units: int, num_passes: int, ranks: Int32s, waits: npt.NDArray[np.bool_], clock: Clock
) -> None:
    """The action received a message, so the sender may send one more: wake it."""
    is_forward = action < num_passes
    sender = action - num_units if is_forward else action + num_units
    if sender < 0 or (not is_forward and sender >= 2 * num_passes):
        return
    rank = ranks[sender]
    if waits[rank] and time_of(clock, rank) > now:
        set_time(clock, rank, now)


@compiled
def _overtaking(
    rank: int, word: Word, following: npt.NDArray[np.int32], step: int, first_actions: Ints, units: Ints,
    num_units: int, is_reversed: bool, ahead: Ints, matters: npt.NDArray[np.bool_], durations: Ints, stash: Ints,
    num_awaited: npt.NDArray[np.int8], ready: Ints, free_stash: int, now: int, awaited: int, patience: int,
    most_sent: int, successors: Int32s, ranks: Int32s, starts: Ints,
) -> tuple[int, int, int]:  # fmt: skip
    """The place of the action that runs instead of the one at ``step`` and the place before it, -1 if none does, and
    the time at which the next one becomes ready.

    Only the next action of a queue can run, and most of them wait: places are searched up to the last that ``matters``
    [queues], which is ready or will be at a known time, and does not end too late.
    """
    num_left = 0
    for queue in range(len(ahead)):
        ahead[queue], matters[queue] = 0, False
        if units[rank, queue] < num_units:
            action = _action(first_actions[rank, queue], units[rank, queue], num_units, is_reversed)
            matters[queue] = num_awaited[action] == 0 and (
                ready[action] > now
                or (
                    (stash[action] <= 0 or stash[action] <= free_stash)
                    and now + durations[action] - patience * durations[action] // 100 <= awaited
                    and not _is_full(action, num_units, most_sent, successors, ranks, starts)
                )
            )
            num_left += matters[queue]
    soonest, change, most, before = UNKNOWN, 0, 0, -1
    for _ in range(WINDOW):
        if step == word.shape[1] or num_left == 0:
            break
        queue = word[rank, step]
        action = _action(first_actions[rank, queue], units[rank, queue] + ahead[queue], num_units, is_reversed)
        if ahead[queue] == 0 and matters[queue]:
            num_left -= 1
            if ready[action] > now:
                soonest = min(soonest, ready[action])
            elif stash[action] <= 0 or stash[action] + most <= free_stash:
                return step, before, soonest
        ahead[queue] += 1
        change += stash[action]
        most = max(most, change)
        before, step = step, following[rank, step]
    return -1, -1, soonest


@compiled
def _release(
    action: int,
    end: int,
    successors: Int32s,
    delays: Ints,
    num_awaited: npt.NDArray[np.int8],
    ready: Ints,
    ranks: Int32s,
    waits: npt.NDArray[np.bool_],
    clock: Clock,
) -> None:
    """Set the times of the successors of an action that ends at ``end``, and wake the ranks that wait for them."""
    for column in range(2):
        successor = successors[action, column]
        if successor >= 0:
            num_awaited[successor] -= 1
            ready[successor] = max(ready[successor], end + delays[action, column])
            rank = ranks[successor]
            if num_awaited[successor] == 0 and waits[rank] and ready[successor] < time_of(clock, rank):
                set_time(clock, rank, ready[successor])


@compiled
def _action(first: int, unit: int, num_units: int, is_reversed: bool) -> int:
    number: int = first + (num_units - 1 - unit if is_reversed else unit)
    return number
