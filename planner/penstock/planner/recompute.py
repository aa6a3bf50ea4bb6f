"""What the stages of a pipeline make again where they have no room to keep it, and which units they own then.

Making an operation's buffers again costs its seconds and gives back its bytes (`penstock.core.remaking`). Operations of
a unit are chosen one by one: whatever is kept, each can run again from what comes before it. So a stage that lacks
bytes takes operations by rising seconds per byte until it lacks none, units of a kind being alike. That greedy solution
of a knapsack whose pieces are units is at most one unit's operation above the optimum, which is much where a stage has
few. So it is improved by branch and bound, whose bound takes parts of pieces, to within `TOLERATED` of the optimum
(`tests/planner/test_recompute.py` compares with an exact solver). It ends early where pieces are many and much alike;
one piece above the optimum is little there. Lynx solves this by an integer program or, for the one policy of identical
structures, by a heuristic (arXiv 2406.08756).

Bytes. A rank that holds n micro-batches of its units has n times their bytes. What is given up comes back for the slice
whose backward runs, so a byte that a unit gives up saves less than n: ``regained``, which two walks through the order
tell, with everything kept and with everything given up.

Stages. Ranks in front hold more micro-batches, so they make more again and should own fewer units. The time of a stage
is that of its units and of what they make again; it grows with the stage, and so do its bytes. So the least time T that
no stage needs to exceed is found by bisection: for each T every stage, from the last on, takes as many units as it can.
Seq1F1B and Lynx alternate between cutting stages and choosing policies, which need not end at the best of both.

Example: two ranks, ten units of 1 s and 10 bytes per micro-batch, of which 8 can be given up for 0.3 s; room for 60
bytes. The first rank holds two micro-batches, the second one. With five units each the first lacks 40 bytes and makes
all five again: 6.5 s. With four and six the first lacks 20: three units again, 4.9 s, and the second takes 6.0 s.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.cluster import PENSTOCK
from penstock.core.layout import REMADE_SLOTS, Operation, remaking
from penstock.core.model import UnitKind
from penstock.core.remaking import OF_LAYERS, Remake, Remakes, full_remakes, pinned_operations, uniform_remakes
from penstock.core.schedule import Kind
from penstock.planner import recompute_kernel as kernel
from penstock.planner.candidate import Candidate
from penstock.planner.nanoseconds import whole_nanoseconds
from penstock.planner.problem import Problem, imported_schedule
from penstock.planner.remake import remake_seconds
from penstock.planner.schedules.registry import BUILT_IN
from penstock.planner.stagecost import UNIT_KINDS, Integers, Stages, prefixes, unit_counts
from penstock.planner.tables import memory_of
from penstock.planner.work import Floats, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """One operation that a unit of a kind runs again: bytes of a micro-batch that it need not keep, and the time."""

    unit: UnitKind
    operation: Operation
    num_bytes: int
    duration_ns: int


TOLERATED = 1.01
"""What is made again takes so many times the least at most, unless that takes more than `MOST_BRANCHES` to find."""

MOST_BRANCHES = 300
"""Choices that are looked at where the greedy one is not known to be good enough: a few milliseconds."""

SHORTER = 3
"""So many ends of the stages in front are followed at once."""

PRECISION = 1_000
"""The part of the least time of the slowest stage that it need not be known to."""

Savings = tuple[Saving, ...]
"""By rising time per byte."""


def savings_of(problem: Problem, tp: int, batch: int, slices: tuple[int, ...]) -> Savings:
    """All that units of layers can give up of a micro-batch of ``batch`` sequences in these slices."""
    cost, work = problem.cost_of(tp), Work.of(batch, slices, prefixes(slices))
    first = {kind: next(unit for unit in problem.model.units if unit.kind is kind) for kind in OF_LAYERS}
    found = []
    for kind, unit in first.items():
        for operation in remaking(problem.model, kind):
            stage = (unit.index, unit.index + 1) if operation is not Operation.OUTPUT else (unit.index, unit.index + 2)
            remakes = (Remake(unit=kind, count=1, operations=(operation,)),)
            memory = memory_of(problem, (stage,), batch, tp, (remakes,))
            num_bytes = int(memory.together_bytes(tuple(REMADE_SLOTS.values()), slices).sum())
            seconds = remake_seconds(cost, problem.model, kind, work, (operation,)) * cost.slowdown(kind, Kind.F)
            if num_bytes:
                duration_ns = int(whole_nanoseconds(seconds).sum())
                found.append(Saving(unit=kind, operation=operation, num_bytes=num_bytes, duration_ns=duration_ns))
    return tuple(sorted(found, key=lambda each: (each.duration_ns / each.num_bytes, each.unit, each.operation)))


def may_recompute(problem: Problem) -> bool:
    """Whether the planner chooses what stages make again: under schedules of which it knows what their ranks hold."""
    pinned = problem.pinned
    is_known = pinned.schedule is None or pinned.schedule in BUILT_IN
    software = replace(problem.software, recomputes_on_demand=False)
    return is_known and pinned.recompute is None and software == PENSTOCK


def pinned_remakes(problem: Problem, stages: Stages) -> tuple[Remakes, ...]:
    """What is pinned for stages, or what the pinned schedule makes again of them; none if nothing is."""
    imported = imported_schedule(problem.pinned)
    named = frozenset[int]() if imported is None else imported.recomputed_stages
    pin = problem.pinned.recompute
    if isinstance(pin, tuple):
        again = list(pin)
    else:
        again = [uniform_remakes(problem.model, stage, pinned_operations(pin)) for stage in stages]
    return _trimmed(
        full_remakes(problem.model, stage) if number in named else remakes
        for number, (stage, remakes) in enumerate(zip(stages, again, strict=True))
    )


def fully_recomputed(problem: Problem, candidate: Candidate) -> Candidate:
    """The candidate with everything of layers made again."""
    kinds = [Remake(unit=kind, count=1, operations=remaking(problem.model, kind)) for kind in OF_LAYERS]
    counts = unit_counts(problem.model, candidate.stages)[:, [UNIT_KINDS.index(kind) for kind in OF_LAYERS]].tolist()
    again = (
        tuple(replace(each, count=count) for each, count in zip(kinds, row, strict=True) if count) for row in counts
    )
    return replace(candidate, recompute=_trimmed(again))


def own_remakes(problem: Problem, candidate: Candidate) -> Candidate:
    """The candidate without what its stages would make again of units that they do not have."""
    counts = [dict(zip(UNIT_KINDS, row, strict=True)) for row in unit_counts(problem.model, candidate.stages).tolist()]
    again = (_dealt(*each)[0] for each in zip(candidate.recompute, counts, strict=True))
    return replace(candidate, recompute=_trimmed(again))


def _dealt(remakes: Remakes, counts: Mapping[UnitKind, int]) -> tuple[Remakes, Remakes]:
    """What so many units of each kind take of them, the first ones most, and what is left for others."""
    left, taken, rest = dict(counts), [], []
    for each in remakes:
        count = min(each.count, left.get(each.unit, 0))
        left[each.unit] = left.get(each.unit, 0) - count
        taken += [replace(each, count=count)] if count else []
        rest += [replace(each, count=each.count - count)] if each.count > count else []
    return tuple(taken), tuple(rest)


def _trimmed(remakes: Iterable[Remakes]) -> tuple[Remakes, ...]:
    found = tuple(remakes)
    return found if any(found) else ()


def cheapest(savings: Savings, counts: Mapping[UnitKind, int], needed_bytes: float) -> Remakes | None:
    """What so many units of each kind make again to give up ``needed_bytes`` of a micro-batch; none if they cannot."""
    chosen = _cheapest(savings, [counts.get(each.unit, 0) for each in savings], math.ceil(needed_bytes))
    return None if chosen is None else _remakes(dict(zip(savings, chosen, strict=True)))


def _cheapest(savings: Savings, most: Sequence[int], needed_bytes: int) -> list[int] | None:
    """How often each of the savings is chosen, at most as often as ``most`` says."""
    best = _greedy(savings, most, needed_bytes)
    if best is None:
        return None
    least_ns, num_branches = _total_ns(savings, best), 0

    def branch(chosen: list[int], missing: int, spent_ns: int) -> None:
        nonlocal best, least_ns, num_branches
        place, num_branches = len(chosen), num_branches + 1
        if missing <= 0:
            if spent_ns < least_ns:
                best, least_ns = chosen + [0] * (len(savings) - place), spent_ns
            return
        if place == len(savings):
            return
        saving = savings[place]
        for count in range(min(most[place], -(-missing // saving.num_bytes)), -1, -1):
            left, spent = missing - count * saving.num_bytes, spent_ns + count * saving.duration_ns
            is_better = TOLERATED * (spent + _bound_ns(savings, most, place + 1, left)) < least_ns
            if num_branches >= MOST_BRANCHES or not (is_better or left <= 0):
                break
            if is_better:
                branch([*chosen, count], left, spent)

    if TOLERATED * _bound_ns(savings, most, 0, needed_bytes) < least_ns:
        branch([], needed_bytes, 0)
    return best


def _bound_ns(savings: Savings, most: Sequence[int], place: int, missing: int) -> float:
    """What savings from a place on cost at least: with parts of pieces; infinite where there is not enough of them."""
    total = 0.0
    for saving, count in zip(savings[place:], most[place:], strict=True):
        if missing <= count * saving.num_bytes:
            return total + max(missing, 0) / saving.num_bytes * saving.duration_ns
        total += count * saving.duration_ns
        missing -= count * saving.num_bytes
    return math.inf if missing > 0 else total


def _greedy(savings: Savings, most: Sequence[int], needed_bytes: int) -> list[int] | None:
    """By rising time per byte, without those that the last one makes needless."""
    missing, chosen = needed_bytes, []
    for saving, count in zip(savings, most, strict=True):
        chosen.append(min(count, max(-(-missing // saving.num_bytes), 0)))
        missing -= chosen[-1] * saving.num_bytes
    if missing > 0:
        return None
    for place in sorted(range(len(savings)), key=lambda place: savings[place].duration_ns, reverse=True):
        spared = min(chosen[place], -missing // savings[place].num_bytes)
        chosen[place] -= spared
        missing += spared * savings[place].num_bytes
    return chosen


def _total_ns(savings: Savings, chosen: Sequence[int]) -> int:
    return sum(count * saving.duration_ns for saving, count in zip(savings, chosen, strict=True))


def _remakes(chosen: Mapping[Saving, int]) -> Remakes:
    """Of each kind, units that run the same again together; the first ones run most."""
    found = []
    for kind in OF_LAYERS:
        own = {saving.operation: count for saving, count in chosen.items() if saving.unit is kind and count}
        before = 0
        for count in sorted(set(own.values())):
            operations = tuple(each for each in Operation if own.get(each, 0) >= count)
            found.append(Remake(unit=kind, count=count - before, operations=operations))
            before = count
    return tuple(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """Units, and the stages that shall own them.

    Per unit: ``unit_ns``, ``state_bytes`` (what is always there) and ``held_bytes`` of a micro-batch, and ``kinds``.
    Per stage: ``in_flight`` micro-batches whose bytes it holds, what it ``regained`` of a byte of a micro-batch that is
    given up, and ``limit_bytes``.
    """

    savings: Savings
    unit_ns: Integers
    state_bytes: Integers
    held_bytes: Integers
    kinds: Sequence[UnitKind]
    in_flight: Floats
    regained: Floats
    limit_bytes: Integers

    @functools.cached_property
    def _running(self) -> tuple[Integers, Integers, Integers, dict[UnitKind, Integers]]:
        """Sums over the units before each."""
        counts = {kind: _running(np.array([each is kind for each in self.kinds])) for kind in OF_LAYERS}
        return _running(self.unit_ns), _running(self.state_bytes), _running(self.held_bytes), counts

    def lacking_bytes(self, stage: int, first: Integers | int, stop: Integers | int) -> Floats:
        """What the stage lacks to hold all of units [first, stop), elementwise."""
        _, state, held, _ = self._running
        total = (state[stop] - state[first]) + self.in_flight[stage] * (held[stop] - held[first])
        lacking: Floats = total - self.limit_bytes[stage]
        return lacking

    def needed_bytes(self, stage: int, first: Integers | int, stop: Integers | int) -> Floats:
        """What the stage has to give up of a micro-batch over units [first, stop), elementwise."""
        lacking = self.lacking_bytes(stage, first, stop)
        needed: Floats = np.where(lacking > 0, lacking / max(self.regained[stage], kernel.TINY), 0.0)
        return needed

    def counts(self, first: Integers | int, stop: Integers | int) -> dict[UnitKind, Integers]:
        """How many units of each kind are among [first, stop), elementwise."""
        return {kind: running[stop] - running[first] for kind, running in self._running[3].items()}

    def times_of(self, stage: int, stop: int) -> Floats:
        """[LEAST GREEDY, firsts]: what the stage takes over units before ``stop`` from unit ``stage`` on or a later
        one, as far as it is known without a search (`penstock.planner.recompute_kernel`).
        """
        if (stage, stop) not in self._known_times:
            times = np.empty((2, stop - stage if stage else 1))
            kernel.price(*self._tables, self._stages[stage], stage, stop, times)
            self._known_times[stage, stop] = times
        return self._known_times[stage, stop]

    @functools.cached_property
    def _known_times(self) -> dict[tuple[int, int], Floats]:
        return {}

    @functools.cached_property
    def _tables(self) -> tuple[Integers, Integers, Integers]:
        """``units``, ``savings`` and ``by_time`` of the kernel."""
        *running, counts = self._running
        kinds = list(counts)
        rows = [(kinds.index(each.unit), each.num_bytes, each.duration_ns) for each in self.savings]
        savings = np.array(rows, dtype=np.int64).reshape(-1, 3)
        by_time = np.argsort(-savings[:, kernel.AGAIN_NS], kind="stable")
        return np.stack([*running, *counts.values()], axis=1), savings, by_time

    @functools.cached_property
    def _stages(self) -> Floats:
        return np.stack([self.in_flight, self.regained, self.limit_bytes], axis=1)

    def stage_ns(self, stage: int, first: int, stop: int) -> float:
        """The time of the stage with what it makes again; infinite where it has no room for its units."""
        if (stage, first, stop) not in self._known_ns:
            counts = self.counts(first, stop)
            most = [int(counts[each.unit]) for each in self.savings]
            chosen = _cheapest(self.savings, most, math.ceil(self.needed_bytes(stage, first, stop)))
            own_ns = int(self._running[0][stop] - self._running[0][first])
            self._known_ns[stage, first, stop] = (
                math.inf if chosen is None else own_ns + _total_ns(self.savings, chosen)
            )
        return self._known_ns[stage, first, stop]

    @functools.cached_property
    def _known_ns(self) -> dict[tuple[int, int, int], float]:
        return {}

    def can_take(self, most_ns: float) -> bool:
        """Whether there are stages that have room and take no longer than ``most_ns``, or none that have room."""
        return most_ns >= self._most_ns or self._within(int(most_ns)) is not None or self._within(self._most_ns) is None

    def best(self) -> tuple[int, ...] | None:
        """The bounds whose slowest stage takes least; none where no stages have room."""
        low, high = max(int(self.unit_ns.sum()) // len(self.in_flight), int(self.unit_ns.max())), self._most_ns
        best = self._within(high)
        while best is not None and low + low // PRECISION < high:
            middle = (low + high) // 2
            found = self._within(middle)
            low, high, best = (low, middle, found) if found is not None else (middle + 1, high, best)
        return best

    @property
    def _most_ns(self) -> int:
        """No stage takes longer, whatever it makes again."""
        return int(self.unit_ns.sum()) + sum(each.duration_ns for each in self.savings) * len(self.unit_ns)

    def remakes_of_ranks(self, stages: Stages, owners: Sequence[int]) -> tuple[Remakes, ...] | None:
        """What these stages make again, those of a rank together, the first ones most; none if a rank has no room."""
        found: list[Remakes] = [()] * len(stages)
        for rank in dict.fromkeys(owners):
            own = [number for number, owner in enumerate(owners) if owner == rank]
            counts = [{kind: int(n) for kind, n in self.counts(*stages[number]).items()} for number in own]
            lacking = sum(float(self.lacking_bytes(number, *stages[number])) for number in own)
            needed = max(lacking, 0.0) / max(float(self.regained[own[0]]), kernel.TINY)
            together = {kind: sum(each[kind] for each in counts) for kind in OF_LAYERS}
            remakes = cheapest(self.savings, together, needed)
            if remakes is None:
                return None
            for number, each in zip(own, counts, strict=True):
                found[number], remakes = _dealt(remakes, each)
        return _trimmed(found)

    def _within(self, most_ns: int) -> tuple[int, ...] | None:
        """Bounds of which no stage takes longer, the last stages as long as can be; none if there are none.

        With a few shorter ones besides: a stage that has room for a single unit may have it for the next one alone.
        """
        reached: dict[int, tuple[int, ...]] = {len(self.unit_ns): (len(self.unit_ns),)}
        for stage in reversed(range(len(self.in_flight))):
            longer: dict[int, tuple[int, ...]] = {}
            for stop, bounds in reached.items():
                for first in self._firsts(most_ns, stage, stop):
                    longer.setdefault(first, (first, *bounds))
            reached = dict(sorted(longer.items())[:SHORTER])
        return reached.get(0)

    def _firsts(self, most_ns: int, stage: int, stop: int) -> list[int]:
        """The first few units from which on the stage takes no longer. Most of them are known without a search."""
        least, greedy = self.times_of(stage, stop)
        possible = stage + (least <= most_ns).nonzero()[0]
        if (greedy[possible[:SHORTER] - stage] <= most_ns).all():
            return [int(first) for first in possible[:SHORTER]]
        fits = (first for first in possible.tolist() if self.stage_ns(stage, first, stop) <= most_ns)
        return list(itertools.islice(fits, SHORTER))


def _running(values: Integers) -> Integers:
    running: Integers = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return running
