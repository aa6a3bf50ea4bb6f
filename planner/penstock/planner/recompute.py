"""Recomputation of a pipeline's stages where they exceed the memory limit, and the units that they own then.

Recomputing an operation's buffers costs its seconds and saves its bytes (`penstock.core.remaking`). Operations of a
unit are chosen one by one: with any choice, each can run again from the results before it. A stage that exceeds the
limit takes operations by rising seconds per byte until it fits; units of a kind are equal. This greedy solution of a
knapsack problem is at most one unit's operation above the optimum, which is much if a stage has few units. So it is
improved by branch and bound, whose bound allows fractions of units, to within `TOLERATED` of the optimum
(`tests/planner/test_recompute.py` compares with an exact solver). The improvement ends early if units are many and
similar, where one more than the optimum is little. Lynx solves this by an integer program or, for the one policy of
identical structures, by a heuristic (arXiv 2406.08756).

Bytes. A rank that holds n micro-batches of its units has n times their bytes. Recomputed bytes return for the slice
whose backward runs, so a byte that a unit gives up saves less than n: ``regained``, which follows from two walks
through the order, with everything kept and with everything recomputed.

Stages. Front ranks hold more micro-batches, so they recompute more and should own fewer units. A stage's time is that
of its units and of its recomputation; both time and bytes grow with the stage. So the least possible time T of the
slowest stage is found by bisection: for each T every stage, from the last on, takes as many units as possible. Seq1F1B
and Lynx alternate between cutting stages and choosing policies, which need not end at the best of both.

Example: two ranks, ten units of 1 s and 10 bytes per micro-batch, of which 8 can be given up for 0.3 s; memory for 60
bytes. The first rank holds two micro-batches, the second one. With five units each the first exceeds this by 40 bytes
and recomputes all five: 6.5 s. With four and six the first exceeds it by 20: three units recompute, 4.9 s, and the
second takes 6.0 s.
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
    """One operation that a unit of a kind may run again: the bytes that this saves per micro-batch, and its time."""

    unit: UnitKind
    operation: Operation
    num_bytes: int
    duration_ns: int


TOLERATED = 1.01
"""Recomputation takes at most the least time times this factor, unless that needs more than `MOST_BRANCHES` to find."""

MOST_BRANCHES = 300
"""Branches that are tried if the greedy choice may be too slow: a few milliseconds."""

SHORTER = 3
"""Number of places for the boundary before a stage that `Cut._within` keeps while it goes on to the stages in front."""

PRECISION = 1_000
"""The time of the slowest stage is minimized up to 1 / `PRECISION` of it."""

Savings = tuple[Saving, ...]
"""Sorted by rising time per byte."""


def savings_of(problem: Problem, tp: int, batch: int, slices: tuple[int, ...]) -> Savings:
    """All savings of layers' units for a micro-batch of ``batch`` sequences in these slices."""
    cost, work = problem.cost_of(tp), Work.of(batch, slices, prefixes(slices))
    first = {kind: next(unit for unit in problem.model.units if unit.kind is kind) for kind in OF_LAYERS}
    savings = []
    for kind, unit in first.items():
        for operation in remaking(problem.model, kind):
            stage = (unit.index, unit.index + 1) if operation is not Operation.OUTPUT else (unit.index, unit.index + 2)
            remakes = (Remake(unit=kind, count=1, operations=(operation,)),)
            memory = memory_of(problem, (stage,), batch, tp, (remakes,))
            num_bytes = int(memory.total_slot_bytes(tuple(REMADE_SLOTS.values()), slices).sum())
            seconds = remake_seconds(cost, problem.model, kind, work, (operation,)) * cost.slowdown(kind, Kind.F)
            if num_bytes:
                duration_ns = int(whole_nanoseconds(seconds).sum())
                savings.append(Saving(unit=kind, operation=operation, num_bytes=num_bytes, duration_ns=duration_ns))
    return tuple(
        sorted(savings, key=lambda saving: (saving.duration_ns / saving.num_bytes, saving.unit, saving.operation))
    )


LINKING = (UnitKind.MLP, Operation.OUTPUT)
"""The input of the next layer. Stages that recompute inside their backwards keep it: without it all of their layers
would be one segment, whose recomputed buffers exist at once (`penstock.core.scratch`).
"""


def keeps_links(problem: Problem, candidate: Candidate) -> bool:
    """Whether the planner's choice keeps the inputs of layers: also for stacks that recompute layer by layer."""
    return candidate.recompute_inside or problem.software.recomputes_on_demand


def savings_inside(savings: Savings) -> Savings:
    """The savings of stages that recompute inside their backwards."""
    return tuple(saving for saving in savings if (saving.unit, saving.operation) != LINKING)


def may_recompute(problem: Problem) -> bool:
    """Whether the planner chooses the recomputation: it is not pinned, the memory of the schedule can be predicted, and
    the software is penstock's.
    """
    pinned = problem.pinned
    is_built_in = pinned.schedule is None or pinned.schedule in BUILT_IN
    software = replace(problem.software, recomputes_on_demand=False)
    return is_built_in and pinned.recompute is None and software == PENSTOCK


def pinned_remakes(problem: Problem, stages: Stages) -> tuple[Remakes, ...]:
    """The pinned recomputation of stages, and that of the pinned schedule; empty if there is none."""
    imported = imported_schedule(problem.pinned)
    recomputed = frozenset[int]() if imported is None else imported.recomputed_stages
    pin = problem.pinned.recompute
    if isinstance(pin, tuple):
        by_stage = list(pin)
    else:
        by_stage = [uniform_remakes(problem.model, stage, pinned_operations(pin)) for stage in stages]
    return _trimmed(
        full_remakes(problem.model, stage) if number in recomputed else remakes
        for number, (stage, remakes) in enumerate(zip(stages, by_stage, strict=True))
    )


def fully_recomputed(problem: Problem, candidate: Candidate) -> Candidate:
    """The candidate with all of its layers recomputed, from their inputs if that is inside backwards."""
    kinds = [Remake(unit=kind, count=1, operations=_most_operations(problem, candidate, kind)) for kind in OF_LAYERS]
    counts = unit_counts(problem.model, candidate.stages)[:, [UNIT_KINDS.index(kind) for kind in OF_LAYERS]].tolist()
    by_counts = {
        row: tuple(replace(remake, count=count) for remake, count in zip(kinds, row, strict=True) if count)
        for row in set(map(tuple, counts))
    }
    return replace(candidate, recompute=_trimmed(by_counts[tuple(row)] for row in counts))


def _most_operations(problem: Problem, candidate: Candidate, kind: UnitKind) -> tuple[Operation, ...]:
    operations = remaking(problem.model, kind)
    if not keeps_links(problem, candidate):
        return operations
    return tuple(operation for operation in operations if (kind, operation) != LINKING)


def own_remakes(problem: Problem, candidate: Candidate) -> Candidate:
    """The candidate without recomputation of units that its stages do not have."""
    counts = [dict(zip(UNIT_KINDS, row, strict=True)) for row in unit_counts(problem.model, candidate.stages).tolist()]
    remakes = (_dealt(*remakes_and_counts)[0] for remakes_and_counts in zip(candidate.recompute, counts, strict=True))
    return replace(candidate, recompute=_trimmed(remakes))


def _dealt(remakes: Remakes, counts: Mapping[UnitKind, int]) -> tuple[Remakes, Remakes]:
    """Split the recomputation: what ``counts`` units of each kind take, from the first groups on, and the rest."""
    num_left, taken, rest = dict(counts), [], []
    for remake in remakes:
        count = min(remake.count, num_left.get(remake.unit, 0))
        num_left[remake.unit] = num_left.get(remake.unit, 0) - count
        taken += [replace(remake, count=count)] if count else []
        rest += [replace(remake, count=remake.count - count)] if remake.count > count else []
    return tuple(taken), tuple(rest)


def _trimmed(remakes: Iterable[Remakes]) -> tuple[Remakes, ...]:
    by_stage = tuple(remakes)
    return by_stage if any(by_stage) else ()


def cheapest(savings: Savings, counts: Mapping[UnitKind, int], needed_bytes: float) -> Remakes | None:
    """The cheapest recomputation by ``counts`` units of each kind that saves ``needed_bytes`` of a micro-batch; None if
    they cannot save that.
    """
    chosen = _cheapest(savings, [counts.get(saving.unit, 0) for saving in savings], math.ceil(needed_bytes))
    return None if chosen is None else _remakes(dict(zip(savings, chosen, strict=True)))


def _cheapest(savings: Savings, most: Sequence[int], needed_bytes: int) -> list[int] | None:
    """How often each of the savings is chosen, at most as often as ``most`` allows; None if that saves too little."""
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
    """Lower bound of the time that the savings from ``place`` on need, with fractions of units; infinite if they are
    too few.
    """
    total = 0.0
    for saving, count in zip(savings[place:], most[place:], strict=True):
        if missing <= count * saving.num_bytes:
            return total + max(missing, 0) / saving.num_bytes * saving.duration_ns
        total += count * saving.duration_ns
        missing -= count * saving.num_bytes
    return math.inf if missing > 0 else total


def _greedy(savings: Savings, most: Sequence[int], needed_bytes: int) -> list[int] | None:
    """Choose by rising time per byte, then drop the choices that the last one makes superfluous."""
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
    """Groups of units of each kind that recompute the same operations; the first groups recompute most."""
    remakes = []
    for kind in OF_LAYERS:
        counts = {saving.operation: count for saving, count in chosen.items() if saving.unit is kind and count}
        num_grouped = 0
        for count in sorted(set(counts.values())):
            operations = tuple(operation for operation in Operation if counts.get(operation, 0) >= count)
            remakes.append(Remake(unit=kind, count=count - num_grouped, operations=operations))
            num_grouped = count
    return tuple(remakes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """Units, and the stages to divide them among.

    Per unit: ``unit_ns``, ``state_bytes`` (always held), ``held_bytes`` of a micro-batch, and ``kinds``. Per stage: the
    number of ``in_flight`` micro-batches whose bytes it holds, the bytes ``regained`` per byte of a micro-batch that is
    given up, ``limit_bytes``, the ``exposed`` share of its recomputation (the rest is hidden and takes no time), and
    the ``slowness`` of its rank, a factor of the time of its units.
    """

    savings: Savings
    unit_ns: Integers
    state_bytes: Integers
    held_bytes: Integers
    kinds: Sequence[UnitKind]
    in_flight: Floats
    regained: Floats
    limit_bytes: Integers
    exposed: Floats
    slowness: Floats

    @functools.cached_property
    def _running(self) -> tuple[Integers, Integers, Integers, dict[UnitKind, Integers]]:
        """Sums over the units before each unit."""
        counts = {kind: _running(np.array([unit_kind is kind for unit_kind in self.kinds])) for kind in OF_LAYERS}
        return _running(self.unit_ns), _running(self.state_bytes), _running(self.held_bytes), counts

    def lacking_bytes(self, stage: int, first: Integers | int, stop: Integers | int) -> Floats:
        """The excess of the stage over its limit if it keeps all of units [first, stop), elementwise; negative if it
        fits.
        """
        _, state, held, _ = self._running
        total = (state[stop] - state[first]) + self.in_flight[stage] * (held[stop] - held[first])
        lacking: Floats = total - self.limit_bytes[stage]
        return lacking

    def needed_bytes(self, stage: int, first: Integers | int, stop: Integers | int) -> Floats:
        """Bytes of a micro-batch that the stage has to give up over units [first, stop), elementwise."""
        lacking = self.lacking_bytes(stage, first, stop)
        needed: Floats = np.where(lacking > 0, lacking / max(self.regained[stage], kernel.TINY), 0.0)
        return needed

    def counts(self, first: Integers | int, stop: Integers | int) -> dict[UnitKind, Integers]:
        """Number of units of each kind among [first, stop), elementwise."""
        return {kind: running[stop] - running[first] for kind, running in self._running[3].items()}

    def times_of(self, stage: int, stop: int) -> Floats:
        """[LEAST GREEDY, firsts]: times of the stage over units before ``stop``, from unit ``stage`` on or a later one,
        as far as they are known without branch and bound (`penstock.planner.recompute_kernel`).
        """
        if (stage, stop) not in self._times_cache:
            times = np.empty((2, stop - stage if stage else 1))
            kernel.price(*self._tables, self._stages[stage], stage, stop, times)
            self._times_cache[stage, stop] = times
        return self._times_cache[stage, stop]

    @functools.cached_property
    def _times_cache(self) -> dict[tuple[int, int], Floats]:
        return {}

    @functools.cached_property
    def _tables(self) -> tuple[Integers, Integers, Integers]:
        """``units``, ``savings`` and ``by_time`` of the kernel."""
        *running, counts = self._running
        kinds = list(counts)
        rows = [(kinds.index(saving.unit), saving.num_bytes, saving.duration_ns) for saving in self.savings]
        savings = np.array(rows, dtype=np.int64).reshape(-1, 3)
        by_time = np.argsort(-savings[:, kernel.RECOMPUTE_NS], kind="stable")
        return np.stack([*running, *counts.values()], axis=1), savings, by_time

    @functools.cached_property
    def _stages(self) -> Floats:
        return np.stack([self.in_flight, self.regained, self.limit_bytes, self.exposed], axis=1)

    def stage_ns(self, stage: int, first: int, stop: int) -> float:
        """The time of the stage with its exposed recomputation; infinite if its units do not fit."""
        if (stage, first, stop) not in self._ns_cache:
            counts = self.counts(first, stop)
            most = [int(counts[saving.unit]) for saving in self.savings]
            chosen = _cheapest(self.savings, most, math.ceil(self.needed_bytes(stage, first, stop)))
            own_ns = int(self._running[0][stop] - self._running[0][first])
            self._ns_cache[stage, first, stop] = (
                math.inf if chosen is None else own_ns + self.exposed[stage] * _total_ns(self.savings, chosen)
            )
        return self._ns_cache[stage, first, stop]

    @functools.cached_property
    def _ns_cache(self) -> dict[tuple[int, int, int], float]:
        return {}

    def can_take(self, most_ns: float) -> bool:
        """Whether stages that fit take at most ``most_ns``; also true if no stages fit."""
        return most_ns >= self._most_ns or self._within(most_ns) is not None or self._within(self._most_ns) is None

    def best(self) -> tuple[int, ...] | None:
        """The bounds with the smallest slowest stage; None if no stages fit."""
        even_ns, least_slowness = int(self.unit_ns.sum()) / len(self.in_flight), float(self.slowness.min())
        low, high = int(least_slowness * max(even_ns, int(self.unit_ns.max()))), self._most_ns
        best = self._within(high)
        while best is not None and low + low // PRECISION < high:
            middle = (low + high) // 2
            bounds = self._within(middle)
            low, high, best = (low, middle, bounds) if bounds is not None else (middle + 1, high, best)
        return best

    @property
    def _most_ns(self) -> int:
        """Upper bound of a stage's time with any recomputation."""
        recompute_ns = sum(saving.duration_ns for saving in self.savings) * len(self.unit_ns)
        return math.ceil((int(self.unit_ns.sum()) + recompute_ns) * float(self.slowness.max()))

    def remakes_of_ranks(self, stages: Stages, owners: Sequence[int]) -> tuple[Remakes, ...] | None:
        """The recomputation of these stages, chosen per rank, with most for its first stages; None if a rank does not
        fit.
        """
        by_stage: list[Remakes] = [()] * len(stages)
        for rank in dict.fromkeys(owners):
            own_stages = [number for number, owner in enumerate(owners) if owner == rank]
            counts = [{kind: int(n) for kind, n in self.counts(*stages[number]).items()} for number in own_stages]
            lacking = sum(float(self.lacking_bytes(number, *stages[number])) for number in own_stages)
            needed = max(lacking, 0.0) / max(float(self.regained[own_stages[0]]), kernel.TINY)
            together = {kind: sum(stage_counts[kind] for stage_counts in counts) for kind in OF_LAYERS}
            remakes = cheapest(self.savings, together, needed)
            if remakes is None:
                return None
            for number, stage_counts in zip(own_stages, counts, strict=True):
                by_stage[number], remakes = _dealt(remakes, stage_counts)
        return _trimmed(by_stage)

    def _within(self, most_ns: float) -> tuple[int, ...] | None:
        """Bounds of stages that take at most ``most_ns``, the last stages as long as possible; None if there are none.

        A few shorter stages are also tried, since a stage with a single unit may only fit with the next one.
        """
        reached: dict[int, tuple[int, ...]] = {len(self.unit_ns): (len(self.unit_ns),)}
        for stage in reversed(range(len(self.in_flight))):
            longer: dict[int, tuple[int, ...]] = {}
            for stop, bounds in reached.items():
                for first in self._firsts(most_ns / float(self.slowness[stage]), stage, stop):
                    longer.setdefault(first, (first, *bounds))
            reached = dict(sorted(longer.items())[:SHORTER])
        return reached.get(0)

    def _firsts(self, most_ns: float, stage: int, stop: int) -> list[int]:
        """The first few units from which the stage takes at most ``most_ns`` on a device of slowness 1; most are known
        without a search.
        """
        times, places = self.times_of(stage, stop), self._places
        num_places = kernel.first_places(times, most_ns, places)
        if num_places >= 0:
            return [stage + place for place in places[:num_places].tolist()]
        possible = stage + (times[kernel.LEAST] <= most_ns).nonzero()[0]
        fits = (first for first in possible.tolist() if self.stage_ns(stage, first, stop) <= most_ns)
        return list(itertools.islice(fits, SHORTER))

    @functools.cached_property
    def _places(self) -> Integers:
        return np.empty(SHORTER, dtype=np.int64)


def _running(values: Integers) -> Integers:
    running: Integers = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return running
