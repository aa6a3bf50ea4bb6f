"""Attention over keys and values that lie in pieces: one for each slice that has its own slots.

A kernel reads one piece. Where there are several, consecutive ones are copied together, into groups of at most
`penstock.core.layout.KEYS_AT_ONCE` keys. So neither the copy grows with the sequence, nor the memory that kernels
allocate themselves: for gradients they repeat keys for every head that shares them. A piece with more keys than that is
a group by itself, and is not copied.

The output of attention over all keys is the mean of the outputs of the groups, weighted by their sums of exponentials
(FlashAttention, arXiv 2205.14135, section 3.1). With l_g the log of group g's sum, and l the log of the sum of all,

    l = log sum_g exp(l_g),    out = sum_g exp(l_g - l) out_g.

The terms are added in the accumulate type. Backward needs no weights: it is given l and out of all keys, so the
gradients of a group's keys and values are complete, and those of the queries are the sum over groups.

Only the last group is causal: it ends with the slice's own keys, which some of the slice's queries may not attend to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.trainer.units.backends import AttentionBackend, Operands, Pieces
from penstock.trainer.units.workspace import Workspace


class PrefixAttention:
    """The attention of a slice. ``backend`` computes it for keys in one piece. ``workspace`` has the memory for several
    pieces (`penstock.core.layout.prefix_bytes`), of which at most ``keys_at_once`` keys are copied at a time.

    Keys and values are pieces [B, G, n, D]: heads are far apart in memory, tokens side by side.
    """

    def __init__(self, backend: AttentionBackend, workspace: Workspace, keys_at_once: int) -> None:
        self._backend, self._workspace, self._keys_at_once = backend, workspace, keys_at_once

    def forward(self, q_BNAD: Tensor, keys: Pieces, values: Pieces, out_BNAD: Tensor, lse_BNA: Tensor) -> None:
        """Write ``out`` and ``lse``."""
        groups = groups_of([piece.shape[2] for piece in keys], self._keys_at_once)
        copies = self._copies(keys, groups)
        first, *others = groups
        operands = Operands(q_BNAD, *_group(keys, values, first, copies), out_BNAD, lse_BNA)
        self._backend.forward(operands, causal=not others)
        if not others:
            return
        total_BNAD = self._workspace.take(*out_BNAD.shape, dtype=lse_BNA.dtype).copy_(out_BNAD)
        some_lse_BNA = torch.empty_like(lse_BNA)
        for group in others:
            operands = Operands(q_BNAD, *_group(keys, values, group, copies), out_BNAD, some_lse_BNA)
            self._backend.forward(operands, causal=group is others[-1])
            joined_BNA = torch.logaddexp(lse_BNA, some_lse_BNA)
            total_BNAD.mul_((lse_BNA - joined_BNA).exp_()[..., None])
            total_BNAD.addcmul_(out_BNAD, (some_lse_BNA - joined_BNA).exp_()[..., None])
            lse_BNA.copy_(joined_BNA)
        out_BNAD.copy_(total_BNAD)

    def backward(
        self,
        q_BNAD: Tensor,
        keys: Pieces,
        values: Pieces,
        out_BNAD: Tensor,
        lse_BNA: Tensor,
        gradients: tuple[Tensor, Tensor, Pieces, Pieces],
        *,
        fresh: bool,
    ) -> None:
        """Compute the gradients of queries, keys and values.

        ``gradients`` holds four. That of the output is read, and that of the queries is written. Those of keys and
        values, in pieces [B, n, G, D], are added to, or written if they are ``fresh``.
        """
        dout_BNAD, dq_BNAD, dk, dv = gradients
        groups = groups_of([piece.shape[2] for piece in keys], self._keys_at_once)
        copies = self._copies(keys, groups)
        total_BNAD = None
        if len(groups) > 1:
            total_BNAD = self._workspace.take(*dq_BNAD.shape, dtype=lse_BNA.dtype).zero_()
        for group in groups:
            operands = Operands(q_BNAD, *_group(keys, values, group, copies), out_BNAD, lse_BNA)
            own = dk[group.start : group.stop], dv[group.start : group.stop]
            self._backend.backward(operands, dout_BNAD, dq_BNAD, *own, fresh=fresh, causal=group is groups[-1])
            if total_BNAD is not None:
                total_BNAD.add_(dq_BNAD)
        if total_BNAD is not None:
            dq_BNAD.copy_(total_BNAD)

    def _copies(self, keys: Pieces, groups: Sequence[range]) -> Tensor | None:
        """Memory for the keys and values of the largest group of several pieces; None if there is none."""
        self._workspace.reset()
        most_keys = max((sum(keys[i].shape[2] for i in group) for group in groups if len(group) > 1), default=0)
        if not most_keys:
            return None
        batch, heads, _, head_dim = keys[0].shape
        return self._workspace.take(2, batch, heads, most_keys, head_dim, dtype=keys[0].dtype)


def groups_of(sizes: Sequence[int], keys_at_once: int) -> list[range]:
    """Ranges of consecutive pieces with at most ``keys_at_once`` keys, or of one piece; the last ones are fullest."""
    groups: list[range] = []
    stop = len(sizes)
    while stop:
        start, num_keys = stop - 1, sizes[stop - 1]
        while start and num_keys + sizes[start - 1] <= keys_at_once:
            start -= 1
            num_keys += sizes[start]
        groups.append(range(start, stop))
        stop = start
    return groups[::-1]


def _group(keys: Pieces, values: Pieces, group: range, copies: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys and values [B, S, G, D] of a group."""
    if len(group) == 1:
        return keys[group.start].transpose(1, 2), values[group.start].transpose(1, 2)
    assert copies is not None, "a group of several pieces is copied"
    num_keys = sum(keys[i].shape[2] for i in group)
    for copy, pieces in zip(copies, (keys, values), strict=True):
        torch.cat([pieces[i] for i in group], dim=2, out=copy[:, :, :num_keys])
    return copies[0, :, :, :num_keys].transpose(1, 2), copies[1, :, :, :num_keys].transpose(1, 2)
