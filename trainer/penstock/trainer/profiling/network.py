"""Times collectives over ranks, the optimizer, and the host's start of a transfer and of a recorded action. Stays
within a given amount of memory.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.job import OptimizerSpec, TrainingSpec
from penstock.core.layout import Precision
from penstock.core.mesh import Mesh
from penstock.core.moments import MomentType
from penstock.core.profile import CollectiveRecord, OptimizerRecord
from penstock.core.replicas import ReductionType, Section
from penstock.core.sharding import Collective
from penstock.planner.memory import state_bytes_per_parameter
from penstock.trainer.clock import Clock
from penstock.trainer.collectives import gather
from penstock.trainer.comm import GroupName, ProcessGroups
from penstock.trainer.graphs import Graphs, can_record
from penstock.trainer.memory import release_unused
from penstock.trainer.optimizer import AdamW
from penstock.trainer.parameters import FlatParameters
from penstock.trainer.profiling.units import mean_and_spread
from penstock.trainer.replicas import Replicas
from penstock.trainer.squared_norm import SquaredNorm, Stretch
from penstock.trainer.units.collectives import Work

REDUCED_BYTES = (16, 2**18, 2**22)
OPTIMIZER_SIZES = (2**16, 2**19, 2**22, 2**24)
LONGEST_SUM_SECONDS = 0.25
"""After a collective that took longer, no larger ones are measured."""

REPEATS = 9

_KERNELS = 256
"""Approximate number of kernels of an action of some layers. Each adds nanoseconds to the launch of a graph."""

_DECAYED_PER_OTHER = 256
"""Approximate ratio of the elements of matrices to those of norms and biases."""


def measure_collectives(
    num_ranks: int, device: torch.device, clock: Clock, gradient_bytes: int, available_bytes: int
) -> list[CollectiveRecord]:
    """Measure the collectives of replicas for every group size in `group_sizes`, with all groups of a size at once.

    The collectives are sums of gradients and, for replicas that divide the optimizer's state, reduce-scatters of
    gradients and all-gathers of weights. Their sizes go up to that of a gradient in such a group, as long as they fit
    in memory and take at most `LONGEST_SUM_SECONDS`.
    """
    records = []
    for size in group_sizes(num_ranks):
        mesh = Mesh(dp=size, pp=num_ranks // size)
        groups = [dist.new_group(list(mesh.peers(place))) for place in range(mesh.pp)]
        own = groups[mesh.pipeline_rank(dist.get_rank())]
        assert isinstance(own, dist.ProcessGroup), "a rank is in the group of its own place"
        summed_bytes = gradient_bytes // mesh.pp
        sizes = reduced_sizes(summed_bytes, available_bytes)
        for (collective, reduction_type), start in _collectives(own, device).items():
            is_sum = collective is Collective.SUM
            own_sizes = sizes if is_sum else sizes_of_halves(sizes, summed_bytes)
            for num_bytes, seconds, spread in _timed(start, own_sizes, size, device, clock):
                records.append(
                    CollectiveRecord(
                        num_ranks=size,
                        num_bytes=num_bytes,
                        seconds=seconds,
                        spread=spread,
                        collective=collective,
                        reduction_type=reduction_type,
                    )
                )
        dist.destroy_process_group(own)
    return records


def _collectives(
    group: dist.ProcessGroup, device: torch.device
) -> dict[tuple[Collective, ReductionType], Callable[[Tensor], Work]]:
    """Functions that start each collective on a tensor, as training does."""
    replicas = Replicas(group, device)
    return {
        (Collective.SUM, ReductionType.FP32): replicas.all_reduce,
        (Collective.SCATTER, ReductionType.FP32): replicas.reduce_scatter,
        (Collective.GATHER, ReductionType.FP32): replicas.all_gather,
        (Collective.SUM, ReductionType.BF16): partial(replicas.sum_narrow, scattered=False),
        (Collective.SCATTER, ReductionType.BF16): partial(replicas.sum_narrow, scattered=True),
    }


def _timed(
    start: Callable[[Tensor], Work], sizes: Sequence[int], num_ranks: int, device: torch.device, clock: Clock
) -> Iterator[tuple[int, float, float]]:
    """(bytes, seconds, spread) of a collective, up to the first that takes over `LONGEST_SUM_SECONDS` on any rank."""
    for num_bytes in sizes:
        tensor = torch.zeros(max(num_bytes // 4 // num_ranks, 1) * num_ranks, device=device)
        seconds, spread = _repeated(partial(_finish, start, tensor), clock)
        yield num_bytes, seconds, spread
        del tensor  # otherwise it would still be allocated when the next one is created
        release_unused(device)
        if max(gather(seconds)) > LONGEST_SUM_SECONDS:
            return


def _finish(start: Callable[[Tensor], Work], tensor: Tensor) -> None:
    start(tensor).wait()


def group_sizes(num_ranks: int) -> tuple[int, ...]:
    """Numbers of replicas to measure: the powers of two above 1 that divide the number of ranks, and that number."""
    powers = [1 << power for power in range(1, num_ranks.bit_length())]
    return tuple(sorted({*(size for size in powers if num_ranks % size == 0), num_ranks} - {1}))


def reduced_sizes(gradient_bytes: int, available_bytes: int) -> tuple[int, ...]:
    """Fixed sizes, then by factors of 8 up to ``gradient_bytes`` or ``available_bytes``, in whole elements."""
    sizes, largest = list(REDUCED_BYTES), min(gradient_bytes, available_bytes)
    while sizes[-1] < largest:
        sizes.append(min(8 * sizes[-1], largest // 4 * 4))
        if sizes[-1] <= sizes[-2]:
            return tuple(sizes[:-1])
    return tuple(sizes)


def sizes_of_halves(sizes: Sequence[int], gradient_bytes: int) -> tuple[int, ...]:
    """The sizes of sums that are measured for reduce-scatter and all-gather, too.

    The first size is left out, since no such message is as small. One size of at least the gradient's is enough.
    """
    last = bisect_left(sizes, gradient_bytes)
    return tuple(sizes[1 : max(last, 1) + 1])


def measure_optimizer(
    precision: Precision, training: TrainingSpec, device: torch.device, clock: Clock, available_bytes: int
) -> list[OptimizerRecord]:
    """Measure norm, clipping and AdamW over flat buffers, on all ranks at once, with moments of each type.

    The cost is linear in the size, so a few sizes predict the cost of any stage. The sizes do not depend on the model.
    """
    records = []
    for moment_type, count in itertools.product(MomentType, optimizer_sizes(precision, available_bytes)):
        of_type = replace(training, optimizer=OptimizerSpec(moment_type=moment_type))
        section = Section.whole(count, count - count // _DECAYED_PER_OTHER)
        parameters = FlatParameters([section], precision=precision, device=device)
        for master in parameters.masters:
            master.zero_()
        norm = SquaredNorm([Stretch(parameters.gradient_flat, 0, 0, count)], device)
        optimizer = AdamW(parameters, of_type)
        seconds, spread = _repeated(partial(_step, norm, optimizer), clock)
        records.append(OptimizerRecord(num_parameters=count, seconds=seconds, spread=spread, moment_type=moment_type))
        del parameters, norm, optimizer
        release_unused(device)
    return records


def optimizer_sizes(precision: Precision, available_bytes: int) -> tuple[int, ...]:
    """Numbers of elements to measure: those whose state fits, and always the smallest."""
    per_parameter = state_bytes_per_parameter(precision)
    smallest, *others = OPTIMIZER_SIZES
    return smallest, *(count for count in others if count * per_parameter <= available_bytes)


def _step(norm: SquaredNorm, optimizer: AdamW) -> None:
    optimizer.step(0, norm.total(norm.limbs()))


def measure_instruction(groups: ProcessGroups, rank: int, num_ranks: int) -> float:
    """Seconds of host time to start a send and a receive, without waiting for the peer or the device. Zero for a single
    rank; NaN on all ranks but the first two, which measure.
    """
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
        begin = time.perf_counter()
        works = (dist.irecv(received, peer, group), dist.isend(sent, peer, group))
        taken.append(time.perf_counter() - begin)
        for work in works:
            assert work is not None
            work.wait()
    return statistics.median(taken)


def measure_replay(device: torch.device) -> float:
    """Seconds of host time to replay a recorded action (`penstock.trainer.graphs`). Zero where none is recorded."""
    if not can_record(device):
        return 0.0
    tensor, graphs = torch.zeros(1, device=device), Graphs(device)

    def action() -> None:
        for _ in range(_KERNELS):
            tensor.add_(1)

    graphs.warm_up(action)
    replay, taken = graphs.record(action), []
    for _ in range(50):
        begin = time.perf_counter()
        replay()
        taken.append(time.perf_counter() - begin)
        torch.cuda.synchronize(device)
    return statistics.median(taken)


def _repeated(action: Callable[[], object], clock: Clock) -> tuple[float, float]:
    """Mean and spread of the time of an action that all ranks start at the same time."""
    taken = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        begin = clock()
        action()
        taken.append(clock() - begin)
    return mean_and_spread(taken[1:])
