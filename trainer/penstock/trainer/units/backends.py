"""Backends for causal attention of a slice over its prefix and itself, chosen once by device and type.

Shape letters: B sequences, N tokens of the slice, S keys (prefix and slice, S >= N), A heads, G key/value heads,
D head dimension. Query i attends to keys 0 to S - N + i: the causal mask is aligned to the lower right corner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_aten = torch.ops.aten

FLASH_CAPABILITY = (8, 0)
"""Compute capability of the oldest CUDA devices that FlashAttention-2 supports."""

QUERY_BLOCK = 256
"""Approximate number of queries per call on the CPU. A block reads only the keys up to its own end, so the masked
triangle is computed for one block at a time. The CPU kernel is fastest at this size. All blocks have the same size,
since a small block passes over as many keys as a large one: 384 queries in two blocks of 192 take 7 % less time than in
256 and 128.
"""
LARGEST_BLOCK = QUERY_BLOCK * 3 // 2
UNDIVIDED_QUERIES = 768
"""From this number of queries on, the CPU kernel uses larger blocks itself: without a prefix one call is 5 % faster."""


class Operands(NamedTuple):
    """Operands of attention: queries of a slice [B, N, A, D], keys and values up to the slice's end [B, S, G, D], the
    output [B, N, A, D], and the log-sum-exp of each query [B, N, A] in the accumulate type.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


Pieces = Sequence[Tensor]
"""A tensor [B, S, G, D] in consecutive pieces of its keys."""


class AttentionBackend(Protocol):
    """Interface of an attention unit to the kernels."""

    def forward(self, operands: Operands, *, causal: bool = True) -> None:
        """Write ``out`` = softmax(q k^T / sqrt(D)) v, and ``lse``. Unless it is ``causal``, queries see all keys."""
        ...

    def backward(
        self,
        operands: Operands,
        dout_BNAD: Tensor,
        dq_BNAD: Tensor,
        dk: Pieces,
        dv: Pieces,
        *,
        fresh: bool,
        causal: bool = True,
    ) -> None:
        """Compute gradients from that of ``out``: write dq, and add to dk and dv. If ``fresh``, overwrite dk and dv.

        If ``out`` and ``lse`` are of more keys than ``operands`` has, dq is the part that these keys contribute.
        """
        ...


def build_backend(device: torch.device, dtype: torch.dtype, head_dim: int, sequence_length: int) -> AttentionBackend:
    """The fastest backend that supports the device, the type and the head dimension."""
    if device.type == "cpu":
        return CpuFlash(dtype, sequence_length)
    is_served = dtype is torch.bfloat16 and head_dim % 8 == 0 and head_dim <= 256
    if device.type == "cuda" and is_served and _has_flash(device):
        return CudaFlash(device)
    return PlainAttention(device, dtype, sequence_length)


def _has_flash(device: torch.device) -> bool:
    """Whether the device supports FlashAttention-2. True without a driver: shapes are then traced for such a device."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def _blocks(
    operands: Operands, undivided_from: int | None = None, *, causal: bool
) -> Iterator[tuple[slice, int, bool]]:
    """Blocks of queries, each with the number of keys that its last query attends to. The last block comes first, since
    it reads all keys, and is marked.

    One block if there is no prefix and at least ``undivided_from`` queries.
    """
    num_queries, num_keys = operands.q.shape[1], operands.k.shape[1]
    undivided = undivided_from is not None and num_queries == num_keys >= undivided_from
    count = 1 if undivided else max(1, (num_queries + QUERY_BLOCK // 2) // QUERY_BLOCK)
    block = -(-num_queries // count)
    for start in reversed(range(0, num_queries, block)):
        stop = min(start + block, num_queries)
        yield slice(start, stop), num_keys - num_queries + stop if causal else num_keys, stop == num_queries


def _put(pieces: Pieces, value_BSGD: Tensor, fresh: bool) -> None:
    """Write or add a value to the pieces of its keys, which are the first ones."""
    start = 0
    for piece in pieces:
        value = value_BSGD[:, start : start + piece.shape[1]]
        if not value.shape[1]:
            return
        target = piece[:, : value.shape[1]]
        if fresh:
            target.copy_(value)
        else:
            target.add_(value)
        start += piece.shape[1]


class _CausalMask:
    """Additive masks for up to `LARGEST_BLOCK` queries and any number of keys: windows of one matrix."""

    def __init__(self, sequence_length: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (min(LARGEST_BLOCK, sequence_length), sequence_length + LARGEST_BLOCK)
        self._matrix = torch.full(shape, -math.inf, dtype=dtype, device=device).triu_(sequence_length + 1)
        self._corner = sequence_length

    def window(self, num_queries: int, num_keys: int) -> Tensor | None:
        """The mask [num_queries, num_keys]; None if nothing is masked."""
        if num_queries == 1:
            return None
        left = self._corner - (num_keys - num_queries)
        return self._matrix[:num_queries, left : left + num_keys]


class CpuFlash:
    """PyTorch's flash attention kernels for the CPU, called directly. They support grouped queries, too."""

    def __init__(self, dtype: torch.dtype, sequence_length: int) -> None:
        self._mask = _CausalMask(sequence_length, dtype, torch.device("cpu"))

    def _masking(self, num_queries: int, num_keys: int, *, causal: bool) -> dict[str, Any]:
        """Mask arguments of a kernel. Its own causal mask, aligned to the upper left, is 3 % faster than an explicit
        one, but wrong with a prefix.
        """
        if not causal:
            return {"is_causal": False, "attn_mask": None}
        if num_queries == num_keys:
            return {"is_causal": True, "attn_mask": None}
        return {"is_causal": False, "attn_mask": self._mask.window(num_queries, num_keys)}

    def forward(self, operands: Operands, *, causal: bool = True) -> None:
        q, k, v, out, lse = (tensor.transpose(1, 2) for tensor in operands)
        for rows, end, _ in _blocks(operands, UNDIVIDED_QUERIES, causal=causal):
            masking = self._masking(rows.stop - rows.start, end, causal=causal)
            some_out, some_lse = _aten._scaled_dot_product_flash_attention_for_cpu(
                q[:, :, rows], k[:, :, :end], v[:, :, :end], **masking
            )
            out[:, :, rows].copy_(some_out)
            lse[:, :, rows].copy_(some_lse)

    def backward(
        self,
        operands: Operands,
        dout_BNAD: Tensor,
        dq_BNAD: Tensor,
        dk: Pieces,
        dv: Pieces,
        *,
        fresh: bool,
        causal: bool = True,
    ) -> None:
        q, k, v, out, lse = (tensor.transpose(1, 2) for tensor in operands)
        dout = dout_BNAD.transpose(1, 2)
        for rows, end, is_first in _blocks(operands, UNDIVIDED_QUERIES, causal=causal):
            first = fresh and is_first
            dq, some_dk, some_dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout[:, :, rows], q[:, :, rows], k[:, :, :end], v[:, :, :end], out[:, :, rows], lse[:, :, rows],
                0.0, **self._masking(rows.stop - rows.start, end, causal=causal),
            )  # fmt: skip
            dq_BNAD[:, rows].copy_(dq.transpose(1, 2))
            _put(dk, some_dk.transpose(1, 2), first)
            _put(dv, some_dv.transpose(1, 2), first)


class CudaFlash:
    """FlashAttention-2 (arXiv 2307.08691) from PyTorch. Its causal mask is aligned to the lower right."""

    def __init__(self, device: torch.device) -> None:
        self._no_dropout_state = torch.zeros(2, dtype=torch.uint64, device=device)

    def forward(self, operands: Operands, *, causal: bool = True) -> None:
        q, k, v, out, lse_BNA = operands
        result, lse_BAN, *_ = _aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False
        )
        out.copy_(result)
        lse_BNA.copy_(lse_BAN.transpose(1, 2))

    def backward(
        self,
        operands: Operands,
        dout_BNAD: Tensor,
        dq_BNAD: Tensor,
        dk: Pieces,
        dv: Pieces,
        *,
        fresh: bool,
        causal: bool = True,
    ) -> None:
        q, k, v, out, lse_BNA = operands
        lse_BAN, state = lse_BNA.transpose(1, 2).contiguous(), self._no_dropout_state
        dq, added_dk, added_dv = _aten._flash_attention_backward(
            dout_BNAD, q, k, v, out, lse_BAN, None, None, q.shape[1], k.shape[1], 0.0, causal, state, state
        )
        dq_BNAD.copy_(dq)
        _put(dk, added_dk, fresh)
        _put(dv, added_dv, fresh)


class PlainAttention:
    """Attention by its formulas, for any device and type, and the reference for the other backends in tests.

    Backward (FlashAttention-2, algorithm 2): P = exp(q k^T / sqrt(D) - lse), dV = P^T dO,
    dS = P (dO V^T - rowsum(dO O)) / sqrt(D), dQ = dS K, dK = dS^T Q.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, sequence_length: int) -> None:
        self._wide = torch.float64 if dtype is torch.float64 else torch.float32
        self._mask = _CausalMask(sequence_length, self._wide, device)

    def forward(self, operands: Operands, *, causal: bool = True) -> None:
        for rows, end, _ in _blocks(operands, causal=causal):
            q, k, v, _, _ = self._block(operands, rows, end)
            scores = self._scores(q, k, causal=causal)
            lse_BGRN = scores.logsumexp(-1)
            weights = scores.sub_(lse_BGRN[..., None]).exp_()
            out = torch.einsum("bgrns,bsgd->bngrd", weights, v)
            operands.out[:, rows].copy_(out.flatten(2, 3))
            operands.lse[:, rows].copy_(lse_BGRN.flatten(1, 2).transpose(1, 2))

    def backward(
        self,
        operands: Operands,
        dout_BNAD: Tensor,
        dq_BNAD: Tensor,
        dk: Pieces,
        dv: Pieces,
        *,
        fresh: bool,
        causal: bool = True,
    ) -> None:
        for rows, end, is_first in _blocks(operands, causal=causal):
            first = fresh and is_first
            q, k, v, out, lse_BNGR1 = self._block(operands, rows, end)
            dout = self._grouped(dout_BNAD[:, rows], k)
            weights = self._scores(q, k, causal=causal).sub_(lse_BNGR1.permute(0, 2, 3, 1, 4)).exp_()
            _put(dv, torch.einsum("bgrns,bngrd->bsgd", weights, dout), first)
            correction = (dout * out).sum(-1).permute(0, 2, 3, 1)[..., None]
            dscores = torch.einsum("bngrd,bsgd->bgrns", dout, v).sub_(correction).mul_(weights)
            dscores.div_(math.sqrt(q.shape[-1]))
            dq_BNAD[:, rows].copy_(torch.einsum("bgrns,bsgd->bngrd", dscores, k).flatten(2, 3))
            _put(dk, torch.einsum("bgrns,bngrd->bsgd", dscores, q), first)

    def _block(self, operands: Operands, rows: slice, end: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, out and lse of a block in the wide type, with the heads of q, out and lse grouped by key head."""
        k, v = operands.k[:, :end].to(self._wide), operands.v[:, :end].to(self._wide)
        q, out, lse = operands.q, operands.out, operands.lse[..., None]
        return self._grouped(q[:, rows], k), k, v, self._grouped(out[:, rows], k), self._grouped(lse[:, rows], k)

    def _grouped(self, x_BNAD: Tensor, k_BSGD: Tensor) -> Tensor:
        """View [B, N, G, A / G, D] in the wide type: heads grouped by the key head that they share."""
        batch, queries, heads, width = x_BNAD.shape
        groups = k_BSGD.shape[2]
        return x_BNAD.reshape(batch, queries, groups, heads // groups, width).to(self._wide)

    def _scores(self, q_BNGRD: Tensor, k_BSGD: Tensor, *, causal: bool) -> Tensor:
        scores = torch.einsum("bngrd,bsgd->bgrns", q_BNGRD, k_BSGD).div_(math.sqrt(q_BNGRD.shape[-1]))
        mask = self._mask.window(q_BNGRD.shape[1], k_BSGD.shape[1]) if causal else None
        return scores if mask is None else scores.add_(mask)
