"""Oracles that try everything: each states its objective in plain Python and enumerates every possible answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from penstock.planner.slicing import SlicingProblem
from penstock.planner.stages import StagesProblem


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``total`` as an ordered sum of positive integers."""
    for num_cuts in range(total):
        for cuts in itertools.combinations(range(1, total), num_cuts):
            yield tuple(stop - start for start, stop in itertools.pairwise((0, *cuts, total)))


def slice_times(problem: SlicingProblem, quanta: tuple[int, ...]) -> tuple[int, ...]:
    """The table's entry for each slice."""
    prefixes = itertools.accumulate(quanta, initial=0)
    return tuple(int(problem.cost_ns[count, prefix]) for count, prefix in zip(quanta, prefixes, strict=False))


def slice_lengths(problem: SlicingProblem, quanta: tuple[int, ...]) -> tuple[int, ...]:
    """Quanta to tokens; the last slice takes what is left over."""
    lengths = [count * problem.quantum for count in quanta]
    lengths[-1] = problem.sequence_length - sum(lengths[:-1])
    return tuple(lengths)


def slicings_by_force(problem: SlicingProblem) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Lengths and times of every slicing within the limits."""
    longest = problem.sequence_length if problem.max_slice_length is None else problem.max_slice_length
    most = problem.sequence_length if problem.max_slices is None else problem.max_slices
    for quanta in compositions(problem.sequence_length // problem.quantum):
        lengths = slice_lengths(problem, quanta)
        if len(quanta) <= most and all(problem.min_slice_length <= length <= longest for length in lengths):
            yield lengths, slice_times(problem, quanta)


def flush_by_force(
    problem: SlicingProblem, num_microbatches: int, num_stages: int
) -> tuple[int, tuple[int, ...]] | None:
    """The smallest M sum(t) + (K-1) max(t) and its slicing: fewest slices, then longest first."""
    ranked = (
        (
            num_microbatches * sum(times) + (num_stages - 1) * max(times),
            len(lengths),
            tuple(-length for length in lengths),
        )
        for lengths, times in slicings_by_force(problem)
    )
    best = min(ranked, default=None)
    return None if best is None else (best[0], tuple(-length for length in best[2]))


def balanced_by_force(problem: SlicingProblem) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Per number of slices the smallest largest slice and the longest-first slicing that has it."""
    best: dict[int, tuple[int, tuple[int, ...]]] = {}
    for lengths, times in slicings_by_force(problem):
        entry = (max(times), tuple(-length for length in lengths))
        best[len(lengths)] = min(best.get(len(lengths), entry), entry)
    return {count: (largest, tuple(-length for length in negated)) for count, (largest, negated) in best.items()}


def flush_by_every_ceiling(problem: SlicingProblem, num_microbatches: int, num_stages: int) -> int | None:
    """The smallest M sum(t) + (K-1) max(t) the plain way (TeraPipe, eq. 6-8), for sequences too long to enumerate.

    Heeds min_slice_length and max_slice_length, not max_slices.
    """
    num_quanta = problem.sequence_length // problem.quantum
    longest = problem.sequence_length if problem.max_slice_length is None else problem.max_slice_length
    edges = {}
    for start, stop in itertools.combinations(range(num_quanta + 1), 2):
        tokens = (stop if stop < num_quanta else problem.sequence_length / problem.quantum) - start
        if problem.min_slice_length <= tokens * problem.quantum <= longest:
            edges[start, stop] = int(problem.cost_ns[stop - start, start])
    best = None
    for ceiling in sorted(set(edges.values())):
        totals: list[float] = [0] + [math.inf] * num_quanta
        for (start, stop), cost in sorted(edges.items()):
            if cost <= ceiling:
                totals[stop] = min(totals[stop], totals[start] + cost)
        if totals[-1] < math.inf:
            objective = num_microbatches * int(totals[-1]) + (num_stages - 1) * ceiling
            best = objective if best is None else min(best, objective)
    return best


def every_partition(problem: StagesProblem) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Bounds, stage times and bytes missing per stage of every partition into non-empty contiguous ranges."""
    for cuts in itertools.combinations(range(1, problem.num_units), problem.num_stages - 1):
        bounds = (0, *cuts, problem.num_units)
        ranges = list(enumerate(itertools.pairwise(bounds)))
        times = tuple(_stage_ns(problem, stage, limits) for stage, limits in ranges)
        missing = tuple(
            max(0, _stage_bytes(problem, stage, limits) - problem.limit_bytes[stage]) for stage, limits in ranges
        )
        yield bounds, times, missing


def partitions_by_force(problem: StagesProblem) -> list[tuple[int, int, tuple[int, ...]]]:
    """(bottleneck, sum of squares, bounds), the best for every bottleneck that a fitting partition has, ascending."""
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {}
    for bounds, times, missing in every_partition(problem):
        if not any(missing):
            entry = (max(times), sum(time * time for time in times), bounds)
            best[entry[0]] = min(best.get(entry[0], entry), entry)
    return [best[bottleneck] for bottleneck in sorted(best)]


def shortage_by_force(problem: StagesProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bounds and missing bytes of the partition that comes closest to fitting."""
    _, _, bounds, missing = min(
        (max(missing), sum(missing), bounds, missing) for bounds, _, missing in every_partition(problem)
    )
    return bounds, missing


def _stage_ns(problem: StagesProblem, stage: int, limits: tuple[int, int]) -> int:
    units = [[unit] if isinstance(unit, int) else unit for unit in problem.unit_ns[slice(*limits)]]
    slowest: int = max(sum(column) for column in zip(*units, strict=True))
    slowdown = 1.0 if problem.slowdown is None else problem.slowdown[stage]
    return math.ceil(slowest * slowdown) + (0 if problem.fixed_ns is None else problem.fixed_ns[stage])


def _stage_bytes(problem: StagesProblem, stage: int, limits: tuple[int, int]) -> int:
    in_flight = sum(problem.in_flight_bytes[slice(*limits)]) * problem.in_flight[stage]
    return sum(problem.resident_bytes[slice(*limits)]) + math.ceil(in_flight)
