"""The learning rate against closed forms, and the flat AdamW against torch's on tensors of their own."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.core.errors import UserError
from penstock.core.job import Decay, OptimizerSpec, TrainingSpec
from penstock.core.job_rules import MOST_BF16_BETA
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.moments import WIDENED_ELEMENTS, MomentType
from penstock.core.schedule import Part
from penstock.trainer.optimizer import AdamW, learning_rate
from penstock.trainer.parameters import StageParameters
from tests.support.small_plans import small_model

CPU = torch.device("cpu")
PEAK = 2e-3

STEPS = st.integers(1, 400)
WARM_UP = st.integers(0, 50)


def training(**changes: object) -> TrainingSpec:
    plain = TrainingSpec(global_batch=1, steps=100, optimizer=OptimizerSpec(learning_rate=PEAK), warmup_steps=10)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


@given(STEPS, WARM_UP, st.sampled_from(Decay))
def test_warm_up_is_a_straight_line_to_the_peak(steps: int, warm_up: int, decay: Decay) -> None:
    spec = training(steps=steps, warmup_steps=warm_up, schedule=decay)
    rates = [learning_rate(spec, step) for step in range(min(warm_up, steps))]
    assert rates == pytest.approx([PEAK * (step + 1) / warm_up for step in range(len(rates))])


@given(STEPS, WARM_UP, st.sampled_from(Decay), st.floats(0, 1), st.floats(0, 1))
def test_rates_lie_between_least_and_peak_and_never_rise_after_warm_up(
    steps: int, warm_up: int, decay: Decay, least: float, share: float
) -> None:
    spec = training(steps=steps, warmup_steps=warm_up, schedule=decay, min_learning_rate=least, decay_share=share)
    rates = [learning_rate(spec, step) for step in range(warm_up, steps)]
    tiny = 1e-12
    assert all(PEAK * least - tiny <= rate <= PEAK + tiny for rate in rates)
    assert all(later <= earlier + tiny for earlier, later in pairwise(rates))
    if len(rates) > 1 and decay is not Decay.CONSTANT:
        assert rates[0] == pytest.approx(PEAK) or round(steps * (1 - share)) <= warm_up
    if rates and steps > 1 and (decay is Decay.COSINE or (decay is Decay.WSD and share > 0)):
        assert rates[-1] == pytest.approx(PEAK * least)


@pytest.mark.parametrize("step", [10, 11, 33, 54, 77, 98, 99])
def test_cosine(step: int) -> None:
    expected = 0.1 * PEAK + 0.9 * PEAK * math.cos(math.pi / 2 * (step - 10) / 89) ** 2
    assert learning_rate(training(schedule=Decay.COSINE), step) == pytest.approx(expected)


@pytest.mark.parametrize(("step", "share"), [(10, 1.0), (50, 1.0), (80, 1.0), (81, 1 - 0.9 / 19), (99, 0.1)])
def test_warm_up_stable_decay(step: int, share: float) -> None:
    assert learning_rate(training(schedule=Decay.WSD), step) == pytest.approx(PEAK * share)


@pytest.mark.parametrize(
    "decay", [{"schedule": Decay.WSD, "decay_share": 0.01}, {"schedule": Decay.COSINE, "warmup_steps": 99}]
)
def test_a_decay_of_one_step_is_one(decay: dict[str, Any]) -> None:
    assert learning_rate(training(**decay), 98) == PEAK
    assert learning_rate(training(**decay), 99) == pytest.approx(0.1 * PEAK)


def test_constant_stays() -> None:
    assert {learning_rate(training(schedule=Decay.CONSTANT), step) for step in range(10, 100)} == {PEAK}


def stage(
    family: Family, first: int = 0, stop: int | None = None, *, precision: Precision = Precision.FP64
) -> StageParameters:
    spec = small_model(family)
    stop = spec.num_units if stop is None else stop
    return StageParameters(spec, first, stop, precision=precision, device=CPU, seed=0)


def fill_gradients(parameters: StageParameters, seed: int, scale: float) -> Tensor:
    """Random gradients; their squared norm."""
    generator = torch.Generator().manual_seed(seed)
    parameters.gradient_flat.copy_(scale * torch.randn(parameters.gradient_flat.shape, generator=generator))
    return parameters.gradient_flat.double().square().sum()


class Separate:
    """torch's own AdamW and clipping, with every parameter a tensor of its own."""

    def __init__(self, parameters: StageParameters, spec: TrainingSpec) -> None:
        self.tensors = {name: tensor.clone().requires_grad_() for name, tensor in parameters.master.items()}
        decayed = [self.tensors[name] for name, declared in parameters.declared.items() if declared.decay]
        others = [self.tensors[name] for name, declared in parameters.declared.items() if not declared.decay]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        optimizer = spec.optimizer
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=1.0,
            betas=optimizer.betas,
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            foreach=False,
        )
        self.spec = spec

    def step(self, step: int, gradients: dict[str, Tensor]) -> float:
        for name, tensor in self.tensors.items():
            tensor.grad = gradients[name].clone()
        norm = torch.nn.utils.clip_grad_norm_(self.tensors.values(), self.spec.clip)
        for group in self.adam.param_groups:
            group["lr"] = learning_rate(self.spec, step)
        self.adam.step()
        return float(norm)


@settings(max_examples=20)
@given(
    st.sampled_from(Family),
    st.sampled_from([(0, None), (0, 1), (1, 2), (7, None)]),
    st.floats(0, 0.5),
    st.floats(1e-3, 10),
    st.sampled_from([(0.9, 0.95), (0.8, 0.999)]),
)
def test_equals_torch_s_on_separate_tensors(
    family: Family, units: tuple[int, int | None], decay: float, clip: float, betas: tuple[float, float]
) -> None:
    optimizer = OptimizerSpec(learning_rate=PEAK, weight_decay=decay, betas=betas)
    spec = training(optimizer=optimizer, clip=clip, warmup_steps=2)
    parameters = stage(family, *units)
    ours, theirs = AdamW(parameters, spec), Separate(parameters, spec)
    for step in range(4):
        squared_norm = fill_gradients(parameters, step, scale=10.0 ** (step - 2))
        gradients = {name: gradient.clone() for name, gradient in parameters.gradients.items()}
        ours.step(step, squared_norm)
        assert float(squared_norm.sqrt()) == pytest.approx(theirs.step(step, gradients))
        assert not parameters.gradient_flat.any()
    assert ours.num_steps == 4
    for name, tensor in parameters.master.items():
        torch.testing.assert_close(tensor, theirs.tensors[name].detach(), rtol=1e-12, atol=1e-12)
        for moment, (flat,) in ours.moments.items():
            torch.testing.assert_close(parameters.by_name(flat)[name], theirs.adam.state[theirs.tensors[name]][moment])


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("at_once", [64, 4096, 2**16])
def test_moments_in_bf16_are_rounded_once_a_step(
    precision: Precision, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update is that of wide moments, however many elements are widened at once."""
    monkeypatch.setitem(WIDENED_ELEMENTS, False, at_once)
    spec = training(optimizer=OptimizerSpec(learning_rate=PEAK), clip=1e9, warmup_steps=0)
    narrow, wide = stage(Family.LLAMA, precision=precision), stage(Family.LLAMA, precision=precision)
    ours, theirs = AdamW(narrow, in_bf16(spec)), AdamW(wide, spec)
    for step in range(4):
        ours.step(step, fill_gradients(narrow, step, 1.0))
        theirs.step(step, fill_gradients(wide, step, 1.0))
        for name, (moment,) in theirs.moments.items():
            moment.copy_(moment.bfloat16())
            assert ours.moments[name][0].dtype is torch.bfloat16
            assert torch.equal(ours.moments[name][0].to(moment.dtype), moment)
    assert torch.equal(narrow.compute_flat, wide.compute_flat)
    assert torch.equal(narrow.masters[0], wide.masters[0])


def in_bf16(spec: TrainingSpec) -> TrainingSpec:
    return dataclasses.replace(spec, optimizer=dataclasses.replace(spec.optimizer, moment_type=MomentType.BF16))


@pytest.mark.parametrize("betas", [(0.9, 0.991), (0.999, 0.95)])
def test_moments_that_could_never_fall_in_bf16_are_refused(betas: tuple[float, float]) -> None:
    with pytest.raises(UserError, match="moments in bf16"):
        OptimizerSpec(betas=betas, moment_type=MomentType.BF16)


def test_a_second_moment_in_bf16_falls_to_its_gradient_s_square() -> None:
    """With the slowest decay that is allowed, to the nearest number of bf16 from which a step moves."""
    spec = in_bf16(training(optimizer=OptimizerSpec(betas=(0.9, MOST_BF16_BETA)), clip=1e9))
    parameters = stage(Family.LLAMA, 0, 1)
    optimizer = AdamW(parameters, spec)
    for step in range(2_000):
        parameters.gradient_flat.fill_(1.0 if step < 500 else 0.1)
        optimizer.step(0, torch.tensor(1.0, dtype=torch.float64))
    (second,) = optimizer.moments["exp_avg_sq"]
    assert second.float().max() < 0.02, "from about 1 to about 0.01"


def test_another_process_goes_on_where_one_stopped() -> None:
    spec = training(warmup_steps=0)
    straight = stage(Family.LLAMA)
    optimizer = AdamW(straight, spec)
    for step in range(3):
        optimizer.step(step, fill_gradients(straight, step, 1.0))

    resumed = stage(Family.LLAMA)
    first = AdamW(resumed, spec)
    first.step(0, fill_gradients(resumed, 0, 1.0))
    second = AdamW(resumed, spec)
    second.num_steps = first.num_steps
    for name, (moment,) in second.moments.items():
        moment.copy_(first.moments[name][0])
    for step in (1, 2):
        second.step(step, fill_gradients(resumed, step, 1.0))
    assert torch.equal(straight.compute_flat, resumed.compute_flat)


def test_compute_weights_follow_the_masters() -> None:
    parameters = stage(Family.LLAMA, precision=Precision.BF16)
    AdamW(parameters, training()).step(50, fill_gradients(parameters, 0, 1.0))
    (masters,) = parameters.masters
    assert torch.equal(parameters.compute_flat, masters.bfloat16())
    assert masters.dtype is torch.float32


@settings(max_examples=30)
@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.sampled_from([Precision.FP32, Precision.FP64]))
def test_clipping_on_the_device_is_that_of_the_host_to_the_bit(scale: float, clip: float, precision: Precision) -> None:
    """So that a job goes on with the same bits after an upgrade from a version that clipped on the host."""
    spec, ours, theirs = training(clip=clip), *(stage(Family.LLAMA, 0, 2, precision=precision) for _ in range(2))
    squared_norm = fill_gradients(ours, 0, scale)
    fill_gradients(theirs, 0, scale)
    norm = math.sqrt(float(squared_norm))
    if norm > clip:
        theirs.gradient_flat.mul_(clip / (norm + 1e-6))
    AdamW(ours, spec).step(50, squared_norm)
    AdamW(theirs, dataclasses.replace(spec, clip=1e18)).step(50, squared_norm)
    assert torch.equal(ours.compute_flat, theirs.compute_flat)


@pytest.mark.parametrize("squared_norm", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("moment_type", MomentType)
def test_a_gradient_that_is_not_finite_spoils_nothing(squared_norm: float, moment_type: MomentType) -> None:
    parameters = stage(Family.LLAMA)
    optimizer = AdamW(parameters, training(optimizer=OptimizerSpec(moment_type=moment_type)))
    optimizer.step(0, fill_gradients(parameters, 0, 1.0))
    state = [flat for flats in (parameters.masters, *optimizer.moments.values()) for flat in flats]
    before = [flat.clone() for flat in state]
    fill_gradients(parameters, 1, math.nan)
    optimizer.step(1, torch.tensor(squared_norm, dtype=torch.float64))
    assert all(torch.equal(one, other) for one, other in zip(before, state, strict=True))
    assert optimizer.num_steps == 1
    assert not parameters.gradient_flat.any()


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.FP64])
@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize("buckets", [(), (Part(3, 6), Part(1, 3), Part(0, 1))])
@pytest.mark.parametrize("moment_type", MomentType)
def test_replicas_that_divide_the_state_take_the_step_of_one(
    precision: Precision, dp: int, buckets: tuple[Part, ...], moment_type: MomentType
) -> None:
    """To the last bit, with clipping, as a whole or in buckets."""
    spec = ModelSpec(family=Family.GPT2, layers=2, hidden=48, heads=4, vocab=97, positions=61)
    options: dict[str, Any] = {"precision": precision, "device": CPU, "seed": 0}
    whole = StageParameters(spec, 0, spec.num_units, **options)
    options |= {"dp": dp, "buckets": buckets}
    replicas = [StageParameters(spec, 0, spec.num_units, replica=replica, **options) for replica in range(dp)]
    adamw = OptimizerSpec(learning_rate=PEAK, moment_type=moment_type)
    updated = training(clip=0.3, warmup_steps=0, optimizer=adamw)
    optimizers = [AdamW(parameters, updated) for parameters in (whole, *replicas)]
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        gradients = {name: torch.randn(g.shape, generator=generator) for name, g in whole.gradients.items()}
        for parameters, optimizer in zip((whole, *replicas), optimizers, strict=True):
            for name, gradient in parameters.gradients.items():
                gradient.copy_(gradients[name])
            optimizer.step(step, torch.tensor(7.0, dtype=torch.float64))
    for own, optimizer in zip(replicas, optimizers[1:], strict=True):
        assert len(own.masters) == max(len(buckets), 1)
        for flats, (flat_of_one,) in (
            (own.masters, whole.masters),
            *zip(optimizer.moments.values(), optimizers[0].moments.values(), strict=True),
        ):
            for name, part in own.own_parts(flats).items():
                start = own.starts[name]
                assert torch.equal(part, whole.by_name(flat_of_one)[name].flatten()[start : start + len(part)])
        for place, master in zip(own.own, own.masters, strict=True):
            assert torch.equal(own.compute_flat[place], master.to(own.compute_flat.dtype))
