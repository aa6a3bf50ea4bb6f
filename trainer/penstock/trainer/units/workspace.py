"""Workspace: one allocation per rank, from which every unit takes the temporaries of an action."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.layout import HEAD_CHUNK_TOKENS, NUM_STATISTICS, Precision, aligned
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.sharding import WHOLE, Sharding


class Workspace:
    """Memory for temporaries. ``reset`` frees all of them, and tensors taken before it must not be used.

    It has two regions: one of ``num_bytes``, and one of ``second_bytes`` for the second action of a pair, whose
    temporaries exist at the same time as those of the first. ``enter`` selects the region of the following calls.
    """

    def __init__(self, num_bytes: int, device: torch.device, second_bytes: int = 0) -> None:
        self._regions = [torch.empty(size, dtype=torch.uint8, device=device) for size in (num_bytes, second_bytes)]
        self._used = [0, 0]
        self._region = 0
        self.peak_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of both regions."""
        return sum(region.numel() for region in self._regions)

    def enter(self, region: int) -> None:
        """Select region 0 or 1. Its tensors stay valid."""
        self._region = region

    def reset(self) -> None:
        """Free all tensors of the selected region."""
        self._used[self._region] = 0

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, valid until the next ``reset``.

        Raises MemoryError if the workspace is too small, which is an error in `workspace_bytes`.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        memory, start = self._regions[self._region], self._used[self._region]
        stop = self._used[self._region] = start + aligned(num_bytes)
        if stop > memory.numel():
            raise MemoryError(f"the workspace holds {memory.numel()} bytes, an action needs {stop}")
        self.peak_bytes = max(self.peak_bytes, sum(self._used))
        return memory[start : start + num_bytes].view(dtype).view(shape)


def workspace_bytes(
    spec: ModelSpec, precision: Precision, first: int, stop: int, tokens: int, sharding: Sharding = WHOLE
) -> int:
    """Peak bytes that any action of units [first, stop) takes for ``tokens`` = B n tokens, on the largest shard."""
    kinds = {(unit.kind, unit.part) for unit in spec.units[first:stop]}
    return max(_UnitBytes(spec, precision, tokens, sharding).of(*kind) for kind in kinds)


@dataclass(frozen=True, slots=True)
class _UnitBytes:
    """Bytes that the actions of one unit take. On CUDA, whose fused kernels take less, this is an upper bound."""

    spec: ModelSpec
    precision: Precision
    tokens: int
    sharding: Sharding

    def of(self, kind: UnitKind, part: int = 0) -> int:
        """Maximum over F, I and W."""
        if kind is UnitKind.HEAD and self.spec.is_divided:
            return self._head_part(part)
        return {
            UnitKind.EMBEDDING: self._embedding,
            UnitKind.ATTENTION: self._attention,
            UnitKind.MLP: self._mlp,
            UnitKind.HEAD: self._head,
        }[kind]()

    def _embedding(self) -> int:
        """With several shards, F takes its addend of the rows of all tokens. W takes the gradients of all tokens, with
        zeros for tokens of other shards.
        """
        if self.sharding.tp == 1:
            return 0
        return max(self._gathered, self._wide(self.tokens, self.spec.hidden))

    def _attention(self) -> int:
        """F: the norm of all shards' tokens, then the joint q, k, v. I: the gradients of attention's output and of q
        (rotary), and after these the gradient of the norm's output and the norm's product. W: the norm of all shards'
        tokens.
        """
        hidden, kv_hidden = self.sharding.hidden(self.spec), self.sharding.kv_hidden(self.spec)
        forward = self._gathered + self._narrow(self.tokens, hidden + 2 * kv_hidden)
        attended = self._narrow(self.tokens, hidden) * (2 if self._is_rms else 1)
        return max(forward, attended, self._hidden + self._product)

    def _mlp(self) -> int:
        """F, W: the norm of all shards' tokens. I: the gradient of the activation's output, and after it the gradient
        of the norm's output and the norm's product.
        """
        activated = self._narrow(self.tokens, self.sharding.ffn_hidden(self.spec))
        return max(self._gathered, activated, self._hidden + self._product)

    def _head(self) -> int:
        """The norm's output, its gradient, the norm's statistics and product, the logits of a chunk, in both types if
        these differ, and the numbers that several shards exchange for a chunk.
        """
        rows = min(self.tokens, HEAD_CHUNK_TOKENS)
        vocab, tp = self.sharding.vocab(self.spec), self.sharding.tp
        is_narrow = self.precision.compute_bytes != self.precision.accumulate_bytes
        logits = self._narrow(rows, vocab) + (self._wide(rows, vocab) if is_narrow else 0)
        shared = self._wide(tp * NUM_SHARED, rows) if tp > 1 else 0
        statistics = self._wide(self.sharding.rows(self.tokens)) * (1 if self._is_rms else 2)
        return 2 * self._hidden + self._product + statistics + logits + shared

    def _head_part(self, part: int) -> int:
        """F: the norm of all shards' tokens, the addend, targets' rows and logits of a chunk, and the numbers that
        shards exchange. For a loss without gradients the last part has the statistics in place of the addend.
        I: targets' rows of all shards' tokens, of a chunk and of the shard's own tokens, and the norm's product. The
        last part handles targets' rows in F, so its I needs no more than its F. W: the norm of all shards' tokens, and
        two scaled copies of a chunk of it.
        """
        chunk, hidden = min(self.tokens, HEAD_CHUNK_TOKENS), self.spec.hidden
        tp, by_tokens = self.sharding.tp, self.sharding.by_tokens
        vocab = -(-len(self.spec.part_rows(part)) // tp)
        logits = self._wide(chunk, vocab) if self.precision.compute_bytes != self.precision.accumulate_bytes else 0
        shared = self._wide(tp * NUM_STATISTICS, chunk) if tp > 1 else 0
        rows = self._narrow(chunk, hidden)
        forward = self._gathered + max(self._hidden + rows, self._wide(NUM_STATISTICS, self.tokens)) + logits + shared
        own = self._narrow(self.sharding.rows(self.tokens), hidden) if by_tokens else 0
        backward = self._hidden + rows + own + (self._product if part == 0 else 0)
        weights = self._gathered + rows + self._wide(chunk, hidden)
        return max(forward, backward if part + 1 < self.spec.head_parts else 0, weights)

    @property
    def _is_rms(self) -> bool:
        return self.spec.family is Family.LLAMA

    @property
    def _hidden(self) -> int:
        """A hidden state of all tokens."""
        return self._narrow(self.sharding.padded_rows(self.tokens), self.spec.hidden)

    @property
    def _gathered(self) -> int:
        """A hidden state of all tokens if a shard holds only a part of it, otherwise nothing."""
        return self._hidden if self.sharding.by_tokens else 0

    @property
    def _product(self) -> int:
        return self._wide(self.sharding.rows(self.tokens), self.spec.hidden) if self._is_rms else 0

    def _narrow(self, *shape: int) -> int:
        return aligned(math.prod(shape) * self.precision.compute_bytes)

    def _wide(self, *shape: int) -> int:
        return aligned(math.prod(shape) * self.precision.accumulate_bytes)


NUM_SHARED = 3
"""Numbers that a shard of a head sends per token (`penstock.trainer.units.cross_entropy`)."""
