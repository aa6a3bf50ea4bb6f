"""Token embedding, with learned positions for gpt2.

Shape letters: B sequences, N tokens of the slice, T = B N, V vocabulary, P positions, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.parameters import StageParameters


class Embedding:
    """The first unit: F looks up, W adds to the rows that were looked up, I has nothing to do."""

    def __init__(self, parameters: StageParameters) -> None:
        self._weight_VH = parameters.compute["embedding.weight"]
        self._weight_gradient_VH = parameters.gradients["embedding.weight"]
        self._position_PH = parameters.compute.get("embedding.position")
        self._position_gradient_PH = parameters.gradients.get("embedding.position")

    def forward(self, token_ids_BN: Tensor, start: int, y_TH: Tensor) -> None:
        """F: rows of the tokens, plus those of positions start, start + 1, ..."""
        torch.index_select(self._weight_VH, 0, token_ids_BN.reshape(-1), out=y_TH)
        if self._position_PH is not None:
            y_BNH = y_TH.view(*token_ids_BN.shape, -1)
            y_BNH.add_(self._position_PH[start : start + token_ids_BN.shape[1]])

    def backward_weight(self, token_ids_BN: Tensor, start: int, dy_TH: Tensor) -> None:
        """W: add each token's gradient to its row, and the sum over sequences to the positions."""
        dy_TH = dy_TH.to(self._weight_gradient_VH.dtype)
        self._weight_gradient_VH.index_add_(0, token_ids_BN.reshape(-1), dy_TH)
        if self._position_gradient_PH is not None:
            own = slice(start, start + token_ids_BN.shape[1])
            self._position_gradient_PH[own].add_(dy_TH.view(*token_ids_BN.shape, -1).sum(0))
