"""Plans of long sequences: every slice has its own keys and values, and ranks need less for it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from penstock.core.devices import cluster_of, device_kind
from penstock.core.job import DataSpec, Device, JobSpec, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.layout import KEYS_AT_ONCE, LONG_SEQUENCE, Precision
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.plan import Plan
from penstock.core.schedule import Kind
from penstock.planner.budget import Budget
from penstock.planner.compile import lowered, program_of
from penstock.planner.decide import decide
from penstock.planner.problem import Problem, problem_from_cluster
from penstock.planner.work import Work

MODEL = ModelSpec(family=Family.LLAMA, layers=8, hidden=1024, heads=8, kv_heads=4, vocab=32_000)
QUICK = Budget(candidates=2, opened=10, neighbours=0, moves=0, starts=1)


def problem(tokens: int, **pins: object) -> Problem:
    """Four described H100, and eight sequences of so many tokens."""
    spec = JobSpec(
        model=MODEL,
        data=DataSpec(source="", sequence_length=tokens),
        training=TrainingSpec(global_batch=8, steps=1, precision=Precision.BF16),
        resources=ResourcesSpec(device=Device.CUDA, ranks=4, memory_per_rank=80 * 10**9),
        parallelism=ParallelismSpec(**pins),  # type: ignore[arg-type]  # a test's own pins
    )
    cluster = dataclasses.replace(cluster_of(device_kind("h100"), 1), devices_per_node=4, nics_per_node=4)
    return problem_from_cluster(spec, cluster)


def planned(tokens: int, slices: int) -> Plan:
    pins = {"dp": 1, "tp": 1, "pp": 4, "micro_batch": 1, "schedule": "1f1b", "slices": slices}
    return decide(problem(tokens, **pins), QUICK).plan


@pytest.mark.parametrize(
    ("tokens", "slices", "by_slice"),
    [(LONG_SEQUENCE, 4, True), (LONG_SEQUENCE // 2, 4, False), (LONG_SEQUENCE, 1, False)],
)
def test_long_sequences_in_slices_have_keys_by_slice(tokens: int, slices: int, by_slice: bool) -> None:
    plan = planned(tokens, slices)
    assert plan.prefix_by_slice == by_slice
    assert ("prefixBySlice" in plan.to_manifest()) == by_slice


def test_the_peak_is_that_of_the_program_and_lower_than_with_keys_of_micro_batches() -> None:
    """The walk's bytes are the slots alive in the Program; what the copy takes is less than they save."""
    plan = planned(8 * LONG_SEQUENCE, 16)
    assert plan.prediction is not None
    program = program_of(plan)
    whole = lowered(dataclasses.replace(plan, prefix_by_slice=False, program_digest=""))
    for rank, theirs in zip(program.ranks, whole.ranks, strict=True):
        assert rank.arena_bytes < theirs.arena_bytes
        assert rank.arena_bytes <= plan.prediction.peak_bytes[rank.rank]


def seconds(tokens: int, kind: Kind, length: int, prefix: int) -> float:
    cost = problem(tokens).cost_of(1)
    (found,) = cost.unit_seconds(UnitKind.ATTENTION, kind, Work.of(1, np.array([length]), np.array([prefix]))).tolist()
    return float(found)


@pytest.mark.parametrize("kind", [Kind.F, Kind.I])
def test_the_copy_of_the_prefix_takes_time(kind: Kind) -> None:
    """With a prefix, and a little of the attention's."""
    long, short = (seconds(tokens, kind, 1024, 15_360) for tokens in (LONG_SEQUENCE, LONG_SEQUENCE - 1))
    assert short < long < 1.1 * short
    assert seconds(LONG_SEQUENCE, kind, 1024, 0) == seconds(LONG_SEQUENCE - 1, kind, 1024, 0)


@pytest.mark.parametrize("kind", [Kind.F, Kind.I])
def test_joining_copies_takes_time(kind: Kind) -> None:
    """By as many as there are, so seconds jump where one more is needed."""
    before, behind, further = (seconds(2**20, kind, 1024, KEYS_AT_ONCE - 1024 + more) for more in (0, 1, 2))
    assert behind - before > 10 * (further - behind)
