"""Times sums over all ranks, the optimizer and the start of a transfer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from penstock.core.job import TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import ModelSpec
from penstock.core.profile import CollectiveRecord, OptimizerRecord
from penstock.trainer.clock import Clock
from penstock.trainer.comm import GroupName, ProcessGroups
from penstock.trainer.optimizer import AdamW
from penstock.trainer.parameters import StageParameters
from penstock.trainer.profiling.units import mean_and_spread

REDUCED_BYTES = (16, 2**18, 2**22)
REPEATS = 9


def measure_collectives(num_ranks: int, device: torch.device, clock: Clock) -> list[CollectiveRecord]:
    """Sums over all ranks."""
    records = []
    for size in REDUCED_BYTES:
        tensor = torch.zeros(size // 4, device=device)
        seconds, spread = _repeated(partial(dist.all_reduce, tensor), clock)
        records.append(CollectiveRecord(num_ranks=num_ranks, num_bytes=size, seconds=seconds, spread=spread))
    return records


def measure_optimizer(
    spec: ModelSpec, precision: Precision, training: TrainingSpec, device: torch.device, clock: Clock
) -> list[OptimizerRecord]:
    """Clipping and AdamW over one block, and over as many as fit half the model, all ranks at once."""
    records = []
    for blocks in sorted({1, max(spec.layers // 2, 1)}):
        parameters = StageParameters(spec, 1, 1 + 2 * blocks, precision=precision, device=device, seed=0)
        optimizer = AdamW(parameters, training)
        seconds, spread = _repeated(partial(_step, parameters, optimizer), clock)
        count = parameters.master_flat.numel()
        records.append(OptimizerRecord(num_parameters=count, seconds=seconds, spread=spread))
    return records


def _step(parameters: StageParameters, optimizer: AdamW) -> None:
    norm = float(torch.dot(parameters.gradient_flat, parameters.gradient_flat))
    optimizer.step(0, norm)


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
