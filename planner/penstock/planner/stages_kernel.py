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

# Columns of `units` [u + 1], sums over all units before this one: bytes always held, bytes held per piece of work in
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
    most so many stages, each as long as possible, own all units. Fewer stages can be divided further. ``running`` [u +
    1] are sums of nanoseconds.
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


MOST_STAGES_IN_PAIRS = 64
"""With more stages units are moved one by one only: pairs of moves take their number to the fourth power."""


@numba.njit(cache=True, nogil=True)
def even(running: Ints, owners: Ints, num_ranks: int, shift: int, bounds: Ints) -> None:
    """Move units from stages of the busiest rank to other stages in ``bounds`` [k + 1], as long as that lowers its
    work, or else the sum of squares of all ranks' work without the last ``shift`` bits. Where no unit does, two do: the
    second is moved from the rank that is the busiest then.

    ``running`` [u + 1] are sums of nanoseconds, ``owners`` [k] the stages' ranks. The stages between a unit's old stage
    and its new one pass a unit on. Of equally good moves that to the first stage counts.
    """
    loads, moved, second = np.zeros((3, num_ranks), dtype=np.int64)
    for stage in range(len(owners)):
        loads[owners[stage]] += running[bounds[stage + 1]] - running[bounds[stage]]
    best = np.array([loads.max(), _spread(loads, shift)])
    move = np.zeros(2, dtype=np.int64)
    is_better = True
    while is_better:
        is_better = _find_move(running, owners, bounds, loads, shift, moved, best, move)
        if is_better:
            _move(running, owners, move[0], move[1], bounds, loads)
        elif len(owners) <= MOST_STAGES_IN_PAIRS:
            is_better = _move_two(running, owners, bounds, loads, shift, moved, second, best, move)


@numba.njit(cache=True, nogil=True)
def _move_two(
    running: Ints,
    owners: Ints,
    bounds: Ints,
    loads: Ints,
    shift: int,
    moved: Ints,
    second: Ints,
    best: Ints,
    move: Ints,
) -> bool:
    """Make the best pair of moves, if one lowers ``best``; whether there was one."""
    busiest = loads.argmax()
    chosen_bounds = bounds.copy()
    is_better = False
    for source in range(len(owners)):
        if owners[source] != busiest or bounds[source + 1] - bounds[source] == 1:
            continue
        for target in range(len(owners)):
            moved_bounds = bounds.copy()
            moved[:] = loads
            _move(running, owners, source, target, moved_bounds, moved)
            if _find_move(running, owners, moved_bounds, moved, shift, second, best, move):
                _move(running, owners, move[0], move[1], moved_bounds, moved)
                chosen_bounds[:] = moved_bounds
                is_better = True
    if is_better:
        bounds[:] = chosen_bounds
        loads[:] = 0
        for stage in range(len(owners)):
            loads[owners[stage]] += running[bounds[stage + 1]] - running[bounds[stage]]
    return is_better


@compiled
def _find_move(
    running: Ints, owners: Ints, bounds: Ints, loads: Ints, shift: int, moved: Ints, best: Ints, move: Ints
) -> bool:
    """Find the best ``move`` (source, target) of a unit from the busiest rank, if one lowers ``best`` (the largest
    work, the sum of squares); whether there is one.
    """
    busiest = 0
    for rank in range(len(loads)):
        if loads[rank] > loads[busiest]:
            busiest = rank
    source, target = -1, -1
    for stage in range(len(owners)):
        if owners[stage] != busiest or bounds[stage + 1] - bounds[stage] == 1:
            continue
        for sign in (-1, 1):
            for rank in range(len(loads)):
                moved[rank] = loads[rank]
            giver = stage
            while 0 <= giver + sign < len(owners):
                _pass_on(running, owners, bounds, giver, sign, moved)
                giver += sign
                largest, spread = _largest(moved), _spread(moved, shift)
                is_alike = largest == best[0] and spread == best[1]
                is_earlier = target > giver or (target == giver and source > stage)
                is_better = largest < best[0] or (largest == best[0] and spread < best[1])
                if is_better or (is_alike and is_earlier):
                    best[0], best[1], source, target = largest, spread, stage, giver
    if target >= 0:
        move[0], move[1] = source, target
    return target >= 0


@compiled
def _move(running: Ints, owners: Ints, source: int, target: int, bounds: Ints, loads: Ints) -> None:
    """Move a unit from stage ``source`` to stage ``target``."""
    sign = 1 if target > source else -1
    giver = source
    while giver != target:
        _pass_on(running, owners, bounds, giver, sign, loads)
        giver += sign
    giver = source
    while giver != target:
        bounds[giver + (1 if sign > 0 else 0)] -= sign
        giver += sign


@compiled
def _pass_on(running: Ints, owners: Ints, bounds: Ints, giver: int, sign: int, loads: Ints) -> None:
    """Move the work of a stage's last unit to the next stage, or of its first one to the previous stage."""
    unit = bounds[giver + 1] - 1 if sign > 0 else bounds[giver]
    unit_ns = running[unit + 1] - running[unit]
    loads[owners[giver]] -= unit_ns
    loads[owners[giver + sign]] += unit_ns


@compiled
def _largest(loads: Ints) -> int:
    largest: int = loads[0]
    for load in loads:
        largest = max(largest, load)
    return largest


@compiled
def _spread(loads: Ints, shift: int) -> int:
    spread = 0
    for load in loads:
        spread += (load >> shift) ** 2
    return spread


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
