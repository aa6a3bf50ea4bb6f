"""The in-process `penstock.trainer.comm.Transport`: ranks are threads of one process. For tests and small proofs.

It is stricter than the real ones: nothing is buffered, so a send is done only once its receive was posted (rendezvous),
and a message of another shape than its receiver is refused.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass, field

from torch import Tensor

from penstock.core.errors import RunError
from penstock.core.program import Channel, Program
from penstock.core.schedule import Group
from penstock.trainer.comm import Mesh


@dataclass(slots=True)
class LocalWork:
    """One end of a transfer; ``refusal`` says why it cannot be done."""

    channel: Channel
    tensor: Tensor
    timeout_seconds: float
    refusal: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """See `penstock.trainer.comm.Work`."""
        if not self.done.wait(self.timeout_seconds):
            raise RunError(f"{self.channel} carried nothing for {self.timeout_seconds:g} s")
        if self.refusal:
            raise RunError(self.refusal)


@dataclass(slots=True)
class LocalSum:
    """One sum over ``ranks``, in their order, so that it does not depend on who came first."""

    ranks: tuple[int, ...]
    timeout_seconds: float
    tensors: dict[int, Tensor] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)

    def finish(self) -> None:
        """Add; the last rank's part."""
        first, *others = [tensor for _, tensor in sorted(self.tensors.items())]
        for tensor in others:
            first += tensor
        for tensor in others:
            tensor.copy_(first)
        self.done.set()

    def wait(self) -> None:
        """Block until the sum is in every tensor; raises `RunError` if not all ranks come in time."""
        if not self.done.wait(self.timeout_seconds):
            raise RunError(f"not all of ranks {list(self.ranks)} came to a sum in {self.timeout_seconds:g} s")


class Fabric:
    """What the transports of all ranks share. A wait of more than ``timeout_seconds`` raises, so a deadlock ends."""

    def __init__(self, program: Program, mesh: Mesh, timeout_seconds: float = 30.0) -> None:
        self.program, self.mesh = program, mesh
        self.timeout_seconds = timeout_seconds
        self.lines: dict[tuple[int, Channel], _Line] = {
            (replica, channel): _Line() for replica in range(mesh.dp) for channel in program.channels
        }
        self._lock = threading.Lock()
        self._num_sums: Counter[tuple[tuple[int, ...], int]] = Counter()
        self._meetings: dict[tuple[tuple[int, ...], int], LocalSum] = {}

    def transport(self, rank: int) -> LocalTransport:
        """The transport of a global rank."""
        return LocalTransport(self, rank)

    def sum_over(self, ranks: tuple[int, ...], rank: int, tensor: Tensor) -> LocalSum:
        """Meet the other ranks; once all are there the sum is in every tensor."""
        with self._lock:
            number = self._num_sums[ranks, rank]
            self._num_sums[ranks, rank] += 1
            meeting = self._meetings.setdefault((ranks, number), LocalSum(ranks, self.timeout_seconds))
            meeting.tensors[rank] = tensor
            if len(meeting.tensors) == len(ranks):
                del self._meetings[ranks, number]
                meeting.finish()
        return meeting


class LocalTransport:
    """One rank's side of a `Fabric`."""

    def __init__(self, fabric: Fabric, rank: int) -> None:
        self._fabric = fabric
        self._rank = rank
        self._replica = fabric.mesh.replica(rank)

    def post_recv(self, channel: Channel, tensor: Tensor) -> LocalWork:
        """See `penstock.trainer.comm.Transport`."""
        work = LocalWork(channel, tensor, self._fabric.timeout_seconds)
        self._fabric.lines[self._replica, channel].add(receive=work)
        return work

    def send(self, channel: Channel, tensor: Tensor) -> LocalWork:
        """See `penstock.trainer.comm.Transport`."""
        work = LocalWork(channel, tensor, self._fabric.timeout_seconds)
        self._fabric.lines[self._replica, channel].add(send=work)
        return work

    def all_reduce(self, group: Group, tensor: Tensor) -> LocalSum:
        """See `penstock.trainer.comm.Transport`."""
        return self._fabric.sum_over(self._members(group), self._rank, tensor)

    def _members(self, group: Group) -> tuple[int, ...]:
        mesh = self._fabric.mesh
        if group is Group.NORM:
            return tuple(range(mesh.num_ranks))
        if group is Group.DP:
            return mesh.peers(mesh.pipeline_rank(self._rank))
        (reduction,) = [reduction for reduction in self._fabric.program.reductions if reduction.group is group]
        return mesh.ranks(self._replica, reduction.ranks)


class _Line:
    """Sends and receives of one channel that have not met. Whoever comes second moves the data."""

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
        brought, expected = list(send.tensor.shape), list(receive.tensor.shape)
        send.refusal = receive.refusal = f"{send.channel} brings {brought} where {expected} is expected"
    send.done.set()
    receive.done.set()
