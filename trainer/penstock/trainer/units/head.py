"""Final norm, logits and loss. The head's F also computes its backward pass, so that no logits outlive it.

Shards divide the vocabulary. Shape letters: B sequences, N tokens of the slice, T = B N, C tokens of one chunk, H
hidden, V vocabulary of the shard, S shards; P, R and U as in `penstock.trainer.units.division`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.core.layout import HEAD_CHUNK_TOKENS
from penstock.core.model import Family, ModelSpec
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.collectives import Gather, Pass, Sum
from penstock.trainer.units.cross_entropy import Scale, cross_entropy, divided_cross_entropy
from penstock.trainer.units.division import Division, vocabulary_parts
from penstock.trainer.units.linear import accumulate_product
from penstock.trainer.units.norm import Statistics, build_norm
from penstock.trainer.units.workspace import NUM_SHARED, Workspace


class Head:
    """The last unit, where the head is undivided."""

    def __init__(self, spec: ModelSpec, parameters: StageParameters, division: Division, workspace: Workspace) -> None:
        matrix = "embedding.weight" if spec.tied else "head.weight"
        self._norm = build_norm(spec, parameters, "head.norm", workspace)
        self._statistics = ("rstd", "mean") if spec.family is Family.GPT2 else ("rstd",)
        self._weight_VH = parameters.compute[matrix]
        self._weight_gradient_VH = parameters.gradients[matrix]
        self._wide = parameters.gradient_flat.dtype
        self._parts = vocabulary_parts(parameters.declared[matrix], division.sharding.tp)
        self._largest_part = division.sharding.vocab(spec)
        self._division = division
        self._workspace = workspace

    def forward(self, x_RH: Tensor, labels_BN: Tensor, gradient_scale: Scale, dx_RH: Tensor) -> Pass[Tensor]:
        """F with the backward pass: write the gradient of x, add the head's gradients, return the summed loss, a
        scalar.

        Gradients are those of gradient_scale times the sum. Labels below 0 are ignored. The first shard returns the
        loss and the others zero, so that a sum over ranks counts it once.
        """
        division, labels_T = self._division, labels_BN.reshape(-1)
        num_tokens = labels_T.shape[0]
        normed_TH, statistics = yield from self._normed(x_RH, num_tokens)
        valid_T1 = (labels_T >= 0).to(x_RH.dtype)[:, None]
        dnormed_PH = division.take(num_tokens, x_RH.shape[1], x_RH.dtype)
        dnormed_TH = division.without_padding(dnormed_PH, num_tokens)
        shared = self._take_shared(num_tokens)
        loss = torch.zeros((), dtype=self._wide, device=x_RH.device)
        for chunk, narrow_CV, logits_CV in self._chunks(normed_TH):
            loss += yield from self._cross_entropy(logits_CV, labels_T[chunk], shared)
            left_scale = _narrow(logits_CV, narrow_CV, gradient_scale)
            dnormed_TH[chunk].addmm_(narrow_CV, self._weight_VH, beta=0, alpha=left_scale)
            normed_CH = normed_TH[chunk].mul_(valid_T1[chunk])
            accumulate_product(self._weight_gradient_VH, narrow_CV, normed_CH, left_scale)
        dnormed_TH.mul_(valid_T1)
        dnormed_UH = yield from division.summed(dnormed_PH, dx_RH, num_tokens)
        x_UH, dx_UH = division.own(x_RH, num_tokens), division.own(dx_RH, num_tokens)
        if len(x_UH):
            self._norm.backward(dnormed_UH, x_UH, statistics, None, dx_UH)
        return self._counted(loss)

    def loss(self, x_RH: Tensor, labels_BN: Tensor) -> Pass[Tensor]:
        """The summed loss without gradients: a scalar on the first shard, zero on the others."""
        labels_T = labels_BN.reshape(-1)
        normed_TH, _ = yield from self._normed(x_RH, labels_T.shape[0])
        shared = self._take_shared(labels_T.shape[0])
        loss = torch.zeros((), dtype=self._wide, device=x_RH.device)
        for chunk, _, logits_CV in self._chunks(normed_TH):
            loss += yield from self._cross_entropy(logits_CV, labels_T[chunk], shared)
        return self._counted(loss)

    def logits_at(self, x_RH: Tensor, row: int) -> Pass[Tensor]:
        """Logits of the whole vocabulary for the token after row ``row`` of the slice, in the accumulate type.

        Every shard returns them. They are valid until the next action.
        """
        normed_1H = yield from self._normed_row(x_RH, row)
        ((_, _, wide_1V),) = self._chunks(normed_1H)
        if self._division.is_alone:
            return wide_1V[0]
        logits_SV = wide_1V.new_zeros(len(self._parts), self._largest_part)
        logits_SV[self._division.shard, : wide_1V.shape[1]] = wide_1V[0]
        yield Gather(logits_SV)
        return torch.cat([own_V[: part.size] for own_V, part in zip(logits_SV, self._parts, strict=True)])

    def _normed(self, x_RH: Tensor, num_tokens: int) -> Pass[tuple[Tensor, Statistics]]:
        """The norm's output for all tokens [T, H], and the statistics of the tokens that the shard holds."""
        self._workspace.reset()
        division = self._division
        normed_PH = division.take(num_tokens, x_RH.shape[1], x_RH.dtype)
        statistics = {
            name: division.own(self._workspace.take(x_RH.shape[0], dtype=self._wide), num_tokens)
            for name in self._statistics
        }
        x_UH = division.own(x_RH, num_tokens)
        if len(x_UH):
            self._norm.forward(x_UH, statistics, division.own(division.block(normed_PH), num_tokens))
        yield from division.gather(normed_PH)
        return division.without_padding(normed_PH, num_tokens), statistics

    def _normed_row(self, x_RH: Tensor, row: int) -> Pass[Tensor]:
        """The norm's output for one row. Where shards hold different rows, the others add zeros to it."""
        self._workspace.reset()
        normed_1H = self._workspace.take(1, x_RH.shape[1], dtype=x_RH.dtype)
        statistics = {name: self._workspace.take(1, dtype=self._wide) for name in self._statistics}
        if not self._division.by_tokens:
            self._norm.forward(x_RH[row : row + 1], statistics, normed_1H)
            return normed_1H
        holder, own_row = divmod(row, x_RH.shape[0])
        if holder == self._division.shard:
            self._norm.forward(x_RH[own_row : own_row + 1], statistics, normed_1H)
        else:
            normed_1H.zero_()
        yield Sum(normed_1H)
        return normed_1H

    def _chunks(self, normed_TH: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Ranges of tokens, with their logits in the compute and in the accumulate type, which may be one tensor."""
        num_tokens = normed_TH.shape[0]
        rows = min(HEAD_CHUNK_TOKENS, num_tokens)
        narrow = self._take_logits(rows, normed_TH.dtype)
        wide = narrow if narrow.dtype == self._wide else self._take_logits(rows, self._wide)
        for start in range(0, num_tokens, rows):
            chunk = slice(start, min(start + rows, num_tokens))
            logits_CV = torch.mm(normed_TH[chunk], self._weight_VH.t(), out=narrow[: chunk.stop - start])
            wide_CV = logits_CV if wide is narrow else wide[: chunk.stop - start].copy_(logits_CV)
            yield chunk, logits_CV, wide_CV

    def _take_logits(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Memory for logits [rows, V]. Every shard takes as much as the largest one needs."""
        vocab = self._weight_VH.shape[0]
        logits = self._workspace.take(rows, self._largest_part, dtype=dtype)
        return logits if vocab == self._largest_part else logits.view(-1)[: rows * vocab].view(rows, vocab)

    def _take_shared(self, num_tokens: int) -> Tensor | None:
        """Memory for the numbers that shards exchange for a chunk; None if there is one shard."""
        if self._division.is_alone:
            return None
        shape = (len(self._parts), NUM_SHARED, min(HEAD_CHUNK_TOKENS, num_tokens))
        return self._workspace.take(*shape, dtype=self._wide)

    def _cross_entropy(self, logits_CV: Tensor, labels_C: Tensor, shared: Tensor | None) -> Pass[Tensor]:
        """The summed loss of a chunk. Leaves its gradient in ``logits``."""
        if shared is None:
            return cross_entropy(logits_CV, labels_C)
        shape, shard = (len(self._parts), NUM_SHARED, len(labels_C)), self._division.shard
        shared_S3C = shared.view(-1)[: shape[0] * shape[1] * shape[2]].view(shape)
        return (yield from divided_cross_entropy(logits_CV, labels_C, self._parts[shard], shard, shared_S3C))

    def _counted(self, loss: Tensor) -> Tensor:
        return loss if self._division.shard == 0 else torch.zeros_like(loss)


def _narrow(wide_CV: Tensor, narrow_CV: Tensor, scale: Scale) -> float:
    """Convert the gradients of logits to the compute type. Returns the factor that is left for products with them.

    A product accepts a Python number as its factor. A device scalar is multiplied during the conversion, before the
    rounding that happens anyway.
    """
    if isinstance(scale, Tensor):
        torch.mul(wide_CV, scale, out=narrow_CV)
        return 1.0
    if narrow_CV is not wide_CV:
        narrow_CV.copy_(wide_CV)
    return scale
