"""Which part of a checkpoint's tensors a rank holds, and where it meets the parts that files hold.

A checkpoint has every tensor under its global name and with its global shape, whatever tensor parallelism divided it.
A shard's own tensor is made of pieces of that (`penstock.core.layout.Parameter.pieces`): rows or columns that lie side
by side there and apart in the whole. Of a joint projection ``qkv`` of 24 rows, 12 of q, 6 of k and 6 of v, shard 1 of 2
holds rows 6-11, 15-17 and 21-23 as one tensor of 12 rows.

Where replicas divide the optimizer's state, each holds a stretch of the elements of the shard's own tensor. That is
part of a row, some rows, and part of another row, each of them in the pieces above.

A tensor counts as a matrix: its first dimension, and all others together; a vector has one column. Rows and columns of
a matrix are a `Box`, and so is everything here: a part of a file, a piece of a shard, and what they have in common.

Shape letters: R rows and C columns of a whole matrix, r and c those of a rank's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

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

    def moved(self, rows: int, columns: int) -> Box:
        """The same box so many rows and columns further on."""
        return Box(_shifted(self.rows, rows), _shifted(self.columns, columns))

    def cut(self, matrix_RC: Tensor) -> Tensor:
        """The box of a matrix, as a view."""
        return matrix_RC[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]

    def chunk(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where it begins in a tensor of this shape, and its sizes, along each axis."""
        inner = math.prod(shape[2:])
        offsets = (self.rows.start, self.columns.start // inner, *(0 for _ in shape[2:]))
        sizes = (len(self.rows), len(self.columns) // inner, *shape[2:])
        return offsets[: len(shape)], sizes[: len(shape)]


def _common(first: range, second: range) -> range:
    start = max(first.start, second.start)
    return range(start, max(start, min(first.stop, second.stop)))


def _shifted(lines: range, by: int) -> range:
    return range(lines.start + by, lines.stop + by)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a rank holds of one tensor of ``shape``: its own ``tensor`` has the ``pieces`` along ``axis``, which is 0
    or 1, one after the other, and is contiguous. A stage that ``is_copy`` of another one's writes nothing. With a
    ``start`` the ``tensor`` is flat, and has the elements of these pieces from there on.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    axis: int
    pieces: tuple[Piece, ...]
    is_copy: bool = False
    start: int | None = None

    @classmethod
    def whole(cls, tensor: Tensor) -> Held:
        """A tensor of which the rank holds all."""
        shape = tuple(tensor.shape)
        return cls(tensor, shape, 0, (Piece(0, len(Box.of(shape).rows), is_owner=True),))

    def common(self, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """What the rank holds of a box of the whole tensor: each common box, and the view of the rank's own memory that
        it belongs into, a matrix.
        """
        for _, held, memory_rc in self._parts():
            common = box.common(held)
            if common.size:
                yield common, common.within(held).cut(memory_rc)

    def owned(self) -> Iterator[tuple[Box, Tensor]]:
        """What this rank, or one like it in another replica, writes: boxes, and their memory, a matrix each."""
        for piece, held, memory_rc in self._parts():
            if piece.is_owner and not self.is_copy:
                yield held, memory_rc

    def _parts(self) -> Iterator[tuple[Piece, Box, Tensor]]:
        """Each box of the whole tensor that the rank holds, of which piece it is, and its memory, a matrix."""
        size = sum(piece.size for piece in self.pieces)
        own_shape = tuple(size if axis == self.axis else length for axis, length in enumerate(self.shape))
        stretches = list(self._stretches(Box.of(own_shape)))
        for piece, place in self._placed():
            here = Box.of(own_shape, self.axis, place, place + piece.size)
            there = Box.of(self.shape, self.axis, piece.start, piece.stop)
            for stretch, memory_rc in stretches:
                common = stretch.common(here)
                if common.size:
                    rows, columns = there.rows.start - here.rows.start, there.columns.start - here.columns.start
                    yield piece, common.moved(rows, columns), common.within(stretch).cut(memory_rc)

    def _stretches(self, own: Box) -> Iterator[tuple[Box, Tensor]]:
        """The rank's memory as boxes of its ``own`` matrix: of a first row in part, of whole rows, of a last one."""
        flat, width = self.tensor.detach().view(-1), len(own.columns)
        start = reached = self.start or 0
        stop = start + len(flat)
        while reached < stop:
            row, column = divmod(reached, width)
            num_rows = 1 if column else max((stop - reached) // width, 1)
            end = min((row + num_rows) * width, stop)
            num_columns = (end - reached) // num_rows
            box = Box(range(row, row + num_rows), range(column, column + num_columns))
            yield box, flat[reached - start : end - start].view(num_rows, num_columns)
            reached = end

    def _placed(self) -> Iterator[tuple[Piece, int]]:
        """Each piece, and where it begins along the axis of the rank's own tensor."""
        place = 0
        for piece in self.pieces:
            yield piece, place
            place += piece.size


@dataclass(frozen=True, slots=True)
class HeldShard:
    """What ``shard`` of ``tp`` holds of the tensors that ``declared`` has, by names of the rank's own: some of its
    stages may hold other rows of the same tensor. Of those in ``starts`` it holds a stretch of elements from there on,
    as one of several replicas.
    """

    declared: Mapping[str, Parameter]
    tp: int
    shard: int
    starts: Mapping[str, int] = field(default_factory=dict)

    def held(self, name: str, tensor: Tensor) -> Held:
        """The shard's ``tensor`` of one of these names."""
        parameter, start = self.declared[name], self.starts.get(name)
        own_shape, shape = parameter.shard_shape(self.tp, self.shard), tuple(tensor.shape)
        if start is None:
            assert shape == own_shape, f"{name} has shape {list(shape)}, not {list(own_shape)}"
        else:
            assert start + len(tensor) <= math.prod(own_shape), f"{name} has no {len(tensor)} elements from {start} on"
        pieces = _joined(parameter.pieces(self.tp, self.shard))
        return Held(tensor, parameter.shape, parameter.axis, pieces, parameter.is_copy, start)

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
    starts = {
        _own_name(number, name): start
        for number, parameters in stages.items()
        for name, start in parameters.starts.items()
    }
    return HeldShard(declared, tp, shard, starts)


def rank_tensors(
    stages: Mapping[int, StageParameters], moments: Mapping[int, Mapping[str, Tensor]]
) -> dict[str, dict[str, Tensor]]:
    """The weights of a rank's stages and the ``moments`` of their optimizers that it steps, by kind, then by stage and
    global name.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    for number, parameters in stages.items():
        flats = {"weights": parameters.master_flat, **moments[number]}
        for kind, flat in flats.items():
            named = parameters.own_parts(flat).items()
            tensors.setdefault(kind, {}).update({_own_name(number, name): tensor for name, tensor in named})
    return tensors


def _own_name(stage: int, name: str) -> str:
    return f"{stage}:{name}"
