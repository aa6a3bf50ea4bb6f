"""RMSNorm and LayerNorm. Their backward pass computes the input's gradient and adds the weight's gradient.

Shape letters: T tokens, H hidden; P, R and U as in `penstock.trainer.units.division`. The T rows of a norm are those
that the shard holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from penstock.core.model import Family, ModelSpec
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.collectives import Pass
from penstock.trainer.units.division import Division
from penstock.trainer.units.frame import Frame
from penstock.trainer.units.workspace import Workspace

_aten = torch.ops.aten

Statistics = Mapping[str, Tensor]
"""Per token, in the accumulate type: ``rstd`` [T], and ``mean`` [T] for LayerNorm."""


class Norm(Protocol):
    """Interface of a unit to its norm."""

    def forward(self, x_TH: Tensor, statistics: Statistics, out_TH: Tensor) -> None:
        """Compute ``out`` = norm(x), and keep ``statistics`` for the backward pass."""
        ...

    def backward(
        self, dy_TH: Tensor, x_TH: Tensor, statistics: Statistics, residual_TH: Tensor | None, out_TH: Tensor
    ) -> None:
        """Compute ``out`` = residual + the gradient of x, from the gradient ``dy`` of norm(x).

        Adds the weight's gradient. ``out`` may be ``dy``.
        """
        ...


def build_norm(spec: ModelSpec, parameters: StageParameters, name: str, workspace: Workspace) -> Norm:
    """The model family's norm with the parameters ``name``."""
    on_cuda = parameters.compute_flat.is_cuda
    weights = parameters.compute if on_cuda else parameters.master
    weight, gradient = weights[f"{name}.weight"], parameters.gradients[f"{name}.weight"]
    if spec.family is Family.GPT2:
        bias, bias_gradient = weights[f"{name}.bias"], parameters.gradients[f"{name}.bias"]
        return LayerNorm(weight, bias, gradient, bias_gradient, spec.norm_epsilon)
    if on_cuda:
        return FusedRmsNorm(weight, gradient, spec.norm_epsilon)
    return RmsNorm(weight, gradient, spec.norm_epsilon, workspace)


class BlockNorm:
    """Norm of a block. A shard normalises its own rows, and the next product needs the rows of all tokens."""

    def __init__(self, norm: Norm, division: Division) -> None:
        self._norm, self._division = norm, division

    def forward(self, frame: Frame, num_tokens: int) -> None:
        """Compute and keep the norm of x and its statistics."""
        own, normed_RH = self._division.own, frame.l["normed"]
        if not self._division.by_tokens:
            self._norm.forward(frame.x, frame.a, normed_RH)
            return
        x_UH = own(frame.x, num_tokens)
        if len(x_UH):
            self._norm.forward(x_UH, self._own_statistics(frame, num_tokens), own(normed_RH, num_tokens))

    def all_tokens(self, frame: Frame, num_tokens: int) -> Pass[Tensor]:
        """The norm of all tokens [T, H], gathered from the rows that the shards keep."""
        return (yield from self._division.all_tokens(frame.l["normed"], num_tokens))

    def backward(self, dnormed_PH: Tensor, frame: Frame, dx_RH: Tensor, num_tokens: int) -> Pass[None]:
        """Compute ``dx``, the gradient of x, from ``w.dy`` through the residual and from that of the norm's output.

        ``dnormed`` is this shard's addend of the latter.
        """
        own, dy_RH = self._division.own, self._division.block(frame.w["dy"])
        dnormed_UH = yield from self._division.summed(dnormed_PH, dx_RH, num_tokens)
        if not self._division.by_tokens:
            self._norm.backward(dnormed_UH, frame.x, frame.a, dy_RH, dx_RH)
        elif len(dnormed_UH):
            statistics = self._own_statistics(frame, num_tokens)
            x_UH, dy_UH, dx_UH = (own(tensor_RH, num_tokens) for tensor_RH in (frame.x, dy_RH, dx_RH))
            self._norm.backward(dnormed_UH, x_UH, statistics, dy_UH, dx_UH)

    def _own_statistics(self, frame: Frame, num_tokens: int) -> Statistics:
        return {name: self._division.own(frame.a[name], num_tokens) for name in ("rstd", "mean") if name in frame.a}


class RmsNorm:
    """y = w x rstd with rstd = 1 / sqrt(mean(x^2) + epsilon) (arXiv 1910.07467), in few passes over memory.

    PyTorch has a fused kernel for CUDA only. Its composite implementation on the CPU takes more than twice the time.
    """

    def __init__(self, weight_H: Tensor, gradient_H: Tensor, epsilon: float, workspace: Workspace) -> None:
        self._weight_H, self._gradient_H = weight_H, gradient_H
        self._epsilon = epsilon
        self._workspace = workspace

    def forward(self, x_TH: Tensor, statistics: Statistics, out_TH: Tensor) -> None:
        rstd_T = statistics["rstd"]
        x_TH = x_TH.to(rstd_T.dtype)
        torch.linalg.vector_norm(x_TH, dim=-1, out=rstd_T)
        rstd_T.square_().div_(x_TH.shape[-1]).add_(self._epsilon).rsqrt_()
        wide_TH = out_TH if out_TH.dtype == rstd_T.dtype else torch.empty_like(x_TH)
        torch.mul(x_TH, rstd_T[:, None], out=wide_TH).mul_(self._weight_H)
        if wide_TH is not out_TH:
            out_TH.copy_(wide_TH)

    def backward(
        self, dy_TH: Tensor, x_TH: Tensor, statistics: Statistics, residual_TH: Tensor | None, out_TH: Tensor
    ) -> None:
        """Compute dx = rstd (w dy - x rstd^2 mean(w dy x)) and dw = sum over tokens of rstd x dy."""
        rstd_T = statistics["rstd"]
        x_TH, dy_TH = x_TH.to(rstd_T.dtype), dy_TH.to(rstd_T.dtype)
        product_TH = torch.mul(dy_TH, x_TH, out=self._workspace.take(*x_TH.shape, dtype=rstd_T.dtype))
        self._gradient_H.addmv_(product_TH.t(), rstd_T)
        slope_T = torch.mv(product_TH, self._weight_H).mul_(rstd_T).mul_(rstd_T).div_(-x_TH.shape[-1])
        torch.mul(dy_TH, self._weight_H, out=product_TH).addcmul_(x_TH, slope_T[:, None])
        if residual_TH is None:
            torch.mul(product_TH, rstd_T[:, None], out=out_TH)
        else:
            torch.addcmul(residual_TH, product_TH, rstd_T[:, None], out=out_TH)


class FusedRmsNorm:
    """RMSNorm by PyTorch's fused kernels."""

    def __init__(self, weight_H: Tensor, gradient_H: Tensor, epsilon: float) -> None:
        self._weight_H, self._gradient_H = weight_H, gradient_H
        self._epsilon = epsilon

    def forward(self, x_TH: Tensor, statistics: Statistics, out_TH: Tensor) -> None:
        y_TH, rstd_T1 = _aten._fused_rms_norm(x_TH, [x_TH.shape[-1]], self._weight_H, self._epsilon)
        out_TH.copy_(y_TH)
        statistics["rstd"].copy_(rstd_T1[:, 0])

    def backward(
        self, dy_TH: Tensor, x_TH: Tensor, statistics: Statistics, residual_TH: Tensor | None, out_TH: Tensor
    ) -> None:
        dx_TH, dweight_H = _aten._fused_rms_norm_backward(
            dy_TH, x_TH, [x_TH.shape[-1]], statistics["rstd"][:, None], self._weight_H, [True, True]
        )
        self._gradient_H.add_(dweight_H)
        _finish(dx_TH, residual_TH, out_TH)


class LayerNorm:
    """y = w (x - mean) rstd + b (arXiv 1607.06450), by PyTorch's kernels."""

    def __init__(
        self, weight_H: Tensor, bias_H: Tensor, gradient_H: Tensor, bias_gradient_H: Tensor, epsilon: float
    ) -> None:
        self._weight_H, self._bias_H = weight_H, bias_H
        self._gradient_H, self._bias_gradient_H = gradient_H, bias_gradient_H
        self._epsilon = epsilon

    def forward(self, x_TH: Tensor, statistics: Statistics, out_TH: Tensor) -> None:
        mean_T1, rstd_T1 = statistics["mean"][:, None], statistics["rstd"][:, None]
        _aten.native_layer_norm.out(
            x_TH, [x_TH.shape[-1]], self._weight_H, self._bias_H, self._epsilon, out0=out_TH, out1=mean_T1, out2=rstd_T1
        )

    def backward(
        self, dy_TH: Tensor, x_TH: Tensor, statistics: Statistics, residual_TH: Tensor | None, out_TH: Tensor
    ) -> None:
        mean_T1, rstd_T1 = statistics["mean"][:, None], statistics["rstd"][:, None]
        dx_TH, dweight_H, dbias_H = _aten.native_layer_norm_backward(
            dy_TH, x_TH, [x_TH.shape[-1]], mean_T1, rstd_T1, self._weight_H, self._bias_H, [True, True, True]
        )
        self._gradient_H.add_(dweight_H)
        self._bias_gradient_H.add_(dbias_H)
        _finish(dx_TH, residual_TH, out_TH)


def _finish(dx_TH: Tensor, residual_TH: Tensor | None, out_TH: Tensor) -> None:
    if residual_TH is None:
        out_TH.copy_(dx_TH)
    else:
        torch.add(residual_TH, dx_TH, out=out_TH)
