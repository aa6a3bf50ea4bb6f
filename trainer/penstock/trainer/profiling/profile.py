"""A Profile from measurements: all ranks measure together, the first writes it down."""

from __future__ import annotations

import math
import os
import platform
import socket
import statistics
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from penstock.core.job import JobSpec
from penstock.core.model import ModelSpec
from penstock.core.profile import MachineKey, MemoryRecord, Profile, TransientRecord, UnitRecord, digest
from penstock.trainer.clock import device_clock
from penstock.trainer.memory import resident_bytes
from penstock.trainer.profiling.grid import Point, batches_to_measure, profile_grid
from penstock.trainer.profiling.network import (
    measure_collectives,
    measure_instruction,
    measure_links,
    measure_optimizer,
)
from penstock.trainer.profiling.units import Key, Samples, UnitTimer, median_and_spread
from penstock.trainer.worker import Worker

T = TypeVar("T")

METHOD = "whole actions of one-unit stages, several blocks in turn; medians, one rank alone and all together"
REPEATS = 3


def machine_key(device: torch.device, threads: int) -> MachineKey:
    """The machine and its software, as far as measurements depend on it."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
    return MachineKey(
        host=socket.gethostname(),
        device=name,
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        threads_per_rank=threads,
        torch_version=torch.__version__,
        backend="nccl" if device.type == "cuda" else "gloo",
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def model_digest(model: ModelSpec, sequence_length: int) -> str:
    """What unit costs depend on: the dimensions, but not how many blocks there are."""
    dimensions = model.to_manifest()
    del dimensions["layers"]
    return digest({**dimensions, "sequenceLength": sequence_length})


def measure(spec: JobSpec, worker: Worker, now: float) -> Profile | None:
    """The Profile on the first rank, none on the others; all ranks call it together."""
    load = os.getloadavg()[0]
    clock, groups = device_clock(worker.device), worker.groups
    links = _gathered(measure_links(groups, worker.rank, worker.num_ranks, clock))
    overhead = _gathered([measure_instruction(groups, worker.rank, worker.num_ranks, clock)])
    collectives = measure_collectives(worker.num_ranks, worker.device, clock)
    constant = _gathered([_constant_bytes(worker)])
    timer = UnitTimer(spec.model, spec.training.precision, spec.data.sequence_length, worker.device, clock)
    grid = profile_grid(spec.data.sequence_length, batches_to_measure(spec.training.global_batch))
    units = [record for point in grid for record in _unit_records(timer, point, worker)]
    transients = [record for point in grid if not point.held_out for record in _transients(timer, point)]
    optimizer = measure_optimizer(spec.model, spec.training.precision, spec.training, worker.device, clock)
    if worker.rank != 0:
        return None
    return Profile(
        key=machine_key(worker.device, spec.resources.threads_per_rank),
        model_digest=model_digest(spec.model, spec.data.sequence_length),
        precision=spec.training.precision,
        measured_at=now,
        num_ranks=worker.num_ranks,
        units=tuple(units),
        links=tuple(links),
        collectives=tuple(collectives),
        optimizer=tuple(optimizer),
        memory=MemoryRecord(constant_bytes=max(constant), transients=tuple(transients)),
        action_overhead_seconds=statistics.median(each for each in overhead if not math.isnan(each)),
        load=load,
        method=METHOD,
    )


def _unit_records(timer: UnitTimer, point: Point, worker: Worker) -> list[UnitRecord]:
    """First the first rank alone, then all at once."""
    dist.barrier()
    alone = timer.measure(point, REPEATS) if worker.rank == 0 else {}
    dist.barrier()
    together = _pooled(timer.measure(point, REPEATS))
    return [_record(point, key, samples, together[key]) for key, samples in alone.items()]


def _pooled(samples: Samples) -> Samples:
    """The samples of all ranks."""
    gathered = _gathered([dict(samples)])
    return {key: [seconds for each in gathered for seconds in each[key]] for key in samples}


def _record(point: Point, key: Key, alone: list[float], together: list[float]) -> UnitRecord:
    median, spread = median_and_spread(alone)
    return UnitRecord(
        unit=key[0],
        kind=key[1],
        batch=point.batch,
        length=point.length,
        prefix=point.prefix,
        alone_seconds=median,
        together_seconds=median_and_spread(together)[0],
        spread=spread,
        samples=len(alone),
        held_out=point.held_out,
    )


def _transients(timer: UnitTimer, point: Point) -> list[TransientRecord]:
    return [
        TransientRecord(
            unit=unit, kind=kind, batch=point.batch, length=point.length, prefix=point.prefix, num_bytes=num_bytes
        )
        for (unit, kind), num_bytes in timer.transients(point).items()
    ]


def _constant_bytes(worker: Worker) -> int:
    """What a rank holds before any parameter: interpreter, torch, groups, kernels used once."""
    if worker.device.type == "cuda":
        return int(torch.cuda.memory_reserved(worker.device))
    return resident_bytes()


def _gathered(values: list[T]) -> list[T]:
    found: list[list[T]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, values)
    return [value for each in found for value in each]
