"""The MLPs' activations: GELU by its tanh formula (gpt2) and SwiGLU (llama), forward and backward.

Shape letters: T tokens, F feed-forward width, R what rises from the hidden width: F, or 2 F for gate and up.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.model import Family, ModelSpec
from penstock.trainer.units.workspace import Workspace

_aten = torch.ops.aten


class Activation(Protocol):
    """What an MLP asks of its activation."""

    def forward(self, risen_TR: Tensor, out_TF: Tensor) -> None:
        """``out`` = activation(risen)."""
        ...

    def backward(self, dy_TF: Tensor, risen_TR: Tensor, activated_TF: Tensor, out_TR: Tensor) -> None:
        """``out`` = the gradient of ``risen`` for the gradient ``dy`` of ``activated``."""
        ...


def build_activation(spec: ModelSpec, dtype: torch.dtype, device: torch.device, workspace: Workspace) -> Activation:
    """The family's activation, by the formula that is fastest for the type and device."""
    if spec.family is Family.LLAMA:
        return SwiGlu(dtype, device)
    exact_steps = device.type == "cpu" and dtype in (torch.float32, torch.float64)
    return SigmoidGelu(dtype, workspace) if exact_steps else FusedGelu()


class FusedGelu:
    """0.5 x (1 + tanh(k (x + c x^3))) by PyTorch's kernels, which keep fp32 inside for narrower types."""

    def forward(self, risen_TR: Tensor, out_TF: Tensor) -> None:
        """See `Activation`."""
        _aten.gelu.out(risen_TR, approximate="tanh", out=out_TF)

    def backward(self, dy_TF: Tensor, risen_TR: Tensor, activated_TF: Tensor, out_TR: Tensor) -> None:
        """See `Activation`."""
        _aten.gelu_backward.grad_input(dy_TF, risen_TR, approximate="tanh", grad_input=out_TR)


class SigmoidGelu:
    """The same function as x s with s = sigmoid(u), u = 2 k (x + c x^3), since 0.5 (1 + tanh(u / 2)) = sigmoid(u).

    The CPU kernels spend most of their time in tanh: 1.8 ms each way for 256 x 2,048 values in fp32, against 0.7
    forward and 0.5 backward here. Backward needs no exponential: s is y / x, and y' = s (1 + (x - y) u'). Among
    subnormal x, and only there, the quotient has no digits to speak of; it stays within 0 and 1.
    """

    _K, _C = 2 * math.sqrt(2 / math.pi), 0.044715

    def __init__(self, dtype: torch.dtype, workspace: Workspace) -> None:
        self._workspace = workspace
        self._k = torch.tensor(self._K, dtype=dtype)

    def forward(self, risen_TR: Tensor, out_TF: Tensor) -> None:
        """See `Activation`."""
        torch.addcmul(self._k, risen_TR, risen_TR, value=self._K * self._C, out=out_TF)
        out_TF.mul_(risen_TR).sigmoid_().mul_(risen_TR)

    def backward(self, dy_TF: Tensor, risen_TR: Tensor, activated_TF: Tensor, out_TR: Tensor) -> None:
        """See `Activation`; overwrites ``dy``."""
        slope_TF = self._workspace.take(*risen_TR.shape, dtype=risen_TR.dtype)
        torch.addcmul(self._k, risen_TR, risen_TR, value=3 * self._K * self._C, out=slope_TF)
        torch.sub(risen_TR, activated_TF, out=out_TR)
        slope_TF.mul_(out_TR)
        torch.div(activated_TF, risen_TR, out=out_TR).nan_to_num_(nan=0.5)  # s(0) = 1/2, where the quotient is 0/0
        dy_TF.mul_(out_TR)
        torch.addcmul(dy_TF, dy_TF, slope_TF, out=out_TR)


class SwiGlu:
    """up x gate sigmoid(gate) (arXiv 2002.05202), gate and up side by side in one [T, 2 F] tensor."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._one = torch.ones((), dtype=dtype, device=device)

    def forward(self, risen_TR: Tensor, out_TF: Tensor) -> None:
        """See `Activation`."""
        gate_TF, up_TF = risen_TR.chunk(2, dim=1)
        _aten.silu.out(gate_TF, out=out_TF)
        out_TF.mul_(up_TF)

    def backward(self, dy_TF: Tensor, risen_TR: Tensor, activated_TF: Tensor, out_TR: Tensor) -> None:
        """See `Activation`; silu' = s + silu (1 - s), interpolation from s to 1 at silu: one exponential will do."""
        gate_TF, up_TF = risen_TR.chunk(2, dim=1)
        dgate_TF, dup_TF = out_TR.chunk(2, dim=1)
        torch.sigmoid(gate_TF, out=dgate_TF)
        torch.mul(gate_TF, dgate_TF, out=dup_TF)
        dgate_TF.lerp_(self._one, dup_TF).mul_(dy_TF).mul_(up_TF)
        dup_TF.mul_(dy_TF)
