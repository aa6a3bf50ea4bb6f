"""Summed cross entropy of next tokens and its gradient, which replaces the logits, with a whole or divided vocabulary.

With a divided vocabulary (Megatron-LM, arXiv 1909.08053, section 3) no logits are sent. For every token a shard shares
three numbers: the maximum m of its logits, z = sum of exp(logit - m), and the logit of the target, or zero if another
shard has it. Let M be the largest m and Z the sum of z exp(m - M). Then the loss is M + log Z - target. A shard's part
of the softmax is the softmax of its own logits times z exp(m - M) / Z.

Example: shard 0 has the logits (1, 3), shard 1 has (2, 0), and the target is the logit 2. m = 3 and 2, z = 1.135 and
1.135, M = 3, Z = 1.135 + 1.135 exp(-1) = 1.553, loss = 3 + 0.440 - 2 = 1.440.

Shape letters: C tokens of a chunk, V vocabulary of the shard, S shards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.trainer.units.collectives import Gather, Pass
from penstock.trainer.units.division import VocabularyPart

_aten = torch.ops.aten

Scale = float | Tensor
"""Factor of the summed loss's gradient. On CUDA it is a device scalar in the accumulate type, which a recorded action
reads on every replay (`penstock.trainer.graphs`). On the CPU it is a Python number, which matrix products accept.
"""


def cross_entropy(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    """Summed loss over labels >= 0. Leaves its gradient, softmax minus one-hot, in ``logits``.

    The log-sum-exp of a row is its maximum minus the log of the maximum's softmax, which is at least 1 / V. This needs
    one exponential per logit, and never the log of a probability that underflowed.
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
    """The same for a shard with the logits of ``part``. Every shard returns the loss over the whole vocabulary.

    ``shared`` is memory for the numbers that shards exchange, in the type of ``logits``.
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
    """Replace ``logits`` by their softmax, with zero at the targets: at ``index`` where ``is_own``.

    Returns the maximum m of the logits, the sum of exp(logit - m), and the target's logit, zero where not ``is_own``.
    """
    target_C = logits_CV.gather(1, index_C1)[:, 0].mul_(is_own_C)
    highest_C = logits_CV.amax(1)
    _aten._softmax.out(logits_CV, 1, False, out=logits_CV)
    sum_C = logits_CV.amax(1).reciprocal_()
    logits_CV.scatter_(1, index_C1, logits_CV.gather(1, index_C1).masked_fill_(is_own_C[:, None], 0.0))
    return highest_C, sum_C, target_C
