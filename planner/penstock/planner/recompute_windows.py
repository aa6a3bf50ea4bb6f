"""Windows of recomputation: how much of it a simulated step hides, and the waits to which other R are moved.

An R directly before its backward fills the wait for the gradient. Where that wait is shorter than the R, or there is
none (on the last stage, or if the gradient came earlier), the rest of the R delays the backward, although the rank may
have waited some actions earlier: for a forward's input, or for the gradient of another slice. An R needs nothing but
its stage's kept buffers, so it may run in any wait behind its forward. Its buffers then exist from there on.

`hidden_in_waits` simulates the step, and moves every R that delays its backward into the nearest earlier wait of its
rank that is long enough, or if there is none into the longest, as far as the rank's bytes stay within its limit at all
actions in between. The moved R change the times of all ranks, so this is repeated, from the latest step, as long as
any R moves, at most `MOST_PASSES` times. The shortest step counts.

Example: a rank has 6 ms of waiting for the input of F7, then runs F7 and B3, whose gradient is there already. An R of 4
ms before B3 delays it and the rank above by 4 ms. Before F7 it delays nothing, and its buffers exist during F7 as well.

A backward that recomputes inside gets an R in the same way, in the wait before it or in an earlier one, if that hides
more than the fixed cost of an action and the rank has the bytes of all layers of the stage there. So a plan may
recompute inside where its ranks are full, and by an R where they are not.

Tried and rejected: only one fixed distance of 2, 4 or 8 actions for all R (`Plan.recompute_ahead`, which long steps
still use). It moves R out of waits for gradients that would hide it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from penstock.planner.order import BACKWARD, FORWARD, INPUT_GRADIENT, RECOMPUTE, Order
from penstock.planner.simulate import kernel, link
from penstock.planner.simulate.arrays import Linked
from penstock.planner.simulate.kernel import Ints

MOST_PASSES = 4

NEVER = -1
"""The arrival of an input that needs no message."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TracedStep:
    """A simulated step with the times of its actions. ``levels`` [actions] are the bytes that a rank holds while the
    action runs, and ``remade_bytes`` [stages, columns] those that an R makes. ``remade_ns`` [stages, columns] is the
    time of an R, and ``inside_ns`` that of the same recomputation inside a backward.
    """

    order: Order
    linked: Linked
    makespan_ns: int
    levels: Ints
    remade_bytes: Ints
    remade_ns: Ints
    inside_ns: Ints

    @property
    def peaks(self) -> Ints:
        """[ranks]: the largest of its levels."""
        peaks: Ints = np.maximum.reduceat(self.levels, self.order.offsets[:-1])
        return peaks


def exposed_shares(step: TracedStep) -> tuple[float, ...]:
    """Per rank, the share of its recomputation's time that delays other ranks or the end of the step, by the rule of
    `penstock.core.recomputation`; 1 for a rank without recomputation.
    """
    times, shares = _Times(step), []
    for rank in range(step.order.num_ranks):
        exposed, total = times.recompute_ns(rank)
        shares.append(exposed / total if total else 1.0)
    return tuple(shares)


def hidden_in_waits(order: Order, simulate: Callable[[Order], TracedStep], limit_bytes: Ints) -> TracedStep | None:
    """The shortest step within ``limit_bytes`` [ranks]: of the order itself, or with R moved to earlier waits, or added
    in waits for backwards that recompute inside. None if the order itself exceeds the limit.

    R in the order recompute whole stages, and stand directly before their backwards.
    """
    best = step = simulate(order)
    limit = limit_bytes.copy()
    if (step.peaks > limit).any():
        return None
    for _ in range(MOST_PASSES):
        moved = _taken_out(step, limit) or _moved(step, limit)
        if moved is None:
            break
        step = simulate(moved)
        excess = np.maximum(step.peaks - limit_bytes, 0)
        if excess.any():  # receives are posted elsewhere in another order
            limit, step = limit - excess, best
        elif step.makespan_ns < best.makespan_ns:
            best = step
    return best


def _taken_out(step: TracedStep, limit_bytes: Ints) -> Order | None:
    """The step's order with an R in a wait for every backward that recomputes inside, where that hides any of it; None
    if there is none.
    """
    order, times = step.order, _Times(step)
    backwards, places = list[int](), list[int]()
    for rank in range(order.num_ranks):
        row = _Row(step, times, rank, int(limit_bytes[rank]))
        for number in row.inside_backwards():
            place = row.wait_for(number)
            if place is not None:
                row.add(number, place)
                backwards.append(number)
                places.append(place)
    return order.with_recomputations_of(np.array(backwards), np.array(places)) if backwards else None


def _moved(step: TracedStep, limit_bytes: Ints) -> Order | None:
    """The step's order with every R that delays its backward in an earlier wait; None if none can be moved."""
    order, times = step.order, _Times(step)
    places = np.arange(order.num_actions)
    for rank in range(order.num_ranks):
        row = _Row(step, times, rank, int(limit_bytes[rank]))
        for number in row.late_recomputations():
            place = row.better_place(number)
            if place is not None:
                row.move(number, place)
                places[number] = place
    return _reordered(order, places) if (places != np.arange(order.num_actions)).any() else None


def _reordered(order: Order, places: Ints) -> Order:
    """The order after moving each action directly before action number ``places[action]``, unless that is itself."""
    numbers = np.arange(order.num_actions)
    sequence = np.lexsort((numbers, places == numbers, places))
    return replace(
        order,
        kinds=order.kinds[sequence],
        stages=order.stages[sequence],
        microbatches=order.microbatches[sequence],
        slices=order.slices[sequence],
        parts=None if order.parts is None else order.parts[sequence],
        joined=None if order.joined is None else order.joined[sequence],
    )


class _Times:
    """Nanoseconds of all actions: when they start and stop, when their rank reached them, when the message arrived
    that they need, and how much of it they recompute inside.
    """

    def __init__(self, step: TracedStep) -> None:
        actions, messages, order = step.linked.actions, step.linked.messages, step.order
        needing = np.flatnonzero(actions[:, link.NEEDS_CHANNEL] >= 0)
        firsts = step.linked.first_messages[actions[needing, link.NEEDS_CHANNEL]]
        senders = messages[firsts + actions[needing, link.NEEDS_NUMBER], link.SENDER]
        arrived = np.full(len(actions), NEVER, dtype=np.int64)
        arrived[needing] = actions[senders, kernel.ARRIVED]
        start, reached = actions[:, kernel.START], actions[:, kernel.REACHED]
        self.offsets, self.kinds = order.offsets.tolist(), order.kinds.tolist()
        self.start, self.stop = start.tolist(), actions[:, kernel.STOP].tolist()
        self.reached = np.where(reached < 0, start, reached).tolist()
        self.arrived = arrived.tolist()
        self.sends = (actions[:, link.SENDS_CHANNEL] >= 0).tolist()
        inside_ns = np.where(order.recomputes_inside(), step.inside_ns[order.stages, order.columns], 0)
        self.inside_ns = inside_ns.tolist()
        self.begins_pair = [False] * len(start) if order.joined is None else order.joined.tolist()

    def duration(self, number: int) -> int:
        """The action's time."""
        return int(self.stop[number] - self.start[number])

    def recompute_ns(self, rank: int) -> tuple[int, int]:
        """Exposed and all nanoseconds of the rank's recomputation."""
        lead = exposed = total = 0
        number, stop = self.offsets[rank : rank + 2]
        while number < stop:
            if self.kinds[number] == RECOMPUTE:
                total += self.duration(number)
                lead += self.duration(number)
                number += 1
                continue
            group = slice(number, number + 1 + self.begins_pair[number])
            lead = min(lead, max(min(self.reached[group]) - max(self.arrived[group]), 0))
            if any(self.sends[group]):
                exposed, lead = exposed + lead, 0
            number = group.stop
        return exposed + lead, total


class _Row:
    """The actions of one rank, the waits before them, and its bytes; both change as R are moved."""

    def __init__(self, step: TracedStep, times: _Times, rank: int, limit_bytes: int) -> None:
        order, self._times, self._limit = step.order, times, limit_bytes
        first, stop = times.offsets[rank : rank + 2]
        own, self._numbers = slice(first, stop), range(first, stop)
        self._first = first
        self._levels = step.levels[own].copy()
        cells = order.stages[own], order.columns[own]
        self._bytes = step.remade_bytes[cells].tolist()
        self._remade_ns, self._inside_ns = step.remade_ns[cells].tolist(), times.inside_ns[own]
        columns = (order.stages, order.microbatches, order.slices)
        self._cells = list(zip(*(column[own].tolist() for column in columns), strict=True))
        before = [times.start[first], *times.stop[first : stop - 1]]
        self._waits = [max(start - end, 0) for start, end in zip(times.start[own], before, strict=True)]
        self._forwards = {self._cells[n - first]: n for n in self._numbers if times.kinds[n] == FORWARD}

    def late_recomputations(self) -> list[int]:
        """The R that are directly before their backwards and delay them."""
        return [number for number in self._numbers if self._is_late(number)]

    def _is_late(self, number: int) -> bool:
        if self._times.kinds[number] != RECOMPUTE:
            return False
        group = self._next_group(number)
        cell = self._cells[number - self._first]
        is_direct = any(
            self._times.kinds[other] in (BACKWARD, INPUT_GRADIENT) and self._cells[other - self._first] == cell
            for other in group
        )
        return is_direct and self._hidden_ns(number) < self._times.duration(number)

    def _next_group(self, number: int) -> range:
        """The action after this one, or the pair."""
        following = number + 1
        is_pair = following < self._numbers.stop and self._times.begins_pair[following]
        return range(following, min(following + 1 + is_pair, self._numbers.stop))

    def _hidden_ns(self, number: int) -> int:
        """The part of an R in which its backward would have waited."""
        arrived = max(self._times.arrived[other] for other in self._next_group(number))
        return int(min(max(arrived - self._times.start[number], 0), self._times.duration(number)))

    def better_place(self, number: int) -> int | None:
        """The action before which the R hides more: after the nearest wait that is long enough, else the longest; None
        if all that the rank has bytes for are shorter than what is hidden already.
        """
        needed, num_bytes = self._times.duration(number), self._bytes[number - self._first]
        best, longest = None, self._hidden_ns(number)
        for place in range(number - 1, self._forwards[self._cells[number - self._first]], -1):
            if longest >= needed or self._levels[place - self._first] + num_bytes > self._limit:
                break
            is_inside_pair = self._times.begins_pair[place - 1]
            if self._waits[place - self._first] > longest and not is_inside_pair:
                best, longest = place, self._waits[place - self._first]
        return best

    def move(self, number: int, place: int) -> None:
        """Run the R before the action at ``place``."""
        self._hold(number, place, number, self._times.duration(number))

    def inside_backwards(self) -> list[int]:
        """The backwards that recompute anything inside."""
        return [number for number in self._numbers if self._inside_ns[number - self._first]]

    def wait_for(self, number: int) -> int | None:
        """The action before which an R of this backward would hide most, like `better_place`; None if no wait that the
        rank has bytes for hides more than the R takes in addition.
        """
        own = number - self._first
        needed, num_bytes = self._remade_ns[own], self._bytes[own]
        best, longest = None, needed - self._inside_ns[own]
        for place in range(number, self._forwards[self._cells[own]], -1):
            if longest >= needed or self._levels[place - self._first] + num_bytes > self._limit:
                break
            if self._waits[place - self._first] > longest:
                best, longest = place, self._waits[place - self._first]
        return best

    def add(self, number: int, place: int) -> None:
        """Run an R of the backward before the action at ``place``."""
        self._hold(number, place, number + 1, self._remade_ns[number - self._first])

    def _hold(self, number: int, place: int, stop: int, duration_ns: int) -> None:
        """Hold the recomputed bytes of an action from ``place`` until ``stop``, and fill the wait there."""
        self._levels[place - self._first : stop - self._first] += self._bytes[number - self._first]
        self._waits[place - self._first] -= min(self._waits[place - self._first], duration_ns)
