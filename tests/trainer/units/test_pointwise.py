"""Norms, activations and rotary positions against autograd through their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from penstock.core.model import Family, ModelSpec
from penstock.trainer.units.activation import BLOCK_BYTES, Activation, FusedGelu, SigmoidGelu, SwiGlu, build_activation
from penstock.trainer.units.norm import FusedRmsNorm, LayerNorm, Norm, RmsNorm
from penstock.trainer.units.rotary import Rotary
from penstock.trainer.units.workspace import Workspace

CPU = torch.device("cpu")
EPSILON = 1e-5
HIDDEN = 6


def _space() -> Workspace:
    return Workspace(1 << 12, CPU)


def _random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _gradients(
    formula: Callable[..., Tensor], inputs: tuple[Tensor, ...], dy: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    leaves = [tensor.detach().double().clone().requires_grad_() for tensor in inputs]
    y = formula(*leaves)
    return y.detach(), torch.autograd.grad(y, leaves, dy.double())


def _rms_formula(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def _check_norm(norm: Norm, x: Tensor, expected: Tensor, dx: Tensor, dy: Tensor, limit: float) -> None:
    """Forward, backward alone and backward onto a residual. Weight gradients are added twice."""
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    statistics = {name: torch.full((x.shape[0],), torch.nan, dtype=wide) for name in ("rstd", "mean")}
    out = torch.full_like(x, torch.nan)
    norm.forward(x, statistics, out)
    torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit)
    alone, onto, residual = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan), torch.ones_like(x)
    norm.backward(dy.clone(), x, statistics, None, alone)
    norm.backward(dy.clone(), x, statistics, residual, onto)
    torch.testing.assert_close(alone.double(), dx, rtol=limit, atol=limit)
    torch.testing.assert_close(onto.double(), dx + 1, rtol=limit, atol=limit)


NORM_TYPES = [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.06)]


@pytest.mark.parametrize(("dtype", "limit"), NORM_TYPES)
def test_rms_norm(dtype: torch.dtype, limit: float) -> None:
    x, dy, weight = _random(5, HIDDEN, dtype=dtype), _random(5, HIDDEN, dtype=dtype, seed=1), _random(HIDDEN, seed=2)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    gradient = torch.zeros(HIDDEN, dtype=wide)
    norm = RmsNorm(weight.to(wide), gradient, EPSILON, _space())
    y, (dx, dweight) = _gradients(_rms_formula, (x, weight), dy)
    _check_norm(norm, x, y, dx, dy, limit)
    torch.testing.assert_close(gradient.double(), 2 * dweight, rtol=limit, atol=2 * limit)


def test_fused_rms_norm_forward() -> None:
    """Its backward kernel exists on CUDA only (test_gpu.py)."""
    x, weight = _random(5, HIDDEN), _random(HIDDEN, seed=2)
    statistics, out = {"rstd": torch.full((5,), torch.nan, dtype=torch.float64)}, torch.full_like(x, torch.nan)
    FusedRmsNorm(weight, torch.zeros(HIDDEN, dtype=torch.float64), EPSILON).forward(x, statistics, out)
    torch.testing.assert_close(out, _rms_formula(x, weight))
    torch.testing.assert_close(statistics["rstd"], (x.square().mean(-1) + EPSILON).rsqrt())


@pytest.mark.parametrize(("dtype", "limit"), NORM_TYPES)
def test_layer_norm(dtype: torch.dtype, limit: float) -> None:
    x, dy = _random(5, HIDDEN, dtype=dtype), _random(5, HIDDEN, dtype=dtype, seed=1)
    weight, bias = _random(HIDDEN, seed=2), _random(HIDDEN, seed=3)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    gradients = torch.zeros(2, HIDDEN, dtype=wide)
    norm = LayerNorm(weight.to(wide), bias.to(wide), gradients[0], gradients[1], EPSILON)

    def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, (HIDDEN,), weight, bias, EPSILON)

    y, (dx, dweight, dbias) = _gradients(formula, (x, weight, bias), dy)
    _check_norm(norm, x, y, dx, dy, limit)
    torch.testing.assert_close(gradients.double(), 2 * torch.stack((dweight, dbias)), rtol=limit, atol=2 * limit)


def _gelu_formula(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _swiglu_formula(projected: Tensor) -> Tensor:
    gate, up = projected.chunk(2, dim=-1)
    return up * gate / (1 + torch.exp(-gate))


def _check_activation(
    activation: Activation, formula: Callable[[Tensor], Tensor], projected: Tensor, width: int, limit: float
) -> None:
    dy = _random(projected.shape[0], width, dtype=projected.dtype, seed=9)
    y, (dprojected,) = _gradients(formula, (projected,), dy)
    out, found = torch.full_like(dy, torch.nan), torch.full_like(projected, torch.nan)
    activation.forward(projected, out)
    torch.testing.assert_close(out.double(), y, rtol=limit, atol=limit)
    activation.backward(dy.clone(), projected, out, found)
    torch.testing.assert_close(found.double(), dprojected, rtol=limit, atol=limit)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
@pytest.mark.parametrize("values", [[0.0, -0.0, 1e-30, -1e-30], [9.0, -9.0, 40.0, -40.0], [-3.0, -0.7, 0.3, 5.0]])
def test_gelu_at_zero_at_the_tails_and_between(dtype: torch.dtype, limit: float, values: list[float]) -> None:
    projected = torch.tensor([values], dtype=dtype)
    _check_activation(SigmoidGelu(dtype), _gelu_formula, projected, 4, limit)
    _check_activation(FusedGelu(), _gelu_formula, projected, 4, limit)


@given(st.lists(st.floats(-30, 30, allow_subnormal=False), min_size=4, max_size=4))
def test_activations_anywhere(values: list[float]) -> None:
    projected = torch.tensor([values], dtype=torch.float64)
    _check_activation(SigmoidGelu(torch.float64), _gelu_formula, projected, 4, 1e-12)
    _check_activation(SwiGlu(torch.float64, CPU), _swiglu_formula, projected, 2, 1e-12)


def test_activations_of_more_rows_than_a_block_has() -> None:
    projected = _random(2 * BLOCK_BYTES // (64 * 8) + 1, 64)
    _check_activation(SigmoidGelu(torch.float64), _gelu_formula, projected, 64, 1e-12)
    _check_activation(SwiGlu(torch.float64, CPU), _swiglu_formula, projected.repeat(2, 1), 32, 1e-12)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize(("family", "formula"), [(Family.GPT2, _gelu_formula), (Family.LLAMA, _swiglu_formula)])
def test_activations_of_narrower_types(
    family: Family, formula: Callable[[Tensor], Tensor], dtype: torch.dtype, limit: float
) -> None:
    spec = ModelSpec(family=family, layers=1, hidden=8, heads=2, vocab=3)
    width = 8 if family is Family.GPT2 else 4
    _check_activation(build_activation(spec, dtype, CPU), formula, _random(3, 8, dtype=dtype), width, limit)


@given(st.integers(0, 20), st.integers(1, 10))
def test_rotary_turns_pairs_by_their_position(start: int, length: int) -> None:
    width, theta = 6, 100.0
    rotary = Rotary(width, theta, 30, torch.float64, CPU)
    x = _random(2, length, 3, width)
    turned, back = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    rotary.rotate(x, start, turned)
    for position in range(length):
        for i in range(width // 2):
            angle = (start + position) * theta ** (-2 * i / width)
            low, high = x[:, position, :, i], x[:, position, :, i + width // 2]
            expected = low * math.cos(angle) - high * math.sin(angle)
            torch.testing.assert_close(turned[:, position, :, i], expected)
            expected = high * math.cos(angle) + low * math.sin(angle)
            torch.testing.assert_close(turned[:, position, :, i + width // 2], expected)
    rotary.rotate_back(turned, start, back)
    torch.testing.assert_close(back, x)
