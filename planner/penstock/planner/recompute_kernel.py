"""Times of a stage with recomputation, for all of its first units, without branch and bound; compiled."""

from __future__ import annotations

import math

import numba
import numpy as np
import numpy.typing as npt

from penstock.planner.compiled import compiled

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Columns of `units` [u + 1], sums over all units before this one: nanoseconds, bytes always held, bytes held per
# micro-batch, and from there on the numbers of units of each kind that can recompute anything.
OWN_NS, STATE, HELD, FIRST_KIND = range(4)

# Columns of `savings`, sorted by rising time per byte: the index of its kind among those, bytes and nanoseconds.
KIND, BYTES, RECOMPUTE_NS = range(3)

# Columns of `stages`: micro-batches in flight, bytes regained per byte given up, the limit, and the exposed share of
# recomputation.
IN_FLIGHT, REGAINED, LIMIT, EXPOSED = range(4)

# Rows of `times`.
LEAST, GREEDY = range(2)

ROUNDING = 1e-9
"""Relative error of sums of bytes as floating-point numbers."""

TINY = 1e-9
"""Bytes regained per byte given up, in place of 0."""

MOST_NEEDED = 2.0**62
"""Upper limit of needed bytes: no stage can give up more."""


@numba.njit(cache=True, nogil=True)
def price(units: Ints, savings: Ints, by_time: Ints, stage: Floats, first: int, stop: int, times: Floats) -> None:
    """Fill ``times`` of the stage over the units before ``stop``, from ``first`` or a later one on: a lower bound, as
    if fractions of units could recompute, and the time with the greedy choice, without superfluous units. ``by_time``
    are the savings by falling nanoseconds. Infinite if its units do not fit.
    """
    chosen = np.zeros(len(savings), dtype=np.int64)
    for place in range(times.shape[1]):
        own = units[stop] - units[first + place]
        lacking = own[STATE] + stage[IN_FLIGHT] * own[HELD] - stage[LIMIT]
        needed = lacking / max(stage[REGAINED], TINY) if lacking > 0 else 0.0
        recompute_ns, missing = 0.0, needed
        for number in range(len(savings)):
            part = min(float(own[FIRST_KIND + savings[number, KIND]]), max(missing, 0.0) / savings[number, BYTES])
            recompute_ns += part * savings[number, RECOMPUTE_NS]
            missing -= part * savings[number, BYTES]
        times[LEAST, place] = math.inf if missing > ROUNDING * needed else own[OWN_NS] + stage[EXPOSED] * recompute_ns
        greedy_ns = _greedy_ns(savings, by_time, own, min(needed, MOST_NEEDED), chosen)
        times[GREEDY, place] = math.inf if greedy_ns == math.inf else own[OWN_NS] + stage[EXPOSED] * greedy_ns


@numba.njit(cache=True, nogil=True)
def _greedy_ns(savings: Ints, by_time: Ints, own: Ints, needed: float, chosen: Ints) -> float:
    """Nanoseconds of the greedy choice; infinite if it saves too little."""
    missing = math.ceil(needed)
    for number in range(len(savings)):
        num_units = max(-(-missing // savings[number, BYTES]), 0)
        chosen[number] = min(own[FIRST_KIND + savings[number, KIND]], num_units)
        missing -= chosen[number] * savings[number, BYTES]
    if missing > 0:
        return math.inf
    total = 0.0
    for number in by_time:
        spared = min(chosen[number], -missing // savings[number, BYTES])
        missing += spared * savings[number, BYTES]
        total += (chosen[number] - spared) * savings[number, RECOMPUTE_NS]
    return total


@compiled
def first_places(times: Floats, most_ns: float, places: Ints) -> int:
    """Fill ``places`` with the first ones whose lower bounds are at most ``most_ns``, and return how many there are; -1
    if for one of them the greedy choice takes longer than ``most_ns``, so that a better choice has to be searched for.
    """
    count = 0
    for place in range(times.shape[1]):
        if times[LEAST, place] <= most_ns:
            if times[GREEDY, place] > most_ns:
                return -1
            places[count] = place
            count += 1
            if count == len(places):
                break
    return count
