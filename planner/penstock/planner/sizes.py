"""Sizes that divide a number into equal or nearly equal parts."""

from __future__ import annotations

import functools
import math


@functools.lru_cache(maxsize=1024)
def microbatch_sizes(share: int) -> tuple[int, ...]:
    """The searched sizes of micro-batches for ``share`` sequences, ascending.

    Divisors, and between them sizes that differ from the next smaller and the next larger one by more than a factor of
    1.5, whose last micro-batch is smaller. Of all sizes with the same number of micro-batches the smallest is taken,
    which leaves the largest last micro-batch. 37 sequences may be 37 or 1 at a time, or 2, 4, 7 or 13. For 8 or 12
    sequences the divisors suffice.
    """
    known = divisors(share)
    sizes = [1]
    for high in known[1:]:
        while 3 * (size := _next_size(share, 3 * sizes[-1] // 2 + 1)) < 2 * high:
            sizes.append(size)
        sizes.append(high)
    return tuple(sizes)


def _next_size(share: int, least: int) -> int:
    """The smallest size from ``least`` on that is the smallest with its number of micro-batches."""
    count = -(-share // least)
    size = -(-share // count)
    return size if size >= least else -(-share // (count - 1))


@functools.lru_cache(maxsize=1024)
def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor < number]
