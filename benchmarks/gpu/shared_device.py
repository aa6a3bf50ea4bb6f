"""One rank of `penstock.trainer` where all ranks share one CUDA device.

    python -m benchmarks.gpu.shared_device ARGS

NCCL refuses two ranks on one device. Here messages and sums go through the host, over gloo. Everything else is the
product's own code. So a machine with one GPU can profile, plan and train a pipeline.

It does not cover NCCL, NCCL's kernels during compute, and memory, since each rank counts the memory of both.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.trainer import __main__ as trainer
from penstock.trainer import graphs, worker
from penstock.trainer.comm import GroupName, ProcessGroups

_isend, _irecv, _all_reduce, _init_process_group = dist.isend, dist.irecv, dist.all_reduce, dist.init_process_group


class HostGroups(ProcessGroups):
    """Process groups of the host only."""

    def _backend(self, name: GroupName) -> str:
        return "gloo"

    def _options(self, name: GroupName) -> None:
        return None


class Arrival:
    """A message that is received in host memory and copied to the device when it is waited for."""

    def __init__(self, work: Any, host: Tensor, tensor: Tensor) -> None:
        self._work, self._host, self._tensor = work, host, tensor

    def wait(self) -> None:
        """Wait for the message, then copy it to the device."""
        self._work.wait()
        self._tensor.copy_(self._host)


def isend(tensor: Tensor, dst: int, group: Any = None) -> Any:
    """Send a copy in host memory."""
    return _isend(tensor.cpu(), dst, group)


def irecv(tensor: Tensor, src: int, group: Any = None) -> Any:
    """Receive into host memory first."""
    host = torch.empty_like(tensor, device="cpu")
    return Arrival(_irecv(host, src, group), host, tensor)


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Sum a copy in host memory."""
    host = tensor.cpu()
    arrival = Arrival(_all_reduce(host, op, group, async_op=True), host, tensor)
    return arrival if async_op else arrival.wait()


def init_process_group(backend: str, device_id: torch.device | None = None) -> None:
    """Initialise groups of the host, whatever backend is requested."""
    _init_process_group("gloo")


def share_device() -> None:
    """Let every rank use device 0, and send messages through the host."""
    changes: dict[Any, dict[str, Any]] = {
        dist: {
            "isend": isend,
            "irecv": irecv,
            "all_reduce": all_reduce,
            "init_process_group": init_process_group,
        },
        worker: {"own_device": lambda rank, count: torch.device("cuda", 0), "ProcessGroups": HostGroups},
        graphs: {"bytes_outside_allocator": lambda device: 0},  # allocations of other ranks would count as graphs
    }
    for module, functions in changes.items():
        for name, function in functions.items():
            setattr(module, name, function)


if __name__ == "__main__":
    share_device()
    sys.exit(trainer.main())
