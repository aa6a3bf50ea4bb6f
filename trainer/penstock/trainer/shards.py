"""Collectives within an action, over the process group of the shards of a pipeline rank.

On CUDA they are NCCL's. On the host they are exchanges between all pairs of shards: gloo's own all-gather and
reduce-scatter use a ring, whose latencies add up, while shards are few and can all reach each other.

- Gather: each shard sends its block to every other shard, and receives their blocks in place.
- Scatter: each shard sends to every other shard the block that belongs to that shard, and adds the blocks that it
  receives in the order of shards. They are received into temporaries, which are kept for the next request
  (`penstock.core.sharding.exchange_bytes`).
- Sum: the elements are divided into one block per shard. A Scatter in place is followed by a Gather of the sums. Two
  shards send each other all of their elements instead: as many bytes, in one round.

So a result does not depend on which shard came first. For Gather and Sum all shards get the same bits. All shards start
the same requests in the same order, and the messages of a pair are first-in first-out, so every message meets its
counterpart and any number of requests may be in flight.

Microseconds, from `benchmarks/shard_collectives.py` on two cores that other work shared:

                          2 shards                        4 shards
                     64 KiB  1 MiB  4 MiB  16 MiB    64 KiB  1 MiB  4 MiB  16 MiB
    gather  pairwise    136    354  1,325   5,866       822  1,054  3,306  11,056
            gloo        187    458  1,722   8,197     1,228  1,939  4,311  15,087
    scatter pairwise    200    468  1,710   7,419       998  1,507  3,773  13,003
            gloo        280    976  3,742  19,795     1,947  3,623  8,160  34,187
    sum     pairwise    197    651  2,724  13,019     1,810  4,241  6,135  28,811
            gloo        246    648  2,920  12,119     1,766  2,655  7,107  31,279

For sums neither way is always the faster. The pairwise one adds in the order of shards, as a Scatter does, and all of
its memory is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.trainer.units.collectives import Gather, Request, Scatter, Shards, Sum, Work

# Newer versions of torch have the first name and deprecate the second.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def shards_of(group: dist.ProcessGroup, device: torch.device) -> Shards:
    """Collectives of this process with the other shards of its rank: the members of ``group``, in their order."""
    return NcclShards(group) if device.type == "cuda" else HostShards(group)


class NcclShards:
    """`Shards` that runs each request as one NCCL collective. NCCL chooses the order of addition, always the same."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._shard, self._num_shards = dist.get_rank(group), dist.get_world_size(group)

    def start(self, request: Request) -> Work:
        """Launch the collective after the work that the current stream has so far."""
        match request:
            case Gather(all_PH):
                own_RH = all_PH.chunk(self._num_shards)[self._shard]
                work = _all_gather(all_PH, own_RH, group=self._group, async_op=True)
            case Scatter(partial_PH, own_RH):
                work = _reduce_scatter(own_RH, partial_PH, group=self._group, async_op=True)
            case Sum(tensor):
                work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return under_way(work)


class HostShards:
    """`Shards` that runs requests as messages between all pairs of shards."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._shard, self._num_shards = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        self._others = {shard: rank for shard, rank in enumerate(ranks) if shard != self._shard}
        self._temporaries = Temporaries()

    def start(self, request: Request) -> Work:
        """Start the request."""
        match request:
            case Gather(all_PH):
                return AllOf(self._gather(all_PH.chunk(self._num_shards)))
            case Scatter(partial_PH, own_RH):
                return self._scatter(partial_PH.chunk(self._num_shards), own_RH)
            case Sum(tensor):
                if self._num_shards == 2:
                    return self._scatter((tensor, tensor), tensor)
                blocks = tensor.view(-1).tensor_split(self._num_shards)
                scattered = self._scatter(blocks, blocks[self._shard])
                return InTurn(scattered, lambda: AllOf(self._gather(blocks)))

    def _gather(self, blocks: Sequence[Tensor]) -> list[Work]:
        """Send this shard's block to all others and receive theirs."""
        return self._exchange(dict.fromkeys(self._others, blocks[self._shard]), dict(enumerate(blocks)))

    def _scatter(self, partials: Sequence[Tensor], own: Tensor) -> _Scattering:
        """Send the others their blocks of this shard's addend, and receive their addends of its own block."""
        num_bytes = len(self._others) * own.nbytes
        memory = self._temporaries.take(num_bytes)
        received = memory[:num_bytes].view(own.dtype).view(len(self._others), *own.shape)
        addends = {self._shard: partials[self._shard], **dict(zip(self._others, received, strict=True))}
        works = self._exchange(dict(enumerate(partials)), addends)
        in_order = [addends[shard] for shard in range(self._num_shards)]
        return _Scattering(works, self._shard, in_order, own, lambda: self._temporaries.give_back(memory))

    def _exchange(self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]) -> list[Work]:
        """Send and receive one tensor for each other shard. Empty tensors are left out."""
        works = []
        for shard, rank in self._others.items():
            if received[shard].numel():
                works.append(irecv(received[shard], rank, self._group))
            if sent[shard].numel():
                works.append(isend(sent[shard], rank, self._group))
        return works


class Temporaries:
    """Memory for requests in flight. Later requests reuse the memory of completed ones."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        """At least ``num_bytes`` of memory: the free buffer that was used last, or a larger one that replaces it."""
        memory = self._free.pop() if self._free else None
        if memory is None or memory.numel() < num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8)
        return memory

    def give_back(self, memory: Tensor) -> None:
        """Return the memory of a completed request."""
        self._free.append(memory)


@dataclass(frozen=True, slots=True)
class AllOf:
    """Several operations in flight."""

    works: Sequence[Work]

    def wait(self) -> None:
        """Block until all are complete."""
        for work in self.works:
            work.wait()


@dataclass(frozen=True, slots=True)
class _Scattering:
    """Addends of ``own`` in flight. ``shard`` is the one whose addend is local."""

    works: Sequence[Work]
    shard: int
    addends: Sequence[Tensor]
    own: Tensor
    over: Callable[[], None]

    def wait(self) -> None:
        """Add in the order of shards. ``own`` may be the local addend, so it is written only once that is added."""
        for work in self.works:
            work.wait()
        total = self.addends[0]
        for shard, addend in enumerate(self.addends[1:], start=1):
            total = torch.add(total, addend, out=self.own if shard >= self.shard else self.addends[0])
        self.over()


@dataclass(frozen=True, slots=True)
class InTurn:
    """Two operations, one after the other: `wait` completes the first, then starts and completes the second."""

    first: Work
    second: Callable[[], Work]

    def wait(self) -> None:
        """Block until both are complete."""
        self.first.wait()
        self.second().wait()


def in_turn(starts: Sequence[Callable[[], Work]]) -> Work:
    """Start the first operation. The wait starts each of the others once the previous one is complete."""
    first = starts[0]()
    return InTurn(first, partial(in_turn, starts[1:])) if len(starts) > 1 else first


def isend(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> Work:
    """Send to a global rank of the group."""
    return under_way(dist.isend(tensor, peer, group))


def irecv(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> Work:
    """Receive from a global rank of the group."""
    return under_way(dist.irecv(tensor, peer, group))


def under_way(work: Work | None) -> Work:
    """The handle that torch returned for a message or collective. Asserts that this rank is a member of the group."""
    assert work is not None, "this rank is no member of the group"
    return work
