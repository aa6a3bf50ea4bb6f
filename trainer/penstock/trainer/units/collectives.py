"""Collectives in the middle of a unit's pass.

A pass is a generator. It computes up to the place where it needs the other shards (`penstock.core.sharding`), yields
the request, and goes on once it is done. The caller decides what happens meanwhile: `run_pass` waits, `run_pair` runs a
part of another pass. A pass also yields where it needs nobody and another one may go on (`TURN`). With one shard no
pass
yields anything.

All shards of a rank drive the same passes in the same order, so their collectives meet.

Shape letters: T tokens of the slice, P rows of all shards' parts together (T padded to a multiple of tp), R = P / tp
rows of one shard's part, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from penstock.core.errors import RunError
from penstock.core.sharding import Collective


class Work(Protocol):
    """A transfer, a collective or a reduction under way."""

    def wait(self) -> object:
        """Block until it is done (on CUDA: make the current stream wait); raises if it cannot be."""


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Fill ``all_PH`` with all shards' parts, block after block; this shard's own block holds its part already."""

    all_PH: Tensor

    collective = Collective.GATHER


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """Write to ``own_RH`` the sum over shards of its block of ``partial_PH``, added in the order of shards."""

    partial_PH: Tensor
    own_RH: Tensor

    collective = Collective.SCATTER


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """Replace ``tensor`` by its sum over shards."""

    tensor: Tensor

    collective = Collective.SUM


Request = Gather | Scatter | Sum

TURN = None
"""What a pass yields in the middle of its compute, so that of a pair the other one can start its next collective."""

_Result = TypeVar("_Result")

Pass = Generator[Request | None, None, _Result]
"""F, I, W or R of a unit or a stage: yields what it needs of the other shards, in the order of `unit_collectives`."""


class Shards(Protocol):
    """Access of one shard to the others of its rank."""

    def start(self, request: Request) -> Work:
        """Begin what is asked for; the request's tensors must not be touched until it is done."""


class _NoShards:
    def start(self, request: Request) -> Work:
        """Refuse the request."""
        raise RunError(f"a pass of a rank with one shard asks for a {request.collective} over shards")


NO_SHARDS: Shards = _NoShards()
"""For the only shard of a rank, whose passes yield nothing."""


class Waits(Protocol):
    """Measurement of waits for other shards."""

    def wait(self, work: Work) -> None:
        """Wait for a collective and measure how long that takes."""


class WaitingShards:
    """Access to other shards whose waits are measured by ``waits``."""

    def __init__(self, shards: Shards, waits: Waits) -> None:
        self._shards, self._waits = shards, waits

    def start(self, request: Request) -> Work:
        """Start the collective. The wait of the result is measured."""
        return _Waiting(self._shards.start(request), self._waits)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    work: Work
    waits: Waits

    def wait(self) -> None:
        """Block until the collective is done, and measure the time."""
        self.waits.wait(self.work)


def run_pass(steps: Pass[_Result], shards: Shards) -> _Result:
    """Run a pass to its end, waiting for every collective where it is asked for."""
    while True:
        try:
            request = next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result
        if request is not None:
            shards.start(request).wait()


def run_pair(first: Pass[object], second: Pass[object], shards: Shards, enter: Callable[[int], None]) -> None:
    """Run two passes that do not need each other in turns, so that the collectives of each run next to the compute of
    the other.

    Whenever one yields, what it asks for starts, and the other one goes on, first waiting for what it had asked for.
    ``enter`` is told whose turn it is, 0 or 1, and 0 at the end, also where a pass fails. Which turns there are follows
    from the passes alone, so all shards start the same requests in the same order. On CUDA the host runs ahead, and the
    device does the same in its streams: a wait holds the compute stream for one collective, not for those behind it.
    """
    passes = {0: first, 1: second}
    under_way: dict[int, Work] = {}
    turn = 0
    try:
        while passes:
            turn = turn if turn in passes else 1 - turn
            if turn in under_way:
                under_way.pop(turn).wait()
            enter(turn)
            try:
                request = next(passes[turn])
            except StopIteration:
                del passes[turn]
            else:
                if request is not None:
                    under_way[turn] = shards.start(request)
            turn = 1 - turn
    finally:
        enter(0)
