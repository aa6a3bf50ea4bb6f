"""Next event time of each of many cells, and the cell with the earliest one: a tree of minima, compiled.

Node n of the tree is the minimum of its children 2 n and 2 n + 1. A leaf holds a cell's time with its number in the
lowest bits, so the root names both. Entry 0 holds the number of those bits. Times go up to 2 ** (62 - bits) - 1
nanoseconds, which is 13 days for 4,096 cells.

numba's cache only checks the file of the calling function: after a change here, touch the files that import it.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

Clock = npt.NDArray[np.int64]


def new_clock(num_cells: int, first: npt.NDArray[np.bool_]) -> Clock:
    """A clock whose ``first`` cells are due at time 0 and the others never."""
    bits = (num_cells - 1).bit_length()
    clock = np.full(2 << bits, 1 << 62, dtype=np.int64)
    clock[1 << bits : (1 << bits) + num_cells][first] = np.flatnonzero(first)
    clock[0] = bits
    for level in reversed(range(bits)):
        children = clock[2 << level : 4 << level]
        clock[1 << level : 2 << level] = np.minimum(children[::2], children[1::2])
    return clock


@numba.njit(cache=True, nogil=True, inline="always")
def never(clock: Clock) -> int:
    """The time of a cell that is never due."""
    time: int = np.int64(1) << (62 - clock[0])
    return time


@numba.njit(cache=True, nogil=True, inline="always")
def next_time(clock: Clock) -> int:
    """The earliest time of any cell."""
    time: int = clock[1] >> clock[0]
    return time


@numba.njit(cache=True, nogil=True, inline="always")
def next_cell(clock: Clock) -> int:
    """The first cell that is due at `next_time`."""
    cell: int = clock[1] & ((1 << clock[0]) - 1)
    return cell


@numba.njit(cache=True, nogil=True, inline="always")
def time_of(clock: Clock, cell: int) -> int:
    """The next time of ``cell``."""
    time: int = clock[cell + len(clock) // 2] >> clock[0]
    return time


@numba.njit(cache=True, nogil=True, inline="always")
def set_time(clock: Clock, cell: int, time: int) -> None:
    """Set the next time of ``cell``. Stops at a node that stays the same: so do those above it."""
    node = cell + len(clock) // 2
    least = time << clock[0] | cell
    while clock[node] != least:
        clock[node] = least
        if node == 1:
            break
        least = min(least, clock[node ^ 1])
        node >>= 1
