"""Order of training windows: a keyed permutation that is computed, never stored.

A balanced Feistel network permutes the smallest power of four that is at least the number of windows. An index that
lands outside is permuted again until it lands inside ("cycle walking", Black and Rogaway, "Ciphers with Arbitrary
Finite Domains", 2002). Any window of any epoch takes O(1) time, so a resumed run needs no state of a loader.

Example: 10 windows need 16 places. If index 3 lands on 12, which is outside, 12 is permuted in turn. As the network is
a bijection of the 16 places, the walk returns to an index below 10 and no two indices end on the same one. At most four
permutations are needed on average, since at least a quarter of the places are inside.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15


def mix(words: Words) -> Words:
    """A bijection of 64-bit words that spreads every input bit (splitmix64; Steele, Lea, Flood, 2014)."""
    words = words + np.uint64(_GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def permute(index: Words, *, size: int, key: Words) -> Words:
    """Permute each ``index`` in [0, size) by the permutation of its ``key``. Both arrays have the same shape."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    permuted = _feistel(index, half_bits=half_bits, key=key)
    while (outside := permuted >= size).any():
        permuted[outside] = _feistel(permuted[outside], half_bits=half_bits, key=key[outside])
    return permuted


def shuffled(position: Words, *, size: int, seed: int) -> Words:
    """The window at each ``position`` of the endless training stream over ``size`` windows.

    Positions [e * size, (e + 1) * size) are epoch ``e``. It has each window once, in its own order.
    """
    epoch = position // np.uint64(size)
    key = mix(epoch ^ mix(np.full_like(epoch, seed & (2**64 - 1))))
    return permute(position % np.uint64(size), size=size, key=key)


def _feistel(index: Words, *, half_bits: int, key: Words) -> Words:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = index >> shift, index & mask
    for _ in range(_ROUNDS):
        key = mix(key)
        left, right = right, left ^ (mix(right ^ key) & mask)
    return (left << shift) | right
