"""Causal attention of a slice over its prefix and itself, chosen once by device and type.

Shape letters: B sequences, N tokens of the slice, S keys (prefix and slice, S >= N), A heads, G key/value heads,
D head dimension. Query i sees keys 0 to S - N + i: the mask is aligned to the lower right corner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

_aten = torch.ops.aten

QUERY_BLOCK = 256
"""Queries per call on the CPU. A block sees only the keys up to its own end, so the masked triangle is never computed
but for one block's; this is also the block at which the CPU kernel works best."""


class AttentionBackend(Protocol):
    """What an attention unit asks of the kernels. Keys and values are given up to the slice's end."""

    def forward(self, q_BNAD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, out_BNAD: Tensor, lse_BNA: Tensor) -> None:
        """``out`` = softmax(q k^T / sqrt(D), causal) v, and the log of each query's sum of exponentials."""
        ...

    def backward(
        self,
        dout_BNAD: Tensor,
        q_BNAD: Tensor,
        k_BSGD: Tensor,
        v_BSGD: Tensor,
        out_BNAD: Tensor,
        lse_BNA: Tensor,
        dq_BNAD: Tensor,
        dk_BSGD: Tensor,
        dv_BSGD: Tensor,
    ) -> None:
        """Write dq; add to dk and dv."""
        ...


def build_backend(device: torch.device, dtype: torch.dtype, head_dim: int, sequence_length: int) -> AttentionBackend:
    """The fastest backend that serves the device, the type and the head dimension."""
    if device.type == "cpu":
        return CpuFlash(dtype, sequence_length)
    if device.type == "cuda" and dtype is torch.bfloat16 and head_dim % 8 == 0 and head_dim <= 256:
        return CudaFlash(device)
    return PlainAttention(device, dtype, sequence_length)


def _blocks(num_queries: int, num_keys: int) -> Iterator[tuple[slice, int]]:
    """Blocks of queries and the number of keys they see, last block first: it is the one that sees all keys."""
    for start in reversed(range(0, num_queries, QUERY_BLOCK)):
        stop = min(start + QUERY_BLOCK, num_queries)
        yield slice(start, stop), num_keys - num_queries + stop


class _CausalMask:
    """Additive masks for every number of queries up to `QUERY_BLOCK` and of keys: windows of one matrix."""

    def __init__(self, sequence_length: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (min(QUERY_BLOCK, sequence_length), sequence_length + QUERY_BLOCK)
        self._matrix = torch.full(shape, -math.inf, dtype=dtype, device=device).triu_(sequence_length + 1)
        self._corner = sequence_length

    def window(self, num_queries: int, num_keys: int) -> Tensor | None:
        """[num_queries, num_keys]; none where every key is seen."""
        if num_queries == 1:
            return None
        left = self._corner - (num_keys - num_queries)
        return self._matrix[:num_queries, left : left + num_keys]


class CpuFlash:
    """PyTorch's flash kernels for the CPU, forward and backward, called directly; they serve grouped queries too."""

    def __init__(self, dtype: torch.dtype, sequence_length: int) -> None:
        self._mask = _CausalMask(sequence_length, dtype, torch.device("cpu"))

    def _masking(self, num_queries: int, num_keys: int) -> dict[str, Any]:
        """The kernels' own causal mask is aligned to the upper left: faster by 3 % without a prefix, wrong with one."""
        if num_queries == num_keys:
            return {"is_causal": True, "attn_mask": None}
        return {"is_causal": False, "attn_mask": self._mask.window(num_queries, num_keys)}

    def forward(self, q_BNAD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, out_BNAD: Tensor, lse_BNA: Tensor) -> None:
        """See `AttentionBackend`."""
        q_BAND, k_BGSD, v_BGSD = (tensor.transpose(1, 2) for tensor in (q_BNAD, k_BSGD, v_BSGD))
        for rows, end in _blocks(q_BNAD.shape[1], k_BSGD.shape[1]):
            out_BAND, lse_BAN = _aten._scaled_dot_product_flash_attention_for_cpu(
                q_BAND[:, :, rows], k_BGSD[:, :, :end], v_BGSD[:, :, :end],
                **self._masking(rows.stop - rows.start, end),
            )  # fmt: skip
            out_BNAD[:, rows].copy_(out_BAND.transpose(1, 2))
            lse_BNA[:, rows].copy_(lse_BAN.transpose(1, 2))

    def backward(
        self,
        dout_BNAD: Tensor,
        q_BNAD: Tensor,
        k_BSGD: Tensor,
        v_BSGD: Tensor,
        out_BNAD: Tensor,
        lse_BNA: Tensor,
        dq_BNAD: Tensor,
        dk_BSGD: Tensor,
        dv_BSGD: Tensor,
    ) -> None:
        """See `AttentionBackend`."""
        dout, q, k, v, out, lse = (
            tensor.transpose(1, 2) for tensor in (dout_BNAD, q_BNAD, k_BSGD, v_BSGD, out_BNAD, lse_BNA)
        )
        for rows, end in _blocks(q_BNAD.shape[1], k_BSGD.shape[1]):
            dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout[:, :, rows], q[:, :, rows], k[:, :, :end], v[:, :, :end], out[:, :, rows], lse[:, :, rows],
                0.0, **self._masking(rows.stop - rows.start, end),
            )  # fmt: skip
            dq_BNAD[:, rows].copy_(dq.transpose(1, 2))
            dk_BSGD[:, :end].add_(dk.transpose(1, 2))
            dv_BSGD[:, :end].add_(dv.transpose(1, 2))


class CudaFlash:
    """FlashAttention-2 (arXiv 2307.08691) as PyTorch carries it; its causal mask is aligned to the lower right."""

    def __init__(self, device: torch.device) -> None:
        self._no_dropout_state = torch.zeros(2, dtype=torch.uint64, device=device)

    def forward(self, q_BNAD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, out_BNAD: Tensor, lse_BNA: Tensor) -> None:
        """See `AttentionBackend`."""
        found = _aten._flash_attention_forward(
            q_BNAD, k_BSGD, v_BSGD, None, None, q_BNAD.shape[1], k_BSGD.shape[1], 0.0, True, False
        )
        out_BNAD.copy_(found[0])
        lse_BNA.copy_(found[1].transpose(1, 2))

    def backward(
        self,
        dout_BNAD: Tensor,
        q_BNAD: Tensor,
        k_BSGD: Tensor,
        v_BSGD: Tensor,
        out_BNAD: Tensor,
        lse_BNA: Tensor,
        dq_BNAD: Tensor,
        dk_BSGD: Tensor,
        dv_BSGD: Tensor,
    ) -> None:
        """See `AttentionBackend`."""
        state = self._no_dropout_state
        dq, dk, dv = _aten._flash_attention_backward(
            dout_BNAD, q_BNAD, k_BSGD, v_BSGD, out_BNAD, lse_BNA.transpose(1, 2).contiguous(),
            None, None, q_BNAD.shape[1], k_BSGD.shape[1], 0.0, True, state, state,
        )  # fmt: skip
        dq_BNAD.copy_(dq)
        dk_BSGD.add_(dk)
        dv_BSGD.add_(dv)


class PlainAttention:
    """The formulas themselves, for any device and type, and the yardstick of the other backends in tests.

    Backward (FlashAttention-2, algorithm 2): P = exp(q k^T - lse), dV = P^T dO, dS = P (dO V^T - rowsum(dO O)).
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, sequence_length: int) -> None:
        self._wide = torch.float64 if dtype is torch.float64 else torch.float32
        self._mask = _CausalMask(sequence_length, self._wide, device)

    def forward(self, q_BNAD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, out_BNAD: Tensor, lse_BNA: Tensor) -> None:
        """See `AttentionBackend`."""
        for rows, end in _blocks(q_BNAD.shape[1], k_BSGD.shape[1]):
            q, k, v = self._grouped(q_BNAD[:, rows], k_BSGD), k_BSGD[:, :end].to(self._wide), v_BSGD[:, :end]
            scores = self._scores(q, k)
            lse_BGRN = scores.logsumexp(-1)
            weights = scores.sub_(lse_BGRN[..., None]).exp_()
            out = torch.einsum("bgrns,bsgd->bngrd", weights, v.to(self._wide))
            out_BNAD[:, rows].copy_(out.flatten(2, 3))
            lse_BNA[:, rows].copy_(lse_BGRN.flatten(1, 2).transpose(1, 2))

    def backward(
        self,
        dout_BNAD: Tensor,
        q_BNAD: Tensor,
        k_BSGD: Tensor,
        v_BSGD: Tensor,
        out_BNAD: Tensor,
        lse_BNA: Tensor,
        dq_BNAD: Tensor,
        dk_BSGD: Tensor,
        dv_BSGD: Tensor,
    ) -> None:
        """See `AttentionBackend`."""
        for rows, end in _blocks(q_BNAD.shape[1], k_BSGD.shape[1]):
            k, v = k_BSGD[:, :end].to(self._wide), v_BSGD[:, :end].to(self._wide)
            q, dout, out = (self._grouped(x[:, rows], k) for x in (q_BNAD, dout_BNAD, out_BNAD))
            lse_BGRN1 = self._grouped(lse_BNA[:, rows, :, None], k).permute(0, 2, 3, 1, 4)
            weights = self._scores(q, k).sub_(lse_BGRN1).exp_()
            dv_BSGD[:, :end].add_(torch.einsum("bgrns,bngrd->bsgd", weights, dout))
            correction = (dout * out).sum(-1).permute(0, 2, 3, 1)[..., None]
            dscores = torch.einsum("bngrd,bsgd->bgrns", dout, v).sub_(correction).mul_(weights)
            dscores.div_(math.sqrt(q.shape[-1]))
            dq_BNAD[:, rows].copy_(torch.einsum("bgrns,bsgd->bngrd", dscores, k).flatten(2, 3))
            dk_BSGD[:, :end].add_(torch.einsum("bgrns,bngrd->bsgd", dscores, q))

    def _grouped(self, x_BNAD: Tensor, k_BSGD: Tensor) -> Tensor:
        """[B, N, G, A / G, D]: the queries that share a key head side by side."""
        batch, queries, heads, width = x_BNAD.shape
        groups = k_BSGD.shape[2]
        return x_BNAD.reshape(batch, queries, groups, heads // groups, width).to(self._wide)

    def _scores(self, q_BNGRD: Tensor, k_BSGD: Tensor) -> Tensor:
        scores = torch.einsum("bngrd,bsgd->bgrns", q_BNGRD, k_BSGD).div_(math.sqrt(q_BNGRD.shape[-1]))
        mask = self._mask.window(q_BNGRD.shape[1], k_BSGD.shape[1])
        return scores if mask is None else scores.add_(mask)
