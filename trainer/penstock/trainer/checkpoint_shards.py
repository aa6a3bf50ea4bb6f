"""Which part of a checkpoint's tensors a rank holds, and where it meets the parts that files hold.

A checkpoint has every tensor under its global name and with its global shape, whatever tensor parallelism divided it.
A shard's own tensor is made of pieces of that (`penstock.core.layout.Parameter.pieces`): rows or columns that lie side
by side there and apart in the whole. Of a joint projection ``qkv`` of 24 rows, 12 of q, 6 of k and 6 of v, shard 1 of 2
holds rows 6-11, 15-17 and 21-23 as one tensor of 12 rows.

A tensor counts as a matrix: its first dimension, and all others together; a vector has one column. Rows and columns of
a matrix are a `Box`, and so is everything here: a part of a file, a piece of a shard, and what they have in common.

Shape letters: R rows and C columns of a whole matrix, r and c those of a rank's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from penstock.core.layout import Parameter
from penstock.core.sharding import Piece
from penstock.trainer.parameters import StageParameters


@dataclass(frozen=True, slots=True)
class Box:
    """Rows and columns of a matrix."""

    rows: range
    columns: range

    @classmethod
    def of(cls, shape: tuple[int, ...], axis: int = 0, start: int = 0, stop: int | None = None) -> Box:
        """[start, stop) along ``axis``, which is 0 or 1, of a tensor of this shape; all of it by default."""
        num_rows, width = (shape[0] if shape else 1), math.prod(shape[1:])
        if stop is None:
            return cls(range(num_rows), range(width))
        if axis == 0:
            return cls(range(start, stop), range(width))
        inner = math.prod(shape[2:])
        return cls(range(num_rows), range(start * inner, stop * inner))

    @property
    def size(self) -> int:
        """How many elements it has."""
        return len(self.rows) * len(self.columns)

    def common(self, other: Box) -> Box:
        """What both have; of size 0 if that is nothing."""
        return Box(_common(self.rows, other.rows), _common(self.columns, other.columns))

    def within(self, outer: Box) -> Box:
        """The same box, counted from the first row and column of ``outer``, which contains it."""
        return Box(_shifted(self.rows, -outer.rows.start), _shifted(self.columns, -outer.columns.start))

    def cut(self, matrix_RC: Tensor) -> Tensor:
        """The box of a matrix, as a view."""
        return matrix_RC[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]


def _common(first: range, second: range) -> range:
    start = max(first.start, second.start)
    return range(start, max(start, min(first.stop, second.stop)))


def _shifted(lines: range, by: int) -> range:
    return range(lines.start + by, lines.stop + by)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a rank holds of one tensor of ``shape``: its own ``tensor`` has the ``pieces`` along ``axis``, which is 0
    or 1, one after the other, and is contiguous. A stage that ``is_copy`` of another one's writes nothing.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    axis: int
    pieces: tuple[Piece, ...]
    is_copy: bool = False

    @classmethod
    def whole(cls, tensor: Tensor) -> Held:
        """A tensor of which the rank holds all."""
        shape = tuple(tensor.shape)
        return cls(tensor, shape, 0, (Piece(0, len(Box.of(shape).rows), is_owner=True),))

    def common(self, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """What the rank holds of a box of the whole tensor: each common box, and the view of the rank's own matrix that
        it belongs into.
        """
        own_shape = tuple(self.tensor.shape)
        own = Box.of(own_shape)
        matrix_rc = self.tensor.detach().view(len(own.rows), len(own.columns))
        for piece, place in self._placed():
            held = Box.of(self.shape, self.axis, piece.start, piece.stop)
            common = box.common(held)
            if common.size:
                own_piece = Box.of(own_shape, self.axis, place, place + piece.size).cut(matrix_rc)
                yield common, common.within(held).cut(own_piece)

    def owned(self) -> Iterator[tuple[Piece, Tensor]]:
        """The pieces that this rank, or one like it in another replica, writes, and their memory."""
        for piece, place in self._placed():
            if piece.is_owner and not self.is_copy:
                yield piece, self.tensor.detach().narrow(self.axis, place, piece.size)

    def _placed(self) -> Iterator[tuple[Piece, int]]:
        """Each piece, and where it begins along the axis of the rank's own tensor."""
        place = 0
        for piece in self.pieces:
            yield piece, place
            place += piece.size


@dataclass(frozen=True, slots=True)
class HeldShard:
    """What ``shard`` of ``tp`` holds of the tensors that ``declared`` has, by names of the rank's own: some of its
    stages may hold other rows of the same tensor.
    """

    declared: Mapping[str, Parameter]
    tp: int
    shard: int

    def held(self, name: str, tensor: Tensor) -> Held:
        """The shard's ``tensor`` of one of these names."""
        parameter = self.declared[name]
        own_shape = parameter.shard_shape(self.tp, self.shard)
        assert tuple(tensor.shape) == own_shape, f"{name} has shape {list(tensor.shape)}, not {list(own_shape)}"
        pieces = _joined(parameter.pieces(self.tp, self.shard))
        return Held(tensor, parameter.shape, parameter.axis, pieces, parameter.is_copy)

    def global_name(self, name: str) -> str:
        """What it is called in a checkpoint."""
        return self.declared[name].name


def _joined(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Pieces that follow each other in the whole tensor as one; empty ones left out."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and (last.stop, last.is_owner) == (piece.start, piece.is_owner):
            joined[-1] = Piece(last.start, piece.stop, piece.is_owner)
        elif piece.size:
            joined.append(piece)
    return tuple(joined)


def held_shard(stages: Mapping[int, StageParameters], tp: int, shard: int) -> HeldShard:
    """What a rank holds of the tensors of its stages, by the names of `rank_tensors`."""
    declared = {
        _own_name(number, name): parameter
        for number, parameters in stages.items()
        for name, parameter in parameters.declared.items()
    }
    return HeldShard(declared, tp, shard)


def rank_tensors(
    stages: Mapping[int, StageParameters], moments: Mapping[int, Mapping[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """The weights of a rank's stages and the ``moments`` of their optimizers, by kind, then by stage and global
    name.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    for number, parameters in stages.items():
        flats = {"weights": parameters.master_flat, **moments[number]}
        for kind, flat in flats.items():
            named = parameters.by_name(flat).items()
            tensors.setdefault(kind, {}).update({_own_name(number, name): tensor for name, tensor in named})
    return tensors


def _own_name(stage: int, name: str) -> str:
    return f"{stage}:{name}"
