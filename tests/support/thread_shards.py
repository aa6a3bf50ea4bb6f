"""The shards of one rank as threads of one process, which meet at every collective."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from penstock.trainer.units.collectives import Gather, Request, Scatter

T = TypeVar("T")
_SECONDS = 60.0


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


@dataclass
class ThreadShard:
    """`penstock.trainer.units.collectives.Shards` of one thread; ``requests`` are all that it has asked for."""

    rank: ThreadShards
    index: int
    requests: list[Request] = field(default_factory=list)

    def start(self, request: Request) -> _Done:
        """Meet the others. Nothing is written before all parts were read, as a true exchange may do it late."""
        self.requests.append(request)
        result = self.rank.exchange(self.index, request)
        _target(request).copy_(result)
        return _Done()


class ThreadShards:
    """What ``tp`` threads meet at. Sums are in the order of shards."""

    def __init__(self, tp: int) -> None:
        self.members = [ThreadShard(self, index) for index in range(tp)]
        self._barrier = threading.Barrier(tp, timeout=_SECONDS)
        self._requests: dict[int, Request] = {}

    def exchange(self, index: int, request: Request) -> Tensor:
        """What the request's target shall hold; refuses requests that differ in kind, shape or type."""
        self._requests[index] = request
        self._barrier.wait()
        requests = [self._requests[each] for each in range(len(self.members))]
        alike = {(type(each), tuple(_source(each).shape), _source(each).dtype) for each in requests}
        assert len(alike) == 1, f"shards ask for different things: {alike}"
        result = self._result(index, requests)
        self._barrier.wait()
        return result

    def _result(self, index: int, requests: list[Request]) -> Tensor:
        sources = [_source(request) for request in requests]
        assert all(source.is_contiguous() for source in sources)
        if isinstance(requests[index], Gather):
            return torch.cat([source.chunk(len(sources))[each] for each, source in enumerate(sources)])
        if isinstance(requests[index], Scatter):
            assert sources[0].shape[0] == len(sources) * _target(requests[index]).shape[0]
            sources = [source.chunk(len(sources))[index] for source in sources]
        total = sources[0].clone()
        for source in sources[1:]:
            total += source
        return total

    def run(self, act: Callable[[ThreadShard], T]) -> list[T]:
        """Call ``act`` for all shards at once; their results, or the first error that is not another one's."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def one(member: ThreadShard) -> None:
            try:
                results[member.index] = act(member)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(member,)) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return [results[index] for index in range(len(self.members))]


def _source(request: Request) -> Tensor:
    """What the request reads."""
    if isinstance(request, Gather):
        return request.all_PH
    return request.partial_PH if isinstance(request, Scatter) else request.tensor


def _target(request: Request) -> Tensor:
    """What the request writes."""
    return request.own_RH if isinstance(request, Scatter) else _source(request)
