"""Times sums over all ranks, the optimizer and the start of a transfer. None needs more memory than it is given."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from penstock.core.job import TrainingSpec
from penstock.core.layout import Precision
from penstock.core.profile import CollectiveRecord, OptimizerRecord
from penstock.planner.memory import state_bytes_per_parameter
from penstock.trainer.clock import Clock
from penstock.trainer.comm import GroupName, ProcessGroups
from penstock.trainer.optimizer import AdamW
from penstock.trainer.parameters import FlatParameters
from penstock.trainer.profiling.units import mean_and_spread

REDUCED_BYTES = (16, 2**18, 2**22)
OPTIMIZER_SIZES = (2**16, 2**19, 2**22, 2**24)
REPEATS = 9

_DECAYED_PER_OTHER = 256
"""Norms and biases are about this much fewer than the elements of matrices."""


def measure_collectives(num_ranks: int, device: torch.device, clock: Clock) -> list[CollectiveRecord]:
    """Sums over all ranks."""
    records = []
    for size in REDUCED_BYTES:
        tensor = torch.zeros(size // 4, device=device)
        seconds, spread = _repeated(partial(dist.all_reduce, tensor), clock)
        records.append(CollectiveRecord(num_ranks=num_ranks, num_bytes=size, seconds=seconds, spread=spread))
    return records


def measure_optimizer(
    precision: Precision, training: TrainingSpec, device: torch.device, clock: Clock, available_bytes: int
) -> list[OptimizerRecord]:
    """The norm, clipping and AdamW over flat buffers, all ranks at once.

    Cost grows linearly with size, so a few sizes tell that of any stage, and none depends on the model.
    """
    records = []
    for count in optimizer_sizes(precision, available_bytes):
        parameters = FlatParameters(count, count - count // _DECAYED_PER_OTHER, precision=precision, device=device)
        parameters.master_flat.zero_()
        optimizer = AdamW(parameters, training)
        seconds, spread = _repeated(partial(_step, parameters, optimizer), clock)
        records.append(OptimizerRecord(num_parameters=count, seconds=seconds, spread=spread))
    return records


def optimizer_sizes(precision: Precision, available_bytes: int) -> tuple[int, ...]:
    """Elements of the buffers to measure: those whose whole state fits, and the smallest in any case."""
    per_parameter = state_bytes_per_parameter(precision)
    smallest, *others = OPTIMIZER_SIZES
    return smallest, *(count for count in others if count * per_parameter <= available_bytes)


def _step(parameters: FlatParameters, optimizer: AdamW) -> None:
    norm = float(torch.linalg.vector_norm(parameters.gradient_flat))  # torch.dot takes at most 2^31 elements on CUDA
    optimizer.step(0, norm**2)


def measure_instruction(groups: ProcessGroups, rank: int, num_ranks: int, clock: Clock) -> float:
    """Seconds that starting a send and a receive keeps a rank, waiting for the peer apart; zero for a single rank."""
    if num_ranks < 2:
        return 0.0
    pair = (0, 1)
    groups.open(iter([GroupName("F", pair)]))
    if rank not in pair:
        return math.nan
    group, peer = groups[GroupName("F", pair)], 1 - rank
    sent, received = torch.zeros(1, device=groups.device), torch.zeros(1, device=groups.device)
    taken = []
    for _ in range(50):
        begin = clock()
        works = (dist.irecv(received, peer, group), dist.isend(sent, peer, group))
        taken.append(clock() - begin)
        for work in works:
            assert work is not None
            work.wait()
    return statistics.median(taken)


def _repeated(action: Callable[[], object], clock: Clock) -> tuple[float, float]:
    """Mean and spread of an action that all ranks begin together."""
    taken = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        begin = clock()
        action()
        taken.append(clock() - begin)
    return mean_and_spread(taken[1:])
