"""Squared norm of gradients, with the same bits however replicas divide the gradients.

A sum of floats depends on the order of its terms, and clipping passes a difference in the last bit on to every weight.
So the sum has two levels. The squares of each *block* of 4,096 elements of a tensor (`penstock.core.replicas.BLOCK`)
are summed in fp64, in an order that depends on the block alone. The sums of blocks are added exactly, so their order
does not matter.

- A block is a row of a matrix that always has the same shape, and all rows are summed at once. The last block of a
  tensor is padded with zeros. No block lies in the shards of two replicas.
- The sum of a block, a double, is cut into *limbs* of 24 bits on a fixed grid: limb k counts multiples of
  2^(24 k - 312). A limb is a whole number that is stored in a double. 2^29 of them add up below 2^53, so their sum is
  exact, over devices too. The squares of fp32 lie between 2^-298 and 2^256, and the sum of a block is below 2^268.
  24 limbs hold all of it, the last one with a few bits more. Values below 2^-312, a norm of 2^-156, are dropped. For
  larger sums in fp64 the last limb is rounded.

Example with limbs of 4 bits on a grid from 1: 300 has the limbs 12, 2, 1 and 20 has 4, 1, 0 (least significant first).
Their sum is 16, 3, 1: 16 + 3 * 16 + 1 * 256 = 320.

The cost is one pass over the gradients and 24 passes over the sums, of which there is one for 4,096 elements.

Rejected: a norm of each tensor, whose bits depend on how tensors are divided; a sum of the blocks' sums in a fixed
order, which needs all of them in one place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from penstock.core.replicas import BLOCK

NUM_LIMBS = 24
_SCALES = [math.ldexp(1.0, 24 * limb - 312) for limb in range(NUM_LIMBS)]

_HOST_ROWS, _DEVICE_ROWS = 32, 512
"""Blocks that are squared at once: 1 MiB, which fits in a core's cache, or 16 MiB, which keep a device busy."""


@dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Elements [start, stop) of a flat buffer. The first block begins at ``origin``."""

    flat: Tensor
    origin: int
    start: int
    stop: int

    def parts(self) -> Iterator[tuple[int, int]]:
        """[start, stop) of the elements before the first block boundary, of the whole blocks, and of the rest."""
        first = self.origin + -(-(self.start - self.origin) // BLOCK) * BLOCK
        last = self.origin + (self.stop - self.origin) // BLOCK * BLOCK
        bounds = (self.start, min(first, self.stop), max(last, min(first, self.stop)), self.stop)
        for start, stop in pairwise(bounds):
            if start < stop:
                yield start, stop


class SquaredNorm:
    """Sum of squares of ``stretches``, in limbs. Bound to their memory once."""

    def __init__(self, stretches: Iterable[Stretch], device: torch.device) -> None:
        rows = _HOST_ROWS if device.type == "cpu" else _DEVICE_ROWS
        self._squares = torch.zeros(rows, BLOCK, dtype=torch.float64, device=device)
        self._fills = list(_fills(stretches, self._squares))
        self._sums = torch.zeros(len(self._fills), rows, dtype=torch.float64, device=device)
        self._scales = torch.tensor(_SCALES, dtype=torch.float64, device=device)

    def limbs(self) -> Tensor:
        """[limbs] of the sum, to be added to those of other ranks. Not finite where the sum is not."""
        for copies, sums in zip(self._fills, self._sums, strict=True):
            self._squares.zero_()
            for target, source in copies:
                target.copy_(source)
            torch.sum(self._squares.square_(), dim=1, out=sums)
        return limbs_of(self._sums.view(-1))

    def total(self, limbs: Tensor) -> Tensor:
        """The sum, a scalar, from limbs that were added over ranks. Equal limbs give equal bits."""
        return (limbs * self._scales).sum()


def _fills(stretches: Iterable[Stretch], squares: Tensor) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """For each time that ``squares`` is filled, the copies that fill it: (target within ``squares``, source)."""
    copies: list[tuple[Tensor, Tensor]] = []
    row = 0
    for stretch in stretches:
        for start, stop in stretch.parts():
            while start < stop:
                count = min(max((stop - start) // BLOCK, 1), len(squares) - row)
                end = min(start + count * BLOCK, stop)
                copies.append((squares[row : row + count].view(-1)[: end - start], stretch.flat[start:end]))
                row, start = row + count, end
                if row == len(squares):
                    yield copies
                    copies, row = [], 0
    if copies:
        yield copies


def limbs_of(sums: Tensor) -> Tensor:
    """[limbs] of the exact sum of non-negative doubles."""
    limbs = sums.new_zeros(NUM_LIMBS)
    rest, whole = sums.clone(), torch.empty_like(sums)
    for limb in reversed(range(NUM_LIMBS)):
        torch.div(rest, _SCALES[limb], rounding_mode="floor", out=whole)
        torch.sum(whole, dim=0, keepdim=True, out=limbs[limb : limb + 1])
        rest.sub_(whole, alpha=_SCALES[limb])
    return limbs
