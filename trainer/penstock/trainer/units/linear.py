"""A matrix with an optional bias: y = x W^T + b, with the weight's gradient apart from the input's.

Shape letters: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.parameters import StageParameters


class Linear:
    """One matrix [O, I] of a stage and the place of its gradient."""

    def __init__(self, parameters: StageParameters, name: str) -> None:
        weight, bias = f"{name}.weight", f"{name}.bias"
        self.weight_OI = parameters.compute[weight]
        self._weight_gradient_OI = parameters.gradients[weight]
        self._bias_O = parameters.compute.get(bias)
        self._bias_gradient_O = parameters.gradients.get(bias)

    def forward(self, x_TI: Tensor, out_TO: Tensor) -> None:
        """``out`` = x W^T + b."""
        if self._bias_O is None:
            torch.mm(x_TI, self.weight_OI.t(), out=out_TO)
        else:
            torch.addmm(self._bias_O, x_TI, self.weight_OI.t(), out=out_TO)

    def forward_onto(self, residual_TO: Tensor, x_TI: Tensor, out_TO: Tensor) -> None:
        """``out`` = residual + x W^T + b; the product adds onto the residual, which saves a pass over memory."""
        if self._bias_O is None:
            torch.addmm(residual_TO, x_TI, self.weight_OI.t(), out=out_TO)
        else:
            torch.add(residual_TO, self._bias_O, out=out_TO)
            out_TO.addmm_(x_TI, self.weight_OI.t())

    def backward_input(self, dy_TO: Tensor, out_TI: Tensor) -> None:
        """``out`` = dy W."""
        torch.mm(dy_TO, self.weight_OI, out=out_TI)

    def backward_weight(self, dy_TO: Tensor, x_TI: Tensor) -> None:
        """Add dy^T x to the weight's gradient and the sum of dy to the bias's."""
        accumulate_product(self._weight_gradient_OI, dy_TO, x_TI)
        if self._bias_gradient_O is not None:
            self._bias_gradient_O.add_(dy_TO.sum(0, dtype=self._bias_gradient_O.dtype))


def accumulate_product(gradient_OI: Tensor, dy_TO: Tensor, x_TI: Tensor, scale: float = 1.0) -> None:
    """Gradient += scale dy^T x, summed in the gradient's type also when dy and x are narrower."""
    wide = gradient_OI.dtype
    if dy_TO.dtype == wide:
        gradient_OI.addmm_(dy_TO.t(), x_TI, alpha=scale)
    elif gradient_OI.is_cuda:
        torch.ops.aten.addmm.dtype_out(gradient_OI, dy_TO.t(), x_TI, wide, alpha=scale, out=gradient_OI)
    else:
        gradient_OI.addmm_(dy_TO.to(wide).t(), x_TI.to(wide), alpha=scale)
