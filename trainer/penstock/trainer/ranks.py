"""Becoming a rank: device, threads and process group, from what torchrun says in the environment."""

from __future__ import annotations

import datetime as dt
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from penstock.core.errors import UserError
from penstock.core.job import Device

PATIENCE = dt.timedelta(minutes=10)
"""How long a message may take: long enough for a peer's checkpoint, since a lost peer shows at once anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """One process among the ranks of an attempt."""

    rank: int
    num_ranks: int
    device: torch.device
    clock: Callable[[], float]

    @property
    def first(self) -> bool:
        """Whether it speaks for all."""
        return self.rank == 0


@contextmanager
def joined(device: Device, threads: int) -> Iterator[Rank]:
    """The rank that torchrun's environment names, in a process group until the block ends."""
    rank, local, num_ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    chosen = _device(device, local)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=num_ranks, timeout=PATIENCE)
    try:
        yield Rank(rank=rank, num_ranks=num_ranks, device=chosen, clock=_clock(chosen))
    finally:
        dist.destroy_process_group()


def _device(device: Device, local: int) -> torch.device:
    if device is Device.CPU:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            what="cuda is asked for, but no NVIDIA device is here",
            where="spec.resources.device",
            remedy="write device: cpu, or run where a device and its driver are",
        )
    chosen = torch.device("cuda", local % torch.cuda.device_count())
    torch.cuda.set_device(chosen)
    return chosen


def _clock(device: torch.device) -> Callable[[], float]:
    if device.type == "cpu":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised
