"""Activations of the MLPs: GELU by its tanh formula (gpt2) and SwiGLU (llama), forward and backward.

Computations with several passes over memory run block by block of rows, so that a block stays in the cache between the
passes. GELU backward for 1,024 x 2,048 values in fp32, too large for a core's cache, takes 5.1 instead of 8.3 ms on an
Intel Xeon.

Shape letters: T tokens, C tokens of one block, F feed-forward width, R width of the first projection's output: F, or
2 F for gate and up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.model import Family, ModelSpec

_aten = torch.ops.aten

BLOCK_BYTES = 2**17
"""Bytes of a block of each tensor. A pass touches at most four, which fit the second-level cache of common processors.
"""


class Activation(Protocol):
    """Interface of an MLP to its activation."""

    def forward(self, projected_TR: Tensor, out_TF: Tensor) -> None:
        """Compute ``out`` = activation(projected)."""
        ...

    def backward(self, dy_TF: Tensor, projected_TR: Tensor, activated_TF: Tensor, out_TR: Tensor) -> None:
        """Compute ``out`` = the gradient of ``projected`` for the gradient ``dy`` of ``activated``. ``dy`` may be
        overwritten.
        """
        ...


def build_activation(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Activation:
    """The model family's activation, in the fastest implementation for the type and device."""
    if spec.family is Family.LLAMA:
        return SwiGlu(dtype, device)
    exact_steps = device.type == "cpu" and dtype in (torch.float32, torch.float64)
    return SigmoidGelu(dtype) if exact_steps else FusedGelu()


class FusedGelu:
    """0.5 x (1 + tanh(k (x + c x^3))) by PyTorch's kernels, which compute narrower types in fp32."""

    def forward(self, projected_TR: Tensor, out_TF: Tensor) -> None:
        _aten.gelu.out(projected_TR, approximate="tanh", out=out_TF)

    def backward(self, dy_TF: Tensor, projected_TR: Tensor, activated_TF: Tensor, out_TR: Tensor) -> None:
        _aten.gelu_backward.grad_input(dy_TF, projected_TR, approximate="tanh", grad_input=out_TR)


class SigmoidGelu:
    """The same function as x s with s = sigmoid(u), u = 2 k (x + c x^3), since 0.5 (1 + tanh(u / 2)) = sigmoid(u).

    The CPU kernels spend most of their time in tanh: 1.8 ms each way for 256 x 2,048 values in fp32. This class takes
    0.7 ms forward and 0.5 ms backward. Backward needs no exponential: s is y / x, and y' = s (1 + (x - y) u'). Only
    for subnormal x the quotient is imprecise; it stays within 0 and 1.
    """

    _K, _C = 2 * math.sqrt(2 / math.pi), 0.044715

    def __init__(self, dtype: torch.dtype) -> None:
        self._k = torch.tensor(self._K, dtype=dtype)

    def forward(self, projected_TR: Tensor, out_TF: Tensor) -> None:
        for x_CF, out_CF in _blocks(projected_TR, out_TF):
            torch.addcmul(self._k, x_CF, x_CF, value=self._K * self._C, out=out_CF)
            out_CF.mul_(x_CF).sigmoid_().mul_(x_CF)

    def backward(self, dy_TF: Tensor, projected_TR: Tensor, activated_TF: Tensor, out_TR: Tensor) -> None:
        """Compute ``out`` = the gradient of ``projected``. Overwrites ``dy``."""
        for dy_CF, x_CF, y_CF, out_CF in _blocks(dy_TF, projected_TR, activated_TF, out_TR):
            torch.addcmul(self._k, x_CF, x_CF, value=3 * self._K * self._C, out=out_CF)
            slope_CF = out_CF.mul_(x_CF - y_CF)
            share_CF = torch.div(y_CF, x_CF).nan_to_num_(nan=0.5)  # s(0) = 1/2, where the quotient is 0/0
            dy_CF.mul_(share_CF)
            torch.addcmul(dy_CF, dy_CF, slope_CF, out=out_CF)


class SwiGlu:
    """up x gate sigmoid(gate) (arXiv 2002.05202). Gate and up are the two halves of one [T, 2 F] tensor."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._one = torch.ones((), dtype=dtype, device=device)

    def forward(self, projected_TR: Tensor, out_TF: Tensor) -> None:
        for projected_CR, out_CF in _blocks(projected_TR, out_TF):
            gate_CF, up_CF = projected_CR.chunk(2, dim=1)
            _aten.silu.out(gate_CF, out=out_CF)
            out_CF.mul_(up_CF)

    def backward(self, dy_TF: Tensor, projected_TR: Tensor, activated_TF: Tensor, out_TR: Tensor) -> None:
        """Compute the gradients of gate and up. silu' = s + silu (1 - s), the interpolation from s to 1 at silu, needs
        one exponential.
        """
        for dy_CF, projected_CR, out_CR in _blocks(dy_TF, projected_TR, out_TR):
            gate_CF, up_CF = projected_CR.chunk(2, dim=1)
            dgate_CF, dup_CF = out_CR.chunk(2, dim=1)
            torch.sigmoid(gate_CF, out=dgate_CF)
            torch.mul(gate_CF, dgate_CF, out=dup_CF)
            dgate_CF.lerp_(self._one, dup_CF).mul_(dy_CF).mul_(up_CF)
            dup_CF.mul_(dy_CF)


def _blocks(first_TF: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same block of rows of all tensors: on the CPU as many rows as the cache holds, otherwise all."""
    tensors = (first_TF, *others)
    row_bytes = first_TF.shape[1] * first_TF.element_size()
    rows = max(1, BLOCK_BYTES // row_bytes) if first_TF.device.type == "cpu" else len(first_TF)
    return zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
