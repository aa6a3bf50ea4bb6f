"""Seconds of units from the shapes of their kernels, on a device whose kernels are described.

The problem. A share of the peak by tokens alone makes small models too fast and large ones too slow: a product's
efficiency depends on all three of its dimensions, and a layer does more than products. At h = 4096 and sequences of
1,024 tokens, softmax, masks and norms take a fifth of a layer whose scores are kept.

The model. Three kinds of kernel make up every pass of a unit:

- *Products* of m x k by k x n. Work comes in tiles, the last wave of tiles leaves multiprocessors idle, and a tile
  needs some depth to fill its pipeline. All three act as if the product were larger, so with the edge e and the depth
  d0 of the device

      compute = 2 (m + e) (n + e) (k + d0) / (share peak),    memory = bytes / (memory share x bandwidth),
      seconds = kernel seconds + (compute^3 + memory^3)^(1/3).

  The cube root joins both roofs smoothly: a product at their crossing takes 1.26 times either, as
  measurements show. Seconds grow with m, n and k, and never fall below either roof.
- *Streams* that read and write memory once (biases, activations, dropout, residuals), and *rows* that reduce rows
  while doing so (norms, softmax): bytes over the reached share of the bandwidth, and the kernel seconds.
- *Fused attention*: 4 d FLOPs per query, key and head, as if every query attended to ``attention_edge`` more keys (the
  halves of blocks that a causal mask leaves idle), every head were ``attention_depth`` wider (exponentials do not
  shrink with d) and there were ``attention_rows`` more rows of queries (the last wave). Backward is 2.5 times the
  FLOPs (FlashAttention-2, arXiv 2307.08691, section 3.1).

The host's launches of a pass are counted next to these seconds: an action takes at least as long as its launches
(`penstock.planner.stagecost`).

The operations of a block's F (`penstock.core.layout.Operation`) divide its kernels, so their seconds add up to the
pass's: norm, first product (and the placement of q, k and v), attention, activation, and the second product with bias,
dropout and residual.

Under tensor parallelism a shard's products, its attention and the operations between them have its part of the width or
of the heads. Norms, residuals and dropout of hidden states are the same on all shards, or with sequence parallelism
those of the shard's rows (`penstock.core.sharding`).

A part of a divided head (`penstock.core.model.DividedModel`) multiplies twice in F, once for its logits and once for
their addend of the gradient at its input, and once in W. F makes the softmax of its logits, which W uses as it is, and
reads and writes the state that goes down the chain of parts. I passes the gradient on and adds the targets' rows, which
the last part does in F. W scales the normed, and adds it to the targets' rows. The norm of the first part counts as if
all parts shared it.

Example: up projection of GPT-3 6.7B (n = 16384, k = 4096) on an A100 (share 0.755 of 312e12, edge 66, depth 55). 6,144
tokens: 824.6 GFLOP become 848.1, 3.60 ms or 229 TFLOP/s. 64 tokens: compute 75 us and memory 79 us make 97 us, and with
the kernel itself 103 us, 84 TFLOP/s.

Where the numbers come from. e, d0, the shares and the kernel seconds are fitted to public microbenchmarks of single
products per kind of device; the files in `penstock.core.devices` name them, with the remaining error (A100: 6.3 % mean
over 36,516 measured products, 4.6 % from 2,048 tokens on). No published training step is used. If the smallest measured
depth is 512, the formula's depth is hardly determined: on V100 anything from 0 to 300 fits equally well, which makes W
of short slices up to three times as long, so V100 has the A100's.

Tried and rejected: explicit tiles, waves and split depth. Its error on A100 is the same (6.3 %), it takes many times as
long, and its steps make the search prefer slice lengths at the edge of a wave, which no measurement resolves.
Efficiency by tokens alone (still used for descriptions without kernels): predictions of published steps were 21 % short
at h = 2304 and 11 % long at h = 6144.

Complexity: a few array operations per kernel over the *distinct* token counts; only attention looks at every slice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.cluster import AttentionKernel, DeviceSpec, Fusion, KernelSpec, SoftwareSpec
from penstock.core.layout import KEYS_AT_ONCE, NUM_STATISTICS, Operation, Precision
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.schedule import Kind
from penstock.core.sharding import WHOLE, Sharding
from penstock.planner.work import Floats, Work, head_rows, rows_of

BACKWARD_FLOPS = 2.5
"""FLOPs of fused attention's backward, as a multiple of its forward's."""

MASK_BYTES = 1
"""Bytes of one element of a dropout mask."""

FUSED_LOSS_BYTES, PLAIN_LOSS_BYTES = 16, 40
"""Memory traffic of the cross entropy of one logit, forward and backward: conversion to fp32, maximum, sum, gradient.
Without fused kernels subtraction, exponentials and the one-hot difference are passes of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTimes:
    """Seconds of one shard of a model's units on one kind of device, under a software stack. With ``copies_prefix`` the
    attention of a slice with a prefix copies keys and values together, since each slice has its own.
    """

    model: ModelSpec
    device: DeviceSpec
    kernels: KernelSpec
    software: SoftwareSpec
    precision: Precision
    sharding: Sharding = WHOLE
    copies_prefix: bool = False

    def unit_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """Seconds of one unit's F, I or W, without collectives."""
        if not has_work(unit, kind, self.software, self.model.head_parts):
            return np.zeros(work.tokens.shape)
        return self._kernels_of(unit, kind, work)[0]

    def launch_seconds(self, unit: UnitKind, kind: Kind, work: Work) -> Floats:
        """Seconds of the host to launch the kernels of one unit's F, I or W; the same for all slices. 0 if the device
        takes longer for any kernel.
        """
        is_immediate = self.software.launch_seconds <= self.kernels.kernel_seconds
        if is_immediate or not has_work(unit, kind, self.software, self.model.head_parts):
            return np.zeros(work.tokens.shape)
        seconds: Floats = np.full(work.tokens.shape, self.software.launch_seconds)
        return seconds * self._num_launches(unit, kind, work)

    def _num_launches(self, unit: UnitKind, kind: Kind, work: Work) -> int:
        """Kernels of the slice that needs most: the one with the longest prefix."""
        longest = np.where(work.keys > work.length + 0.5, work.keys, 0).argmax()
        tokens, pairs = work.tokens.flat[longest], work.pairs.flat[longest]
        one = Work(tokens=np.array([tokens]), pairs=np.array([pairs]), sequences=work.sequences)
        return self._kernels_of(unit, kind, one)[1]

    def operation_seconds(self, unit: UnitKind, operation: Operation, work: Work) -> Floats:
        """Seconds of one operation of the F of a block's unit, without collectives."""
        return self._kernels_of(unit, Kind.F, work, (operation,))[0]

    def _kernels_of(
        self, unit: UnitKind, kind: Kind, work: Work, operations: Collection[Operation] = tuple(Operation)
    ) -> tuple[Floats, int]:
        """Seconds and number of the kernels of a pass; of a block's F only those of ``operations``."""
        tokens, places = work.distinct_tokens
        dense = _Pass(self, tokens)
        self._add_dense(dense, unit, kind, operations)
        seconds, launches = dense.seconds[places], dense.launches
        if unit is UnitKind.ATTENTION and kind is not Kind.W and Operation.ATTEND in operations:
            core = _Pass(self, work.tokens)
            self._add_attention(core, kind, work)
            seconds, launches = seconds + core.seconds, launches + core.launches
        return seconds, launches

    def _add_dense(self, total: _Pass, unit: UnitKind, kind: Kind, operations: Collection[Operation]) -> None:
        """Everything of the pass that depends on tokens alone."""
        if unit is UnitKind.EMBEDDING:
            self._add_embedding(total, kind)
        elif unit is UnitKind.HEAD and self.model.head_parts > 1:
            self._add_head_part(total, kind)
        elif unit is UnitKind.HEAD:
            self._add_head(total, kind)
        elif kind is Kind.F:
            self._add_forward(total, unit, operations)
        elif kind is Kind.I:
            self._add_input_gradient(total, unit)
        else:
            self._add_weight_gradient(total, unit)

    def _matrices(self, unit: UnitKind) -> tuple[tuple[int, int], tuple[int, int]]:
        """(columns, depth) of the unit's first (rising) and second (falling) product on one device."""
        spec, sharding = self.model, self.sharding
        if unit is UnitKind.ATTENTION:
            return (self._qkv_width, spec.hidden), (spec.hidden, sharding.hidden(spec))
        width = sharding.ffn_hidden(spec)
        return (width * (2 if spec.family is Family.LLAMA else 1), spec.hidden), (spec.hidden, width)

    @property
    def _qkv_width(self) -> int:
        return self.sharding.hidden(self.model) + 2 * self.sharding.kv_hidden(self.model)

    def _add_forward(self, total: _Pass, unit: UnitKind, operations: Collection[Operation]) -> None:
        rising, falling = self._matrices(unit)
        if Operation.NORM in operations:
            total.hidden_rows(2 * self.model.hidden)
        if Operation.PROJECT in operations:
            total.product(*rising)
            if unit is UnitKind.ATTENTION:
                total.stream(2 * self._qkv_width, kernels=3)  # queries, keys and values go to their places
        if Operation.ACTIVATE in operations and unit is UnitKind.MLP:
            total.stream(rising[0] + falling[1])
        if Operation.OUTPUT in operations:
            total.product(*falling)
            self._add_residual(total)

    def _add_residual(self, total: _Pass) -> None:
        """Bias, dropout and residual of a block's unit."""
        hidden = self.model.hidden
        if self.software.fusion is Fusion.NONE:
            total.hidden_stream(2 * hidden)
            if self.software.dropout:
                total.hidden_stream(2 * hidden, hidden * MASK_BYTES)
            total.hidden_stream(3 * hidden)
        else:
            total.hidden_stream(3 * hidden, hidden * MASK_BYTES if self.software.dropout else 0)

    def _add_input_gradient(self, total: _Pass, unit: UnitKind) -> None:
        hidden, (rising, falling) = self.model.hidden, self._matrices(unit)
        if self.software.dropout:
            total.hidden_stream(2 * hidden, hidden * MASK_BYTES)
        total.product(*reversed(falling))
        if unit is UnitKind.ATTENTION:
            total.stream(2 * self._qkv_width, kernels=3)
        else:
            total.stream(2 * rising[0] + falling[1])
        total.product(*reversed(rising))
        if self.software.fusion is Fusion.EPILOGUE:
            total.hidden_rows(4 * hidden)
        else:
            total.hidden_rows(3 * hidden)
            total.hidden_stream(3 * hidden)
        total.hidden_rows(2 * hidden)  # gradients of the norm's own parameters

    def _add_weight_gradient(self, total: _Pass, unit: UnitKind) -> None:
        rising, falling = self._matrices(unit)
        has_biases = self.model.family is Family.GPT2
        total.gradient_product(*rising)
        if has_biases:
            total.stream(rising[0])
        total.gradient_product(*falling)
        if has_biases:
            total.hidden_stream(falling[0])

    def _add_embedding(self, total: _Pass, kind: Kind) -> None:
        hidden = self.model.hidden
        if kind is Kind.F:
            total.stream(3 * hidden)
            if self.software.dropout:
                total.hidden_stream(2 * hidden, hidden * MASK_BYTES)
        else:
            total.stream(hidden, 2 * hidden * self._gradient_bytes)

    def _add_head(self, total: _Pass, kind: Kind) -> None:
        hidden, vocab, is_whole = self.model.hidden, self.sharding.vocab(self.model), self.software.head_in_forward
        if kind is Kind.F:
            total.hidden_rows(2 * hidden)
            total.product(vocab, hidden)
            total.rows(0, self._loss_bytes * vocab / 2, kernels=3)
        if kind is (Kind.F if is_whole else Kind.I):
            total.rows(0, self._loss_bytes * vocab / 2, kernels=3)
            total.product(hidden, vocab)
            total.hidden_rows(5 * hidden)
        if kind is (Kind.F if is_whole else Kind.W):
            total.gradient_product(vocab, hidden)

    def _add_head_part(self, total: _Pass, kind: Kind) -> None:
        """The kernels of a part of the head. F: all passes over the logits; addend and normed are read and written, the
        addend twice. I: a row of targets is zeroed, read, and added to the gradient. W: the normed is scaled twice,
        also in the accumulation type, which is added to the targets' rows.
        """
        hidden, parts, wide = self.model.hidden, self.model.head_parts, self.precision.accumulate_bytes
        vocab, numbers = head_rows(self.model, self.sharding), 2 * NUM_STATISTICS * wide
        if kind is Kind.F:
            total.hidden_rows(2 * hidden / parts)
            total.product(vocab, hidden)
            total.rows(0, self._loss_bytes * vocab, kernels=6)
            total.product(hidden, vocab)
            total.hidden_stream(6 * hidden, numbers)
        elif kind is Kind.I:
            total.stream(6 * hidden, kernels=3)
            total.hidden_stream(5 * hidden, numbers)
            total.hidden_rows(5 * hidden / parts)
        else:
            total.stream(2 * hidden)
            total.gradient_product(vocab, hidden)
            total.stream(hidden, 2 * hidden * (wide + self._gradient_bytes), kernels=2)

    def _add_copies(self, total: _Pass, kind: Kind, work: Work) -> None:
        """Keys and values that are copied together, and results of groups of them that are added in fp32
        (`penstock.trainer.units.prefix`). F scales the sum, too.
        """
        keys = np.where(work.keys > work.length + 0.5, work.keys, 0)
        num_sums = np.maximum(np.ceil(keys / KEYS_AT_ONCE) - 1, 0)
        wide, elements = self.precision.accumulate_bytes, self.sharding.hidden(self.model) * work.tokens * num_sums
        copies, sums = _Pass(self, work.tokens), _Pass(self, work.tokens)
        copies.whole_stream(4 * self.sharding.kv_hidden(self.model) * work.sequences * keys, kernels=2)
        sums.whole_stream(elements, (4 if kind is Kind.F else 2) * wide * elements)
        total.join(copies, where=keys > 0)
        total.join(sums, where=num_sums > 0)

    @property
    def _loss_bytes(self) -> int:
        return PLAIN_LOSS_BYTES if self.software.fusion is Fusion.NONE else FUSED_LOSS_BYTES

    def _add_attention(self, total: _Pass, kind: Kind, work: Work) -> None:
        """Scores, softmax and weighted sum, forward or backward."""
        heads, head_dim = self.sharding.heads(self.model), self.model.head_dim
        if self.software.attention is AttentionKernel.FLASH:
            total.fused_attention(work, heads, head_dim, backward=kind is Kind.I)
            if self.copies_prefix:
                self._add_copies(total, kind, work)
            return
        count, queries, keys = work.sequences * heads, work.length, work.keys
        scores = count * queries * keys
        is_plain, mask = self.software.fusion is Fusion.NONE, MASK_BYTES * scores
        for rows, columns, depth in _score_products(kind, queries, keys, head_dim):
            total.batched_product(count, rows, columns, depth)
        total.whole_rows((3 if kind is Kind.I else 2) * scores)
        if is_plain:
            total.whole_stream(4 * scores, kernels=2)  # scaling and mask
        if self.software.dropout:
            total.whole_stream(2 * scores, mask)

    @property
    def _gradient_bytes(self) -> int:
        """Bytes of one element of an accumulated gradient."""
        return self.software.gradient_type.num_bytes(self.precision)


def has_work(unit: UnitKind, kind: Kind, software: SoftwareSpec, head_parts: int = 1) -> bool:
    """Whether the pass has any work. An embedding has no I. A whole head has no I and W of its own if its F includes
    them.
    """
    if unit is UnitKind.HEAD:
        return kind is Kind.F or head_parts > 1 or not software.head_in_forward
    return unit is not UnitKind.EMBEDDING or kind is not Kind.I


def _score_products(
    kind: Kind, queries: Floats, keys: Floats, head_dim: int
) -> tuple[tuple[Floats | int, Floats | int, Floats | int], ...]:
    """(rows, columns, depth) of one head's products: scores and weighted sum, or the gradients of all four factors."""
    if kind is Kind.F:
        return (queries, keys, head_dim), (queries, head_dim, keys)
    return (
        (queries, keys, head_dim),
        (keys, head_dim, queries),
        (queries, head_dim, keys),
        (keys, head_dim, queries),
    )


class _Pass:
    """The kernels of one pass: their seconds, elementwise over tokens, and how many are launched."""

    def __init__(self, times: KernelTimes, tokens: Floats) -> None:
        self.seconds: Floats = np.zeros(tokens.shape)
        self.launches = 0
        self._times, self._tokens, self._own_rows = times, tokens, rows_of(times.sharding, tokens)
        self._kernels = times.kernels
        self._width = times.precision.compute_bytes
        self._rate = times.kernels.product_share * times.device.peak_flops
        bandwidth = times.device.memory_bandwidth
        self._product_bandwidth = times.kernels.product_memory_share * bandwidth
        self._stream_bandwidth = times.kernels.stream_share * bandwidth
        self._row_bandwidth = times.kernels.row_share * bandwidth

    def product(self, columns: int, depth: int) -> None:
        """Product of tokens x depth by depth x columns."""
        tokens, width = self._tokens, self._width
        self._multiply(1, tokens, columns, depth, width * (tokens * (columns + depth) + columns * depth))

    def gradient_product(self, columns: int, depth: int) -> None:
        """The gradient of such a product's weights, added to the accumulated gradient."""
        tokens, width, gradient = self._tokens, self._width, self._times._gradient_bytes
        is_fused = self._times.software.fused_gradients
        weights = columns * depth
        written = 2 * gradient * weights if is_fused else width * weights
        self._multiply(1, columns, depth, tokens, width * tokens * (columns + depth) + written)
        if not is_fused:
            self._move(weights * (width + 2 * gradient), self._stream_bandwidth)

    def batched_product(self, count: int, rows: Floats | int, columns: Floats | int, depth: Floats | int) -> None:
        """``count`` independent products in one kernel."""
        elements = rows * depth + depth * columns + rows * columns
        self._multiply(count, rows, columns, depth, count * self._width * elements)

    def _multiply(
        self, count: int, rows: Floats | int, columns: Floats | int, depth: Floats | int, num_bytes: Floats | int
    ) -> None:
        edge = self._kernels.product_edge
        padded = (rows + edge) * (columns + edge) * (depth + self._kernels.product_depth)
        compute, memory = 2 * count * padded / self._rate, num_bytes / self._product_bandwidth
        self._add(np.cbrt(compute * compute * compute + memory * memory * memory))

    def fused_attention(self, work: Work, heads: int, head_dim: int, *, backward: bool) -> None:
        """One kernel over all queries, keys and heads."""
        kernels = self._kernels
        share = kernels.attention_backward_share if backward else kernels.attention_share
        pairs = heads * (work.pairs + kernels.attention_edge * work.tokens)
        flops = 4 * (head_dim + kernels.attention_depth) * pairs * (BACKWARD_FLOPS if backward else 1.0)
        waves = 1 + kernels.attention_rows / (heads * work.tokens)
        self._add(flops * waves / (share * self._times.device.peak_flops))

    def stream(self, elements: float, other_bytes: float = 0, *, kernels: int = 1) -> None:
        """Traffic of ``elements`` of the compute type and ``other_bytes``, both per token, read or written once."""
        self._move(self._tokens * (elements * self._width + other_bytes), self._stream_bandwidth, kernels)

    def rows(self, elements: float, other_bytes: float = 0, *, kernels: int = 1) -> None:
        """Like `stream`, by kernels that reduce rows."""
        self._move(self._tokens * (elements * self._width + other_bytes), self._row_bandwidth, kernels)

    def hidden_stream(self, elements: float, other_bytes: float = 0) -> None:
        """Like `stream`, for hidden states, of which a shard has its own rows."""
        self._move(self._own_rows * (elements * self._width + other_bytes), self._stream_bandwidth)

    def hidden_rows(self, elements: float) -> None:
        """Like `hidden_stream`, by kernels that reduce rows."""
        self._move(self._own_rows * (elements * self._width), self._row_bandwidth)

    def whole_stream(self, elements: Floats, other_bytes: Floats | int = 0, *, kernels: int = 1) -> None:
        """Traffic of ``elements`` and ``other_bytes`` in total, read or written once."""
        self._move(elements * self._width + other_bytes, self._stream_bandwidth, kernels)

    def whole_rows(self, elements: Floats) -> None:
        """Like `whole_stream`, by kernels that reduce rows."""
        self._move(elements * self._width, self._row_bandwidth)

    def join(self, other: _Pass, *, where: npt.NDArray[np.bool_]) -> None:
        """Add the kernels of ``other``, which only these slices need."""
        self.seconds = self.seconds + np.where(where, other.seconds, 0)
        self.launches += other.launches if where.any() else 0

    def _move(self, num_bytes: Floats | float, bandwidth: float, kernels: int = 1) -> None:
        self._add(num_bytes / bandwidth, kernels)

    def _add(self, seconds: Floats | float, kernels: int = 1) -> None:
        self.seconds = self.seconds + seconds + kernels * self._kernels.kernel_seconds
        self.launches += kernels
