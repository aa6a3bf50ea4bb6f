"""The work of slices, on which all costs depend: tokens, query-key pairs and their sequences."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.layout import Operation, remaking
from penstock.core.model import ModelSpec, UnitKind, attention_flops, linear_flops_per_token
from penstock.core.schedule import Kind
from penstock.core.sharding import Sharding

Floats = npt.NDArray[np.float64]
Lengths = npt.ArrayLike

PASSES_WITH_WORK = (
    (UnitKind.EMBEDDING, Kind.F),
    (UnitKind.EMBEDDING, Kind.W),
    *((unit, kind) for unit in (UnitKind.ATTENTION, UnitKind.MLP) for kind in (Kind.F, Kind.I, Kind.W)),
    (UnitKind.HEAD, Kind.F),
)
"""Passes that take time in penstock's own trainer: the F of a whole head includes its backward."""

MOST_BYTES = 64 * 2**40
"""Larger sizes of one unit in a slot or beyond its slots count as this. No rank has so much memory, and the sum over a
model's units fits 64 bits.
"""


def rows_of(sharding: Sharding, tokens: Floats) -> Floats:
    """`Sharding.rows`, elementwise."""
    return np.ceil(tokens / sharding.tp) if sharding.by_tokens else tokens


def head_rows(model: ModelSpec, sharding: Sharding) -> int:
    """Rows of the vocabulary on the largest shard of the largest part of the head."""
    part_rows = -(-model.vocab // model.head_parts)
    return -(-part_rows // sharding.tp)


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """The work of one pass of a unit on slices, elementwise.

    B sequences of n tokens after c of prefix are B n tokens and B (n c + n (n + 1) / 2) pairs. A slice of another form
    (packed documents, a part of the keys) has its own tokens and pairs.
    """

    tokens: Floats
    pairs: Floats
    sequences: int = 1

    @classmethod
    def of(cls, batch: int, length: Lengths, prefix: Lengths) -> Work:
        """The work of ``batch`` sequences of ``length`` causal tokens after ``prefix`` others; both broadcast."""
        n, c = np.broadcast_arrays(np.asarray(length, dtype=np.float64), np.asarray(prefix, dtype=np.float64))
        return cls(tokens=batch * n, pairs=batch * (n * c + n * (n + 1) / 2), sequences=batch)

    @property
    def length(self) -> Floats:
        """Tokens of one sequence."""
        return self.tokens / self.sequences

    @property
    def keys(self) -> Floats:
        """Keys that the last token of each sequence attends to: the mean plus half a slice."""
        return self.pairs / self.tokens + (self.length - 1) / 2

    @functools.cached_property
    def distinct_tokens(self) -> tuple[Floats, npt.NDArray[np.intp]]:
        """The distinct token counts, ascending, and the index of each slice's among them."""
        distinct, places = np.unique(self.tokens, return_inverse=True)
        return distinct, places.reshape(self.tokens.shape)


def operation_flops(spec: ModelSpec, kind: UnitKind, operation: Operation, work: Work) -> Floats:
    """Forward FLOPs of one operation of an attention unit or an MLP; norms and activations have none."""
    if operation is Operation.ATTEND:
        return attention_flops(spec, 1) * work.pairs
    falling = 2 * spec.hidden * (spec.hidden if kind is UnitKind.ATTENTION else spec.ffn_hidden)
    per_token = {Operation.PROJECT: linear_flops_per_token(spec, kind) - falling, Operation.OUTPUT: falling}
    return per_token.get(operation, 0) * work.tokens


def flops_share(spec: ModelSpec, kind: UnitKind, operation: Operation, work: Work) -> Floats:
    """The operation's fraction of the forward FLOPs of an attention unit or an MLP."""
    total = sum(operation_flops(spec, kind, other, work) for other in remaking(spec, kind))
    share: Floats = operation_flops(spec, kind, operation, work) / total
    return share
