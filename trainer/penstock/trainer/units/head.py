"""Final norm, logits and loss; the head's F does its backward at once, so that no logits outlive it.

Shape letters: B sequences, N tokens of the slice, T = B N, C tokens of one chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.core.layout import HEAD_CHUNK_TOKENS
from penstock.core.model import Family, ModelSpec
from penstock.trainer.parameters import StageParameters
from penstock.trainer.units.linear import accumulate_product
from penstock.trainer.units.norm import Statistics, build_norm
from penstock.trainer.units.workspace import Workspace

_aten = torch.ops.aten


class Head:
    """The last unit."""

    def __init__(self, spec: ModelSpec, parameters: StageParameters, workspace: Workspace) -> None:
        matrix = "embedding.weight" if spec.tied else "head.weight"
        self._norm = build_norm(spec, parameters, "head.norm", workspace)
        self._statistics = ("rstd", "mean") if spec.family is Family.GPT2 else ("rstd",)
        self._weight_VH = parameters.compute[matrix]
        self._weight_gradient_VH = parameters.gradients[matrix]
        self._wide = parameters.master_flat.dtype
        self._workspace = workspace

    def forward(self, x_TH: Tensor, labels_BN: Tensor, gradient_scale: float, dx_TH: Tensor) -> Tensor:
        """F with everything backward: write the gradient of x, add the head's own; return the summed loss (a scalar).

        Gradients are those of gradient_scale times the sum. Labels below 0 are left out.
        """
        normed_TH, statistics = self._normed(x_TH)
        labels_T = labels_BN.reshape(-1)
        valid_T1 = (labels_T >= 0).to(x_TH.dtype)[:, None]
        dnormed_TH = self._workspace.take(*x_TH.shape, dtype=x_TH.dtype)
        loss = torch.zeros((), dtype=self._wide, device=x_TH.device)
        for chunk, narrow_CV, logits_CV in self._chunks(normed_TH):
            loss += _cross_entropy(logits_CV, labels_T[chunk])
            if narrow_CV is not logits_CV:
                narrow_CV.copy_(logits_CV)
            dnormed_TH[chunk].addmm_(narrow_CV, self._weight_VH, beta=0, alpha=gradient_scale)
            seen_CH = normed_TH[chunk].mul_(valid_T1[chunk])
            accumulate_product(self._weight_gradient_VH, narrow_CV, seen_CH, gradient_scale)
        dnormed_TH.mul_(valid_T1)
        self._norm.backward(dnormed_TH, x_TH, statistics, None, dx_TH)
        return loss

    def loss(self, x_TH: Tensor, labels_BN: Tensor) -> Tensor:
        """The summed loss alone, as a scalar; gradients stay as they are."""
        normed_TH, _ = self._normed(x_TH)
        labels_T = labels_BN.reshape(-1)
        loss = torch.zeros((), dtype=self._wide, device=x_TH.device)
        for chunk, _, logits_CV in self._chunks(normed_TH):
            loss += _cross_entropy(logits_CV, labels_T[chunk])
        return loss

    def logits_at(self, x_TH: Tensor, row: int) -> Tensor:
        """Logits [V] of the token that follows row ``row``, in the accumulate type; valid until the next action."""
        normed_TH, _ = self._normed(x_TH)
        ((_, _, wide_1V),) = self._chunks(normed_TH[row : row + 1])
        return wide_1V[0]

    def _normed(self, x_TH: Tensor) -> tuple[Tensor, Statistics]:
        self._workspace.reset()
        normed_TH = self._workspace.take(*x_TH.shape, dtype=x_TH.dtype)
        statistics = {name: self._workspace.take(x_TH.shape[0], dtype=self._wide) for name in self._statistics}
        self._norm.forward(x_TH, statistics, normed_TH)
        return normed_TH, statistics

    def _chunks(self, normed_TH: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Token ranges with their logits in the compute and in the accumulate type; one tensor where these agree."""
        num_tokens, vocab = normed_TH.shape[0], self._weight_VH.shape[0]
        rows = min(HEAD_CHUNK_TOKENS, num_tokens)
        narrow = self._workspace.take(rows, vocab, dtype=normed_TH.dtype)
        wide = narrow if narrow.dtype == self._wide else self._workspace.take(rows, vocab, dtype=self._wide)
        for start in range(0, num_tokens, rows):
            chunk = slice(start, min(start + rows, num_tokens))
            logits_CV = torch.mm(normed_TH[chunk], self._weight_VH.t(), out=narrow[: chunk.stop - start])
            wide_CV = logits_CV if wide is narrow else wide[: chunk.stop - start].copy_(logits_CV)
            yield chunk, logits_CV, wide_CV


def _cross_entropy(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    """The summed loss over labels from 0 on; leaves softmax minus one-hot, its gradient, in ``logits``.

    The log of a row's sum of exponentials is its maximum less the log of the maximum's softmax, which is at least
    1 / V: one exponential per logit, and no log of a probability that vanished.
    """
    index_C1 = labels_C.clamp_min(0)[:, None]
    target_C = logits_CV.gather(1, index_C1)[:, 0]
    highest_C = logits_CV.amax(1)
    _aten._softmax.out(logits_CV, 1, False, out=logits_CV)
    losses_C = highest_C.sub_(logits_CV.amax(1).log_()).sub_(target_C)
    logits_CV.scatter_add_(1, index_C1, logits_CV.new_full((1, 1), -1.0).expand_as(index_C1))
    return losses_C.masked_fill_(labels_C < 0, 0.0).sum()
