"""How ranks talk: messages on channels, sums over groups. A narrow seam with two sides.

`ProcessGroupTransport` is the real one (gloo on CPU, NCCL on CUDA); `penstock.trainer.local_transport` is an in-process
one for tests. Both ends know every size from the Program, so nothing but the tensors themselves is sent.

One process group of two ranks serves each channel. On NCCL a group is one communicator with one stream, in which
operations run in the order of their launch: two directions, or activations and gradients, in one group could wait for
each other forever. On gloo it keeps the channels' messages apart.

Shards of a rank (`penstock.core.sharding`) exchange messages with their like alone: every channel, copy of a tied
matrix and set of replicas exists once for each shard. One group joins the shards of a rank, in the middle of actions
(`penstock.trainer.shards`) and for reductions over tp; where several hold the same key/value heads, one more joins
these.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.plan import Plan
from penstock.core.program import Channel, Program, Reduction
from penstock.core.schedule import Group
from penstock.trainer.reduce_scatter import HostReduceScatter
from penstock.trainer.shards import irecv, isend, shards_of, under_way
from penstock.trainer.units.collectives import NO_SHARDS, Gather, Scatter, Shards, Work

MAX_BLOCKS = 4
"""Thread blocks of one kernel that sends or receives on CUDA. `penstock.core.residency.NUM_PLACES` of them spin at once
at most: 32 blocks, which leave most of a device's multiprocessors (108 on an A100, 132 on an H100) to compute.
"""

MAX_SHARD_BLOCKS = 32
"""Thread blocks of a collective of shards, of which one spins at once next to the kernels that send and receive
(`penstock.core.residency`). As many as NCCL takes at most by itself (``ncclConfig_t.maxCTAs``): shards wait for them.
"""

_CHANNELS = ("F", "B")


class Messages(Protocol):
    """One rank's access to its channels. Messages of a channel arrive in the order they were sent."""

    def post_recv(self, channel: Channel, tensor: Tensor) -> Work:
        """Receive the channel's next message into ``tensor``, which must have exactly its size."""

    def send(self, channel: Channel, tensor: Tensor) -> Work:
        """Send ``tensor``, which must not change until the work is done."""


class Transport(Messages, Protocol):
    """One rank's access to its channels and groups."""

    @property
    def shards(self) -> Shards:
        """Access to the other shards of its pipeline rank, where there are others."""

    def all_reduce(self, group: Group, tensor: Tensor) -> Work:
        """Replace ``tensor`` by its sum over the group's ranks, which must not change until the work is done. NORM is
        every rank of every replica; TIE has groups of two (`sum_tied`).
        """

    def reduce_scatter(self, tensor: Tensor) -> Work:
        """Replace this replica's part of ``tensor``, of equal parts in the order of replicas, by its sum over them. It
        must not change until the work is done, and what the other parts hold is of no use then.
        """

    def all_gather(self, tensor: Tensor) -> Work:
        """Replace the other replicas' parts of ``tensor`` by theirs, of equal parts in the order of replicas."""

    def sum_copies(self, tensor: Tensor) -> Work:
        """The same over the shards that hold copies of the same key/value heads, where there are copies."""

    def sum_tied(self, pipeline_rank: int, tensor: Tensor) -> Work:
        """The same over two ranks that hold the same rows of a tied matrix: this one and another, of which one has the
        first stage.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The global ranks of a run: ``rank = (replica * pp + pipeline rank) * tp + shard``, so shards are neighbours.

    ``kv_copies`` neighbouring shards hold copies of the same key/value heads.
    """

    dp: int
    tp: int = 1
    pp: int
    kv_copies: int = 1

    @classmethod
    def of(cls, plan: Plan) -> Mesh:
        """The mesh that a plan runs on."""
        return cls(dp=plan.dp, tp=plan.tp, pp=plan.pp, kv_copies=plan.model.kv_copies(plan.tp))

    @property
    def num_ranks(self) -> int:
        """All of them: dp x tp x pp."""
        return self.dp * self.tp * self.pp

    def replica(self, rank: int) -> int:
        """The replica that ``rank`` works in."""
        return rank // (self.pp * self.tp)

    def pipeline_rank(self, rank: int) -> int:
        """The rank's place in its replica's pipeline."""
        return rank // self.tp % self.pp

    def shard(self, rank: int) -> int:
        """Which of its pipeline rank's shards ``rank`` is."""
        return rank % self.tp

    def rank(self, replica: int, pipeline_rank: int, shard: int = 0) -> int:
        """The global rank of a shard."""
        return (replica * self.pp + pipeline_rank) * self.tp + shard

    def ranks(self, replica: int, pipeline_ranks: tuple[int, ...], shard: int = 0) -> tuple[int, ...]:
        """The global ranks of one shard of some pipeline ranks of one replica."""
        return tuple(self.rank(replica, pipeline_rank, shard) for pipeline_rank in pipeline_ranks)

    def peers(self, pipeline_rank: int, shard: int = 0) -> tuple[int, ...]:
        """The global ranks that hold the same parts of the same stages, one per replica."""
        return tuple(self.rank(replica, pipeline_rank, shard) for replica in range(self.dp))

    def shards(self, replica: int, pipeline_rank: int) -> tuple[int, ...]:
        """The global ranks that share the units of a pipeline rank."""
        return tuple(self.rank(replica, pipeline_rank, shard) for shard in range(self.tp))

    def copies(self, rank: int) -> tuple[int, ...]:
        """The global ranks that hold the same key/value heads as ``rank``, of its shards."""
        first = rank - self.shard(rank) % self.kv_copies
        return tuple(range(first, first + self.kv_copies))


@dataclass(frozen=True, slots=True)
class GroupName:
    """What a process group is for: a channel's text or a `Group`, and the global ranks, the sender first."""

    purpose: str
    ranks: tuple[int, ...]


def group_names(program: Program, mesh: Mesh) -> Iterator[GroupName]:
    """Every group of a run, in the one order in which all ranks make them; some perhaps more than once."""
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
    """The pipeline ranks that sum rows of a tied matrix: that of the first stage with each other one."""
    first = program.stage_ranks[0]
    return [(first, other) for other in reduction.ranks if other != first]


def tied_peers(program: Program, pipeline_rank: int) -> dict[int, tuple[int, int]]:
    """The pipeline ranks with which one sums rows of a tied matrix (`Transport.sum_tied`), each with its pair."""
    ties = [reduction for reduction in program.reductions if reduction.group is Group.TIE]
    pairs = [pair for reduction in ties for pair in tied_pairs(program, reduction) if pipeline_rank in pair]
    return {pair[pair[0] == pipeline_rank]: pair for pair in pairs}


def channel_group(channel: Channel, mesh: Mesh, replica: int, shard: int = 0) -> GroupName:
    """The group of a channel of one shard in one replica."""
    return GroupName(channel.direction, mesh.ranks(replica, (channel.source, channel.target), shard))


def shard_group(mesh: Mesh, rank: int) -> GroupName:
    """The group of the shards of ``rank``, a global one."""
    return GroupName(Group.TP, mesh.shards(mesh.replica(rank), mesh.pipeline_rank(rank)))


def copies_group(mesh: Mesh, rank: int) -> GroupName:
    """The group of those that hold copies of its key/value heads; of all its shards, where all do."""
    return GroupName(Group.TP, mesh.copies(rank))


def everyone(mesh: Mesh) -> GroupName:
    """The group of all ranks of the run."""
    return GroupName(Group.NORM, tuple(range(mesh.num_ranks)))


class ProcessGroups:
    """Process groups by name, each made and warmed once.

    All ranks of the default process group call `open` with the same names in the same order, members or not.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._groups: dict[GroupName, dist.ProcessGroup | None] = {}

    def open(self, names: Iterator[GroupName]) -> None:
        """Make the groups that do not exist yet, then let each carry one element, so that no step pays for set-up."""
        missing = [name for name in dict.fromkeys(names) if name not in self._groups]
        for name in missing:
            group = dist.new_group(sorted(name.ranks), backend=self._backend(name), pg_options=self._options(name))
            self._groups[name] = group if isinstance(group, dist.ProcessGroup) else None
        for name in missing:
            if dist.get_rank() in name.ranks:
                self._warm(name)

    def _backend(self, name: GroupName) -> str:
        """The group of all ranks also carries what lives on the host, such as recorded times."""
        if self.device.type != "cuda":
            return "gloo"
        return "cpu:gloo,cuda:nccl" if name.purpose == Group.NORM else "nccl"

    def _options(self, name: GroupName) -> Any:
        """NCCL's settings for channels and shards, whose kernels spin next to others; its own choice for all else."""
        blocks = {**dict.fromkeys(_CHANNELS, MAX_BLOCKS), Group.TP: MAX_SHARD_BLOCKS}
        if self.device.type != "cuda" or name.purpose not in blocks:
            return None
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = blocks[name.purpose]
        return options

    def _warm(self, name: GroupName) -> None:
        """Every rank takes its groups in the same order, so the earliest unfinished exchange can always go on."""
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
        """``rank`` is the global one."""
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
        self._replicas = NO_SHARDS
        if program.zero:
            self._replicas = shards_of(self._groups[Group.DP], groups.device)
        on_host = program.zero and groups.device.type != "cuda"
        self._reduce_scatter = HostReduceScatter(self._groups[Group.DP]) if on_host else None
        self._tied = {
            peer: groups[GroupName(Group.TIE, mesh.ranks(replica, pair, shard))]
            for peer, pair in tied_peers(program, pipeline_rank).items()
        }
        self.shards: Shards = NO_SHARDS
        if mesh.tp > 1:
            self._groups[Group.TP] = groups[shard_group(mesh, rank)]
            self.shards = shards_of(self._groups[Group.TP], groups.device)
        self._copies = groups[copies_group(mesh, rank)] if mesh.kv_copies > 1 else None

    def post_recv(self, channel: Channel, tensor: Tensor) -> Work:
        return irecv(tensor, *self._ends[channel])

    def send(self, channel: Channel, tensor: Tensor) -> Work:
        return isend(tensor, *self._ends[channel])

    def all_reduce(self, group: Group, tensor: Tensor) -> Work:
        return under_way(dist.all_reduce(tensor, group=self._groups[group], async_op=True))

    def reduce_scatter(self, tensor: Tensor) -> Work:
        if self._reduce_scatter is not None:
            return self._reduce_scatter.start(tensor)
        return self._replicas.start(Scatter(tensor, tensor.chunk(self._num_replicas)[self._replica]))

    def all_gather(self, tensor: Tensor) -> Work:
        return self._replicas.start(Gather(tensor))

    def sum_copies(self, tensor: Tensor) -> Work:
        return under_way(dist.all_reduce(tensor, group=self._copies, async_op=True))

    def sum_tied(self, pipeline_rank: int, tensor: Tensor) -> Work:
        """All-reduce in the group of the two ranks."""
        return under_way(dist.all_reduce(tensor, group=self._tied[pipeline_rank], async_op=True))


def open_transport(program: Program, mesh: Mesh, rank: int, groups: ProcessGroups) -> ProcessGroupTransport:
    """Make every group of the run, on all ranks, and give this rank's transport."""
    groups.open(group_names(program, mesh))
    return ProcessGroupTransport(groups, program, mesh, rank)
