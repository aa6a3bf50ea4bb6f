"""Linear layer: y = x W^T + b with an optional bias, and separate passes for the gradients of input and weight.

Shape letters: T tokens, I inputs and O outputs of the shard; P, R and U as in `penstock.trainer.units.division`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.collectives import Pass
from penstock.trainer.units.division import Division


class Linear:
    """One matrix [O, I] of a stage, with the buffer of its gradient."""

    def __init__(self, parameters: StageParameters, name: str) -> None:
        weight, bias = f"{name}.weight", f"{name}.bias"
        self.weight_OI = parameters.compute[weight]
        self._weight_gradient_OI = parameters.gradients[weight]
        self._bias_O = parameters.compute.get(bias)
        self._bias_gradient_O = parameters.gradients.get(bias)

    def forward(self, x_TI: Tensor, out_TO: Tensor) -> None:
        """Compute ``out`` = x W^T + b."""
        if self._bias_O is None:
            torch.mm(x_TI, self.weight_OI.t(), out=out_TO)
        else:
            torch.addmm(self._bias_O, x_TI, self.weight_OI.t(), out=out_TO)

    def backward_input(self, dy_TO: Tensor, out_TI: Tensor) -> None:
        """Compute ``out`` = dy W."""
        torch.mm(dy_TO, self.weight_OI, out=out_TI)

    def backward_weight(self, dy_TO: Tensor, x_TI: Tensor) -> None:
        """Add dy^T x to the weight's gradient and the sum of dy to the bias's."""
        accumulate_product(self._weight_gradient_OI, dy_TO, x_TI)
        self._add_bias_gradient(dy_TO)

    def _add_bias_gradient(self, dy_TO: Tensor) -> None:
        if self._bias_gradient_O is not None:
            self._bias_gradient_O.add_(dy_TO.sum(0, dtype=self._bias_gradient_O.dtype))


class RowParallelLinear(Linear):
    """Second matrix of a block. Shards divide its inputs, and the sum of their products is the block's output.

    The first shard adds the bias. Each shard sums the bias's gradient over its own rows of ``dy``.
    """

    def __init__(self, parameters: StageParameters, name: str, division: Division) -> None:
        super().__init__(parameters, name)
        self._division = division
        if division.shard > 0:
            self._bias_O = None

    def forward_onto(self, residual_RO: Tensor, x_TI: Tensor, out_RO: Tensor) -> Pass[None]:
        """Compute ``out`` = residual + x W^T + b, with the product summed over shards.

        A single shard adds the product directly to the residual, which saves a pass over memory. Several shards sum
        their addends first: these are small relative to the residual, and narrow types would round each partial sum to
        the residual's precision.
        """
        if self._division.is_alone:
            self._add_product(residual_RO, x_TI, out_RO)
            return
        num_tokens = x_TI.shape[0]
        addend_PO = self._division.addend_of(out_RO, num_tokens)
        self.forward(x_TI, self._division.without_padding(addend_PO, num_tokens))
        out_UO = yield from self._division.summed(addend_PO, out_RO, num_tokens)
        out_UO.add_(self._division.own(residual_RO, num_tokens))

    def _add_product(self, residual_TO: Tensor, x_TI: Tensor, out_TO: Tensor) -> None:
        if self._bias_O is None:
            torch.addmm(residual_TO, x_TI, self.weight_OI.t(), out=out_TO)
        else:
            torch.add(residual_TO, self._bias_O, out=out_TO)
            out_TO.addmm_(x_TI, self.weight_OI.t())

    def backward_weight(self, dy_PO: Tensor, x_TI: Tensor) -> None:
        """Add dy^T x to the weight's gradient and the sum of the shard's rows of dy to the bias's."""
        num_tokens = x_TI.shape[0]
        accumulate_product(self._weight_gradient_OI, self._division.without_padding(dy_PO, num_tokens), x_TI)
        self._add_bias_gradient(self._division.own(self._division.block(dy_PO), num_tokens))


def accumulate_product(gradient_OI: Tensor, dy_TO: Tensor, x_TI: Tensor, scale: float = 1.0) -> None:
    """Add scale dy^T x to the gradient. Sums are in the gradient's type even if dy and x are narrower."""
    wide = gradient_OI.dtype
    if dy_TO.dtype == wide:
        gradient_OI.addmm_(dy_TO.t(), x_TI, alpha=scale)
    elif gradient_OI.is_cuda:
        torch.ops.aten.addmm.dtype_out(gradient_OI, dy_TO.t(), x_TI, wide, alpha=scale, out=gradient_OI)
    else:
        gradient_OI.addmm_(dy_TO.to(wide).t(), x_TI.to(wide), alpha=scale)
