"""The in-process `penstock.trainer.comm.Transport`: ranks are threads of one process. For tests.

It is stricter than the real ones. Nothing is buffered: a send is done only once its receive is posted (rendezvous).
Messages of a shape that the receiver does not expect fail, and so do collectives on whose arguments the ranks disagree.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from torch import Tensor

from penstock.core.errors import RunError
from penstock.core.mesh import Mesh
from penstock.core.program import Channel, Program
from penstock.core.schedule import Group
from penstock.trainer.narrow import Widening, narrow, parts_of
from penstock.trainer.units.collectives import NO_SHARDS, Gather, Request, Scatter, Shards, Sum


@dataclass(slots=True)
class LocalWork:
    """One end of a transfer; ``refusal`` says why it failed."""

    channel: Channel
    tensor: Tensor
    timeout_seconds: float
    refusal: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Block until both ends have met; raises `RunError` on a timeout, or if they disagree."""
        if not self.done.wait(self.timeout_seconds):
            raise RunError(f"{self.channel} carried nothing for {self.timeout_seconds:g} s")
        if self.refusal:
            raise RunError(self.refusal)


@dataclass(slots=True)
class LocalMeeting:
    """One collective over ``ranks``, computed in their order, so that the result does not depend on arrival order.

    ``refusal`` says why it failed: the ranks request different things.
    """

    ranks: tuple[int, ...]
    timeout_seconds: float
    requests: dict[int, Request] = field(default_factory=dict)
    refusal: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def finish(self) -> None:
        """Move the data; called by the last rank to arrive."""
        requests = [self.requests[rank] for rank in self.ranks]
        shapes = {_shape(request) for request in requests}
        if len(shapes) == 1:
            _meet(requests)
        else:
            self.refusal = f"ranks {list(self.ranks)} ask for {' and '.join(sorted(shapes))}"
        self.done.set()

    def wait(self) -> None:
        """Block until it is done; raises `RunError` on a timeout, or if ranks request different things."""
        if not self.done.wait(self.timeout_seconds):
            raise RunError(f"not all of ranks {list(self.ranks)} came to a collective in {self.timeout_seconds:g} s")
        if self.refusal:
            raise RunError(self.refusal)


def _shape(request: Request) -> str:
    """Description of the properties on which all ranks have to agree."""
    match request:
        case Gather(tensor) | Sum(tensor):
            shapes = [list(tensor.shape)]
        case Scatter(partial_PH, own_RH):
            shapes = [list(partial_PH.shape), list(own_RH.shape)]
    return f"{request.collective} of {' to '.join(map(str, shapes))}"


def _meet(requests: Sequence[Request]) -> None:
    """Carry out the requests on the tensors of all ranks."""
    _gather([request.all_PH.chunk(len(requests)) for request in requests if isinstance(request, Gather)])
    _scatter([request for request in requests if isinstance(request, Scatter)])
    _sum([request.tensor for request in requests if isinstance(request, Sum)])


def _gather(blocks_of_rank: Sequence[Sequence[Tensor]]) -> None:
    for rank, own_blocks in enumerate(blocks_of_rank):
        for other, blocks in enumerate(blocks_of_rank):
            if other != rank:
                own_blocks[other].copy_(blocks[other])


def _scatter(requests: Sequence[Scatter]) -> None:
    for rank, request in enumerate(requests):
        request.own_RH.copy_(_total([other.partial_PH.chunk(len(requests))[rank] for other in requests]))


def _sum(tensors: Sequence[Tensor]) -> None:
    if tensors:
        total = _total(tensors)
        for tensor in tensors:
            tensor.copy_(total)


def _total(addends: Sequence[Tensor]) -> Tensor:
    """The sum of all addends, in order."""
    total = addends[0].clone()
    for addend in addends[1:]:
        total += addend
    return total


class Fabric:
    """Shared state of the transports of all ranks. A wait of more than ``timeout_seconds`` raises, so deadlocks end."""

    def __init__(self, program: Program, mesh: Mesh, timeout_seconds: float = 30.0) -> None:
        self.program, self.mesh = program, mesh
        self.timeout_seconds = timeout_seconds
        places = product(range(mesh.dp), range(mesh.tp), program.channels)
        self.lines: dict[tuple[int, int, Channel], _Line] = {place: _Line() for place in places}
        self._lock = threading.Lock()
        self._num_meetings: Counter[tuple[tuple[int, ...], int]] = Counter()
        self._meetings: dict[tuple[tuple[int, ...], int], LocalMeeting] = {}

    def transport(self, rank: int) -> LocalTransport:
        """The transport of a global rank."""
        return LocalTransport(self, rank)

    def meet(self, ranks: tuple[int, ...], rank: int, request: Request) -> LocalMeeting:
        """Join the collective of ``ranks``; the last rank to arrive completes it."""
        with self._lock:
            number = self._num_meetings[ranks, rank]
            self._num_meetings[ranks, rank] += 1
            meeting = self._meetings.setdefault((ranks, number), LocalMeeting(ranks, self.timeout_seconds))
            meeting.requests[rank] = request
            is_complete = len(meeting.requests) == len(ranks)
            if is_complete:
                del self._meetings[ranks, number]
        if is_complete:
            meeting.finish()
        return meeting


@dataclass(frozen=True, slots=True)
class LocalShards:
    """One rank's `penstock.trainer.units.collectives.Shards` of a `Fabric`."""

    fabric: Fabric
    rank: int

    def start(self, request: Request) -> LocalMeeting:
        """Start the requested collective."""
        mesh = self.fabric.mesh
        members = mesh.shards(mesh.replica(self.rank), mesh.pipeline_rank(self.rank))
        return self.fabric.meet(members, self.rank, request)


class LocalTransport:
    """One rank's side of a `Fabric`."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self._fabric = fabric
        self._rank = rank
        self._replica, self._shard = fabric.mesh.replica(rank), fabric.mesh.shard(rank)
        self.shards: Shards = LocalShards(fabric, rank) if fabric.mesh.tp > 1 else NO_SHARDS

    def post_recv(self, channel: Channel, tensor: Tensor) -> LocalWork:
        work = LocalWork(channel, tensor, self._fabric.timeout_seconds)
        self._fabric.lines[self._replica, self._shard, channel].add(receive=work)
        return work

    def send(self, channel: Channel, tensor: Tensor) -> LocalWork:
        work = LocalWork(channel, tensor, self._fabric.timeout_seconds)
        self._fabric.lines[self._replica, self._shard, channel].add(send=work)
        return work

    def all_reduce(self, group: Group, tensor: Tensor) -> LocalMeeting:
        return self._fabric.meet(self._members(group), self._rank, Sum(tensor))

    def reduce_scatter(self, tensor: Tensor) -> LocalMeeting:
        own = tensor.chunk(self._fabric.mesh.dp)[self._replica]
        return self._fabric.meet(self._members(Group.DP), self._rank, Scatter(tensor, own))

    def sum_narrow(self, tensor: Tensor, *, scattered: bool) -> Widening:
        """As NCCL does: the sum is rounded after every addend."""
        if scattered:
            own = parts_of(len(tensor), self._fabric.mesh.dp)[self._replica]
            return Widening(self.reduce_scatter(narrow(tensor)), tensor, own)
        return Widening(self.all_reduce(Group.DP, narrow(tensor)), tensor, slice(0, len(tensor)))

    def all_gather(self, tensor: Tensor) -> LocalMeeting:
        return self._fabric.meet(self._members(Group.DP), self._rank, Gather(tensor))

    def sum_copies(self, tensor: Tensor) -> LocalMeeting:
        return self._fabric.meet(self._fabric.mesh.copies(self._rank), self._rank, Sum(tensor))

    def sum_tied(self, pipeline_rank: int, tensor: Tensor) -> LocalMeeting:
        """Sum over the two ranks."""
        mesh = self._fabric.mesh
        pair = tuple(sorted((mesh.rank(self._replica, pipeline_rank, self._shard), self._rank)))
        return self._fabric.meet(pair, self._rank, Sum(tensor))

    def _members(self, group: Group) -> tuple[int, ...]:
        mesh = self._fabric.mesh
        if group is Group.NORM:
            return tuple(range(mesh.num_ranks))
        if group is Group.DP:
            return mesh.peers(mesh.pipeline_rank(self._rank), self._shard)
        assert group is Group.TP, "a tied matrix is summed over pairs"
        return mesh.shards(self._replica, mesh.pipeline_rank(self._rank))


class _Line:
    """Unmatched sends and receives of one channel. The second end of a pair to arrive moves the data."""

    def __init__(self) -> None:
        self._sends: deque[LocalWork] = deque()
        self._receives: deque[LocalWork] = deque()
        self._lock = threading.Lock()

    def add(self, *, send: LocalWork | None = None, receive: LocalWork | None = None) -> None:
        with self._lock:
            self._sends.extend([send] if send else [])
            self._receives.extend([receive] if receive else [])
            while self._sends and self._receives:
                _deliver(self._sends.popleft(), self._receives.popleft())


def _deliver(send: LocalWork, receive: LocalWork) -> None:
    if send.tensor.shape == receive.tensor.shape:
        receive.tensor.copy_(send.tensor)
    else:
        sent_shape, expected_shape = list(send.tensor.shape), list(receive.tensor.shape)
        send.refusal = receive.refusal = f"{send.channel} brings {sent_shape} where {expected_shape} is expected"
    send.done.set()
    receive.done.set()
