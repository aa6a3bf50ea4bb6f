"""Token embedding, with learned positions for gpt2.

Shards divide the vocabulary: each shard looks up its own tokens, and the sum over shards has all rows.

Shape letters: B sequences, N tokens of the slice, T = B N, V rows of the vocabulary that the shard holds, M positions,
H hidden; P, R and U as in `penstock.trainer.units.division`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.collectives import Pass
from penstock.trainer.units.division import Division, vocabulary_parts
from penstock.trainer.units.workspace import Workspace

_MATRIX, _POSITIONS = "embedding.weight", "embedding.position"


class Embedding:
    """The first unit. F looks up rows, W adds to the gradients of these rows, I only gathers ``dy``."""

    def __init__(self, parameters: StageParameters, division: Division, workspace: Workspace) -> None:
        self._weight_VH = parameters.compute[_MATRIX]
        self._weight_gradient_VH = parameters.gradients[_MATRIX]
        self._position_MH = parameters.compute.get(_POSITIONS)
        self._position_gradient_MH = parameters.gradients.get(_POSITIONS)
        self._part = vocabulary_parts(parameters.declared[_MATRIX], division.sharding.tp)[division.shard]
        self._division = division
        self._workspace = workspace

    def forward(self, token_ids_BN: Tensor, start: int, y_RH: Tensor) -> Pass[None]:
        """F: look up the rows of the tokens, and add those of positions start, start + 1, ..."""
        self._workspace.reset()
        ids_T = token_ids_BN.reshape(-1)
        addend_PH = self._division.addend_of(y_RH, len(ids_T))
        self._look_up(ids_T, self._division.without_padding(addend_PH, len(ids_T)))
        y_UH = yield from self._division.summed(addend_PH, y_RH, len(ids_T))
        if self._position_MH is None:
            return
        batch, length = token_ids_BN.shape
        if self._division.by_tokens:
            for rows, places in self._runs(batch, length, start):
                y_UH[rows].add_(self._position_MH[places])
        else:
            y_UH.view(batch, length, -1).add_(self._position_MH[start : start + length])

    def _look_up(self, ids_T: Tensor, out_TH: Tensor) -> None:
        """Write the rows of the tokens that the shard holds, and zeros for other tokens."""
        if self._division.is_alone:
            torch.index_select(self._weight_VH, 0, ids_T, out=out_TH)
        else:
            torch.index_select(self._weight_VH, 0, self._part.rows(ids_T), out=out_TH)
            out_TH.masked_fill_(self._part.holds(ids_T).logical_not_()[:, None], 0.0)

    def _runs(self, batch: int, length: int, start: int) -> Iterator[tuple[slice, slice]]:
        """For each sequence, the rows of it that the shard holds and their positions."""
        own = self._division.own_tokens(batch * length)
        for sequence in range(own.start // length, -(-own.stop // length)):
            first, stop = max(own.start, sequence * length), min(own.stop, (sequence + 1) * length)
            offset = start - sequence * length
            yield slice(first - own.start, stop - own.start), slice(first + offset, stop + offset)

    def backward_input(self, dy_PH: Tensor) -> Pass[None]:
        """I: gather ``dy`` of all tokens for W. The embedding's input has no gradient."""
        yield from self._division.gather(dy_PH)

    def backward_weight(self, token_ids_BN: Tensor, start: int, dy_PH: Tensor) -> None:
        """W: add each token's gradient to that of its row, and the sum over sequences to that of the positions."""
        ids_T, (batch, length) = token_ids_BN.reshape(-1), token_ids_BN.shape
        dy_TH = self._division.without_padding(dy_PH, len(ids_T))
        if self._division.is_alone:
            dy_TH = dy_TH.to(self._weight_gradient_VH.dtype)
            self._weight_gradient_VH.index_add_(0, ids_T, dy_TH)
        else:
            self._add_own(ids_T, dy_TH)
        if self._position_gradient_MH is None:
            return
        if self._division.by_tokens:
            dy_UH = self._division.own(self._division.block(dy_PH), len(ids_T))
            for rows, places in self._runs(batch, length, start):
                self._position_gradient_MH[places].add_(dy_UH[rows])
        else:
            total_NH = dy_TH.view(batch, length, -1).sum(0, dtype=self._position_gradient_MH.dtype)
            self._position_gradient_MH[start : start + length].add_(total_NH)

    def _add_own(self, ids_T: Tensor, dy_TH: Tensor) -> None:
        """Add the gradients of the tokens that the shard holds to those of their rows.

        Gradients of other tokens are set to zero. To leave them out, the host would have to wait for their count.
        """
        self._workspace.reset()
        own_TH = self._workspace.take(*dy_TH.shape, dtype=self._weight_gradient_VH.dtype).copy_(dy_TH)
        own_TH.masked_fill_(self._part.holds(ids_T).logical_not_()[:, None], 0.0)
        self._weight_gradient_VH.index_add_(0, self._part.rows(ids_T), own_TH)
