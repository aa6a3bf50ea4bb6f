"""Sums of gradients over replicas on the host: each replica ends with the sum of its own part, or with all sums.

gloo's reduce-scatter copies the whole tensor. Here all pairs of replicas exchange parts in rounds of at most
`ROUND_BYTES`. Each replica adds the pieces of a round, in the order of replicas, to its own part in place. The next
round is exchanged while one is added, so the memory of two rounds is enough. A replica sends and receives (n - 1) / n
of the tensor, as in a ring. The result depends on the addends only. For two replicas it equals the all-reduce's.

Example: 4 replicas and a tensor of 12 elements, so a part has 3. Replica 1 owns elements 3 to 5. It receives elements
3 to 5 of replicas 0, 2 and 3, sends them theirs, and stores g0 + g1 + g2 + g3, added from left to right. It sends 9
elements and receives 9: 3/4 of 12.

The third round reuses the memory of the first, so it can start only after the first is added up. A separate thread
adds, as gloo's threads do for its collectives, while the rank computes. NumPy adds on that thread alone; torch would
start a team of threads. Requests run in the order in which they were started, which is the same on all replicas.

In bf16 (`penstock.trainer.narrow`) the same thread also narrows, gathers and widens; torch uses no team for so few
elements at a time. If every replica gets all sums, parts need not be equally large, and each replica sends its sums to
all others at the end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.replicas import ROUND_BYTES as ROUND_BYTES
from penstock.trainer.narrow import add_narrow, narrow, parts_of, widen
from penstock.trainer.shards import irecv, isend
from penstock.trainer.units.collectives import Work


class HostReduceScatter:
    """Sums over ``group``, whose members are the replicas in their order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._replica, self._num_replicas = dist.get_rank(group), dist.get_world_size(group)
        ranks = dist.get_process_group_ranks(group)
        self._others = {replica: rank for replica, rank in enumerate(ranks) if replica != self._replica}
        self._memory = torch.empty(0)
        self._thread = _Thread()

    def start(self, flat: Tensor) -> Work:
        """Begin to replace this replica's part of ``flat``, one of equal ones, by its sum over replicas."""
        return _Started(self._thread.run(lambda: self._scatter(flat.chunk(self._num_replicas))))

    def start_narrow(self, flat: Tensor, *, scattered: bool) -> Work:
        """Begin to replace ``flat`` of fp32 by its sums over replicas, which travel in bf16. If they are ``scattered``,
        only this replica's part of ``flat``, one of equal ones, is defined afterwards.
        """
        return _Started(self._thread.run(lambda: self._run_narrow(flat, scattered)))

    def _run_narrow(self, flat: Tensor, scattered: bool) -> None:
        narrowed, places = narrow(flat), parts_of(len(flat), self._num_replicas)
        parts = [narrowed[place] for place in places]
        self._scatter(parts)
        if not scattered:
            self._gather(parts)
        widen(flat, places[self._replica] if scattered else slice(0, len(flat)))

    def _gather(self, parts: Sequence[Tensor]) -> None:
        """Send this replica's part to all others, and receive theirs."""
        works = []
        for replica, rank in self._others.items():
            if len(parts[replica]):
                works.append(irecv(parts[replica], rank, self._group))
            if len(parts[self._replica]):
                works.append(isend(parts[self._replica], rank, self._group))
        for work in works:
            work.wait()

    def _scatter(self, parts: Sequence[Tensor]) -> None:
        """Replace this replica's part by its sum. The first part is as large as any."""
        count = max(ROUND_BYTES // (len(self._others) * parts[0].itemsize), 1)
        rounds = self._rounds(parts[0].dtype, min(count, len(parts[0])))
        under_way: Callable[[], None] | None = None
        for number, start in enumerate(range(0, len(parts[0]), count)):
            pieces = [part[start : start + count] for part in parts]
            began = self._begin(pieces, rounds[number % len(rounds)])
            if under_way is not None:
                under_way()
            under_way = began
        if under_way is not None:
            under_way()

    def _rounds(self, dtype: torch.dtype, count: int) -> Tensor:
        """Memory into which two rounds are received, [2, other replicas, elements]. It is kept for the next tensor."""
        shape = (2, len(self._others), count)
        if self._memory.dtype != dtype or self._memory.numel() < 2 * len(self._others) * count:
            self._memory = torch.empty(shape, dtype=dtype)
        return self._memory.view(-1)[: 2 * len(self._others) * count].view(shape)

    def _begin(self, pieces: Sequence[Tensor], received: Tensor) -> Callable[[], None]:
        """Start the exchange of one round. The returned function waits for it and adds the pieces."""
        own = pieces[self._replica]
        addends = {self._replica: own}
        works: list[Work] = []
        for (replica, rank), memory in zip(self._others.items(), received, strict=True):
            addends[replica] = memory[: len(own)]
            if len(own):
                works.append(irecv(addends[replica], rank, self._group))
            if len(pieces[replica]):
                works.append(isend(pieces[replica], rank, self._group))
        in_order = [addends[replica] for replica in range(self._num_replicas)]

        def end() -> None:
            for work in works:
                work.wait()
            if own.dtype == torch.bfloat16:
                add_narrow(in_order, own)
            else:
                self._add([addend.numpy() for addend in in_order])

        return end

    def _add(self, addends: Sequence[npt.NDArray[Any]]) -> None:
        """Add to this replica's addend, in the order of replicas."""
        total = addends[0]
        for replica, addend in enumerate(addends[1:], start=1):
            total = np.add(total, addend, out=addends[self._replica if replica >= self._replica else 0])


class _Started:
    """A sum that the thread runs."""

    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> None:
        """Block until it is complete; raises its error if it failed."""
        self._done.result()


class _Thread:
    """Runs tasks one after the other in a daemon thread, which does not delay the end of the process."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, task: Callable[[], None]) -> Future[None]:
        """Queue a task behind the earlier ones, and return its future."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="reduce-scatter", daemon=True)
            self._thread.start()
        done: Future[None] = Future()
        self._tasks.put((task, done))
        return done

    def _work(self) -> None:
        while True:
            task, done = self._tasks.get()
            try:
                task()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)
            del task, done  # otherwise their tensors would stay allocated until the next task
