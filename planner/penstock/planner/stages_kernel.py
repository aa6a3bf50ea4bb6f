"""The dynamic programmes of the stage partition, compiled. `penstock.planner.stages` has the problem and an example.

The cost of a range of units is its stage's nanoseconds, or its stage's excess bytes if no partition fits. Neither falls
as a range grows, so stops are tried one by one only until a range costs too much, and no table of all ranges is made.

- `smallest_largest` keeps two values per stage and first unit: the smallest bottleneck of the rest, and the smallest
  one above a given bottleneck, which yields the bottlenecks in ascending order.
- `cheapest` keeps for each of them the smallest sum of squares, once for rests that have to contain a stage with
  exactly the bottleneck and once for rests that need not. Otherwise a partition with a smaller bottleneck could be
  returned for a larger one.

Shape letters: k stages, u units, w = u - k + 1 places (see stages.py).
"""

from __future__ import annotations

import math

import numba
import numpy as np
import numpy.typing as npt

from penstock.planner.compiled import compiled

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

FORBIDDEN = 1 << 60
"""The cost of a forbidden range; the sum of two still fits 64 bits."""

# Columns of `units` [u + 1], sums over all units before this one: bytes always held, bytes held per micro-batch in
# flight, and from there on every entry of their nanoseconds.
RESIDENT, HELD, FIRST_NS = range(3)

# Columns of `stages` [k] and of `factors` [k]. The most units that a stage may own depend on whether its first unit's
# number is even or odd, since attention and MLP alternate.
LIMIT, FIXED_NS, MOST_FROM_EVEN, MOST_FROM_ODD = range(4)
IN_FLIGHT, SLOWDOWN = range(2)


@numba.njit(cache=True, nogil=True)
def smallest_largest(units: Ints, stages: Ints, factors: Floats, lacking: bool, above: int) -> int:
    """The smallest cost above ``above`` that is the largest of a partition's ranges, FORBIDDEN if there is none."""
    num_places = len(units) - len(stages)
    tails = np.full((2, num_places), FORBIDDEN, dtype=np.int64)  # of all partitions, of those with a cost above
    tails[0, -1] = 0
    for stage in range(len(stages) - 1, -1, -1):
        for start in range(num_places):
            best = best_beyond = FORBIDDEN
            for place in range(start, num_places):
                cost = _cost(units, stages, factors, lacking, stage, stage + start, stage + 1 + place)
                if cost >= best_beyond:
                    break
                best = min(best, max(cost, tails[0, place]))
                best_beyond = min(best_beyond, max(cost, tails[0 if cost > above else 1, place]))
            tails[0, start], tails[1, start] = best, best_beyond
    smallest: int = tails[1, 0]
    return smallest


@numba.njit(cache=True, nogil=True)
def smallest_longest(running: Ints, num_stages: int) -> int:
    """The smallest longest time of ``num_stages`` stages, without memory, by bisection: the least time within which at
    most ``num_stages`` stages, each as long as possible, own all units. Fewer stages can be divided further.
    ``running`` [u + 1] are sums of nanoseconds.
    """
    low, high = 0, running[-1]
    for unit in range(len(running) - 1):
        low = max(low, running[unit + 1] - running[unit])
    while low < high:
        middle = low + (high - low) // 2
        count, first = 1, 0
        for stop in range(1, len(running)):
            if running[stop] - running[first] > middle:
                count, first = count + 1, stop - 1
        if count <= num_stages:
            high = middle
        else:
            low = middle + 1
    smallest: int = low
    return smallest


@numba.njit(cache=True, nogil=True)
def cheapest(units: Ints, stages: Ints, factors: Floats, lacking: bool, largest: int, shift: int, bounds: Ints) -> None:
    """Fill ``bounds`` [k + 1] with those of the partition whose largest cost is ``largest`` and whose squared costs
    without their last ``shift`` bits (for excess bytes the costs themselves) have the smallest sum; ties are broken by
    the smallest bounds.
    """
    num_places = len(units) - len(stages)
    best = np.full(
        (2, len(stages) + 1, num_places), FORBIDDEN, dtype=np.int64
    )  # a largest range is still needed, or not
    choices = np.zeros((2, len(stages), num_places), dtype=np.int64)
    best[1, -1, -1] = 0
    for stage in range(len(stages) - 1, -1, -1):
        for start in range(num_places):
            for place in range(start, num_places):
                cost = _cost(units, stages, factors, lacking, stage, stage + start, stage + 1 + place)
                if cost > largest:
                    break
                weight = cost if lacking else (cost >> shift) ** 2
                for done in range(2):
                    total = weight + best[max(done, cost == largest), stage + 1, place]
                    if total < best[done, stage, start]:
                        best[done, stage, start] = total
                        choices[done, stage, start] = place
    start = done = 0
    for stage in range(len(stages)):
        place = choices[done, stage, start]
        if _cost(units, stages, factors, lacking, stage, stage + start, stage + 1 + place) == largest:
            done = 1
        start = place
        bounds[stage + 1] = stage + 1 + place


@compiled
def _cost(units: Ints, stages: Ints, factors: Floats, lacking: bool, stage: int, first: int, stop: int) -> int:
    """The excess bytes of ``stage`` for units [first, stop), or their nanoseconds there, FORBIDDEN if it exceeds its
    limit.
    """
    held = math.ceil((units[stop, HELD] - units[first, HELD]) * factors[stage, IN_FLIGHT])
    missing = units[stop, RESIDENT] - units[first, RESIDENT] + held - stages[stage, LIMIT]
    too_many = stop - first > stages[stage, MOST_FROM_EVEN + first % 2]
    if lacking or missing > 0 or too_many:
        cost: int = max(missing, 0) if lacking else FORBIDDEN
    else:
        largest = 0
        for column in range(FIRST_NS, units.shape[1]):
            largest = max(largest, units[stop, column] - units[first, column])
        cost = math.ceil(largest * factors[stage, SLOWDOWN]) + stages[stage, FIXED_NS]
    return cost
