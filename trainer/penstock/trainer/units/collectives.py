"""Collectives within a unit's pass.

A pass is a generator. It computes until it needs the other shards (`penstock.core.sharding`), yields a request, and
continues once the request is complete. The caller decides what happens in between: `run_pass` waits, `run_pair` runs a
section of another pass. A pass also yields `TURN` at points where it needs no collective but another pass may continue.
With one shard no pass yields anything.

All shards of a rank run the same passes in the same order, so their collectives match.

Example with two shards and sequence parallelism: a pass of attention computes its norm and yields Gather; then it
projects q, k and v and yields TURN; then it attends, multiplies by the output matrix and yields Scatter. `run_pair`
starts the Gather of pass 1, runs pass 2 up to its own Gather, waits for the first Gather, continues pass 1, and so on.

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
    """A transfer, a collective or a reduction in flight."""

    def wait(self) -> object:
        """Block until it is complete (on CUDA: make the current stream wait). Raises if it failed."""


@dataclass(frozen=True, slots=True, eq=False)
class Gather:
    """Fill ``all_PH`` with the parts of all shards, one block each. This shard's block already holds its part."""

    all_PH: Tensor

    collective = Collective.GATHER


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """Write to ``own_RH`` the sum over shards of this shard's block of ``partial_PH``, added in the order of shards."""

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
"""Yielded by a pass within its compute, so that the other pass of a pair can start its next collective."""

_Result = TypeVar("_Result")

Pass = Generator[Request | None, None, _Result]
"""F, I, W or R of a unit or a stage. It yields requests to the other shards in the order of `unit_collectives`."""


class Shards(Protocol):
    """Collectives of one shard with the other shards of its rank."""

    def start(self, request: Request) -> Work:
        """Start the request. The caller must not touch its tensors until it is complete."""


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
    """Run a pass to its end. Waits for every collective as soon as the pass requests it."""
    while True:
        try:
            request = next(steps)
        except StopIteration as end:
            result: _Result = end.value
            return result
        if request is not None:
            shards.start(request).wait()


def run_pair(first: Pass[object], second: Pass[object], shards: Shards, enter: Callable[[int], None]) -> None:
    """Run two independent passes in turns, so that the collectives of each run during the compute of the other.

    Whenever one pass yields, its request starts. Then the other pass waits for its own last request and continues.
    ``enter`` is called with the pass that continues, 0 or 1, and with 0 at the end, even if a pass fails. The order of
    turns depends on the passes alone, so all shards start the same requests in the same order. On CUDA the host runs
    ahead and the device follows the same order in its streams: a wait blocks the compute stream for one collective, not
    for later ones.
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
