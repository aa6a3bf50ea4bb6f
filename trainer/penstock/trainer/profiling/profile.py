"""Measures a Profile. All ranks take part, and the first one returns it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from penstock.core.errors import UserError
from penstock.core.job import JobSpec
from penstock.core.layout import num_parameters
from penstock.core.mesh import Mesh
from penstock.core.profile import MemoryRecord, Profile, TransientRecord, UnitRecord
from penstock.core.profile_matching import (
    batches_to_measure,
    head_degrees_to_measure,
    largest_microbatch,
    model_digest,
    tp_degrees_to_measure,
)
from penstock.core.sharding import Sharding
from penstock.trainer.clock import Taken, action_timer, device_clock
from penstock.trainer.collectives import concatenated, gather
from penstock.trainer.comm import everyone, shard_group
from penstock.trainer.graphs import most_bytes
from penstock.trainer.memory import held_bytes, release_unused
from penstock.trainer.profiling.grid import Point, profile_grid, sparse_grid, transient_grid
from penstock.trainer.profiling.links import measure_links, message_sizes
from penstock.trainer.profiling.machine import fullest_host, hosts_of, joined_name, machine_key, this_place
from penstock.trainer.profiling.network import (
    measure_collectives,
    measure_instruction,
    measure_optimizer,
    measure_replay,
)
from penstock.trainer.profiling.parts import Part, Workload, choose_parts
from penstock.trainer.profiling.units import Key, Samples, UnitTimer, mean_and_spread, steady_rounds
from penstock.trainer.shards import shards_of
from penstock.trainer.units.collectives import NO_SHARDS, Shards
from penstock.trainer.worker import Worker

METHOD = "actions of one-unit stages, several blocks in turn; means of steady rounds, one rank alone and all by turns"

MOST_ROUNDS = 2
"""Largest number of rounds, as a multiple of the steady rounds that a point needs."""

MOST_UNEVEN = 1.2
"""Ranks count as equally fast up to this ratio of their times: cores of a shared machine drift by a tenth."""

_KERNELS_SHARE = 8
"""One part in this many of the available memory is reserved for allocations of kernels."""

Progress = Callable[[int, int], None]
"""Called with the number of completed points and the number of all points."""


def ignore(done: int, total: int) -> None:
    """`Progress` that does nothing."""


def measure(spec: JobSpec, worker: Worker, now: float, progress: Progress = ignore) -> Profile | None:
    """Measure and return the Profile on the first rank, None on the others. Collective.

    ``now`` is in seconds since the epoch. Only the first rank calls ``progress``.
    """
    load = os.getloadavg()[0]
    clock, groups = device_clock(worker.device), worker.groups
    places = gather(this_place())
    hosts = hosts_of(places)
    nodes = [place.name for place in places]
    available = min(gather(_available_bytes(spec, worker.device)))
    sizes = message_sizes(min(_largest_message_bytes(spec), available))
    links = concatenated(measure_links(worker.device, worker.rank, nodes, clock, sizes))
    transfer = measure_instruction(groups, worker.rank, worker.num_ranks)
    overhead = gather(transfer + measure_replay(worker.device))
    collectives = measure_collectives(worker.num_ranks, worker.device, clock, _gradient_bytes(spec), available)
    crowded = hosts[worker.rank] == fullest_host(hosts)
    degrees = tp_degrees_to_measure(spec, hosts)
    parts = parts_to_measure(spec, degrees, worker.num_ranks, available)
    units, passes_memory, slowness = _measure_units(
        parts, worker, progress if worker.rank == 0 else ignore, crowded=crowded
    )
    release_unused(worker.device)
    optimizer = measure_optimizer(spec.training.precision, spec.training, worker.device, clock, available)
    groups.open(iter([everyone(Mesh(dp=1, pp=worker.num_ranks))]))  # every plan opens this group
    constant, graphs = max(gather(_constant_bytes(worker))), min(gather(most_bytes(worker.device)))
    if worker.rank != 0:
        return None
    return Profile(
        key=dataclasses.replace(machine_key(worker.device, spec.resources.threads_per_rank), host=joined_name(places)),
        model_digest=model_digest(spec.model, spec.data.sequence_length),
        precision=spec.training.precision,
        measured_at=now,
        num_ranks=worker.num_ranks,
        units=tuple(units),
        links=tuple(links),
        collectives=tuple(collectives),
        optimizer=tuple(optimizer),
        memory=dataclasses.replace(passes_memory, constant_bytes=constant, most_graph_bytes=graphs),
        action_overhead_seconds=statistics.median(seconds for seconds in overhead if not math.isnan(seconds)),
        load=load,
        method=METHOD,
        hosts=hosts if len(set(hosts)) > 1 else (),
        sequence_parallel=spec.parallelism.is_sequence_parallel or max(degrees) == 1,
        only_tp=spec.parallelism.tp,
        slowness=slowness,
    )


def _available_bytes(spec: JobSpec, device: torch.device) -> int:
    """Bytes that measurements on this rank may add to those it holds now, without a reserve for kernels."""
    left = spec.resources.memory_per_rank - held_bytes(device)
    return left - max(left, 0) // _KERNELS_SHARE


def _largest_message_bytes(spec: JobSpec) -> int:
    """Bytes of the hidden state of the largest micro-batch in one slice."""
    sequences = largest_microbatch(spec.training.global_batch, spec.data.sequence_length)
    return sequences * spec.data.sequence_length * spec.model.hidden * spec.training.precision.compute_bytes


def _gradient_bytes(spec: JobSpec) -> int:
    """Bytes of the gradient of the whole model, which replicas of one rank sum."""
    return num_parameters(spec.model) * spec.training.precision.accumulate_bytes


def parts_to_measure(spec: JobSpec, degrees: Sequence[int], num_ranks: int, available_bytes: int) -> list[Part]:
    """The parts to measure within ``available_bytes``. A divided head that does not fit is left out, unless it is
    pinned.

    Raises `UserError` if anything else does not fit.
    """
    parts: list[Part] = []
    for load in _workloads(spec, degrees, num_ranks):
        try:
            parts += choose_parts(load, available_bytes)
        except UserError:
            if load.model.head_parts in (1, spec.parallelism.head_parts):
                raise
    return parts


def _workloads(spec: JobSpec, degrees: Sequence[int], num_ranks: int) -> Iterator[Workload]:
    """Workloads of all units at each degree of tensor parallelism, with more points at the first, and of divided heads.

    Passes of a divided head are as smooth in tokens as others and do not depend on the prefix.
    """
    length, batches = spec.data.sequence_length, batches_to_measure(spec.training.global_batch)
    largest = largest_microbatch(spec.training.global_batch, length)
    sparse = sparse_grid(length, batches, largest)
    for tp in degrees:
        whole = Workload(
            model=spec.model,
            precision=spec.training.precision,
            sequence_length=length,
            timed=profile_grid(length, batches, largest) if tp == degrees[0] else sparse,
            weighed=transient_grid(length, batches),
            sharding=Sharding(tp, spec.parallelism.is_sequence_parallel),
        )
        yield whole
        of_head = tuple(point for point in sparse if point.whole)
        for head_parts in head_degrees_to_measure(spec, tp, num_ranks):
            yield dataclasses.replace(whole, model=spec.model.divided(head_parts), timed=of_head)


@dataclass(frozen=True, slots=True)
class _ShardPlace:
    """A rank's place in its group of shards. The first group also measures alone; ranks without one do not measure."""

    shards: Shards
    shard: int
    is_first: bool
    is_member: bool


def _join_shards(worker: Worker, tp: int) -> _ShardPlace:
    """Join this rank's group of ``tp`` shards. Collective."""
    if tp == 1:
        return _ShardPlace(NO_SHARDS, 0, is_first=worker.rank == 0, is_member=True)
    mesh = Mesh(dp=worker.num_ranks // tp, tp=tp, pp=1)
    worker.groups.open(shard_group(mesh, first) for first in range(0, mesh.num_ranks, tp))
    if worker.rank >= mesh.num_ranks:
        return _ShardPlace(NO_SHARDS, 0, is_first=False, is_member=False)
    shards = shards_of(worker.groups[shard_group(mesh, worker.rank)], worker.device)
    return _ShardPlace(shards, mesh.shard(worker.rank), is_first=worker.rank < tp, is_member=True)


@dataclass(frozen=True, slots=True)
class _Timed:
    """A point's samples on this rank, alone and together, and the slowness of every rank at this point."""

    point: Point
    tp: int
    head_parts: int
    alone: Samples
    together: Samples
    slowness: Sequence[float]


def _measure_units(
    parts: Sequence[Part], worker: Worker, progress: Progress, *, crowded: bool
) -> tuple[list[UnitRecord], MemoryRecord, tuple[float, ...]]:
    """Measure times and memory of all parts, without that of the process, and the slowness of ranks. If this rank is
    ``crowded``, the records use its times while all ranks measure.
    """
    total = sum(len(part.load.timed) + len(part.load.weighed) for part in parts)
    count = itertools.count()
    timed: list[_Timed] = []
    transients: list[TransientRecord] = []
    graphs: list[TransientRecord] = []
    for part in parts:
        release_unused(worker.device)  # before the next part is allocated
        place = _join_shards(worker, part.load.sharding.tp)
        clock = action_timer(worker.device, is_recorded=part.load.sharding.tp == 1)
        timer = UnitTimer(part, worker.device, clock, shards=place.shards, shard=place.shard)
        for point in part.load.timed:
            progress(next(count), total)
            timed.append(_timed(timer, point, place))
        for point in part.load.weighed if place.is_member else ():
            progress(next(count), total)
            transients.extend(_memory_records(timer, point, timer.transients(point)))
            graphs.extend(_memory_records(timer, point, timer.graphs(point)))
        del timer
    progress(total, total)
    least_tp = min(point.tp for point in timed)  # the shards of a group all take as long as the slowest
    slowness = slowness_of_ranks([point.slowness for point in timed if point.tp == least_tp])
    records = [record for point in timed for record in _unit_records(point, slowness, worker.rank, crowded=crowded)]
    return records, MemoryRecord(constant_bytes=0, transients=tuple(transients), graphs=tuple(graphs)), slowness


def _timed(timer: UnitTimer, point: Point, place: _ShardPlace) -> _Timed:
    """Time the passes of a point, the first rank or group of shards alone and all ranks at once, in alternation.

    The alternation exposes both to the same changes over time. Rounds continue until enough of them are steady on all
    ranks. If that takes too many, the machine is not steady, and all rounds count.
    """
    visit = timer.visit(point) if place.is_member else list
    visit()
    rounds: list[tuple[Samples, Samples]] = []
    seconds: list[list[float]] = []
    counted: Sequence[int] = ()
    while len(counted) < point.repeats and len(rounds) < MOST_ROUNDS * point.repeats:
        dist.barrier()
        alone = visit() if place.is_first else []
        dist.barrier()
        rounds.append((alone, visit()))
        seconds.append(concatenated([_total_seconds(samples) for samples in rounds[-1]]))
        counted = steady_rounds(seconds)
    if len(counted) < point.repeats:
        counted = range(len(rounds))
    of_rounds = zip(*(_slowness(seconds[i]) for i in counted), strict=True)
    return _Timed(
        point,
        timer.tp,
        timer.head_parts,
        alone=_flat(rounds[i][0] for i in counted),
        together=_flat(rounds[i][1] for i in counted),
        slowness=[statistics.median(of_rank) for of_rank in of_rounds],
    )


def _unit_records(timed: _Timed, slowness: tuple[float, ...], rank: int, *, crowded: bool) -> Iterator[UnitRecord]:
    """The records of a point, at the speed of a rank whose slowness is 1. Collective."""
    own, first = (slowest_of_group(slowness, of_rank, timed.tp) for of_rank in (rank, 0))
    pooled = _by_key(concatenated(divided_by(timed.together, own) if crowded else []))
    for key, samples in _by_key(divided_by(timed.alone, first)).items():
        yield _record(timed, key, samples, pooled[key])


def slowest_of_group(slowness: Sequence[float], rank: int, tp: int) -> float:
    """The slowness of the slowest of a rank's group of ``tp`` shards; 1 if ranks are alike."""
    first = rank // tp * tp
    return max(slowness[first : first + tp], default=1.0)


def divided_by(samples: Samples, slowness: float) -> Samples:
    """The times on a rank that is ``slowness`` times as fast."""
    return [(key, taken.divided_by(slowness)) for key, taken in samples]


def _slowness(seconds: Sequence[float]) -> list[float]:
    """The seconds of each rank while all ranks measured, divided by those of the first rank; NaN for a rank that did
    not measure. ``seconds`` are of one round, two for every rank: alone and together.
    """
    return [together / seconds[1] if together else math.nan for together in seconds[1::2]]


def slowness_of_ranks(of_points: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The median slowness of every rank over all points. Ranks that differ by at most `MOST_UNEVEN` get the same value;
    the result is empty if all ranks do. A rank that never measured gets the value of the first rank.
    """
    of_ranks = [[value for value in values if not math.isnan(value)] for values in zip(*of_points, strict=True)]
    medians = [statistics.median(values) if values else 1.0 for values in of_ranks]
    slowness, left = [1.0] * len(medians), sorted(range(len(medians)), key=medians.__getitem__)
    while left:
        alike = [rank for rank in left if medians[rank] <= MOST_UNEVEN * medians[left[0]]]
        for rank in alike:
            slowness[rank] = 1.0 if 0 in alike else statistics.median(medians[other] for other in alike)
        left = left[len(alike) :]
    return () if len(set(slowness)) == 1 else tuple(slowness)


def _flat(samples: Iterable[Samples]) -> Samples:
    return list(itertools.chain.from_iterable(samples))


def _total_seconds(samples: Samples) -> float:
    return sum(taken.device for _, taken in samples)


def _by_key(samples: Samples) -> dict[Key, list[Taken]]:
    samples_of: dict[Key, list[Taken]] = {}
    for key, taken in samples:
        samples_of.setdefault(key, []).append(taken)
    return samples_of


def _record(timed: _Timed, key: Key, alone: list[Taken], together: list[Taken]) -> UnitRecord:
    alone_seconds, spread = mean_and_spread([taken.device for taken in alone])
    together_seconds, together_spread = mean_and_spread([taken.device for taken in together])
    host_seconds, _ = mean_and_spread([taken.host for taken in together])
    return UnitRecord(
        unit=key[0],
        kind=key[1],
        batch=timed.point.batch,
        length=timed.point.length,
        prefix=timed.point.prefix,
        alone_seconds=alone_seconds,
        together_seconds=together_seconds,
        spread=spread,
        together_spread=together_spread,
        host_seconds=None if all(taken.host == taken.device for taken in together) else host_seconds,
        samples=len(alone),
        held_out=timed.point.held_out,
        tp=timed.tp,
        head_parts=timed.head_parts,
    )


def _memory_records(timer: UnitTimer, point: Point, of_passes: Iterable[tuple[Key, int]]) -> Iterator[TransientRecord]:
    """Memory of the passes of a point. Of several parts of a head, the maximum."""
    most: dict[Key, int] = {}
    for key, num_bytes in of_passes:
        most[key] = max(num_bytes, most.get(key, 0))
    for (unit, kind), num_bytes in most.items():
        yield TransientRecord(
            unit=unit,
            kind=kind,
            batch=point.batch,
            length=point.length,
            prefix=point.prefix,
            num_bytes=num_bytes,
            tp=timer.tp,
            head_parts=timer.head_parts,
        )


def _constant_bytes(worker: Worker) -> int:
    """Bytes that a rank holds in addition to parameters and slots: interpreter, torch, process groups, loaded kernels.

    On CUDA, their memory on the device, and the most that graphs may take.
    """
    release_unused(worker.device)
    return held_bytes(worker.device) + most_bytes(worker.device)
