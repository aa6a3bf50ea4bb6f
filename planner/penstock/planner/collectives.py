"""Seconds of collectives by algorithm and topology: links inside a node, and network cards that its devices share.

A group has g devices on each of N nodes, n = g N in all. All devices of a node reduce at the same time, at the end of a
step, so each gets an even share of the node's cards: b bytes per second. Two algorithms compete, as in NCCL:

- *Ring* over all n devices, over as many channels as the group's share of the cards carries: every node passes on 2
  (n - 1) / n of the bytes (Patarasuk and Yuan, 2009), at the slower of the cards and the links inside.
- *Hierarchical*: reduce-scatter inside each node, a ring over the N nodes for each of the g parts, all-gather inside.
  The cards carry 2 (N - 1) / N of the bytes, in 2 (N - 1) steps of their latency instead of 2 (n - 1).

The faster one counts. A reduce-scatter or an all-gather is one of the ring's two passes (Thakur, Rabenseifner and
Gropp, 2005, sections 4.1 and 4.5): half the bytes and half the steps, so that the two of sequence parallelism take as
long as the sum that they replace (Korthikanti et al., arXiv 2205.05198, section 4.2.2).

Example: 1 GB over two nodes of eight A100 (235 GB/s inside, eight cards of 22 GB/s). Hierarchical: 7/8 GB at 235 GB/s
twice, 7.4 ms, and between the nodes 2 x 1/2 x 1/8 GB at 22 GB/s, 5.7 ms: 13.1 ms. The ring takes 1.875 GB at 8 x 22 =
176 GB/s, 10.7 ms, and is chosen. With one card of 22 GB/s the hierarchy wins with 52.9 ms, against 85.2 ms.

Not modelled: trees (their latency grows with log N, which matters from hundreds of nodes on for small messages),
reductions inside switches, and other traffic on the cards at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from penstock.core.sharding import Collective
from penstock.planner.work import Floats

RING_PASSES = {Collective.GATHER: 1, Collective.SCATTER: 1, Collective.SUM: 2}
"""How many times the bytes pass around a ring of devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """Seconds until a message's first byte arrives, and seconds per byte."""

    latency: float
    per_byte: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTopology:
    """Links of a group: ``group_sizes`` are its devices per node, ``between`` is one device's share of the cards."""

    inside: Link
    between: Link
    group_sizes: tuple[int, ...]

    def seconds(self, collectives: Iterable[Collective], num_bytes: Floats | float) -> Floats:
        """Seconds of the collectives, one after another; ``num_bytes`` are summed per device, or gathered in total."""
        passes = sum(RING_PASSES[collective] for collective in collectives)
        return self._seconds(np.asarray(num_bytes, dtype=np.float64), passes)

    def all_reduce_seconds(self, num_bytes: Floats | float) -> Floats:
        """Seconds of a sum of ``num_bytes`` per device that every device gets."""
        return self.seconds((Collective.SUM,), num_bytes)

    def reduce_scatter_seconds(self, num_bytes: Floats | float) -> Floats:
        """Seconds of a sum of ``num_bytes`` per device of which every device gets its part."""
        return self.seconds((Collective.SCATTER,), num_bytes)

    def all_gather_seconds(self, num_bytes: Floats | float) -> Floats:
        """Seconds until every device has ``num_bytes``, starting with one part each."""
        return self.seconds((Collective.GATHER,), num_bytes)

    def _seconds(self, num_bytes: Floats, passes: int) -> Floats:
        if sum(self.group_sizes) < 2:
            return np.zeros(num_bytes.shape)
        if len(self.group_sizes) == 1:
            return _ring(self.inside, self.group_sizes[0], num_bytes, passes)
        ring = self._flat_ring(num_bytes, passes)
        if len(set(self.group_sizes)) > 1 or self.group_sizes[0] == 1:
            return ring
        return np.minimum(ring, self._hierarchical(num_bytes, passes))

    def _flat_ring(self, num_bytes: Floats, passes: int) -> Floats:
        fewest = min(self.group_sizes)
        inside = self.inside.per_byte if max(self.group_sizes) > 1 else 0.0
        slowest = Link(latency=self.between.latency, per_byte=max(self.between.per_byte / fewest, inside))
        return _ring(slowest, sum(self.group_sizes), num_bytes, passes)

    def _hierarchical(self, num_bytes: Floats, passes: int) -> Floats:
        size = self.group_sizes[0]
        within = _ring(self.inside, size, num_bytes, passes)
        return within + _ring(self.between, len(self.group_sizes), num_bytes / size, passes)


def _ring(link: Link, size: int, num_bytes: Floats, passes: int) -> Floats:
    """``passes`` rounds of a ring: each has size - 1 steps that send one part of the bytes to the next device."""
    seconds: Floats = passes * (size - 1) * (link.latency + num_bytes / size * link.per_byte)
    return seconds
