"""Which units are measured together in how little memory, and what the optimizer is measured on."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UserError
from penstock.core.job import JobSpec, TrainingSpec
from penstock.core.layout import LONG_SEQUENCE, Precision, num_parameters
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.moments import MomentType
from penstock.core.sharding import WHOLE, Sharding
from penstock.planner.memory import state_bytes_per_parameter
from penstock.trainer.profiling.grid import Point, profile_grid, transient_grid
from penstock.trainer.profiling.network import (
    OPTIMIZER_SIZES,
    REDUCED_BYTES,
    REPEATS,
    group_sizes,
    measure_optimizer,
    optimizer_sizes,
    reduced_sizes,
    sizes_of_halves,
)
from penstock.trainer.profiling.parts import MOST_BLOCKS, MOST_SLICES, Workload, choose_parts
from penstock.trainer.profiling.profile import _workloads, parts_to_measure
from penstock.trainer.squared_norm import SquaredNorm
from tests.support.planning import job
from tests.support.small_plans import small_model

GIB = 2**30
ENOUGH_BYTES = 2**20
"""For one unit of a small model, whatever it is."""

LARGE = ModelSpec(family=Family.LLAMA, layers=96, hidden=10240, heads=80, kv_heads=8, ffn_hidden=27648, vocab=128_000)


def workload(
    model: ModelSpec, length: int, batches: tuple[int, ...], precision: Precision, sharding: Sharding = WHOLE
) -> Workload:
    return Workload(
        sharding=sharding,
        model=model,
        precision=precision,
        sequence_length=length,
        timed=profile_grid(length, batches, max(batches)),
        weighed=transient_grid(length, batches),
    )


@pytest.mark.parametrize("gib", [24, 40, 80])
def test_a_model_of_a_hundred_billion_parameters_is_measured_on_devices_of_any_size(gib: int) -> None:
    assert num_parameters(LARGE) > 10**11
    parts = choose_parts(workload(LARGE, 4096, (1, 2, 4), Precision.BF16), gib * GIB)
    assert [unit.kind for part in parts for unit in part.one_of_each] == list(UnitKind)
    assert all(part.num_bytes <= gib * GIB for part in parts)
    per_parameter = state_bytes_per_parameter(Precision.BF16)
    assert max(optimizer_sizes(Precision.BF16, gib * GIB)) * per_parameter < GIB
    assert max(optimizer_sizes(Precision.BF16, gib * GIB)) < 2**31


def test_a_model_that_fits_is_measured_as_a_whole() -> None:
    (part,) = choose_parts(workload(small_model(Family.LLAMA, layers=9), 32, (1, 2), Precision.FP32), GIB)
    kinds = [unit.kind for unit in part.units]
    body = [UnitKind.ATTENTION, UnitKind.MLP] * MOST_BLOCKS
    assert kinds == [UnitKind.EMBEDDING, *body, UnitKind.HEAD]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_shards_hold_a_part_of_what_one_device_holds(sequence_parallel: bool) -> None:
    """An eighth of parameters and inner buffers; hidden states are divided by tokens only."""
    sharding = Sharding(8, sequence_parallel)
    (whole,), (shared,) = (
        choose_parts(workload(LARGE, 4096, (1, 2, 4), Precision.BF16, each), 300 * GIB) for each in (WHOLE, sharding)
    )
    assert [unit.kind for unit in shared.units] == [unit.kind for unit in whole.units]
    assert shared.parameter_bytes == pytest.approx(whole.parameter_bytes / 8, rel=1e-3)
    assert whole.slot_bytes / 8 < shared.slot_bytes < whole.slot_bytes / (4 if sequence_parallel else 1.5)


@given(
    st.sampled_from(Family),
    st.sampled_from(Precision),
    st.integers(1, 6),
    st.sampled_from([(1,), (1, 2, 4)]),
    st.integers(0, 2**22),
)
def test_no_part_needs_more_than_there_is_and_all_is_measured(
    family: Family, precision: Precision, layers: int, batches: tuple[int, ...], available: int
) -> None:
    model = small_model(family, layers=layers)
    load = workload(model, 64, batches, precision)
    try:
        parts = choose_parts(load, available)
    except UserError:
        parts = ()
    if not parts:
        assert available < ENOUGH_BYTES
        return
    assert all(part.num_bytes <= available for part in parts)
    assert {unit.kind for part in parts for unit in part.units} == {unit.kind for unit in model.units}
    assert all(set(part.load.timed) >= {each for each in load.timed if not each.single} for part in parts)
    assert all(set(part.load.weighed) >= set(transient_grid(64, (1,))) for part in parts)


def test_several_whole_sequences_are_timed_and_weighed_or_neither() -> None:
    model = small_model(Family.LLAMA, layers=2)
    load = workload(model, 64, (1, 2, 4), Precision.FP32)
    (whole,) = choose_parts(load, GIB)
    assert (whole.load.timed, whole.load.weighed) == (load.timed, load.weighed)
    enough = [available for available in range(0, whole.num_bytes, 2**12) if _can_be_measured(load, available)]
    least = choose_parts(load, enough[0])
    assert not any(point.single for part in least for point in part.load.timed)
    assert not any(point.batch > 1 for part in least for point in part.load.weighed)


def _can_be_measured(load: Workload, available: int) -> bool:
    try:
        return bool(choose_parts(load, available))
    except UserError:
        return False


def test_a_head_in_parts_that_does_not_fit_is_left_out_unless_it_is_pinned() -> None:
    """Two parts together hold all of the head's rows, and more of running statistics."""

    def spec(**pinned: Any) -> JobSpec:
        return job(model=heavy, ranks=2, tp=1, **pinned)

    def enough(head_parts: int) -> int:
        load = next(each for each in _workloads(spec(), (1,), 2) if each.model.head_parts == head_parts)
        return next(room for room in itertools.count(0, 2**12) if _can_be_measured(load, room))

    heavy = dataclasses.replace(small_model(Family.LLAMA, layers=2), vocab=4096)
    room = enough(1)
    assert room < enough(2)
    parts = parts_to_measure(spec(), (1,), 2, room)
    assert {part.load.model.head_parts for part in parts} == {1}
    assert {unit.kind for part in parts for unit in part.units} == set(UnitKind)
    everything = parts_to_measure(spec(), (1,), 2, enough(2))
    assert {part.load.model.head_parts for part in everything} == {1, 2}
    with pytest.raises(UserError, match="measuring one unit"):
        parts_to_measure(spec(head_parts=2), (1,), 2, room)
    with pytest.raises(UserError, match="measuring one unit"):
        parts_to_measure(spec(), (1,), 2, 0)


def test_one_unit_of_each_kind_stands_for_all_where_much_data_passes() -> None:
    """The points of single units add no memory to that of the other points."""
    load = workload(small_model(Family.LLAMA, layers=9), 64, (1, 2, 4), Precision.FP32)
    (part,) = choose_parts(load, GIB)
    (single,) = [point for point in load.timed if point.single]
    assert part.units_at(single) == part.one_of_each
    assert all(part.units_at(point) == part.units for point in load.timed if not point.single)
    without = dataclasses.replace(load, timed=tuple(point for point in load.timed if not point.single))
    assert part.num_bytes == choose_parts(without, GIB)[0].num_bytes


def test_the_smallest_buffer_is_measured_in_any_case() -> None:
    assert optimizer_sizes(Precision.FP32, -1) == OPTIMIZER_SIZES[:1]
    assert optimizer_sizes(Precision.FP32, 2**40) == OPTIMIZER_SIZES
    assert max(optimizer_sizes(Precision.FP32, 2**27)) * 16 <= 2**27


def test_the_optimizer_is_measured_with_the_norm_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's norm is summed exactly, which takes several times as long as torch's."""
    limbs, sums = SquaredNorm.limbs, list[torch.Tensor]()

    def counted(norm: SquaredNorm) -> torch.Tensor:
        sums.append(limbs(norm))
        return sums[-1]

    monkeypatch.setattr(SquaredNorm, "limbs", counted)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    training = TrainingSpec(steps=1, global_batch=1)
    with torch.no_grad():
        records = measure_optimizer(Precision.FP32, training, torch.device("cpu"), time.perf_counter, -1)
    assert [record.moment_type for record in records] == list(MomentType)
    assert len(sums) == (REPEATS + 1) * len(records)


@pytest.mark.parametrize(
    ("num_ranks", "sizes"), [(1, ()), (2, (2,)), (3, (3,)), (6, (2, 6)), (8, (2, 4, 8)), (24, (2, 4, 8, 24))]
)
def test_sums_are_measured_over_groups_that_replicas_form(num_ranks: int, sizes: tuple[int, ...]) -> None:
    assert group_sizes(num_ranks) == sizes


@given(st.integers(0, 2**40), st.integers(-1, 2**40))
def test_sums_reach_a_gradient_if_it_fits(gradient: int, available: int) -> None:
    sizes = reduced_sizes(gradient, available)
    assert sizes[: len(REDUCED_BYTES)] == REDUCED_BYTES
    assert all(a < b for a, b in itertools.pairwise(sizes))
    assert all(size % 4 == 0 for size in sizes)
    assert sizes[-1] <= max(REDUCED_BYTES[-1], min(gradient, available))
    assert sizes[-1] + 4 > min(gradient, available)


@given(st.integers(0, 2**40), st.integers(-1, 2**40))
def test_halves_of_sums_are_measured_from_a_quarter_of_a_mebibyte_up_to_the_gradient(
    gradient: int, available: int
) -> None:
    sizes = reduced_sizes(gradient, available)
    halves = sizes_of_halves(sizes, gradient)
    assert halves == sizes[1 : len(halves) + 1]
    assert halves[-1] >= gradient or halves[-1] == sizes[-1]
    assert all(size < gradient for size in halves[:-1])


@pytest.mark.parametrize(("length", "prefix"), [(4096, 0), (512, 15_872), (512, 512), (1000, 3500), (16, 16_368)])
def test_a_long_prefix_is_measured_in_slices(length: int, prefix: int) -> None:
    load, point = workload(small_model(Family.LLAMA), LONG_SEQUENCE, (1,), Precision.BF16), Point(1, length, prefix)
    slices = load.slices_up_to(point)
    assert sum(slices) == prefix + length
    assert slices[-1] == length
    assert len(slices) <= MOST_SLICES + 2
    assert (load.prefix_bytes(point) > 0) == (prefix > 0)
    short = workload(small_model(Family.LLAMA), LONG_SEQUENCE - 1, (1,), Precision.BF16)
    assert short.slices_up_to(point) == (prefix + length,)
    assert short.prefix_bytes(point) == 0
