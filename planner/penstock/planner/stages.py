"""Units of each stage: contiguous ranges with the smallest bottleneck, within the memory of every stage.

Problem. A pipeline is as fast as its slowest stage. Units (embedding, attention, MLP, head) differ in time and memory,
and early stages hold more micro-batches in flight. Divide the units into contiguous stages such that every stage fits
in its memory and the slowest stage is as fast as possible.

Idea. Two dynamic programmes over (stage, first unit). The first finds the smallest bottleneck. Many partitions have it,
so the second finds, among those with exactly this bottleneck, the one with the smallest sum of squared stage times,
since other stages should have slack, too. The next larger bottlenecks follow in the same way: the simulator may rank
them differently.

Example: units with the times 1, 3, 4, 3, 4, 5 on 3 stages. Every unit has 1 byte of state and 1 byte per micro-batch in
flight, and the stages hold 3, 2 and 1 micro-batches.

    limit of 12 bytes    1 3 4 | 3 4 | 5      times 8, 7, 5    bytes 12, 6, 2
    limit of 10 bytes    1 3 | 4 3 | 4 5      times 4, 7, 9    bytes 8, 6, 4

Without the limit, 8 is optimal. With it the first stage can have two units at most, and 9 is optimal.

If a rank has several stages, the slowest rank counts, not the slowest stage. There is no such recursion over ranks, so
`evened_bounds` moves units between stages until no move of a unit relieves the busiest rank.

Complexity. k w^2 ranges at most, for k stages and w = u - k + 1 places of u units. Costs do not fall as a range grows,
so a row stops at the first range that is too expensive. Without memory limits and with equal devices, bisection on the
bottleneck takes u steps per bit (`stages_kernel.smallest_longest`).

Not used: a table of all ranges, which has k u^2 entries; bisection in general, which finds neither the next bottlenecks
nor the smallest sum of squares, and for which the most units of a stage must not depend on where it starts.

Legend for shapes: k stages, u units, w = u - k + 1 places. Stage ``s`` starts at unit s + x and stops before unit s + 1
+ y, with places 0 <= x <= y < w, so no stage is empty and the next stage starts at place y. Places are fewer than
units, which saves work if stages are many.

The dynamic programmes (`stages_kernel`) run from the last stage to the first, so that the first of several equally good
choices is the shortest early stage: early stages hold the most micro-batches in flight.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.planner import stages_kernel as kernel
from penstock.planner.slicing import IntArray

SQUARE_BITS = 26
"""Times keep this many leading bits when squared, so that the squares of 255 stages stay below `kernel.FORBIDDEN`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StagesProblem:
    """Units, and the stages to divide them among.

    Per unit: ``unit_ns`` (an integer, or a vector of which a stage's largest sum counts, such as one entry per slice),
    ``resident_bytes`` (parameters, gradients, optimizer state) and ``in_flight_bytes`` (activations of one
    micro-batch). Per stage: ``in_flight`` (how many micro-batches it holds at most, may be fractional),
    ``limit_bytes``, and optionally ``slowdown`` (time relative to the device the units were measured on, default 1),
    ``fixed_ns`` (default 0) and ``most_units`` (a pair: the most units it may own if its first unit's number is even,
    and if it is odd).

    Stage s over a range of units takes ceil(slowdown[s] * sum(unit_ns)) + fixed_ns[s] nanoseconds and
    sum(resident_bytes) + ceil(in_flight[s] * sum(in_flight_bytes)) bytes. Only ``limit_bytes`` may be negative, since
    callers subtract constants from it. Raises ValueError for lengths that disagree, for other negative numbers, and for
    fewer units than stages.
    """

    unit_ns: Sequence[int] | Sequence[Sequence[int]]
    resident_bytes: Sequence[int]
    in_flight_bytes: Sequence[int]
    in_flight: Sequence[float]
    limit_bytes: Sequence[int]
    slowdown: Sequence[float] | None = None
    fixed_ns: Sequence[int] | None = None
    most_units: Sequence[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        per_stage = ("in_flight", "limit_bytes", "slowdown", "fixed_ns", "most_units")
        for name in ("unit_ns", "resident_bytes", "in_flight_bytes", *per_stage):
            values = getattr(self, name)
            if values is None:
                continue
            expected = self.num_stages if name in per_stage else self.num_units
            if len(values) != expected:
                raise ValueError(f"{name} has {len(values)} entries, not {expected}")
            if name != "limit_bytes" and np.min(values, initial=0) < 0:
                raise ValueError(f"{name} has a negative entry")
        if not 1 <= self.num_stages <= self.num_units:
            raise ValueError(f"{self.num_units} units cannot fill {self.num_stages} stages")

    @property
    def num_units(self) -> int:
        """Number of units."""
        return len(self.unit_ns)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.limit_bytes)

    def stage_ns(self, stage: int | IntArray, first: npt.ArrayLike, stop: npt.ArrayLike) -> IntArray:
        """The time of ``stage`` over units [first, stop), elementwise."""
        slowed_ns: IntArray = _sums(self.unit_ns, first, stop).max(axis=-1)
        if self.slowdown is not None:
            slowed_ns = _scaled(slowed_ns, np.asarray(self.slowdown)[stage])
        if self.fixed_ns is not None:
            slowed_ns = slowed_ns + np.asarray(self.fixed_ns)[stage]
        return slowed_ns

    def stage_bytes(self, stage: int | IntArray, first: npt.ArrayLike, stop: npt.ArrayLike) -> IntArray:
        """The memory of ``stage`` over units [first, stop), elementwise."""
        in_flight_bytes = _scaled(_sums(self.in_flight_bytes, first, stop)[..., 0], np.asarray(self.in_flight)[stage])
        return _sums(self.resident_bytes, first, stop)[..., 0] + in_flight_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePartition:
    """Stage s owns units [bounds[s], bounds[s + 1]), takes stage_ns[s] and needs stage_bytes[s]."""

    bounds: tuple[int, ...]
    stage_ns: tuple[int, ...]
    stage_bytes: tuple[int, ...]

    @property
    def bottleneck_ns(self) -> int:
        """The time of the slowest stage."""
        return max(self.stage_ns)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShortage:
    """No partition fits. ``bounds`` comes closest: it minimizes the largest number of missing bytes, then their sum.

    ``missing_bytes[s]`` is the excess of stage s, 0 if it fits.
    """

    bounds: tuple[int, ...]
    missing_bytes: tuple[int, ...]

    @property
    def stage(self) -> int:
        """The first stage that does not fit."""
        return next(stage for stage, missing in enumerate(self.missing_bytes) if missing)


def best_partitions(problem: StagesProblem, *, count: int = 1) -> tuple[StagePartition, ...] | MemoryShortage:
    """Partitions within memory for the ``count`` smallest bottlenecks, ascending; fewer if fewer exist.

    For each bottleneck the partition with the smallest sum of squared stage times (of their SQUARE_BITS leading bits,
    so exact below 67 ms), among equals the lexicographically smallest bounds. If no partition fits, the shortage.
    """
    if count < 1:
        raise ValueError(f"{count=} is not positive")
    tables = _tables(problem)
    bottlenecks = list(itertools.islice(_bottlenecks(tables), count))
    if not bottlenecks:
        return _shortage(problem, tables)
    return tuple(_partition(problem, _cheapest(tables, bottleneck_ns)) for bottleneck_ns in bottlenecks)


def balanced_bounds(unit_ns: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """The bounds of the partition with the smallest bottleneck, without a memory limit.

    Units are divided evenly if their times are too large to be summed.
    """
    units = np.zeros((len(unit_ns) + 1, kernel.FIRST_NS + 1), dtype=np.int64)
    units[1:, kernel.FIRST_NS] = np.cumsum(unit_ns, dtype=np.int64)
    if not 1 <= num_stages <= len(unit_ns):
        raise ValueError(f"{len(unit_ns)} units cannot fill {num_stages} stages")
    # Through a float, as the kernel scales times.
    bottleneck_ns = int(float(kernel.smallest_longest(units[:, kernel.FIRST_NS].copy(), num_stages)))
    if bottleneck_ns >= kernel.FORBIDDEN:
        return tuple(len(unit_ns) * stage // num_stages for stage in range(num_stages + 1))
    stages = np.zeros((num_stages, kernel.MOST_FROM_ODD + 1), dtype=np.int64)
    stages[:, [kernel.MOST_FROM_EVEN, kernel.MOST_FROM_ODD]] = len(unit_ns)
    factors = np.zeros((num_stages, kernel.SLOWDOWN + 1))
    factors[:, kernel.SLOWDOWN] = 1.0
    return _cheapest((units, stages, factors), bottleneck_ns)


MOST_SLOWED = 512
"""Largest number of stages that are cut in the best way for unequal ranks: for 1,024 stages that takes seconds."""


def slowed_bounds(unit_ns: Sequence[int], owners: Sequence[int], slowness: Sequence[float]) -> tuple[int, ...]:
    """Bounds like those of `balanced_bounds` for ranks of unequal speed: ``slowness`` [ranks] is a factor of the time
    of units on each rank. ``owners`` [stages] are the stages' ranks. If ranks have several stages, `evened_bounds` then
    balances the ranks, once from these bounds and once from those of equally fast ranks, so that the result is not
    worse than the latter, but for the rounding of times to nanoseconds. More than `MOST_SLOWED` stages are cut in
    proportion to the speed of their ranks.
    """
    if len(owners) > MOST_SLOWED:
        return _proportional_bounds(unit_ns, np.array([1 / slowness[owner] for owner in owners]))
    nothing = [0] * len(unit_ns)
    partitions = best_partitions(
        StagesProblem(
            unit_ns=unit_ns,
            resident_bytes=nothing,
            in_flight_bytes=nothing,
            in_flight=[0.0] * len(owners),
            limit_bytes=[0] * len(owners),
            slowdown=[slowness[owner] for owner in owners],
        )
    )
    assert not isinstance(partitions, MemoryShortage), "nothing takes memory"
    bounds = partitions[0].bounds
    if len(set(owners)) == len(owners):
        return bounds
    equal = evened_bounds(unit_ns, balanced_bounds(unit_ns, len(owners)), owners)
    options = [evened_bounds(unit_ns, start, owners, slowness) for start in (bounds, equal)]
    return min(options, key=lambda option: float((rank_loads(unit_ns, option, owners) * slowness).max()))


def evened_bounds(
    unit_ns: Sequence[int], bounds: Sequence[int], owners: Sequence[int], slowness: Sequence[float] | None = None
) -> tuple[int, ...]:
    """Bounds whose busiest rank has less work than with ``bounds``, by moving units between stages.

    ``owners`` [stages] are the stages' ranks. ``slowness`` [ranks] is a factor of the time of work on each rank, by
    default 1. The smallest bottleneck over stages is not the smallest over ranks with several stages: if the head takes
    as long as a stage, a V's first rank has the head in addition to an ordinary stage.
    """
    running = np.concatenate([[0], np.cumsum(unit_ns, dtype=np.int64)])
    by_rank = np.argsort(owners, kind="stable")
    ranks, first_of_rank = np.unique(np.array(owners)[by_rank], return_index=True)
    numbers = np.arange(len(bounds))
    factors = None if slowness is None else np.array(slowness)[ranks]

    def loads_of(options: IntArray) -> IntArray:
        loads: IntArray = np.add.reduceat(np.diff(running[options])[:, by_rank], first_of_rank, axis=1)
        return loads if factors is None else _scaled(loads, factors)

    best = np.array(bounds)
    loads = loads_of(best[None])[0]
    while True:
        busiest = np.flatnonzero(np.array(owners) == ranks[loads.argmax()])
        source, target = (grid.reshape(-1, 1) for grid in np.meshgrid(busiest, np.arange(len(owners))))
        options = best + ((source >= numbers) & (target < numbers)) - ((source < numbers) & (target >= numbers))
        options = options[(np.diff(options) > 0).all(axis=1)]
        if not len(options):
            break
        offered = loads_of(options)
        spread = (offered.astype(np.float64) ** 2).sum(axis=1)
        chosen = int(np.lexsort((spread, offered.max(axis=1)))[0])
        if (offered[chosen].max(), spread[chosen]) >= (loads.max(), (loads.astype(np.float64) ** 2).sum()):
            break
        best, loads = options[chosen], offered[chosen]
    return tuple(best.tolist())


def _proportional_bounds(unit_ns: Sequence[int], speeds: npt.NDArray[np.float64]) -> tuple[int, ...]:
    """Bounds with which the work of stages is about proportional to ``speeds`` [stages], each of at least a unit."""
    num_units, num_stages = len(unit_ns), len(speeds)
    running = np.cumsum(np.asarray(unit_ns, dtype=np.float64))
    shares = np.concatenate([[0.0], np.cumsum(speeds) / speeds.sum()])
    wanted = np.searchsorted(running, running[-1] * shares[:-1], side="left")
    stages = np.arange(num_stages)
    increasing = np.maximum.accumulate(np.minimum(wanted, num_units - num_stages + stages) - stages) + stages
    return *increasing.tolist(), num_units


MOST_CUTS = 5_000
"""Up to this number of ways to cut the units, all are tried."""

FEW_STAGES = 16
"""With more stages only one cut is evened, since that takes milliseconds there."""


def shared_head_bounds(unit_ns: Sequence[int], head_parts: int, owners: Sequence[int]) -> tuple[int, ...]:
    """Bounds that minimize the busiest rank's work for ranks with several stages, where the last ``head_parts`` units
    are parts of the head, which differ from layers in size.

    All cuts are tried if they are few. Else single units are moved until no move helps, from several starting points:
    the smallest bottleneck over stages, and for each number of last stages the cut where those share the parts and the
    others the layers, so that ranks with fewer parts have more layers. With many stages only the best of few such cuts
    is evened.
    """
    is_few = len(owners) <= FEW_STAGES
    if is_few and math.comb(len(unit_ns) - 1, len(owners) - 1) <= MOST_CUTS:
        return _best_cut(unit_ns, owners)
    most_stages = min(head_parts, len(owners) - 1)
    counts = range(1, most_stages + 1) if is_few else sorted({most_stages, min(most_stages, max(owners) + 1)})
    starts = [cut for count in counts if (cut := headed_bounds(unit_ns, head_parts, owners, count)) is not None]
    if is_few or not starts:
        starts.append(balanced_bounds(unit_ns, len(owners)))
    else:
        starts = [min(starts, key=lambda bounds: _load_order(unit_ns, bounds, owners))]
    evened = [evened_bounds(unit_ns, start, owners) for start in dict.fromkeys(starts)]
    return min(evened, key=lambda bounds: _load_order(unit_ns, bounds, owners))


def _best_cut(unit_ns: Sequence[int], owners: Sequence[int]) -> tuple[int, ...]:
    running = np.concatenate([[0], np.cumsum(unit_ns, dtype=np.int64)])
    cuts = _every_cut(len(unit_ns), len(owners))
    loads = np.diff(running[cuts]) @ np.eye(max(owners) + 1, dtype=np.int64)[list(owners)]
    spread = (loads.astype(np.float64) ** 2).sum(axis=1)
    best: list[int] = cuts[np.lexsort((spread, loads.max(axis=1)))[0]].tolist()
    return tuple(best)


@functools.lru_cache(maxsize=16)
def _every_cut(num_units: int, num_stages: int) -> IntArray:
    """[cuts, stages + 1]: bounds of all ways to give every stage at least one unit."""
    inner = list(itertools.combinations(range(1, num_units), num_stages - 1))
    cuts: IntArray = np.pad(np.array(inner, dtype=np.int64).reshape(len(inner), -1), ((0, 0), (1, 1)))
    cuts[:, -1] = num_units
    return cuts


def headed_bounds(unit_ns: Sequence[int], head_parts: int, owners: Sequence[int], count: int) -> tuple[int, ...] | None:
    """Bounds with which the last ``count`` stages share the parts of the head evenly, and the others the layers, so
    that ranks with fewer parts have more layers; None if there are too few layers.
    """
    num_layers, num_front = len(unit_ns) - head_parts, len(owners) - count
    if not 0 < num_front <= num_layers:
        return None
    of_parts = [num_layers + head_parts * i // count for i in range(count + 1)]
    parts_ns = np.zeros(max(owners) + 1)
    for owner, (first, stop) in zip(owners[num_front:], itertools.pairwise(of_parts), strict=True):
        parts_ns[owner] += sum(unit_ns[first:stop])
    front_counts = np.bincount(owners[:num_front], minlength=len(parts_ns))
    fixed_ns = (parts_ns / np.maximum(front_counts, 1))[list(owners[:num_front])]
    no_bytes, no_limits = [0] * num_layers, [0] * num_front
    partitions = best_partitions(
        StagesProblem(
            unit_ns=unit_ns[:num_layers],
            resident_bytes=no_bytes,
            in_flight_bytes=no_bytes,
            in_flight=[0.0] * num_front,
            limit_bytes=no_limits,
            fixed_ns=fixed_ns.astype(np.int64).tolist(),
        )
    )
    return None if isinstance(partitions, MemoryShortage) else (*partitions[0].bounds, *of_parts[1:])


def rank_loads(unit_ns: Sequence[int], bounds: Sequence[int], owners: Sequence[int]) -> npt.NDArray[np.float64]:
    """[ranks]: the work of all stages of each rank."""
    running = np.concatenate([[0], np.cumsum(unit_ns, dtype=np.int64)])
    loads = np.zeros(max(owners) + 1)
    np.add.at(loads, list(owners), np.diff(running[list(bounds)]))
    return loads


def _load_order(
    unit_ns: Sequence[int], bounds: Sequence[int], owners: Sequence[int]
) -> tuple[float, float, tuple[int, ...]]:
    """Sort key: the busiest rank's work, then the sum of squares, then the bounds."""
    loads = rank_loads(unit_ns, bounds, owners)
    return float(loads.max()), float((loads**2).sum()), tuple(bounds)


def _sums(values: Sequence[int] | Sequence[Sequence[int]], first: npt.ArrayLike, stop: npt.ArrayLike) -> IntArray:
    """Sums over [first, stop), with a last axis for the entries of a vector (one for plain integers)."""
    columns = np.asarray(values, dtype=np.int64).reshape(len(values), -1)
    running: IntArray = np.concatenate([np.zeros_like(columns[:1]), columns.cumsum(axis=0)])
    sums: IntArray = running[np.asarray(stop)] - running[np.asarray(first)]
    return sums


def _scaled(values: IntArray, factor: npt.NDArray[np.float64]) -> IntArray:
    scaled: IntArray = np.ceil(values * factor).astype(np.int64)
    return scaled


Tables = tuple[IntArray, IntArray, npt.NDArray[np.float64]]
"""``units``, ``stages`` and ``factors`` of the kernel."""


def _tables(problem: StagesProblem) -> Tables:
    unit_ns = np.asarray(problem.unit_ns, dtype=np.int64).reshape(problem.num_units, -1)
    columns = np.column_stack([problem.resident_bytes, problem.in_flight_bytes, unit_ns]).astype(np.int64)
    units = np.concatenate([np.zeros_like(columns[:1]), columns.cumsum(axis=0)])
    fixed_ns = [0] * problem.num_stages if problem.fixed_ns is None else problem.fixed_ns
    slowdown = [1.0] * problem.num_stages if problem.slowdown is None else problem.slowdown
    most_units = [(problem.num_units,) * 2] * problem.num_stages if problem.most_units is None else problem.most_units
    stages = np.column_stack([problem.limit_bytes, fixed_ns, most_units]).astype(np.int64)
    return units, stages, np.column_stack([problem.in_flight, slowdown]).astype(np.float64)


def _bottlenecks(tables: Tables) -> Iterator[int]:
    """The bottlenecks of all partitions, ascending."""
    bottleneck_ns = -1
    while (bottleneck_ns := kernel.smallest_largest(*tables, False, bottleneck_ns)) < kernel.FORBIDDEN:
        yield bottleneck_ns


def _cheapest(tables: Tables, bottleneck_ns: int) -> tuple[int, ...]:
    """The bounds with the smallest sum of squares among partitions with exactly this bottleneck."""
    shift = max(0, bottleneck_ns.bit_length() - SQUARE_BITS)
    bounds = np.zeros(len(tables[1]) + 1, dtype=np.int64)
    kernel.cheapest(*tables, False, bottleneck_ns, shift, bounds)
    return tuple(bounds.tolist())


def _shortage(problem: StagesProblem, tables: Tables) -> MemoryShortage:
    most_bytes = kernel.smallest_largest(*tables, True, -1)
    bounds = np.zeros(problem.num_stages + 1, dtype=np.int64)
    kernel.cheapest(*tables, True, most_bytes, 0, bounds)
    needed_bytes = problem.stage_bytes(np.arange(problem.num_stages), bounds[:-1], bounds[1:]).tolist()
    missing_bytes = (
        max(0, stage_bytes - limit) for stage_bytes, limit in zip(needed_bytes, problem.limit_bytes, strict=True)
    )
    return MemoryShortage(bounds=tuple(bounds.tolist()), missing_bytes=tuple(missing_bytes))


def _partition(problem: StagesProblem, bounds: tuple[int, ...]) -> StagePartition:
    ranges = (np.arange(problem.num_stages), bounds[:-1], bounds[1:])
    return StagePartition(
        bounds=bounds,
        stage_ns=tuple(problem.stage_ns(*ranges).tolist()),
        stage_bytes=tuple(problem.stage_bytes(*ranges).tolist()),
    )
