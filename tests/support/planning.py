"""Small planning problems: a tiny model on a described cluster whose numbers are easy to follow by hand."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from penstock.core.cluster import ClusterSpec, DeviceSpec, LinkOverride, LinkSpec
from penstock.core.job import DataSpec, JobSpec, Objective, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.profile import LinkRecord, MachineKey, MemoryRecord, Profile, UnitRecord
from penstock.core.profile_matching import model_digest
from penstock.core.schedule import Kind
from penstock.planner.measured import problem_from_profile
from penstock.planner.problem import Problem, problem_from_cluster

TINY_LLAMA = ModelSpec(family=Family.LLAMA, layers=4, hidden=32, heads=4, kv_heads=4, vocab=64)
TINY_GPT2 = ModelSpec(family=Family.GPT2, layers=3, hidden=32, heads=4, vocab=64, positions=64)
DEVICE = DeviceSpec(
    name="abacus",
    peak_flops=1e9,
    memory_bytes=2**30,
    efficiency=((1, 0.1), (16, 0.5)),
    memory_bandwidth=1e9,
    action_overhead_seconds=1e-5,
)
INSIDE = LinkSpec(latency_seconds=1e-6, bytes_per_second=1e9)
BETWEEN = LinkSpec(latency_seconds=1e-5, bytes_per_second=1e8)


def slower_device(times: float) -> DeviceSpec:
    """The device, so many times slower in everything."""
    return dataclasses.replace(
        DEVICE,
        peak_flops=DEVICE.peak_flops / times,
        memory_bandwidth=DEVICE.memory_bandwidth / times,
        action_overhead_seconds=DEVICE.action_overhead_seconds * times,
    )


def cluster(num_nodes: int = 2, devices_per_node: int = 2, **changes: Any) -> ClusterSpec:
    """A cluster of abaci."""
    fields: dict[str, Any] = {"name": "desk", "device": DEVICE, "intra_node": INSIDE, "inter_node": BETWEEN}
    return ClusterSpec(**fields | {"num_nodes": num_nodes, "devices_per_node": devices_per_node} | changes)


def slow_link(source: int, target: int, factor: float) -> LinkOverride:
    """An exception between two nodes: ``factor`` times slower than the others."""
    link = LinkSpec(latency_seconds=BETWEEN.latency_seconds, bytes_per_second=BETWEEN.bytes_per_second / factor)
    return LinkOverride(source=source, target=target, link=link)


def job(
    *,
    model: ModelSpec = TINY_LLAMA,
    sequence_length: int = 16,
    global_batch: int = 2,
    ranks: int = 2,
    min_ranks: int | None = None,
    memory: int = 2**30,
    objective: Objective = Objective.TIME,
    **pinned: Any,
) -> JobSpec:
    """A job; further arguments are what it pins."""
    return JobSpec(
        model=model,
        data=DataSpec(source="", sequence_length=sequence_length),
        training=TrainingSpec(global_batch=global_batch, steps=1, precision=Precision.FP32),
        resources=ResourcesSpec(ranks=ranks, min_ranks=min_ranks, memory_per_rank=memory),
        parallelism=ParallelismSpec(**pinned),
        objective=objective,
        price_per_device_hour=1.0,
    )


def problem(described: ClusterSpec | None = None, **changes: Any) -> Problem:
    """The problem of `job` on `cluster`."""
    return problem_from_cluster(job(**changes), described or cluster())


def measured_problem(*, slowdown: float = 1.0, **changes: Any) -> Problem:
    """The problem of `job` on two measured ranks whose passes take a microsecond per token."""
    passes = itertools.product(UnitKind, (Kind.F, Kind.I, Kind.W))
    units = tuple(measured(unit, kind, slowdown=slowdown) for unit, kind in passes)
    return problem_from_profile(job(**changes), profile(units))


def units_at(tp: int, *, share: float = 1.0) -> tuple[UnitRecord, ...]:
    """Every pass of one of ``tp`` shards, at a ``share`` of a microsecond per token."""
    passes = itertools.product(UnitKind, (Kind.F, Kind.I, Kind.W))
    return tuple(measured(unit, kind, seconds=16e-6 * share, tp=tp) for unit, kind in passes)


def machine() -> MachineKey:
    """A machine that was measured."""
    return MachineKey(
        host="desk", device="abacus", num_cores=2, memory_bytes=2**30, threads_per_rank=1, torch_version="", backend=""
    )


def profile(units: tuple[UnitRecord, ...] = (), **changes: Any) -> Profile:
    """A profile of two ranks; without ``units`` every pass takes a microsecond per token."""
    fields: dict[str, Any] = {
        "key": machine(),
        "model_digest": "",
        "precision": Precision.FP32,
        "measured_at": 0.0,
        "num_ranks": 2,
        "units": units or tuple(measured(unit, kind) for unit in UnitKind for kind in (Kind.F, Kind.I, Kind.W)),
        "links": tuple(
            LinkRecord(source=a, target=1 - a, latency_seconds=1e-5, bytes_per_second=1e9, error=0.0) for a in (0, 1)
        ),
        "collectives": (),
        "optimizer": (),
        "memory": MemoryRecord(constant_bytes=1000),
        "action_overhead_seconds": 1e-5,
    }
    return Profile(**fields | changes)


def measured(
    unit: UnitKind,
    kind: Kind,
    *,
    batch: int = 1,
    length: int = 16,
    prefix: int = 0,
    seconds: float | None = None,
    slowdown: float = 1.0,
    held_out: bool = False,
    tp: int = 1,
    head_parts: int = 1,
) -> UnitRecord:
    """One measurement; by default a microsecond per token."""
    alone = batch * length * 1e-6 if seconds is None else seconds
    return UnitRecord(
        unit=unit,
        kind=kind,
        batch=batch,
        length=length,
        prefix=prefix,
        alone_seconds=alone,
        together_seconds=alone * slowdown,
        spread=0.0,
        samples=1,
        held_out=held_out,
        tp=tp,
        head_parts=head_parts,
    )


def profile_for(spec: JobSpec, **changes: Any) -> Profile:
    """A measurement that serves such a job, made when tests' clocks stand still."""
    of = {"model_digest": model_digest(spec.model, spec.data.sequence_length), "measured_at": 1_700_000_000.0}
    found = profile(**{**of, "precision": spec.training.precision, "num_ranks": spec.resources.ranks, **changes})
    return found if "units" in changes else _at_both_batches(found)


def _at_both_batches(found: Profile) -> Profile:
    both = [
        dataclasses.replace(
            each,
            batch=batch,
            alone_seconds=batch * each.alone_seconds,
            together_seconds=batch * each.together_seconds,
        )
        for batch in (1, 2)
        for each in found.units
    ]
    return dataclasses.replace(found, units=tuple(both))
