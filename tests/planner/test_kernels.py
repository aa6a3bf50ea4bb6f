"""Times by the shapes of kernels: closed forms, roofs, and what must not become cheaper."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.cluster import AttentionKernel, DeviceSpec, Fusion, GradientType, KernelSpec, SoftwareSpec
from penstock.core.devices import device_kind, device_kinds
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec, UnitKind, step_flops
from penstock.core.schedule import Kind
from penstock.core.sharding import Sharding
from penstock.planner.cost import DescribedCost
from penstock.planner.kernels import KernelTimes, has_work
from penstock.planner.work import Work
from tests.support.planning import cluster

PASSES = (Kind.F, Kind.I, Kind.W)
GPT = ModelSpec(family=Family.GPT2, layers=4, hidden=1024, heads=16, vocab=51200, positions=8192)
LLAMA = ModelSpec(family=Family.LLAMA, layers=4, hidden=1024, heads=16, kv_heads=8, vocab=32000)
MODELS = st.sampled_from([GPT, LLAMA])
STACKS = st.builds(
    SoftwareSpec,
    attention=st.sampled_from(AttentionKernel),
    dropout=st.booleans(),
    fusion=st.sampled_from(Fusion),
    fused_gradients=st.booleans(),
    gradient_type=st.sampled_from(GradientType),
    head_in_forward=st.booleans(),
)
KINDS = st.sampled_from([device_kind(name).device for name in device_kinds()])

IDEAL = KernelSpec(
    product_share=1.0,
    product_edge=0.0,
    product_depth=0.0,
    product_memory_share=1.0,
    attention_share=1.0,
    attention_backward_share=1.0,
    attention_edge=0.0,
    attention_depth=0.0,
    stream_share=1.0,
    row_share=1.0,
    kernel_seconds=0.0,
)
FREE_MEMORY = DeviceSpec(
    name="no memory wall", peak_flops=1e12, memory_bytes=2**40, memory_bandwidth=1e30, kernels=IDEAL
)
NO_LAUNCH = SoftwareSpec(launch_seconds=0.0)


def times(
    model: ModelSpec = GPT,
    device: DeviceSpec = FREE_MEMORY,
    software: SoftwareSpec = NO_LAUNCH,
    tp: int = 1,
    sequence_parallel: bool = True,
) -> KernelTimes:
    assert device.kernels is not None
    return KernelTimes(
        model=model,
        device=device,
        kernels=device.kernels,
        software=software,
        precision=Precision.BF16,
        sharding=Sharding(tp, sequence_parallel),
    )


def layer_seconds(cost: KernelTimes, work: Work) -> float:
    """F, I and W of a whole model but for its embedding."""
    units = [(unit, cost.model.layers) for unit in (UnitKind.ATTENTION, UnitKind.MLP)] + [(UnitKind.HEAD, 1)]
    return sum(count * float(cost.unit_seconds(unit, kind, work)) for unit, count in units for kind in PASSES)


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_at_both_ideal_roofs_a_step_takes_its_flops_at_the_peak(model: ModelSpec) -> None:
    work = Work.of(2, 512, 0)
    pairs = model.layers * 4 * model.hidden * 2 * (512 * 513 / 2)
    recomputed = 0.5 * pairs  # backward of fused attention recomputes the scores: 2.5 times the forward, not 2
    expected = (step_flops(model, 2, 512) + recomputed) / FREE_MEMORY.peak_flops
    assert layer_seconds(times(model), work) == pytest.approx(expected, rel=1e-6)


def test_megatrons_count_of_flops_is_that_of_unfused_attention() -> None:
    """96 B s l h^2 (1 + s / 6 h + v / 16 l h), of which a quarter is recomputation (arXiv 2104.04473, section 5.1)."""
    batch, length, h, layers = 2, 512, GPT.hidden, GPT.layers
    software = dataclasses.replace(NO_LAUNCH, attention=AttentionKernel.UNFUSED)
    expected = 72 * batch * length * layers * h * h * (1 + length / (6 * h) + GPT.vocab / (12 * layers * h))
    seconds = layer_seconds(times(software=software), Work.of(batch, length, 0))
    assert seconds * FREE_MEMORY.peak_flops == pytest.approx(expected, rel=1e-6)


def test_a_product_is_as_slow_as_a_larger_one_by_its_edge_and_depth() -> None:
    padded = dataclasses.replace(IDEAL, product_edge=64.0, product_depth=32.0, product_share=0.5)
    cost = times(device=dataclasses.replace(FREE_MEMORY, kernels=padded))
    h, f, n = GPT.hidden, GPT.ffn_hidden, 256
    flops = 2 * (n + 64) * ((f + 64) * (h + 32) + (h + 64) * (f + 32))
    seconds = float(cost.unit_seconds(UnitKind.MLP, Kind.F, Work.of(1, n, 0)))
    assert seconds == pytest.approx(flops / (0.5 * FREE_MEMORY.peak_flops), rel=1e-6)


def test_a_few_tokens_cost_the_reading_of_all_weights() -> None:
    slow = dataclasses.replace(FREE_MEMORY, peak_flops=1e30, memory_bandwidth=1e9)
    h, f = GPT.hidden, GPT.ffn_hidden
    activations = (2 * h + h + f + f + h + 2 * f + 3 * h) * 2  # norm, both products' in and out, activation, residual
    seconds = float(times(device=slow).unit_seconds(UnitKind.MLP, Kind.F, Work.of(1, 1, 0)))
    assert seconds == pytest.approx((2 * h * f * 2 + activations) / 1e9, rel=1e-6)


def test_every_kernel_and_every_launch_take_their_time() -> None:
    fast = dataclasses.replace(FREE_MEMORY, peak_flops=1e30, kernels=dataclasses.replace(IDEAL, kernel_seconds=1e-3))
    work = Work.of(1, 1, 0)
    kernels = round(float(times(device=fast).unit_seconds(UnitKind.MLP, Kind.F, work)) * 1e3)
    assert kernels == 5  # norm, two products, activation, residual
    slow_host = times(device=fast, software=dataclasses.replace(NO_LAUNCH, launch_seconds=1.0))
    assert float(slow_host.launch_seconds(UnitKind.MLP, Kind.F, work)) == kernels
    assert not slow_host.launch_seconds(UnitKind.EMBEDDING, Kind.I, work).any()
    fast_host = times(device=fast, software=dataclasses.replace(NO_LAUNCH, launch_seconds=1e-3))
    assert not fast_host.launch_seconds(UnitKind.MLP, Kind.F, work).any(), "no kernel takes the device less"


@given(MODELS, KINDS, STACKS, st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.integers(0, 4096), st.data())
def test_more_tokens_and_more_prefix_never_take_less(
    model: ModelSpec, device: DeviceSpec, software: SoftwareSpec, tp: int, batch: int, prefix: int, data: st.DataObject
) -> None:
    lengths = np.array(sorted(data.draw(st.lists(st.integers(1, 8192), min_size=2, max_size=6))))
    cost = times(model, device, software, tp)
    for unit, kind in itertools.product(UnitKind, PASSES):
        seconds = cost.unit_seconds(unit, kind, Work.of(batch, lengths, prefix))
        assert (np.diff(seconds) >= -1e-12).all()
        assert (cost.unit_seconds(unit, kind, Work.of(batch, lengths, prefix + 64)) >= seconds - 1e-12).all()
        assert (seconds > 0).all() == has_work(unit, kind, software)


@given(MODELS, KINDS, STACKS, st.integers(1, 4), st.integers(1, 4096))
def test_more_tensor_parallelism_never_takes_longer_on_a_device_nor_saves_more_than_its_share(
    model: ModelSpec, device: DeviceSpec, software: SoftwareSpec, batch: int, length: int
) -> None:
    work = Work.of(batch, length, 0)
    for unit, kind in itertools.product(UnitKind, PASSES):
        seconds = [float(times(model, device, software, tp).unit_seconds(unit, kind, work)) for tp in (1, 2, 4, 8)]
        for narrow, wide in itertools.pairwise(seconds):
            assert wide <= narrow + 1e-12 <= 2 * wide + 2e-12


@given(MODELS, KINDS, STACKS, st.sampled_from([2, 4, 8]), st.integers(1, 4), st.integers(1, 4096))
def test_hidden_states_by_tokens_never_take_longer(
    model: ModelSpec, device: DeviceSpec, software: SoftwareSpec, tp: int, batch: int, length: int
) -> None:
    work = Work.of(batch, length, 0)
    for unit, kind in itertools.product(UnitKind, PASSES):
        own, whole = (times(model, device, software, tp, each).unit_seconds(unit, kind, work) for each in (True, False))
        assert own <= whole


@pytest.mark.parametrize(
    ("unit", "kind", "width"),
    [
        (UnitKind.MLP, Kind.F, 2 + 3),  # norm, residual
        (UnitKind.ATTENTION, Kind.I, 4 + 2),  # norm with residual, gradients of the norm
        (UnitKind.MLP, Kind.W, 1),  # bias
        (UnitKind.HEAD, Kind.F, 2 + 5),  # norm and its gradients
        (UnitKind.EMBEDDING, Kind.F, 0),
    ],
)
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_only_hidden_states_are_divided_by_tokens(unit: UnitKind, kind: Kind, width: int, tp: int) -> None:
    """For memory-bound kernels a shard has its part of the hidden states of 96 tokens, otherwise the same time."""
    streams = dataclasses.replace(FREE_MEMORY, peak_flops=1e30, memory_bandwidth=1e9)
    work = Work.of(1, 96, 0)
    own, whole = (
        float(times(device=streams, tp=tp, sequence_parallel=each).unit_seconds(unit, kind, work))
        for each in (True, False)
    )
    assert whole - own == pytest.approx((1 - 1 / tp) * 96 * width * GPT.hidden * 2 / 1e9, rel=1e-6, abs=1e-12)


@given(MODELS, KINDS, STACKS, st.integers(1, 4), st.integers(1, 4096))
def test_no_device_is_faster_than_either_of_its_roofs(
    model: ModelSpec, device: DeviceSpec, software: SoftwareSpec, batch: int, length: int
) -> None:
    tokens = batch * length
    for kind in PASSES:
        seconds = float(times(model, device, software).unit_seconds(UnitKind.MLP, kind, Work.of(batch, length, 0)))
        widths = 3 if model.family is Family.LLAMA else 2
        weights = widths * model.hidden * model.ffn_hidden
        assert seconds >= 2 * tokens * weights / device.peak_flops
        assert seconds >= 2 * weights / device.memory_bandwidth


@given(MODELS, KINDS, STACKS, st.integers(1, 3), st.lists(st.integers(1, 512), min_size=1, max_size=4))
def test_a_sequence_in_slices_never_takes_less_than_whole(
    model: ModelSpec, device: DeviceSpec, software: SoftwareSpec, batch: int, slices: list[int]
) -> None:
    before = np.cumsum([0, *slices[:-1]])
    flash = dataclasses.replace(software, attention=AttentionKernel.FLASH)
    cost = times(model, device, flash)
    for unit, kind in itertools.product(UnitKind, PASSES):
        parts = cost.unit_seconds(unit, kind, Work.of(batch, slices, before)).sum()
        assert parts >= float(cost.unit_seconds(unit, kind, Work.of(batch, sum(slices), 0))) - 1e-12


@given(MODELS, KINDS, st.integers(1, 4), st.integers(1, 4096))
def test_extra_work_of_a_software_stack_takes_time(
    model: ModelSpec, device: DeviceSpec, batch: int, length: int
) -> None:
    work = Work.of(batch, length, 0)

    def whole(**changes: object) -> float:
        return layer_seconds(times(model, device, dataclasses.replace(NO_LAUNCH, **changes)), work)  # type: ignore[arg-type]

    grouped = whole(fusion=Fusion.GROUPED)
    assert whole() <= grouped < whole(fusion=Fusion.NONE)
    assert whole(dropout=True) > whole()
    assert whole(fused_gradients=False) > whole()
    assert whole(gradient_type=GradientType.BF16) < whole()
    assert whole(head_in_forward=False) == pytest.approx(whole())


def test_the_head_works_where_its_stack_does() -> None:
    work = Work.of(1, 64, 0)
    whole, split = times(), times(software=dataclasses.replace(NO_LAUNCH, head_in_forward=False))
    assert [float(whole.unit_seconds(UnitKind.HEAD, kind, work)) > 0 for kind in PASSES] == [True, False, False]
    assert [float(split.unit_seconds(UnitKind.HEAD, kind, work)) > 0 for kind in PASSES] == [True, True, True]


@pytest.mark.parametrize(
    ("family", "published"), [("h4096 b6", (14.86, 14.72, 9.96)), ("h2304 b12", (12.35, 12.06, 6.22))]
)
def test_layers_that_the_zero_bubble_authors_timed(family: str, published: tuple[float, float, float]) -> None:
    """Milliseconds per layer on A100, from their `v_schedule.py`: no part of any description."""
    hidden, batch = (int(word[1:]) for word in family.split())
    model = ModelSpec(
        family=Family.GPT2, layers=1, hidden=hidden, heads=hidden // (96 if hidden == 2304 else 128), vocab=128
    )
    megatron = SoftwareSpec(
        attention=AttentionKernel.UNFUSED, dropout=True, fusion=Fusion.GROUPED, head_in_forward=False
    )
    described = dataclasses.replace(cluster(), device=device_kind("a100-80").device, software=megatron)
    cost = DescribedCost(model=model, cluster=described, precision=Precision.BF16)
    work = Work.of(batch, 1024, 0)
    units = (UnitKind.ATTENTION, UnitKind.MLP)
    seconds = sum(float(cost.unit_seconds(unit, kind, work)) for unit in units for kind in PASSES)
    assert 1e3 * seconds == pytest.approx(sum(published), rel=0.04)


# A head in parts


@given(st.integers(2, 8), st.integers(64, 4096), st.sampled_from([GPT, LLAMA]))
def test_parts_of_a_head_do_its_products_together(parts: int, tokens: int, model: ModelSpec) -> None:
    """Without memory time, equal parts of a vocabulary together take the time of the whole head."""
    model = dataclasses.replace(model, vocab=parts * 4096)
    work = Work.of(1, tokens, 0)
    whole, divided = times(model), times(model.divided(parts))
    of_part = [float(divided.unit_seconds(UnitKind.HEAD, kind, work)) for kind in PASSES]
    forward = float(whole.unit_seconds(UnitKind.HEAD, Kind.F, work))
    assert parts * sum(of_part) == pytest.approx(forward)
    assert of_part[0] == pytest.approx(2 * of_part[2])
    assert of_part[1] == pytest.approx(0.0, abs=1e-12 * forward)


@given(MODELS, STACKS, KINDS, st.integers(2, 8), st.integers(16, 4096))
def test_a_head_in_parts_is_never_cheaper_than_whole(
    model: ModelSpec, software: SoftwareSpec, device: DeviceSpec, parts: int, tokens: int
) -> None:
    work = Work.of(1, tokens, 0)
    whole, divided = (times(spec, device, software) for spec in (model, model.divided(parts)))
    of_part = sum(float(divided.unit_seconds(UnitKind.HEAD, kind, work)) for kind in PASSES)
    assert parts * of_part >= sum(float(whole.unit_seconds(UnitKind.HEAD, kind, work)) for kind in PASSES)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("gradients", GradientType)
def test_a_memory_bound_part_takes_the_time_of_its_reads_and_writes(
    parts: int, tp: int, gradients: GradientType
) -> None:
    """In bytes, of whole hidden states: products with their matrices, streams of T tokens, gradients read and added."""
    streams = dataclasses.replace(FREE_MEMORY, peak_flops=1e30, memory_bandwidth=1e9)
    model = dataclasses.replace(LLAMA, vocab=parts * tp * 512).divided(parts)
    software = dataclasses.replace(NO_LAUNCH, gradient_type=gradients)
    cost = times(model, streams, software, tp, sequence_parallel=False)
    t, h, v, wide = 96, model.hidden, 512, 4
    width, gradient = 2, wide if gradients is GradientType.FP32 else 2
    product = width * (t * h + t * v + h * v)
    softmax = 16 * t * v
    weights = width * t * (v + h) + 2 * gradient * h * v
    scaled, targets = width * 2 * t * h, width * t * h + t * h * (wide + wide + 2 * gradient)
    statistics = 2 * 3 * wide * t
    expected = {
        Kind.F: 2 * product + softmax + width * t * h * (6 + 2 / parts) + statistics,
        Kind.I: width * t * h * (6 + 5 + 5 / parts) + statistics,
        Kind.W: weights + scaled + targets,
    }
    for kind, num_bytes in expected.items():
        seconds = float(cost.unit_seconds(UnitKind.HEAD, kind, Work.of(1, t, 0)))
        assert 1e9 * seconds == pytest.approx(num_bytes, rel=1e-6), kind


def test_every_pass_of_a_part_does_something() -> None:
    for software in (NO_LAUNCH, SoftwareSpec(head_in_forward=False)):
        assert all(has_work(UnitKind.HEAD, kind, software, head_parts=2) for kind in PASSES)
    assert [has_work(UnitKind.HEAD, kind, NO_LAUNCH) for kind in PASSES] == [True, False, False]
