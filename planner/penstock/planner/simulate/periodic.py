"""Long runs of equal micro-batches: simulate until the pipeline repeats itself, then add whole periods.

Problem. A step may have thousands of micro-batches, and a search simulates hundreds of candidates. Most of a step is
its steady state, in which the same pattern repeats. Closed forms do not know that pattern: it depends on messages,
contention and the order of actions. And an estimate may rank two plans that differ by a thousandth wrongly.

Idea. The pipeline is a deterministic machine: its state (every rank's position in its order, and the transfers and
computations under way with their remaining time) determines everything that follows. If its state at one time equals
that at a later one except for P micro-batches and L nanoseconds, while every rank still has forwards to begin, then a
step with P more micro-batches is the same step with that period once more, and its totals grow by those of a period. So
the result is exact, not an estimate.

Example: 1F1B on 4 ranks, F takes 1 ns and B 2 ns, messages take no time. `enough_to_repeat` is 21 micro-batches, whose
step takes (21 + 3) * 3 = 72 ns. In it every rank repeats one F and one B every 3 ns: P = 1, L = 3. The step of 22
micro-batches takes 75 ns, so 1,000 micro-batches take 72 + 979 * 3 = 3,009 ns, which is (1,000 + 3) * 3.

A smaller last micro-batch is the last one of every simulated step, and the repetition precedes it.

States are compared through the actions of ranks: everything between the oldest event that still matters and the first
time has to happen again P micro-batches and L nanoseconds later.

Posts follow waits. If receives are posted late, they also depend on the action after them, and so do the WAIT_SENDs of
the other side. After the second time that action differs from the one in the longer step. So all places of POST_RECV
and WAIT_SEND in the longer step are compared with those in the shorter one, and so is each rank's next action.

Complexity. Two or three simulations of about 3 K / S + 9 micro-batches of S slices on K ranks, whatever their number,
and one pass over their actions per period that is tried, up to `MOST_MICROBATCHES_PER_PERIOD` micro-batches. If none
repeats there, a step twice as long is tried. If that does not repeat either, times are extrapolated linearly from both,
and `Extrapolation.is_exact` is false.

Rejected: linear extrapolation in every case, which is off as long as the warm-up still has an effect; snapshots of the
simulator's state, since the trace of actions determines it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.program import Reduction
from penstock.planner.order import FORWARD, Integers, Order
from penstock.planner.simulate import kernel, link
from penstock.planner.simulate.arrays import Linked, StepTimes, link_order, simulate_linked
from penstock.planner.simulate.costs import Costs

Ints = npt.NDArray[np.int64]

MOST_MICROBATCHES_PER_PERIOD = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Extrapolation:
    """The times of a step (without trace), and the ``order`` of the longest step that was simulated for them.

    ``is_exact`` if that was the step itself or its repetition was proved; otherwise the times were extrapolated
    linearly from two shorter steps.
    """

    times: StepTimes
    order: Order
    linked: Linked
    is_exact: bool

    @property
    def num_simulated(self) -> int:
        """Number of micro-batches of the longest simulated step."""
        return self.order.num_microbatches


def extrapolate(
    generate: Callable[[int], Order],
    num_microbatches: int,
    costs: Costs,
    *,
    receive_ahead: int = 2,
    late_receives: bool = False,
    reductions: Sequence[Reduction] = (),
    first: int | None = None,
    multiple: int = 1,
) -> Extrapolation:
    """The times of ``generate(num_microbatches)``. ``generate`` gives the order for any number of micro-batches, or for
    ``first`` plus any ``multiple``.

    With more micro-batches its orders have to repeat the same part more often. The formulas of 1f1b and zb-h1 do so,
    and so do orders with a ``first``. A variant of zb without it may differ beyond the simulated part, so the step of a
    plan is simulated in full in the end.
    """
    if first is None:
        first = enough_to_repeat(costs.num_ranks, costs.num_slices)
        second = 2 * first
    else:
        first, second = first + 2 * multiple, first + 6 * multiple
    machine = _Machine(
        generate=generate,
        costs=costs,
        receive_ahead=receive_ahead,
        late_receives=late_receives,
        reductions=reductions,
    )
    if second >= num_microbatches:
        step = machine.step(num_microbatches)
        return Extrapolation(times=step.times, order=step.order, linked=step.linked, is_exact=True)
    traced: list[_Step] = []
    for count in (first, second):
        step = machine.step(count, traced=True)
        cut_and_longer = _find_cut(machine, step, multiple) if 2 * count < num_microbatches else None
        if cut_and_longer is not None:
            return _repeated(machine, step, *cut_and_longer, num_microbatches)
        traced.append(step)
    earlier, later = traced
    times = _continued(earlier.times, later.times, num_microbatches - first, second - first)
    return Extrapolation(times=times, order=later.order, linked=later.linked, is_exact=False)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Step:
    """A simulated step; its trace, if it has one, is in ``linked.actions``."""

    order: Order
    linked: Linked
    times: StepTimes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Machine:
    """Simulates the orders of any number of micro-batches."""

    generate: Callable[[int], Order]
    costs: Costs
    receive_ahead: int
    late_receives: bool
    reductions: Sequence[Reduction]

    def step(self, num_microbatches: int, *, traced: bool = False) -> _Step:
        """The step of ``num_microbatches`` micro-batches."""
        order = self.generate(num_microbatches)
        return self.simulated(order, self.link(order, traced=traced))

    def link(self, order: Order, *, traced: bool = False) -> Linked:
        """The order with its messages, ready for simulation."""
        width = kernel.ARRIVED + 1 if traced else kernel.REACHED
        return link_order(order, self.receive_ahead, self.late_receives, width=width)

    def simulated(self, order: Order, linked: Linked) -> _Step:
        """The step of a linked order."""
        times = simulate_linked(order, linked, self.costs, receive_ahead=self.receive_ahead, reductions=self.reductions)
        return _Step(order=order, linked=linked, times=times)


def _repeated(
    machine: _Machine, step: _Step, cut: Cut, longer: Order, linked: Linked, num_microbatches: int
) -> Extrapolation:
    """The times of ``num_microbatches``; ``longer``, not simulated yet, is the order of ``step`` plus one period."""
    count = step.order.num_microbatches
    base = count + (num_microbatches - count) % cut.period
    if base == count:
        last = machine.simulated(longer, linked)
    else:
        step, last = machine.step(base), machine.step(base + cut.period)
    times = _continued(step.times, last.times, (num_microbatches - base) // cut.period, 1)
    return Extrapolation(times=times, order=last.order, linked=last.linked, is_exact=True)


def enough_to_repeat(num_ranks: int, num_slices: int) -> int:
    """Number of micro-batches of a step that may repeat itself: three times 1F1B's warm-up, and a few more."""
    return 3 * (num_ranks // num_slices + 1) + 6


def _continued(times: StepTimes, longer: StepTimes, numerator: int, denominator: int) -> StepTimes:
    """``times`` plus ``numerator / denominator`` times the difference between ``longer`` and ``times``."""
    names = [field.name for field in dataclasses.fields(StepTimes) if field.name.endswith("_ns")]
    pairs = {name: (getattr(times, name), getattr(longer, name)) for name in names}
    totals = {name: a + (b - a) * numerator // denominator for name, (a, b) in pairs.items()}
    return dataclasses.replace(times, **totals, reductions=(), trace=times.trace[:, :0])


def _find_cut(machine: _Machine, step: _Step, multiple: int) -> tuple[Cut, Order, Linked] | None:
    """Two times between which the step repeats itself, if there are such, and the order of one period more."""
    order, linked = step.order, step.linked
    for period in range(multiple, max(MOST_MICROBATCHES_PER_PERIOD, multiple) + 1, multiple):
        cut = _cut(order, linked, period)
        if cut is not None and _repeats(order, linked, machine.receive_ahead, cut):
            longer = machine.generate(order.num_microbatches + period)
            if _is_stretched(order, longer, cut):
                longer_linked = machine.link(longer)
                if not machine.late_receives or _are_places_stretched(step, longer, longer_linked, cut):
                    return cut, longer, longer_linked
    return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Cut:
    """Two times of a step, ``length_ns`` and ``period`` micro-batches apart.

    Per rank, ``at`` is the last action begun at the first time, ``places`` the number begun by then, and ``shift`` the
    number begun between the two times.
    """

    period: int
    time_ns: int
    length_ns: int
    at: Ints
    places: Ints
    shift: Ints


def _cut(order: Order, linked: Linked, period: int) -> Cut | None:
    """The cut whose second time is the earliest start of a rank's last forward, before a smaller last micro-batch."""
    start = linked.actions[:, kernel.START]
    shift = np.diff(order.offsets) * order.num_slices // order.num_cells * period
    last_forwards = np.array([lo + _last_forward(order, lo, hi) for lo, hi in _spans(order)])
    rank = int(start[last_forwards].argmin())
    first = int(last_forwards[rank] - shift[rank])
    time, length = int(start[first]), int(start[last_forwards[rank]] - start[first])
    at, later = _begun(order, start, time), _begun(order, start, time + length)
    if (at < order.offsets[:-1]).any() or (later != at + shift).any():
        return None
    places = at + 1 - order.offsets[:-1]
    return Cut(period=period, time_ns=time, length_ns=length, at=at, places=places, shift=shift)


def _last_forward(order: Order, first: int, stop: int) -> int:
    """The index of a rank's last forward before any action of a smaller last micro-batch."""
    if order.num_remainder_slices:
        stop = first + int((order.microbatches[first:stop] == order.num_microbatches - 1).argmax())
    return int(np.flatnonzero(order.kinds[first:stop] == FORWARD)[-1])


def _spans(order: Order) -> list[tuple[int, int]]:
    return list(itertools.pairwise(order.offsets.tolist()))


def _begun(order: Order, start: Ints, time: int) -> Ints:
    """The last action that each rank has begun at ``time``."""
    return np.array([lo + np.searchsorted(start[lo:hi], time, side="right") - 1 for lo, hi in _spans(order)])


def _repeats(order: Order, linked: Linked, receive_ahead: int, cut: Cut) -> bool:
    """Whether all events that still matter at the first time, and at least a period, recurred before the second."""
    actions = linked.actions
    oldest = _begun(order, actions[:, kernel.START], _oldest_begin(linked, receive_ahead, cut))
    first = np.maximum(np.minimum(oldest, cut.at - cut.shift), order.offsets[:-1])
    lengths = cut.at + 1 - first
    once = np.concatenate([np.arange(lo, hi + 1) for lo, hi in zip(first, cut.at, strict=True)])
    repeated = once + np.repeat(cut.shift, lengths)
    rounds = actions[repeated, link.ROUND] - actions[once, link.ROUND]
    waits = actions[repeated, link.STOP_WAIT] - actions[once, link.STOP_WAIT]
    channel_counts = np.diff(linked.first_messages) * order.num_slices // order.num_cells * cut.period
    num_sent = np.zeros(order.num_ranks, dtype=np.int64)
    np.add.at(num_sent, linked.channels.sources, channel_counts)
    return (
        np.array_equal(order.kinds[once], order.kinds[repeated])
        and np.array_equal(order.slices[once], order.slices[repeated])
        and np.array_equal(order.microbatches[once] + cut.period, order.microbatches[repeated])
        and bool((rounds == rounds[0]).all())
        and np.array_equal(waits, np.repeat(num_sent, lengths))
        and np.array_equal(*_times_until(actions, once, repeated, cut))
    )


def _times_until(actions: Ints, once: Ints, repeated: Ints, cut: Cut) -> tuple[Ints, Ints]:
    """Both traces up to their time, the second shifted back by the length between them."""
    first_times, second_times = actions[once, kernel.REACHED :], actions[repeated, kernel.REACHED :]
    second_times = np.where(second_times < 0, second_times, np.minimum(second_times - cut.length_ns, cut.time_ns))
    return np.minimum(first_times, cut.time_ns), second_times


def _oldest_begin(linked: Linked, receive_ahead: int, cut: Cut) -> int:
    """The begin of the oldest action that still matters at the first time: one under way, one whose message is not
    consumed, one that posts a receive for which a WAIT_SEND is still to come, or one whose message may have shared a
    card with such a message.
    """
    actions, start = linked.actions, linked.actions[:, kernel.START]
    is_begun = start <= cut.time_ns
    needing = np.flatnonzero(actions[:, link.NEEDS_CHANNEL] >= 0)
    numbers = linked.first_messages[actions[needing, link.NEEDS_CHANNEL]] + actions[needing, link.NEEDS_NUMBER]
    consumers = np.empty(len(linked.messages), dtype=np.int64)
    consumers[numbers] = needing
    senders = linked.messages[:, link.SENDER]
    unconsumed = senders[is_begun[senders] & ~is_begun[consumers]]
    posts = consumers[_oldest_posts(linked, receive_ahead, cut)]
    oldest = int(start[np.concatenate([cut.at, unconsumed, posts])].min())
    concurrent = senders[is_begun[senders] & (actions[senders, kernel.ARRIVED] > oldest)]
    return min(oldest, int(start[concurrent].min(initial=oldest)))


def _oldest_posts(linked: Linked, receive_ahead: int, cut: Cut) -> Ints:
    """Per channel with a WAIT_SEND to come, the message whose WAIT_RECV precedes the POST_RECV that it waits for."""
    num_channels = len(linked.channels.sources)
    first_waits, stop_waits = linked.first_waits, linked.actions[cut.at, link.STOP_WAIT]
    done = [linked.messages[lo:hi, link.AWAITED] for lo, hi in zip(first_waits, stop_waits, strict=True)]
    awaited = np.bincount(np.concatenate(done), minlength=num_channels)
    oldest: Ints = np.minimum(np.maximum(awaited - receive_ahead, 0), np.diff(linked.first_messages) - 1)
    return oldest + linked.first_messages[:-1]


def _is_stretched(order: Order, longer: Order, cut: Cut) -> bool:
    """Whether ``longer`` is ``order`` with the part between the two times repeated once more."""
    return all(
        _is_row_stretched(_row(order, rank), _row(longer, rank), place, place + shift, cut.period)
        for rank, (place, shift) in enumerate(zip(cut.places.tolist(), cut.shift.tolist(), strict=True))
    )


def _row(order: Order, rank: int) -> Integers:
    own = slice(order.offsets[rank], order.offsets[rank + 1])
    return np.stack([order.kinds[own], order.slices[own], order.microbatches[own]])


def _is_row_stretched(row: Integers, longer: Integers, first: int, stop: int, period: int) -> bool:
    """Whether a rank's ``longer`` row is ``row`` with actions [first, stop) repeated; rows are (kind, slice,
    micro-batch).
    """
    later = np.array([[0], [0], [period]], dtype=np.int32)
    return np.array_equal(longer, np.concatenate([row[:, :stop], row[:, first:] + later], axis=1))


def _are_places_stretched(step: _Step, longer: Order, linked: Linked, cut: Cut) -> bool:
    """Whether POST_RECVs and WAIT_SENDs of ``longer`` are those of the step with the part between the two times
    repeated, and each rank is at the second time where it was at the first.
    """
    stops = step.linked.actions[cut.at + cut.shift, kernel.STOP]
    for rank, (first, shift) in enumerate(zip(cut.places.tolist(), cut.shift.tolist(), strict=True)):
        stop = first + shift
        posts, waits = _transport(step.order, step.linked, rank)
        longer_posts, longer_waits = _transport(longer, linked, rank)
        num_more = posts.num_per_microbatch * cut.period
        may_be_over = stops[rank] <= cut.time_ns + cut.length_ns
        if not (
            (not may_be_over or _is_next_alike(_row(step.order, rank), posts.counts, first, stop, cut.period, num_more))
            and posts.counts[stop - 1] == posts.counts[first - 1] + num_more
            and posts.is_stretched(longer_posts, first, stop)
            and waits.is_stretched(longer_waits, first, stop)
        ):
            return False
    return True


def _is_next_alike(row: Integers, counts: Ints, first: int, stop: int, period: int, num_more: int) -> bool:
    """Whether the action at ``stop`` and its POST_RECVs equal those at ``first``, ``period`` micro-batches later."""
    later = np.array([0, 0, period])
    is_there = stop < len(counts) and np.array_equal(row[:, stop], row[:, first] + later)
    return is_there and bool(counts[stop] == counts[first] + num_more)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Places:
    """One rank's POST_RECVs or WAIT_SENDs: their channels in order, and the number done with each action."""

    channels: Ints
    counts: Ints
    num_per_microbatch: int

    def is_stretched(self, longer: _Places, first: int, stop: int) -> bool:
        """Whether ``longer`` is the same with actions [first, stop) repeated once more."""
        before, after = int(self.counts[first - 1]), int(self.counts[stop - 1])
        counts = np.concatenate([self.counts[:stop], self.counts[first:] + (after - before)])
        channels = np.concatenate([self.channels[:after], self.channels[before:]])
        return np.array_equal(longer.counts, counts) and np.array_equal(longer.channels, channels)


def _transport(order: Order, linked: Linked, rank: int) -> tuple[_Places, _Places]:
    """The rank's POST_RECVs and its WAIT_SENDs."""
    actions = linked.actions[order.offsets[rank] : order.offsets[rank + 1]]
    places = []
    for firsts, count, channel in (
        (linked.first_posts, link.STOP_POST, link.POSTED),
        (linked.first_waits, link.STOP_WAIT, link.AWAITED),
    ):
        first, stop = [*firsts.tolist(), len(linked.messages)][rank : rank + 2]
        places.append(
            _Places(
                channels=linked.messages[first:stop, channel],
                counts=actions[:, count] - first,
                num_per_microbatch=(stop - first) * order.num_slices // order.num_cells,
            )
        )
    return places[0], places[1]
