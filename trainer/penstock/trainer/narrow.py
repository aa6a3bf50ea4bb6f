"""Gradients in fp32 that replicas exchange in bf16, without a copy of them.

Gradients are narrowed in place: n elements of fp32 become n elements of bf16 in the first half of their memory. These
are exchanged, and the sums are widened in place again. Both go through a buffer of a few elements. Narrowing begins
with the first elements and widening with the last, so neither overwrites elements that it still has to read.

Every addend is rounded to bf16, including a replica's own, and so is the sum. So all replicas get the same bits. On the
host the addends of an element are widened and added in fp32, in the order of replicas (`add_narrow`), so the bits are
the same whether each replica gets all sums or only those of its part. NCCL adds in bf16, and rounds after every addend.

Example with 4 elements in 16 bytes. Narrowing: element 0 moves from bytes 0-3 to bytes 0-1, then element 1 from bytes
4-7 to bytes 2-3, which element 0 no longer needs. Widening starts with element 3, from bytes 6-7 to bytes 12-15.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from penstock.core.replicas import NARROWED_ELEMENTS
from penstock.trainer.units.collectives import Work


def narrow(flat: Tensor) -> Tensor:
    """Round ``flat``, one dimension of fp32, to bf16 in place, and return the view of the first half of its memory that
    holds the result.
    """
    narrowed = flat.view(torch.bfloat16)[: len(flat)]
    buffer = _buffer(flat)
    for start in range(0, len(flat), len(buffer)):
        wide = flat[start : start + len(buffer)]
        narrowed[start : start + len(wide)].copy_(buffer[: len(wide)].copy_(wide))
    return narrowed


def widen(flat: Tensor, part: slice) -> None:
    """Undo `narrow` for the elements of ``flat`` in ``part``. Widen parts from the last to the first: this overwrites
    narrowed elements after ``part``, and leaves those before it narrowed.
    """
    narrowed = flat.view(torch.bfloat16)[: len(flat)]
    buffer = _buffer(flat)
    for start in reversed(range(part.start, part.stop, len(buffer))):
        values = narrowed[start : min(start + len(buffer), part.stop)]
        flat[start : start + len(values)].copy_(buffer[: len(values)].copy_(values))


def _buffer(flat: Tensor) -> Tensor:
    return torch.empty(NARROWED_ELEMENTS[flat.is_cuda], dtype=torch.bfloat16, device=flat.device)


def add_narrow(addends: Sequence[Tensor], total: Tensor) -> None:
    """Add ``addends`` of bf16 in fp32, from the first to the last, and round the sums into ``total``, which may be one
    of the addends.
    """
    buffer = torch.empty(NARROWED_ELEMENTS[False])
    for start in range(0, len(total), len(buffer)):
        first, *others = (addend[start : start + len(buffer)] for addend in addends)
        wide = buffer[: len(first)].copy_(first)
        for other in others:
            wide.add_(other)
        total[start : start + len(wide)].copy_(wide)


@dataclass(frozen=True, slots=True)
class Widening:
    """The exchange ``work`` of gradients that were narrowed in ``flat``. `wait` widens ``part``."""

    work: Work
    flat: Tensor
    part: slice

    def wait(self) -> None:
        """Wait, and widen."""
        self.work.wait()
        widen(self.flat, self.part)


def parts_of(num_elements: int, num_replicas: int) -> list[slice]:
    """Divide elements into a part for each replica. Parts differ by at most one element; the first is the largest."""
    size, rest = divmod(num_elements, num_replicas)
    bounds = [replica * size + min(replica, rest) for replica in range(num_replicas + 1)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]
