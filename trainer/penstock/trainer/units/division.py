"""Parts of hidden states and of the vocabulary that one shard holds, and the passes that join the parts of all shards.

Units support every `penstock.core.sharding.Sharding`. A shard holds either some rows of every hidden state or, like all
other shards, whole hidden states. With whole hidden states nothing below cuts or copies. With one shard nothing yields.

Shape letters: T tokens of the slice, P rows of the parts of all shards (T padded to a multiple of tp), R = P / tp rows
of one shard's part, U the first of these rows, which hold tokens, H hidden. For whole hidden states P = R = U = T.

Example: T = 10 tokens and tp = 4 give P = 12 and R = 3. Shards 0 to 2 have U = 3 and shard 3 has U = 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.core.layout import Parameter
from penstock.core.sharding import Sharding
from penstock.trainer.units.collectives import TURN, Gather, Pass, Scatter, Sum
from penstock.trainer.units.workspace import Workspace


class Division:
    """One shard's view of ``sharding``. Temporaries are taken from ``workspace``."""

    def __init__(self, sharding: Sharding, shard: int, workspace: Workspace) -> None:
        self.sharding, self.shard = sharding, shard
        self.is_alone, self.by_tokens = sharding.tp == 1, sharding.by_tokens
        self._workspace = workspace

    def own_tokens(self, num_tokens: int) -> range:
        """The tokens of the slice that the U rows hold."""
        return self.sharding.own_tokens(num_tokens, self.shard)

    def own(self, part_RH: Tensor, num_tokens: int) -> Tensor:
        """The U rows of a part that hold tokens. The other rows are undefined."""
        return part_RH[: len(self.own_tokens(num_tokens))] if self.by_tokens else part_RH

    def block(self, all_PH: Tensor) -> Tensor:
        """The part [R, H] of this shard in a buffer for all parts."""
        if not self.by_tokens:
            return all_PH
        rows = all_PH.shape[0] // self.sharding.tp
        return all_PH.narrow(0, self.shard * rows, rows)

    def without_padding(self, all_PH: Tensor, num_tokens: int) -> Tensor:
        """The T rows that hold tokens."""
        return all_PH[:num_tokens] if self.by_tokens else all_PH

    def take(self, num_tokens: int, width: int, dtype: torch.dtype) -> Tensor:
        """A buffer [P, width] for all parts, in the workspace."""
        return self._workspace.take(self.sharding.padded_rows(num_tokens), width, dtype=dtype)

    def addend_of(self, part_RH: Tensor, num_tokens: int) -> Tensor:
        """Buffer for this shard's addend of a hidden state before `summed`: [P, H] in the workspace, or the part itself
        where hidden states are whole.
        """
        return self.take(num_tokens, part_RH.shape[1], part_RH.dtype) if self.by_tokens else part_RH

    def gather(self, all_PH: Tensor) -> Pass[None]:
        """Fill the blocks of the other shards in ``all_PH``. This shard's block already holds its part."""
        if self.by_tokens:
            yield Gather(all_PH)

    def turn(self) -> Pass[None]:
        """Let another pass continue within a unit's compute.

        Where hidden states are divided by tokens, a unit ends with a collective and the next unit starts with one. The
        turn divides the compute in between, so that each of these two collectives of another pass overlaps a section.
        """
        if self.by_tokens:
            yield TURN

    def all_tokens(self, part_RH: Tensor, num_tokens: int) -> Pass[Tensor]:
        """The rows [T, H] of all shards, gathered into the workspace, or the part itself where it is whole."""
        if not self.by_tokens:
            return part_RH
        all_PH = self.take(num_tokens, part_RH.shape[1], part_RH.dtype)
        self.block(all_PH).copy_(part_RH)
        yield from self.gather(all_PH)
        return self.without_padding(all_PH, num_tokens)

    def summed(self, addend_PH: Tensor, part_RH: Tensor, num_tokens: int) -> Pass[Tensor]:
        """Sum the addends of all shards and return the shard's rows [U, H] of the sum: in ``part_RH``, or in
        ``addend_PH`` where hidden states are whole.
        """
        if self.by_tokens:
            yield Scatter(addend_PH, part_RH)
            return self.own(part_RH, num_tokens)
        if not self.is_alone:
            yield Sum(addend_PH)
        return addend_PH


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """Token ids whose rows of an embedding or a head one shard holds: ranges, whose rows are adjacent."""

    ranges: tuple[range, ...]

    @property
    def size(self) -> int:
        """Number of token ids."""
        return sum(len(tokens) for tokens in self.ranges)

    def rows(self, ids: Tensor) -> Tensor:
        """Row of every token in the shard's matrix, or an arbitrary valid row if the shard does not hold the token."""
        first, *others = self.ranges
        rows = (ids - first.start).clamp_(0, len(first) - 1)
        before = len(first)
        for tokens in others:
            rows = torch.where(ids >= tokens.start, (ids - tokens.start + before).clamp_(max=self.size - 1), rows)
            before += len(tokens)
        return rows

    def holds(self, ids: Tensor) -> Tensor:
        """Whether the shard holds the token's row."""
        first, *others = (torch.logical_and(ids >= tokens.start, ids < tokens.stop) for tokens in self.ranges)
        for other in others:
            first = torch.logical_or(first, other)
        return first


def vocabulary_parts(matrix: Parameter, tp: int, rows: range | None = None) -> tuple[VocabularyPart, ...]:
    """The part of an embedding's or a head's matrix, or of its ``rows``, that each of ``tp`` shards holds."""
    pieces = [
        [range(piece.start, piece.stop) for piece in matrix.pieces(tp, shard) if rows is None or piece.start in rows]
        for shard in range(tp)
    ]
    return tuple(VocabularyPart(tuple(of_shard)) for of_shard in pieces)
