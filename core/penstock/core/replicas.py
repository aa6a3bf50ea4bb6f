"""Division of a stage's optimizer state between replicas (ZeRO-1, Rajbhandari et al., arXiv 1910.02054).

The flat parameters of a stage are in *sections*, one per bucket of its gradients (`penstock.core.buckets`), or one in
all. Of a section that begins at f, replica r of dp steps the range [f + r s, f + (r + 1) s). Only it holds their
moments and master weights. It ends the reduction with the sum of their gradients, and sends the new weights to the
others. So every bucket is divided evenly, and its sum uses both directions of a link. All shards of a section are
equally large, as NCCL's collectives require, and s is a multiple of `BLOCK`.

Gradients are squared and summed in blocks of `BLOCK` elements, counted from the start of each tensor, so that the norm
does not depend on the division between replicas (`penstock.trainer.squared_norm`). No block may be in two shards, so a
tensor that crosses a shard's bound begins at a multiple of `BLOCK`. At most dp - 1 tensors of a section cross one, and
each leaves a gap of less than `BLOCK` elements before it, which hold zeros.

Example with blocks of 4: tensors of 3, 10 and 2 elements, and 2 replicas. Of 15 elements a shard has 8. The second
tensor would begin at 3 and be cut at 8, which is in its second block. It begins at 4, and the section ends at 16.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

BLOCK = 4096
"""Elements: 16 KiB of fp32, small next to any message and large next to its overhead."""

ROUND_BYTES = 2 * 2**20
"""Bytes that one rank receives in one round of a reduce-scatter on the host, from all others together."""


NARROWED_ELEMENTS = {False: 2**14, True: 2**22}
"""Elements that are converted at once between fp32 and bf16: on the host and, which is True, on a CUDA device. On the
host they fit a core's cache, and are too few for torch to divide over threads; a device needs few launches.
"""


class ReductionType(enum.StrEnum):
    """The type in which replicas exchange gradients; ``fp32`` is that of the gradients, in proofs fp64."""

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def is_narrow(self) -> bool:
        """Whether gradients are converted for the exchange."""
        return self is ReductionType.BF16


def narrowing_bytes(part_elements: int, dp: int, *, is_cuda: bool) -> int:
    """Upper bound of the bytes that a rank needs besides its gradients to sum them in bf16, with parts of so many
    elements per replica: on the host two rounds, and everywhere the elements that are converted at once, on the host
    also in fp32 (`penstock.trainer.narrow`).
    """
    if is_cuda:
        return 2 * NARROWED_ELEMENTS[True]
    return exchange_bytes(2 * part_elements, dp) + 6 * NARROWED_ELEMENTS[False]


def exchange_bytes(shard_bytes: int, dp: int) -> int:
    """Upper bound of the bytes that a rank on the host needs besides its gradients to scatter sums with shards of so
    many bytes: two rounds (`penstock.trainer.reduce_scatter`).
    """
    return 2 * min(ROUND_BYTES, (dp - 1) * shard_bytes)


def largest_shard(num_elements: int, dp: int) -> int:
    """Upper bound of the elements of one replica's shard of a section, gaps included. One replica has all of them."""
    return num_elements if dp == 1 else (-(-num_elements // (dp * BLOCK)) + 1) * BLOCK


@dataclass(frozen=True, slots=True)
class Section:
    """A range of a stage's flat buffers from ``start`` on, of ``total`` elements. The first ``num_decayed`` have weight
    decay. Replicas divide it into shards of ``shard_elements``.
    """

    start: int
    total: int
    num_decayed: int
    shard_elements: int

    @classmethod
    def whole(cls, total: int, num_decayed: int) -> Section:
        """Buffers that replicas do not divide."""
        return cls(0, total, num_decayed, total)

    @property
    def place(self) -> slice:
        """Its range of the flat buffers."""
        return slice(self.start, self.start + self.total)

    def shard(self, replica: int) -> slice:
        """The range of the flat buffers that a replica steps."""
        start = self.start + replica * self.shard_elements
        return slice(start, start + self.shard_elements)


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """Offsets of a section's tensors from its start, its ``total`` elements, and the elements of a shard."""

    offsets: tuple[int, ...]
    shard_elements: int
    total: int


def replica_layout(sizes: Sequence[int], dp: int) -> ReplicaLayout:
    """The layout of tensors with ``sizes`` elements, in their order, for ``dp`` replicas; without gaps for one."""
    if dp == 1:
        offsets, stop = _packed(sizes, 0)
        return ReplicaLayout(offsets, stop, stop)
    least = -(-sum(sizes) // (dp * BLOCK)) * BLOCK
    for shard_elements in count(max(least, BLOCK), BLOCK):
        offsets, stop = _packed(sizes, shard_elements)
        if stop <= dp * shard_elements:
            return ReplicaLayout(offsets, shard_elements, dp * shard_elements)
    raise AssertionError("the shards grow")


def _packed(sizes: Sequence[int], bound: int) -> tuple[tuple[int, ...], int]:
    """The offsets of tensors and the end of the last one, if those that a multiple of ``bound`` would cut begin a
    block.
    """
    offsets, start = [], 0
    for size in sizes:
        if bound and start // bound != (start + size - 1) // bound:
            start = -(-start // BLOCK) * BLOCK
        offsets.append(start)
        start += size
    return tuple(offsets), start
