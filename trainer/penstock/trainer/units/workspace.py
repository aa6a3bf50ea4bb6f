"""Temporaries of one action: one allocation per rank, carved anew by every unit."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from penstock.core.layout import HEAD_CHUNK_TOKENS, Precision, aligned
from penstock.core.model import Family, ModelSpec, UnitKind


class Workspace:
    """Memory for temporaries. ``reset`` gives everything back at once; tensors taken before it must not be used."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._used = 0
        self.peak_bytes = 0

    @property
    def num_bytes(self) -> int:
        """What it holds."""
        return self._memory.numel()

    def reset(self) -> None:
        """Start over."""
        self._used = 0

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, valid until the next ``reset``.

        Raises MemoryError when the workspace was made too small, which is a mistake of the caller's arithmetic.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        start, self._used = self._used, self._used + aligned(num_bytes)
        if self._used > self.num_bytes:
            raise MemoryError(f"the workspace holds {self.num_bytes} bytes, an action needs {self._used}")
        self.peak_bytes = max(self.peak_bytes, self._used)
        return self._memory[start : start + num_bytes].view(dtype).view(shape)


def workspace_bytes(spec: ModelSpec, precision: Precision, first: int, stop: int, tokens: int) -> int:
    """Bytes that the actions of units [first, stop) need for ``tokens`` = B n tokens at once."""
    kinds = {unit.kind for unit in spec.units[first:stop]}
    return max(_unit_bytes(spec, precision, kind, tokens) for kind in kinds)


def _unit_bytes(spec: ModelSpec, precision: Precision, kind: UnitKind, tokens: int) -> int:
    """Attention: F needs the joint q, k, v; I the gradients of what was attended and of q (rotary), the norm's product.

    MLP: I needs the gradients of the activated and of the normed, the norm's product. Head: normed, its gradient, the
    norm's statistics and product, the logits of a chunk, in both types where these differ. On CUDA, whose fused kernels
    need less, this is a bound.
    """
    narrow, wide = precision.compute_bytes, precision.accumulate_bytes
    rms = spec.family is Family.LLAMA
    row = aligned(tokens * spec.hidden * narrow)
    product = aligned(tokens * spec.hidden * wide) if rms else 0
    if kind is UnitKind.EMBEDDING:
        return 0
    if kind is UnitKind.ATTENTION:
        forward = aligned(tokens * (spec.hidden + 2 * spec.kv_hidden) * narrow)
        return max(forward, row + (row if rms else 0) + product)
    if kind is UnitKind.MLP:
        return aligned(tokens * spec.ffn_hidden * narrow) + row + product
    logits = min(tokens, HEAD_CHUNK_TOKENS) * spec.vocab
    statistics = aligned(tokens * wide) * (1 if rms else 2)
    both = aligned(logits * narrow) + (aligned(logits * wide) if narrow != wide else 0)
    return 2 * row + product + statistics + both
