"""What stages take with what they make again, known without a search: compiled, for all first units of a stage."""

from __future__ import annotations

import math

import numba
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Columns of `units` [u + 1]: sums over all units before this one of nanoseconds, of what stays, of what a micro-batch
# holds, and from there on the numbers of units of each kind that can make anything again.
OWN_NS, STATE, HELD, FIRST_KIND = range(4)

# Columns of `savings`, which go by rising time per byte: the place of its kind among those, bytes and nanoseconds.
KIND, BYTES, AGAIN_NS = range(3)

# Columns of `stages`: micro-batches in flight, what is regained of a byte that is given up, and the limit.
IN_FLIGHT, REGAINED, LIMIT = range(3)

# Rows of `times`.
LEAST, GREEDY = range(2)

ROUNDING = 1e-9
"""Of sums of bytes as floating-point numbers."""

TINY = 1e-9
"""Bytes that are regained of one that is given up, where none are."""

MOST_NEEDED = 2.0**62
"""Bytes: more are never there to be given up."""


@numba.njit(cache=True, nogil=True)
def price(units: Ints, savings: Ints, by_time: Ints, stage: Floats, first: int, stop: int, times: Floats) -> None:
    """Fill ``times`` of the stage over the units before ``stop``, from ``first`` or the next ones on: at least what it
    takes, as if parts of units could make something again, and what it takes where that is chosen greedily, without
    those that the last one makes needless. ``by_time`` are the savings by falling nanoseconds. Infinite where it has no
    room for its units.
    """
    chosen = np.zeros(len(savings), dtype=np.int64)
    for place in range(times.shape[1]):
        own = units[stop] - units[first + place]
        lacking = own[STATE] + stage[IN_FLIGHT] * own[HELD] - stage[LIMIT]
        needed = lacking / max(stage[REGAINED], TINY) if lacking > 0 else 0.0
        again, missing = 0.0, needed
        for number in range(len(savings)):
            part = min(float(own[FIRST_KIND + savings[number, KIND]]), max(missing, 0.0) / savings[number, BYTES])
            again += part * savings[number, AGAIN_NS]
            missing -= part * savings[number, BYTES]
        times[LEAST, place] = math.inf if missing > ROUNDING * needed else own[OWN_NS] + again
        times[GREEDY, place] = own[OWN_NS] + _greedy_ns(savings, by_time, own, min(needed, MOST_NEEDED), chosen)


@numba.njit(cache=True, nogil=True)
def _greedy_ns(savings: Ints, by_time: Ints, own: Ints, needed: float, chosen: Ints) -> float:
    """What is chosen takes; infinite where there is not enough."""
    missing = math.ceil(needed)
    for number in range(len(savings)):
        wanted = max(-(-missing // savings[number, BYTES]), 0)
        chosen[number] = min(own[FIRST_KIND + savings[number, KIND]], wanted)
        missing -= chosen[number] * savings[number, BYTES]
    if missing > 0:
        return math.inf
    total = 0.0
    for number in by_time:
        spared = min(chosen[number], -missing // savings[number, BYTES])
        missing += spared * savings[number, BYTES]
        total += (chosen[number] - spared) * savings[number, AGAIN_NS]
    return total
