"""Predicted time of recomputation: operations sum to a pass, and R of a stage leaves out its last output."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.cluster import AttentionKernel, DeviceSpec, Fusion, KernelSpec, SoftwareSpec
from penstock.core.devices import device_kind, device_kinds
from penstock.core.layout import Operation, Precision, remaking
from penstock.core.model import Family, ModelSpec, UnitKind, attention_flops, linear_flops_per_token
from penstock.core.profile import UnitRecord
from penstock.core.remaking import SELECTIVE, Remake, full_remakes, remade_of, uniform_remakes
from penstock.core.schedule import Kind
from penstock.core.sharding import Sharding
from penstock.planner.candidate import Candidate
from penstock.planner.cost import CostModel, DescribedCost
from penstock.planner.evaluate import Simulated
from penstock.planner.fit import MeasuredCost, measured_cost
from penstock.planner.order import FORWARD, RECOMPUTE
from penstock.planner.problem import Mesh
from penstock.planner.remake import operation_seconds, remake_seconds, remake_until_ns
from penstock.planner.stagecost import stage_costs
from penstock.planner.work import Floats, Work, operation_flops
from tests.support.planning import DEVICE, INSIDE, cluster, measured, problem, profile, units_at
from tests.support.small_plans import looped_schedule

LLAMA = ModelSpec(family=Family.LLAMA, layers=4, hidden=64, heads=4, kv_heads=2, vocab=128)
GPT2 = ModelSpec(family=Family.GPT2, layers=4, hidden=64, heads=4, vocab=128)
SLICES = (96, 32)
WORK = Work.of(2, SLICES, (0, 96))
DESCRIBED = problem(cluster(num_nodes=1, devices_per_node=2), ranks=2)
BLOCK = (UnitKind.ATTENTION, UnitKind.MLP)

DEVICES = st.sampled_from([DEVICE, *(device_kind(name).device for name in device_kinds())])
STACKS = st.builds(
    SoftwareSpec,
    attention=st.sampled_from(AttentionKernel),
    dropout=st.booleans(),
    fusion=st.sampled_from(Fusion),
    launch_seconds=st.sampled_from([0.0, 5e-6, 1e-3]),
)
SHARDINGS = st.builds(Sharding, st.sampled_from([1, 2, 4]), st.booleans())


def described(model: ModelSpec, device: DeviceSpec, software: SoftwareSpec, sharding: Sharding) -> DescribedCost:
    where = cluster(device=device, software=software, devices_per_node=4)
    return DescribedCost(model=model, cluster=where, precision=Precision.BF16, sharding=sharding)


def with_selective(norm: float, both: float, tp: int = 1) -> tuple[UnitRecord, ...]:
    """Measured times of the operations that are not products, of an attention unit and of an MLP."""
    seconds = {UnitKind.ATTENTION: norm, UnitKind.MLP: both}
    return tuple(measured(unit, Kind.R, seconds=each, tp=tp) for unit, each in seconds.items())


@st.composite
def costs(draw: st.DrawFn) -> tuple[ModelSpec, CostModel]:
    """A model, and what its units take: described, or measured with more or less for the operations without products
    than their whole passes take.
    """
    model = draw(st.sampled_from([LLAMA, GPT2]))
    if draw(st.booleans()):
        return model, described(model, draw(DEVICES), draw(STACKS), draw(SHARDINGS))
    records = units_at(1)
    if draw(st.booleans()):
        records += with_selective(*draw(st.tuples(st.floats(1e-7, 4e-5), st.floats(1e-7, 4e-5))))
    if draw(st.booleans()):
        records = tuple(dataclasses.replace(each, host_seconds=1e-9) for each in records)
        shards = tuple(dataclasses.replace(each, tp=2) for each in records)
        return model, measured_cost(profile(records + shards, sequence_parallel=draw(st.booleans())), 2)
    return model, measured_cost(profile(records))


@given(costs(), st.sampled_from(BLOCK), st.integers(1, 3), st.integers(1, 512), st.integers(0, 2048))
def test_operations_add_up_to_the_pass(
    of: tuple[ModelSpec, CostModel], kind: UnitKind, batch: int, length: int, prefix: int
) -> None:
    model, cost = of
    work = Work.of(batch, [length, 1], [prefix, prefix + length])
    parts = [operation_seconds(cost, model, kind, operation, work) for operation in remaking(model, kind)]
    assert all((part >= 0).all() for part in parts)
    np.testing.assert_allclose(sum(parts), cost.unit_seconds(kind, Kind.F, work), rtol=1e-9)


@given(costs(), st.sampled_from(UnitKind), st.sets(st.sampled_from(Operation)), st.sets(st.sampled_from(Operation)))
def test_more_operations_never_take_less(
    of: tuple[ModelSpec, CostModel], kind: UnitKind, some: set[Operation], others: set[Operation]
) -> None:
    model, cost = of
    few, many = (remake_seconds(cost, model, kind, WORK, operations) for operations in (some, some | others))
    assert (few <= many * (1 + 1e-9)).all()
    assert (many <= cost.unit_seconds(kind, Kind.F, WORK) * (1 + 1e-9)).all()


@pytest.mark.parametrize("spec", [LLAMA, GPT2])
@pytest.mark.parametrize("kind", BLOCK)
def test_flops_of_operations_add_up_to_those_of_the_unit(spec: ModelSpec, kind: UnitKind) -> None:
    total = sum(operation_flops(spec, kind, operation, WORK) for operation in remaking(spec, kind))
    expected = linear_flops_per_token(spec, kind) * WORK.tokens
    if kind is UnitKind.ATTENTION:
        expected = expected + attention_flops(spec, 1) * WORK.pairs
    np.testing.assert_allclose(total, expected, rtol=1e-12)


@pytest.mark.parametrize("kind", UnitKind)
def test_all_operations_take_exactly_the_pass_and_fewer_take_less(kind: UnitKind) -> None:
    cost, spec = DESCRIBED.cost_of(1), DESCRIBED.model
    whole = remake_seconds(cost, spec, kind, WORK, remaking(spec, kind))
    less = remake_seconds(cost, spec, kind, WORK, remaking(spec, kind, with_output=False))
    if kind is UnitKind.HEAD:
        assert not whole.any()
        return
    np.testing.assert_array_equal(whole, cost.unit_seconds(kind, Kind.F, WORK))
    assert (less < whole).all()


# Described devices

KERNELS = KernelSpec(
    product_share=1.0,
    product_edge=0.0,
    product_depth=0.0,
    product_memory_share=1.0,
    attention_share=1.0,
    attention_backward_share=1.0,
    attention_edge=0.0,
    attention_depth=0.0,
    stream_share=0.5,
    row_share=0.25,
    kernel_seconds=1e-6,
)
SIMPLE = DeviceSpec(name="simple", peak_flops=1e12, memory_bytes=2**40, memory_bandwidth=1e9, kernels=KERNELS)
NO_LAUNCH = SoftwareSpec(launch_seconds=0.0)


def test_norm_and_activation_take_their_bytes_and_their_kernels() -> None:
    """In bf16 the norm reads and writes h values of 2 bytes per token, SwiGLU reads 2 f and writes f."""
    cost = described(LLAMA, SIMPLE, NO_LAUNCH, Sharding())
    norm = 1e-6 + WORK.tokens * 2 * LLAMA.hidden * 2 / (0.25 * 1e9)
    activate = 1e-6 + WORK.tokens * 3 * LLAMA.ffn_hidden * 2 / (0.5 * 1e9)
    selective = remake_seconds(cost, LLAMA, UnitKind.MLP, WORK, SELECTIVE)
    np.testing.assert_allclose(selective, norm + activate, rtol=1e-12)
    np.testing.assert_allclose(remake_seconds(cost, LLAMA, UnitKind.ATTENTION, WORK, SELECTIVE), norm, rtol=1e-12)


def test_each_shard_recomputes_norms_of_its_rows_and_activations_of_its_columns() -> None:
    """Recomputation needs no collective, so the network does not matter."""
    cost = described(LLAMA, SIMPLE, NO_LAUNCH, Sharding(2))
    norm = 1e-6 + np.ceil(WORK.tokens / 2) * 2 * LLAMA.hidden * 2 / (0.25 * 1e9)
    activate = 1e-6 + WORK.tokens * 3 * (LLAMA.ffn_hidden // 2) * 2 / (0.5 * 1e9)
    selective = remake_seconds(cost, LLAMA, UnitKind.MLP, WORK, SELECTIVE)
    np.testing.assert_allclose(selective, norm + activate, rtol=1e-12)


@pytest.mark.parametrize("device", [SIMPLE, DEVICE])
@pytest.mark.parametrize("kind", BLOCK)
def test_the_first_product_gathers_and_the_second_scatters_or_sums(kind: UnitKind, device: DeviceSpec) -> None:
    """Each takes a round of the ring, and the sum in the place of both takes two."""
    num_bytes = WORK.tokens * LLAMA.hidden * 2
    ring = INSIDE.latency_seconds + num_bytes / 2 / INSIDE.bytes_per_second
    rings = {
        True: {Operation.PROJECT: 1, Operation.OUTPUT: 1},
        False: {Operation.OUTPUT: 2},
    }
    slow = cluster(device=device, software=NO_LAUNCH)
    quick = dataclasses.replace(
        slow, intra_node=dataclasses.replace(slow.intra_node, latency_seconds=0.0, bytes_per_second=1e30)
    )
    for by_tokens, expected in rings.items():
        sharding = Sharding(2, by_tokens)
        with_ring, without = (
            DescribedCost(model=LLAMA, cluster=each, precision=Precision.BF16, sharding=sharding)
            for each in (slow, quick)
        )
        for operation in remaking(LLAMA, kind):
            taken = with_ring.operation_seconds(LLAMA, kind, operation, WORK)
            taken = taken - without.operation_seconds(LLAMA, kind, operation, WORK)
            np.testing.assert_allclose(taken, expected.get(operation, 0) * ring, rtol=1e-6, atol=1e-15)


def test_without_described_kernels_a_norm_takes_a_third_of_the_traffic() -> None:
    cost = described(LLAMA, DEVICE, NO_LAUNCH, Sharding())
    third = WORK.tokens * 2 * LLAMA.hidden * 2 / DEVICE.memory_bandwidth
    np.testing.assert_allclose(remake_seconds(cost, LLAMA, UnitKind.ATTENTION, WORK, SELECTIVE), third)
    np.testing.assert_allclose(remake_seconds(cost, LLAMA, UnitKind.MLP, WORK, SELECTIVE), 2 * third)


# Measured ones


def test_norm_and_activation_take_their_measured_time() -> None:
    """A microsecond per token in all of F, a tenth of it for the norm, a quarter for the norm and the activation."""
    cost = measured_cost(profile(units_at(1) + with_selective(1.6e-6, 4e-6)))
    each = WORK.tokens * 1e-6
    for kind, share in ((UnitKind.ATTENTION, 0.1), (UnitKind.MLP, 0.25)):
        np.testing.assert_allclose(remake_seconds(cost, LLAMA, kind, WORK, SELECTIVE), share * each)
    np.testing.assert_allclose(remake_seconds(cost, LLAMA, UnitKind.MLP, WORK, {Operation.NORM}), 0.1 * each)
    output = remake_seconds(cost, LLAMA, UnitKind.MLP, WORK, {Operation.OUTPUT})
    np.testing.assert_allclose(output, (1 - 0.25) / 3 * each)


def test_an_older_profile_shares_the_pass_by_flops() -> None:
    cost = measured_cost(profile(units_at(1)))
    for kind in BLOCK:
        total = sum(operation_flops(LLAMA, kind, operation, WORK) for operation in remaking(LLAMA, kind))
        assert not remake_seconds(cost, LLAMA, kind, WORK, SELECTIVE).any()
        for operation in remaking(LLAMA, kind):
            expected = operation_flops(LLAMA, kind, operation, WORK) / total * cost.unit_seconds(kind, Kind.F, WORK)
            np.testing.assert_allclose(operation_seconds(cost, LLAMA, kind, operation, WORK), expected)


def measured_shards(*, sequence_parallel: bool) -> MeasuredCost:
    """A CUDA device's: of two shards a pass takes 0.8 of a microsecond per token where one device takes 1."""
    records = tuple(
        dataclasses.replace(each, host_seconds=1e-9)
        for each in (*units_at(1), *units_at(2, share=0.8), *with_selective(1.6e-6, 4e-6, tp=2))
    )
    return measured_cost(profile(records, sequence_parallel=sequence_parallel), 2)


def test_measured_collectives_go_with_the_products_that_need_them() -> None:
    """Of 0.8 microseconds per token, collectives take 0.3, norm and activation 0.25."""
    by_tokens, whole = (measured_shards(sequence_parallel=each) for each in (True, False))
    each = WORK.tokens * 1e-6
    products, waiting = 0.8 - 0.25 - 0.3, 0.3
    for cost, gather, added in ((by_tokens, waiting / 2, waiting / 2), (whole, 0.0, waiting)):
        for operation, share, own in ((Operation.PROJECT, 2 / 3, gather), (Operation.OUTPUT, 1 / 3, added)):
            seconds = operation_seconds(cost, LLAMA, UnitKind.MLP, operation, WORK)
            np.testing.assert_allclose(seconds, (share * products + own) * each)


# Ends of the model


def test_the_embedding_takes_its_pass() -> None:
    cost = DESCRIBED.cost_of(1)
    seconds = remake_seconds(cost, DESCRIBED.model, UnitKind.EMBEDDING, WORK, {Operation.EMBED})
    np.testing.assert_array_equal(seconds, cost.unit_seconds(UnitKind.EMBEDDING, Kind.F, WORK))


@pytest.mark.parametrize("device", [SIMPLE, DEVICE])
@pytest.mark.parametrize("part", [0, 1])
def test_a_head_part_recomputes_half_of_its_pass(part: int, device: DeviceSpec) -> None:
    """It recomputes the norm, or its copy, and the logits; without the output of the norm it takes less time."""
    model = LLAMA.divided(2)
    cost = described(model, device, NO_LAUNCH, Sharding())
    half = cost.unit_seconds(UnitKind.HEAD, Kind.F, WORK) / 2
    np.testing.assert_allclose(remake_seconds(cost, model, UnitKind.HEAD, WORK, tuple(Operation), part), half)
    logits = remake_seconds(cost, model, UnitKind.HEAD, WORK, {Operation.ACTIVATE}, part)
    assert (logits > 0).all()
    assert (logits < half).all()


# Stages


def test_a_stage_is_its_units_and_the_last_output_is_left_out() -> None:
    """Embedding, attention, MLP: the next stage holds the output of the MLP."""
    cost, spec = DESCRIBED.cost_of(1), DESCRIBED.model
    until = remake_until_ns(cost, spec, (0, 3), SLICES, 2, remade_of(spec, (0, 3), full_remakes(spec, (0, 3))))
    kinds = (UnitKind.EMBEDDING, UnitKind.ATTENTION)
    before = sum(cost.unit_seconds(kind, Kind.F, WORK) for kind in kinds)
    last = remake_seconds(cost, spec, UnitKind.MLP, WORK, (Operation.NORM, Operation.PROJECT, Operation.ACTIVATE))
    np.testing.assert_allclose(until[2], 1e9 * before, atol=1)
    np.testing.assert_allclose(until[3], 1e9 * (before + last), atol=1)
    assert not until[0].any()


def test_units_of_a_stage_may_recompute_different_operations() -> None:
    """The first MLP recomputes its activation, the second all but its unused output, and attention nothing."""
    cost, spec, stage = DESCRIBED.cost_of(1), DESCRIBED.model, (1, 5)
    remakes = (
        Remake(unit=UnitKind.MLP, count=1, operations=(Operation.ACTIVATE,)),
        Remake(unit=UnitKind.MLP, count=1, operations=tuple(remaking(spec, UnitKind.MLP))),
    )
    until = remake_until_ns(cost, spec, stage, SLICES, 2, remade_of(spec, stage, remakes))
    seconds: list[Floats] = [
        np.zeros(2),
        remake_seconds(cost, spec, UnitKind.MLP, WORK, {Operation.ACTIVATE}),
        np.zeros(2),
        remake_seconds(cost, spec, UnitKind.MLP, WORK, remaking(spec, UnitKind.MLP, with_output=False)),
    ]
    np.testing.assert_allclose(np.diff(until, axis=0), 1e9 * np.stack(seconds), atol=1)


def test_units_after_the_last_named_one_recompute_nothing() -> None:
    cost, spec = DESCRIBED.cost_of(1), DESCRIBED.model
    until = remake_until_ns(cost, spec, (1, 5), SLICES, 2, (frozenset(SELECTIVE),))
    assert until.shape == (5, 2)
    assert (until[1:] == until[1]).all()
    assert (until[1] > 0).all()


@settings(max_examples=25)
@given(st.sets(st.sampled_from(Operation)), st.sets(st.sampled_from(Operation)), st.sampled_from([1, 2]))
def test_a_stage_takes_no_less_for_more_operations(
    some: set[Operation], others: set[Operation], head_parts: int
) -> None:
    spec = LLAMA.divided(head_parts) if head_parts > 1 else LLAMA
    cost, stage = described(spec, DEVICE, NO_LAUNCH, Sharding()), (0, spec.num_units)
    remades = (remade_of(spec, stage, uniform_remakes(spec, stage, tuple(each))) for each in (some, some | others))
    few, many = (remake_until_ns(cost, spec, stage, SLICES, 2, remade) for remade in remades)
    assert (few[-1] <= many[-1] + 1).all()


def test_recomputation_leaves_out_the_head() -> None:
    """Its F does its whole backward and keeps nothing."""
    num_units = DESCRIBED.model.num_units
    stages = (0, 3), (3, num_units)
    candidate = Candidate(
        mesh=Mesh(dp=1, tp=1, pp=2, microbatch=1, num_microbatches=2),
        stages=stages,
        slices=(DESCRIBED.sequence_length // 2,) * 2,
        schedule=looped_schedule(num_ranks=2, num_stages=2, num_microbatches=2, num_slices=2, recompute=True),
        recompute=tuple(full_remakes(DESCRIBED.model, stage) for stage in stages),
    )
    judge = Simulated(DESCRIBED)
    table = judge.costs(candidate, (0, 1)).compute_ns
    assert (table[RECOMPUTE] < table[FORWARD]).all()
    units = DESCRIBED.units(1, 1, candidate.slices)
    without_head = stage_costs(units, DESCRIBED.model, ((0, 3), (3, num_units - 1))).alone_ns[0]
    assert (table[RECOMPUTE][1] < without_head[1]).all()
    whole = judge.evaluate(candidate).step_ns
    forward = looped_schedule(num_ranks=2, num_stages=2, num_microbatches=2, num_slices=2)
    assert judge.evaluate(dataclasses.replace(candidate, schedule=forward, recompute=())).step_ns < whole
