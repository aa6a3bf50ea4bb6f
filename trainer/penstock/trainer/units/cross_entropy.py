"""Summed cross entropy of next tokens, and its gradient in place of the logits, whole or divided by the vocabulary.

Divided (Megatron-LM, arXiv 1909.08053, section 3), no logits move. Of every token a shard shares three numbers: the
highest of its logits m, their sum of exponentials z = sum of exp(logit - m), and the target's logit, or zero if it is
another shard's. With M the highest m and Z = sum of z exp(m - M), the loss is M + log Z - target, and the shard's part
of the softmax is that of its logits alone times z exp(m - M) / Z.

Shape letters: C tokens of a chunk, V vocabulary of the shard, S shards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.units.collectives import Gather, Pass
from penstock.trainer.units.division import VocabularyPart

_aten = torch.ops.aten

Scale = float | Tensor
"""What the gradient of the summed loss is multiplied by. On CUDA a scalar of the device in the accumulate type, which a
recorded action reads whenever it is replayed (`penstock.trainer.graphs`); on the CPU a number, which products take.
"""


def cross_entropy(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
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


def divided_cross_entropy(
    logits_CV: Tensor, labels_C: Tensor, part: VocabularyPart, shard: int, shared_S3C: Tensor
) -> Pass[Tensor]:
    """The same where a shard has the logits of ``part``: the loss over all of the vocabulary, on every shard.

    ``shared`` is memory for what shards share, in the type of ``logits``.
    """
    index_C1, is_own_C = part.rows(labels_C)[:, None], part.holds(labels_C)
    highest_C, sum_C, target_C = shared_S3C[shard]
    torch.mul(logits_CV.gather(1, index_C1)[:, 0], is_own_C, out=target_C)
    torch.amax(logits_CV, 1, out=highest_C)
    _aten._softmax.out(logits_CV, 1, False, out=logits_CV)
    torch.reciprocal(logits_CV.amax(1), out=sum_C)
    yield Gather(shared_S3C.flatten(0, 1))
    highest_SC, sum_SC, target_SC = shared_S3C.unbind(1)
    most_C = highest_SC.amax(0)
    parts_SC = (highest_SC - most_C).exp_().mul_(sum_SC)
    total_C = parts_SC.sum(0)
    logits_CV.mul_((parts_SC[shard] / total_C)[:, None])
    logits_CV.scatter_add_(1, index_C1, is_own_C.to(logits_CV.dtype).neg_()[:, None])
    losses_C = total_C.log_().add_(most_C).sub_(target_SC.sum(0))
    return losses_C.masked_fill_(labels_C < 0, 0.0).sum()


def softmax_without_targets(logits_CV: Tensor, index_C1: Tensor, is_own_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Leave in ``logits`` their softmax, zero at targets: those at ``index`` where ``is_own``. The highest logit m, the
    sum of exponentials of logit - m, and the target's logit, zero where it is not here.
    """
    target_C = logits_CV.gather(1, index_C1)[:, 0].mul_(is_own_C)
    highest_C = logits_CV.amax(1)
    _aten._softmax.out(logits_CV, 1, False, out=logits_CV)
    sum_C = logits_CV.amax(1).reciprocal_()
    logits_CV.scatter_(1, index_C1, logits_CV.gather(1, index_C1).masked_fill_(is_own_C[:, None], 0.0))
    return highest_C, sum_C, target_C
