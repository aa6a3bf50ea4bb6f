"""How ranks talk: messages on channels, sums over groups. A narrow seam with two sides.

`ProcessGroupTransport` is the real one (gloo on CPU, NCCL on CUDA); `penstock.trainer.local_transport` is an in-process
one for tests. Both ends know every size from the Program, so nothing but the tensors themselves is sent.

One process group of two ranks serves each channel. On NCCL a group is one communicator with one stream, in which
operations run in the order of their launch: two directions, or activations and gradients, in one group could wait for
each other forever. On gloo it keeps the channels' messages apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.program import Channel, Program
from penstock.core.schedule import Group

MAX_BLOCKS = 4
"""Thread blocks of one kernel that sends or receives on CUDA. `penstock.core.residency.NUM_PLACES` of them spin at once
at most: 32 blocks, which leave most of a device's multiprocessors (108 on an A100, 132 on an H100) to compute.
"""

_CHANNELS = ("F", "B")


class Work(Protocol):
    """A transfer or a reduction under way."""

    def wait(self) -> object:
        """Block until it is done (on CUDA: make the current stream wait); raises if it cannot be."""


class Transport(Protocol):
    """One rank's access to its channels and groups. Messages of a channel arrive in the order they were sent."""

    def post_recv(self, channel: Channel, tensor: Tensor) -> Work:
        """Receive the channel's next message into ``tensor``, which must have exactly its size."""

    def send(self, channel: Channel, tensor: Tensor) -> Work:
        """Send ``tensor``, which must not change until the work is done."""

    def all_reduce(self, group: Group, tensor: Tensor) -> Work:
        """Replace ``tensor`` by its sum over the group's ranks, which must not change until the work is done. NORM is
        every rank of every replica.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The global ranks of a run: ``rank = (replica * pp + pipeline rank) * tp + shard``, so shards are neighbours."""

    dp: int
    tp: int = 1
    pp: int

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


@dataclass(frozen=True, slots=True)
class GroupName:
    """What a process group is for: a channel's text or a `Group`, and the global ranks, the sender first."""

    purpose: str
    ranks: tuple[int, ...]


def group_names(program: Program, mesh: Mesh) -> Iterator[GroupName]:
    """Every group of a run, in the one order in which all ranks make them."""
    for replica in range(mesh.dp):
        for channel in program.channels:
            yield channel_group(channel, mesh, replica)
    for reduction in program.reductions:
        if reduction.group is Group.DP:
            for rank in reduction.ranks:
                yield GroupName(Group.DP, mesh.peers(rank))
        elif reduction.group is Group.TIE:
            for replica in range(mesh.dp):
                yield GroupName(Group.TIE, mesh.ranks(replica, reduction.ranks))
    yield everyone(mesh)


def channel_group(channel: Channel, mesh: Mesh, replica: int) -> GroupName:
    """The group of a channel in one replica."""
    return GroupName(channel.direction, mesh.ranks(replica, (channel.source, channel.target)))


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
        """NCCL's settings for a channel, whose kernels spin next to compute; its own choice for all else."""
        if self.device.type != "cuda" or name.purpose not in _CHANNELS:
            return None
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = MAX_BLOCKS
        return options

    def _warm(self, name: GroupName) -> None:
        """Every rank takes its groups in the same order, so the earliest unfinished exchange can always go on."""
        one = torch.ones(1, device=self.device)
        group = self[name]
        if name.purpose not in _CHANNELS:
            dist.all_reduce(one, group=group)
        elif dist.get_rank() == name.ranks[0]:
            _isend(one, name.ranks[1], group).wait()
        else:
            _irecv(one, name.ranks[0], group).wait()

    def __getitem__(self, name: GroupName) -> dist.ProcessGroup:
        group = self._groups[name]
        assert group is not None, f"this rank is no member of {name}"
        return group


class ProcessGroupTransport:
    """`Transport` over `torch.distributed`; ``groups`` must have opened ``group_names(program, mesh)``."""

    def __init__(self, groups: ProcessGroups, program: Program, mesh: Mesh, rank: int) -> None:
        """``rank`` is the global one."""
        replica, pipeline_rank = mesh.replica(rank), mesh.pipeline_rank(rank)
        self._ends: dict[Channel, tuple[int, dist.ProcessGroup]] = {}
        for channel in program.channels:
            if pipeline_rank in (channel.source, channel.target):
                peer = channel.target if pipeline_rank == channel.source else channel.source
                group = groups[channel_group(channel, mesh, replica)]
                self._ends[channel] = (replica * mesh.pp + peer, group)
        self._groups = {Group.NORM: groups[everyone(mesh)]}
        for reduction in program.reductions:
            if reduction.group is Group.DP:
                self._groups[Group.DP] = groups[GroupName(Group.DP, mesh.peers(pipeline_rank))]
            elif reduction.group is Group.TIE and pipeline_rank in reduction.ranks:
                self._groups[Group.TIE] = groups[GroupName(Group.TIE, mesh.ranks(replica, reduction.ranks))]

    def post_recv(self, channel: Channel, tensor: Tensor) -> Work:
        """See `Transport`."""
        return _irecv(tensor, *self._ends[channel])

    def send(self, channel: Channel, tensor: Tensor) -> Work:
        """See `Transport`."""
        return _isend(tensor, *self._ends[channel])

    def all_reduce(self, group: Group, tensor: Tensor) -> Work:
        """See `Transport`."""
        work = dist.all_reduce(tensor, group=self._groups[group], async_op=True)
        assert work is not None, "this rank is no member of the group"
        return work


def _isend(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> Work:
    work = dist.isend(tensor, peer, group)
    assert work is not None, "this rank is no member of the group"
    return work


def _irecv(tensor: Tensor, peer: int, group: dist.ProcessGroup) -> Work:
    work = dist.irecv(tensor, peer, group)
    assert work is not None, "this rank is no member of the group"
    return work


def open_transport(program: Program, mesh: Mesh, rank: int, groups: ProcessGroups) -> ProcessGroupTransport:
    """Make every group of the run, on all ranks, and give this rank's transport."""
    groups.open(group_names(program, mesh))
    return ProcessGroupTransport(groups, program, mesh, rank)
