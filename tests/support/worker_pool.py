"""A pool of processes joined by gloo, started once and used by many tests.

Processes are forked by a server that has imported torch and started no thread, so that a rank costs milliseconds and
little memory. A pool whose rank raised is not used again: the others may wait for a message that never comes.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from penstock.core.mesh import Mesh
from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.trainer import gloo
from penstock.trainer.comm import GroupName, ProcessGroups, group_names

T = TypeVar("T")

CPU = torch.device("cpu")
_PRELOADED = [
    "penstock.trainer.checkpoint",  # three seconds of processor time, which each rank would need by itself
    "penstock.trainer.rehearse",
    "penstock.trainer.runtime",
    "tests.support.worker_pool",
    "torch.distributed",
]


@dataclass
class PoolRank:
    """What a function that runs in the pool is given: its rank, and the groups opened so far."""

    rank: int
    groups: ProcessGroups


class WorkerPool:
    """``num_ranks`` processes."""

    def __init__(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self._store = store
        self._connections: list[Connection[Any, Any]] = []
        self._processes = []
        self.broken = False
        for rank in range(num_ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, num_ranks, store.port, there), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., T], *arguments: Any, num_ranks: int | None = None) -> list[T]:
        """Call ``function(PoolRank, *arguments)`` on the first ``num_ranks`` ranks, or all; their results.

        A call that is cut off leaves answers behind that the next one would take for its own: the pool is broken.
        """
        self.broken = True
        connections = self._connections[:num_ranks]
        for connection in connections:
            connection.send((function, arguments))
        answers = [connection.recv() for connection in connections]
        failures = [f"rank {rank}:\n{failure}" for rank, (failure, _) in enumerate(answers) if failure]
        self.broken = bool(failures)
        assert not failures, "\n".join(failures)
        return [result for _, result in answers]

    def connect(self, plan: Plan, program: Program) -> Mesh:
        """Open the plan's process groups; every rank of the pool takes part."""
        mesh = plan.mesh
        self.open(program, mesh)
        return mesh

    def open(self, program: Program, mesh: Mesh) -> None:
        """Open the groups that the program needs on this mesh."""
        self.run(_open, list(group_names(program, mesh)))

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if not self.broken:
                process.join(5)
            if process.is_alive():
                process.kill()


def _open(me: PoolRank, names: Sequence[GroupName]) -> None:
    me.groups.open(iter(names))


def _serve(rank: int, num_ranks: int, port: int, connection: Connection[Any, Any]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group(gloo.backend(), store=store, rank=rank, world_size=num_ranks)
    me = PoolRank(rank, ProcessGroups(CPU))
    while True:
        try:
            function, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        try:
            connection.send(("", function(me, *arguments)))
        except Exception:
            connection.send((traceback.format_exc(), None))
