"""Collectives of replicas: sums of gradients and gathers of weights, as training runs and the profile measures them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.trainer.narrow import Widening, narrow, parts_of
from penstock.trainer.reduce_scatter import HostReduceScatter
from penstock.trainer.shards import shards_of, under_way
from penstock.trainer.units.collectives import Gather, Scatter, Work


class Replicas:
    """Collectives over ``group``, whose members are the replicas in their order.

    On the host, sums of which each replica gets its part and sums in bf16 are penstock's own. The others are gloo's
    and NCCL's.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self._replica, self._num_replicas = dist.get_rank(group), dist.get_world_size(group)
        self._collectives = shards_of(group, device)
        self._host_sums = None if device.type == "cuda" else HostReduceScatter(group)

    def all_reduce(self, tensor: Tensor) -> Work:
        """Replace ``tensor`` by its sum."""
        return under_way(dist.all_reduce(tensor, group=self._group, async_op=True))

    def reduce_scatter(self, tensor: Tensor) -> Work:
        """Replace this replica's part of ``tensor``, one of equal ones, by its sum."""
        if self._host_sums is not None:
            return self._host_sums.start(tensor)
        return self._collectives.start(Scatter(tensor, tensor.chunk(self._num_replicas)[self._replica]))

    def sum_narrow(self, tensor: Tensor, *, scattered: bool) -> Work:
        """Replace ``tensor`` of fp32, or this replica's part if ``scattered``, by its sum, which travels in bf16."""
        if self._host_sums is not None:
            return self._host_sums.start_narrow(tensor, scattered=scattered)
        if scattered:
            own = parts_of(len(tensor), self._num_replicas)[self._replica]
            return Widening(self.reduce_scatter(narrow(tensor)), tensor, own)
        return Widening(self.all_reduce(narrow(tensor)), tensor, slice(0, len(tensor)))

    def all_gather(self, tensor: Tensor) -> Work:
        """Fill the other replicas' parts of ``tensor``."""
        return self._collectives.start(Gather(tensor))
