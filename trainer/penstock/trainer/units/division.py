"""What one shard holds of hidden states and of the vocabulary, and the passes that join the shards' parts.

Units are written for every `penstock.core.sharding.Sharding`. A shard either holds some rows of every hidden state, or
like all others whole hidden states; then nothing below cuts or copies. A shard without others yields nothing.

Shape letters: T tokens of the slice, P rows of all shards' parts together (T padded to a multiple of tp), R = P / tp
rows of one shard's part, U of these the first, which hold tokens, H hidden. Of whole hidden states P = R = U = T.
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
    """One shard's side of ``sharding``; what does not lie in a slot lies in ``workspace``."""

    def __init__(self, sharding: Sharding, shard: int, workspace: Workspace) -> None:
        self.sharding, self.shard = sharding, shard
        self.is_alone, self.by_tokens = sharding.tp == 1, sharding.by_tokens
        self._workspace = workspace

    def own_tokens(self, num_tokens: int) -> range:
        """Which of the slice's tokens the U rows hold."""
        return self.sharding.own_tokens(num_tokens, self.shard)

    def own(self, part_RH: Tensor, num_tokens: int) -> Tensor:
        """The U rows of a part that hold tokens; the others must not be read."""
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
        """Where this shard's addend of a hidden state goes before `summed`: a buffer [P, H] in the workspace, or in
        place where a part is the whole.
        """
        return self.take(num_tokens, part_RH.shape[1], part_RH.dtype) if self.by_tokens else part_RH

    def gather(self, all_PH: Tensor) -> Pass[None]:
        """Fill the other shards' blocks of ``all_PH``; this shard's holds its part already."""
        if self.by_tokens:
            yield Gather(all_PH)

    def turn(self) -> Pass[None]:
        """Let another pass go on in the middle of a unit's compute. Where hidden states are divided by tokens a unit
        ends with a collective and the next one begins with one, which that pass then runs next to: each next to a part.
        """
        if self.by_tokens:
            yield TURN

    def all_tokens(self, part_RH: Tensor, num_tokens: int) -> Pass[Tensor]:
        """All shards' rows [T, H], in the workspace unless the part is the whole."""
        if not self.by_tokens:
            return part_RH
        all_PH = self.take(num_tokens, part_RH.shape[1], part_RH.dtype)
        self.block(all_PH).copy_(part_RH)
        yield from self.gather(all_PH)
        return self.without_padding(all_PH, num_tokens)

    def summed(self, addend_PH: Tensor, part_RH: Tensor, num_tokens: int) -> Pass[Tensor]:
        """The rows [U, H] of this shard of the sum of all addends: in ``part_RH``, or where a part is the whole in
        ``addend_PH``.
        """
        if self.by_tokens:
            yield Scatter(addend_PH, part_RH)
            return self.own(part_RH, num_tokens)
        if not self.is_alone:
            yield Sum(addend_PH)
        return addend_PH


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The tokens whose rows of an embedding or a head one shard holds: ranges, whose rows follow each other."""

    ranges: tuple[range, ...]

    @property
    def size(self) -> int:
        """How many there are."""
        return sum(len(tokens) for tokens in self.ranges)

    def rows(self, ids: Tensor) -> Tensor:
        """Every token's row of the shard's matrix; for a token that it does not hold, one of its rows."""
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
    """What each of ``tp`` shards holds of an embedding's or a head's matrix, or of some rows of it."""
    pieces = [
        [range(piece.start, piece.stop) for piece in matrix.pieces(tp, shard) if rows is None or piece.start in rows]
        for shard in range(tp)
    ]
    return tuple(VocabularyPart(tuple(of_shard)) for of_shard in pieces)
