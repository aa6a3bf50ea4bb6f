"""Division of a pipeline rank's layers over its devices: tensor parallelism, and with it sequence parallelism.

A *shard* is one of the ``tp`` devices that together hold a pipeline rank's units. All shards run the same Program, each
on its part of every tensor (Megatron-LM, arXiv 1909.08053, section 3):

- The first product of a block's unit is divided by rows (heads of q, k and v; the feed-forward width), so that each
  shard makes its own heads or columns. The second is divided by columns: each shard's product is one addend of the
  unit's output, which is summed over shards.
- Embedding and head are divided by the vocabulary. A shard looks up the tokens of its range and adds nothing for the
  others; the head never holds more than its range of the logits.
- Fewer key/value heads than shards: ``tp / kv_heads`` shards hold copies of the same head.

With *sequence parallelism* (arXiv 2205.05198, section 4.2) hidden states are divided by tokens: between the sum and the
next product a shard holds ``rows(tokens)`` of them, all norms and residuals included. The sum becomes a
reduce-scatter, and an all-gather precedes each first product. Both together move as many bytes as the all-reduce that
they replace, and a stage's input, output, norms and messages take one part in tp of the memory. Without it every shard
holds whole hidden states and computes the same norms.

Collectives of a unit, in order:

    pass                 sequence parallel                         without
    F of a block's unit  gather normed, scatter the output         sum the output
    I of a block's unit  gather dy, scatter the gradient of normed sum the gradient of normed
    W of a block's unit  gather normed                             -
    F, I of embedding    scatter the output; gather dy             sum the output
    F of the head        gather normed, scatter its gradient       sum the gradient of normed
    F of a head's part   gather normed, scatter its addend         sum the addend
    I of a head's part   scatter the rows of targets               sum the rows of targets; the last part none
    W of a head's part   gather normed                             -

``dy`` is gathered in place, into the ``w`` slot, where W reads it; ``normed`` is kept by tokens and gathered again for
W, as in Megatron-LM: memory that outlives an action is one part in tp. The head also gathers, per chunk of tokens, each
shard's maximum, sum of exponentials and target.

Example: 10 tokens on 4 shards. ``rows(10)`` is 3, shards hold tokens 0-2, 3-5, 6-8 and 9; a gathered buffer has
``padded_rows(10)`` = 12 rows, of which the first 10 count. Blocks are contiguous, so a gathered buffer needs no
reordering, and all shards' buffers are equally large, as NCCL requires.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.core.model import ModelSpec, UnitKind
from penstock.core.schedule import Kind


@dataclass(frozen=True, slots=True)
class Sharding:
    """``tp`` shards; ``sequence_parallel`` divides hidden states by tokens and has no effect for one shard."""

    tp: int = 1
    sequence_parallel: bool = True

    @property
    def by_tokens(self) -> bool:
        """Whether a shard holds only some tokens of hidden states."""
        return self.sequence_parallel and self.tp > 1

    def rows(self, tokens: int) -> int:
        """Rows of the buffer for a shard's part of a hidden state of ``tokens``; the last shards may fill fewer."""
        return -(-tokens // self.tp) if self.by_tokens else tokens

    def padded_rows(self, tokens: int) -> int:
        """Rows of a buffer that all shards' parts are gathered into."""
        return self.rows(tokens) * self.tp if self.by_tokens else tokens

    def own_tokens(self, tokens: int, shard: int) -> range:
        """The range of ``tokens`` of a hidden state that the shard holds."""
        if not self.by_tokens:
            return range(tokens)
        rows = self.rows(tokens)
        return range(min(shard * rows, tokens), min((shard + 1) * rows, tokens))

    def heads(self, spec: ModelSpec) -> int:
        """Query heads of a shard."""
        return spec.heads // self.tp

    def kv_heads(self, spec: ModelSpec) -> int:
        """Key/value heads of a shard."""
        return max(spec.kv_heads // self.tp, 1)

    def hidden(self, spec: ModelSpec) -> int:
        """Width of a shard's query heads together."""
        return self.heads(spec) * spec.head_dim

    def kv_hidden(self, spec: ModelSpec) -> int:
        """Width of a shard's key heads together."""
        return self.kv_heads(spec) * spec.head_dim

    def ffn_hidden(self, spec: ModelSpec) -> int:
        """Feed-forward width of a shard."""
        return spec.ffn_hidden // self.tp

    def vocab(self, spec: ModelSpec) -> int:
        """Rows of the vocabulary that the largest shard holds."""
        return -(-spec.vocab // self.tp)


WHOLE = Sharding()
"""One device holds all of a rank's units."""


@dataclass(frozen=True, slots=True)
class Block:
    """Rows or columns of a parameter that shards divide evenly.

    Several shards may hold the same of ``num_groups`` parts that are not divided further (key/value heads); 0: single
    rows are divided.
    """

    size: int
    num_groups: int = 0

    def copies(self, tp: int) -> int:
        """Number of the ``tp`` shards that hold the same part."""
        return max(tp // self.num_groups, 1) if self.num_groups else 1

    def part(self, tp: int, shard: int) -> range:
        """The rows of ``shard``, counted from the block's first."""
        copies = self.copies(tp)
        parts, index = tp // copies, shard // copies
        return range(self.size * index // parts, self.size * (index + 1) // parts)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows or columns [start, stop) of a parameter that a shard holds; ``is_owner``: no shard before it holds them."""

    start: int
    stop: int
    is_owner: bool

    @property
    def size(self) -> int:
        """Number of rows or columns."""
        return self.stop - self.start


class Collective(enum.StrEnum):
    """A collective operation of the shards of a rank in the middle of an action."""

    GATHER = "gather"
    SCATTER = "scatter"
    SUM = "sum"


def exchange_bytes(collective: Collective, num_bytes: int, tp: int) -> int:
    """Bytes that a shard on the host needs in addition to the tensors for a collective of ``num_bytes`` on each of
    ``tp``.

    Each of the others sends it an addend of the block that it sums, or for a sum over two shards the whole tensor
    (`penstock.trainer.shards`). The memory is kept for the next collective.
    """
    if collective is Collective.GATHER:
        return 0
    num_blocks = 1 if collective is Collective.SUM and tp == 2 else tp
    return (tp - 1) * -(-num_bytes // num_blocks)


def unit_collectives(
    unit: UnitKind, kind: Kind, sharding: Sharding, *, head_parts: int = 1, part: int = 0
) -> tuple[Collective, ...]:
    """The collectives of one unit's F, I or W, in order, each of the unit's hidden state [tokens, h].

    A W after its I in one action (B) finds ``dy`` gathered, as any W does. For a head in ``head_parts`` units, the unit
    is number ``part``, alone in its stage.
    """
    if sharding.tp == 1:
        return ()
    by_tokens = sharding.by_tokens
    if unit is UnitKind.HEAD and head_parts > 1:
        return _part_collectives(kind, by_tokens=by_tokens, is_last=part == head_parts - 1)
    table: dict[Kind, tuple[Collective, ...]]
    if unit is UnitKind.EMBEDDING:
        table = {Kind.F: (Collective.SCATTER,), Kind.I: (Collective.GATHER,)} if by_tokens else {Kind.F: _SUMMED}
    elif unit is UnitKind.HEAD:
        table = {Kind.F: _BOTH if by_tokens else _SUMMED}
    elif by_tokens:
        table = {Kind.F: _BOTH, Kind.I: _BOTH, Kind.W: (Collective.GATHER,)}
    else:
        table = {Kind.F: _SUMMED, Kind.I: _SUMMED}
    return table.get(kind, ())


def _part_collectives(kind: Kind, *, by_tokens: bool, is_last: bool) -> tuple[Collective, ...]:
    """I sums the rows of targets; those of the last part are in its F."""
    added = _BOTH[1:] if by_tokens else _SUMMED
    gathered = _BOTH[:1] if by_tokens else ()
    table = {Kind.F: gathered + added, Kind.I: () if is_last else added, Kind.W: gathered}
    return table.get(kind, ())


_BOTH = (Collective.GATHER, Collective.SCATTER)
_SUMMED = (Collective.SUM,)
