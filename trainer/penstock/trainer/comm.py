"""Communication of ranks: messages on channels, and sums over groups, behind one interface.

`ProcessGroupTransport` uses gloo on CPU and NCCL on CUDA. `penstock.trainer.local_transport` works within a process,
for tests. Both ends know every size from the Program, so only the tensors themselves are sent.

Each channel has its own process group of two ranks. An NCCL group is one communicator with one stream, which runs
operations in launch order. If one group carried two directions, or activations and gradients, operations could wait for
each other forever. On gloo separate groups keep the messages of channels apart.

A shard of a rank (`penstock.core.sharding`) exchanges messages only with the same shard of other ranks: every channel,
copy of a tied matrix and set of replicas exists once per shard. One group joins the shards of a rank, for collectives
within actions (`penstock.trainer.shards`) and for reductions over tp. Where several shards hold the same key/value
heads, one more group joins these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.mesh import Mesh
from penstock.core.program import Channel, Program, Reduction
from penstock.core.schedule import Group
from penstock.trainer import gloo
from penstock.trainer.replicas import Replicas
from penstock.trainer.shards import irecv, isend, shards_of, under_way
from penstock.trainer.units.collectives import NO_SHARDS, Shards, Work

MAX_BLOCKS = 4
"""Thread blocks of a CUDA kernel that sends or receives. At most `penstock.core.residency.NUM_PLACES` of these kernels
spin at a time: 32 blocks, which leaves most of a device's multiprocessors (108 on an A100, 132 on an H100) for compute.
"""

MAX_SHARD_BLOCKS = 32
"""Thread blocks of a collective of shards. One of these spins at a time, next to the kernels that send and receive
(`penstock.core.residency`). NCCL's own maximum (``ncclConfig_t.maxCTAs``), since shards wait for them.
"""

_CHANNELS = ("F", "B")


class Messages(Protocol):
    """One rank's access to its channels. Messages of a channel arrive in the order in which they were sent."""

    def post_recv(self, channel: Channel, tensor: Tensor) -> Work:
        """Receive the channel's next message into ``tensor``, which must have exactly its size."""

    def send(self, channel: Channel, tensor: Tensor) -> Work:
        """Send ``tensor``, which must not change until the work is done."""


class Transport(Messages, Protocol):
    """One rank's access to its channels and groups."""

    @property
    def shards(self) -> Shards:
        """Access to the other shards of this pipeline rank, if there are any."""

    def all_reduce(self, group: Group, tensor: Tensor) -> Work:
        """Replace ``tensor`` by its sum over the ranks of ``group``; it must not change until the work is done. NORM
        contains every rank of every replica. TIE has groups of two (`sum_tied`).
        """

    def reduce_scatter(self, tensor: Tensor) -> Work:
        """Replace this replica's part of ``tensor`` by the sum over replicas; the parts are equal and in the order of
        replicas. ``tensor`` must not change until the work is done. Afterwards its other parts are undefined.
        """

    def sum_narrow(self, tensor: Tensor, *, scattered: bool) -> Work:
        """Replace ``tensor`` of fp32 by its sum over replicas, which travels in bf16; it must not change until the work
        is done. If sums are ``scattered``, as by `reduce_scatter`, only this replica's part is defined afterwards.
        """

    def all_gather(self, tensor: Tensor) -> Work:
        """Fill the other replicas' parts of ``tensor`` from those replicas; the parts are equal and in the order of
        replicas.
        """

    def sum_copies(self, tensor: Tensor) -> Work:
        """All-reduce over the shards that hold copies of the same key/value heads, if there are copies."""

    def sum_tied(self, pipeline_rank: int, tensor: Tensor) -> Work:
        """All-reduce over this rank and ``pipeline_rank``, which hold the same rows of a tied matrix. One of them has
        the first stage.
        """


@dataclass(frozen=True, slots=True)
class GroupName:
    """The purpose of a process group (a channel's direction or a `Group`) and its global ranks; the sender of a channel
    comes first.
    """

    purpose: str
    ranks: tuple[int, ...]


def group_names(program: Program, mesh: Mesh) -> Iterator[GroupName]:
    """Every group of a run, in the order in which all ranks create them; names may repeat."""
    for rank in range(mesh.num_ranks) if mesh.tp > 1 else ():
        yield shard_group(mesh, rank)
        if mesh.kv_copies > 1:
            yield copies_group(mesh, rank)
    places = list(product(range(mesh.dp), range(mesh.tp)))
    for (replica, shard), channel in product(places, program.channels):
        yield channel_group(channel, mesh, replica, shard)
    for reduction in program.reductions:
        if reduction.group is Group.DP:
            for pipeline_rank, shard in product(reduction.ranks, range(mesh.tp)):
                yield GroupName(Group.DP, mesh.peers(pipeline_rank, shard))
        elif reduction.group is Group.TIE:
            for replica, shard in places:
                for pair in tied_pairs(program, reduction):
                    yield GroupName(Group.TIE, mesh.ranks(replica, pair, shard))
    yield everyone(mesh)


def tied_pairs(program: Program, reduction: Reduction) -> list[tuple[int, int]]:
    """The pipeline ranks that sum rows of a tied matrix: the rank of the first stage with every other one."""
    first = program.stage_ranks[0]
    return [(first, other) for other in reduction.ranks if other != first]


def tied_peers(program: Program, pipeline_rank: int) -> dict[int, tuple[int, int]]:
    """The pipeline ranks with which ``pipeline_rank`` sums rows of a tied matrix (`Transport.sum_tied`), each mapped to
    its pair in `tied_pairs`.
    """
    ties = [reduction for reduction in program.reductions if reduction.group is Group.TIE]
    pairs = [pair for reduction in ties for pair in tied_pairs(program, reduction) if pipeline_rank in pair]
    return {pair[pair[0] == pipeline_rank]: pair for pair in pairs}


def channel_group(channel: Channel, mesh: Mesh, replica: int, shard: int = 0) -> GroupName:
    """The group of a channel of one shard in one replica."""
    return GroupName(channel.direction, mesh.ranks(replica, (channel.source, channel.target), shard))


def shard_group(mesh: Mesh, rank: int) -> GroupName:
    """The group of all shards of the pipeline rank of ``rank``, a global rank."""
    return GroupName(Group.TP, mesh.shards(mesh.replica(rank), mesh.pipeline_rank(rank)))


def copies_group(mesh: Mesh, rank: int) -> GroupName:
    """The group of the shards that hold copies of the key/value heads of ``rank``; if all hold them, the group of all
    shards.
    """
    return GroupName(Group.TP, mesh.copies(rank))


def everyone(mesh: Mesh) -> GroupName:
    """The group of all ranks of the run."""
    return GroupName(Group.NORM, tuple(range(mesh.num_ranks)))


class ProcessGroups:
    """Process groups by name, each created and warmed up once.

    All ranks of the default process group call `open` with the same names in the same order, whether or not they are
    members.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._groups: dict[GroupName, dist.ProcessGroup | None] = {}

    def open(self, names: Iterator[GroupName]) -> None:
        """Create the missing groups and send one element over each, so that no step pays for set-up."""
        missing = [name for name in dict.fromkeys(names) if name not in self._groups]
        for name in missing:
            group = dist.new_group(sorted(name.ranks), backend=self._backend(name), pg_options=self._options(name))
            self._groups[name] = group if isinstance(group, dist.ProcessGroup) else None
        for name in missing:
            if dist.get_rank() in name.ranks:
                self._warm(name)

    def _backend(self, name: GroupName) -> str:
        """The backend of a group. The group of all ranks also carries host tensors, such as recorded times."""
        if self.device.type != "cuda":
            return gloo.backend()
        return "cpu:gloo,cuda:nccl" if name.purpose == Group.NORM else "nccl"

    def _options(self, name: GroupName) -> Any:
        """NCCL settings for channels and shards, whose kernels spin next to others; None, NCCL's defaults, for all
        else.
        """
        blocks = {**dict.fromkeys(_CHANNELS, MAX_BLOCKS), Group.TP: MAX_SHARD_BLOCKS}
        if self.device.type != "cuda" or name.purpose not in blocks:
            return None
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = blocks[name.purpose]
        return options

    def _warm(self, name: GroupName) -> None:
        """Send one element. Every rank warms its groups in the same order, so the earliest unfinished exchange can
        proceed.
        """
        one = torch.ones(1, device=self.device)
        group = self[name]
        if name.purpose not in _CHANNELS:
            dist.all_reduce(one, group=group)
        elif dist.get_rank() == name.ranks[0]:
            isend(one, name.ranks[1], group).wait()
        else:
            irecv(one, name.ranks[0], group).wait()

    def __getitem__(self, name: GroupName) -> dist.ProcessGroup:
        group = self._groups[name]
        assert group is not None, f"this rank is no member of {name}"
        return group


class ProcessGroupTransport:
    """`Transport` over `torch.distributed`; ``groups`` must have opened ``group_names(program, mesh)``."""

    def __init__(self, groups: ProcessGroups, program: Program, mesh: Mesh, rank: int) -> None:
        """``rank`` is a global rank."""
        replica, pipeline_rank, shard = mesh.replica(rank), mesh.pipeline_rank(rank), mesh.shard(rank)
        self._replica, self._num_replicas = replica, mesh.dp
        self._ends: dict[Channel, tuple[int, dist.ProcessGroup]] = {}
        for channel in program.channels:
            if pipeline_rank in (channel.source, channel.target):
                peer = channel.target if pipeline_rank == channel.source else channel.source
                group = groups[channel_group(channel, mesh, replica, shard)]
                self._ends[channel] = (mesh.rank(replica, peer, shard), group)
        self._groups = {Group.NORM: groups[everyone(mesh)]}
        for reduction in program.reductions:
            if reduction.group is Group.DP:
                self._groups[Group.DP] = groups[GroupName(Group.DP, mesh.peers(pipeline_rank, shard))]
        self._replicas = Replicas(self._groups[Group.DP], groups.device) if Group.DP in self._groups else None
        self._tied = {
            peer: groups[GroupName(Group.TIE, mesh.ranks(replica, pair, shard))]
            for peer, pair in tied_peers(program, pipeline_rank).items()
        }
        self.shards: Shards = NO_SHARDS
        if mesh.tp > 1:
            self._groups[Group.TP] = groups[shard_group(mesh, rank)]
            self.shards = shards_of(self._groups[Group.TP], groups.device)
        self._copies = groups[copies_group(mesh, rank)] if mesh.kv_copies > 1 else None

    @property
    def _peers(self) -> Replicas:
        assert self._replicas is not None, "one replica has no collectives"
        return self._replicas

    def post_recv(self, channel: Channel, tensor: Tensor) -> Work:
        return irecv(tensor, *self._ends[channel])

    def send(self, channel: Channel, tensor: Tensor) -> Work:
        return isend(tensor, *self._ends[channel])

    def all_reduce(self, group: Group, tensor: Tensor) -> Work:
        return under_way(dist.all_reduce(tensor, group=self._groups[group], async_op=True))

    def reduce_scatter(self, tensor: Tensor) -> Work:
        return self._peers.reduce_scatter(tensor)

    def sum_narrow(self, tensor: Tensor, *, scattered: bool) -> Work:
        return self._peers.sum_narrow(tensor, scattered=scattered)

    def all_gather(self, tensor: Tensor) -> Work:
        return self._peers.all_gather(tensor)

    def sum_copies(self, tensor: Tensor) -> Work:
        return under_way(dist.all_reduce(tensor, group=self._copies, async_op=True))

    def sum_tied(self, pipeline_rank: int, tensor: Tensor) -> Work:
        """All-reduce in the group of the two ranks."""
        return under_way(dist.all_reduce(tensor, group=self._tied[pipeline_rank], async_op=True))


def open_transport(program: Program, mesh: Mesh, rank: int, groups: ProcessGroups) -> ProcessGroupTransport:
    """Create every group of the run, on all ranks, and return this rank's transport."""
    groups.open(group_names(program, mesh))
    return ProcessGroupTransport(groups, program, mesh, rank)
