"""Which parts of a checkpoint's tensors a rank holds, and how they overlap with the parts in files.

A checkpoint stores every tensor with its global name and global shape, however tensor parallelism divided it. A shard's
own tensor consists of pieces of the global one (`penstock.core.layout.Parameter.pieces`): rows or columns that are
adjacent in the shard's tensor and apart in the global one. Example: a joint projection ``qkv`` has 24 rows, 12 of q, 6
of k and 6 of v. Shard 1 of 2 holds rows 6-11, 15-17 and 21-23 as one tensor of 12 rows.

Where replicas divide the optimizer state, each holds a range of the elements of the shard's own tensor: the end of a
row, whole rows, and the beginning of another row, all of them within the pieces above.

Every tensor is treated as a matrix: the first dimension, and all others flattened. A vector has one column. A `Box` is
a range of rows and columns of a matrix. It describes a part in a file, a piece of a shard, and their overlap.

Shape letters: R rows and C columns of a whole matrix, r and c those of a rank's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
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
        """The box of [start, stop) along ``axis``, 0 or 1, of a tensor of this shape; by default the whole tensor."""
        num_rows, width = (shape[0] if shape else 1), math.prod(shape[1:])
        if stop is None:
            return cls(range(num_rows), range(width))
        if axis == 0:
            return cls(range(start, stop), range(width))
        inner = math.prod(shape[2:])
        return cls(range(num_rows), range(start * inner, stop * inner))

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.rows) * len(self.columns)

    def common(self, other: Box) -> Box:
        """The overlap of both boxes; its size is 0 if there is none."""
        return Box(_common(self.rows, other.rows), _common(self.columns, other.columns))

    def within(self, outer: Box) -> Box:
        """The same box with rows and columns counted from those of ``outer``, which contains it."""
        return Box(_shifted(self.rows, -outer.rows.start), _shifted(self.columns, -outer.columns.start))

    def moved(self, rows: int, columns: int) -> Box:
        """The box shifted by ``rows`` and ``columns``."""
        return Box(_shifted(self.rows, rows), _shifted(self.columns, columns))

    def cut(self, matrix_RC: Tensor) -> Tensor:
        """The view of a matrix that this box describes."""
        return matrix_RC[self.rows.start : self.rows.stop, self.columns.start : self.columns.stop]

    def chunk(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes along each axis of a tensor of this shape."""
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
    """The part of one tensor of ``shape`` that a rank holds.

    ``tensor`` is contiguous and consists of the ``pieces`` along ``axis``, 0 or 1, one after the other. ``is_copy``:
    another stage holds the same tensor and writes it. With a ``start``, ``tensor`` is flat and holds the elements of
    the pieces from that index on.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    axis: int
    pieces: tuple[Piece, ...]
    is_copy: bool = False
    start: int | None = None

    @classmethod
    def whole(cls, tensor: Tensor) -> Held:
        """A tensor that the rank holds completely."""
        shape = tuple(tensor.shape)
        return cls(tensor, shape, 0, (Piece(0, len(Box.of(shape).rows), is_owner=True),))

    def common(self, box: Box) -> Iterator[tuple[Box, Tensor]]:
        """Boxes in which a box of the whole tensor overlaps the rank's part, each with a view of the rank's memory, a
        matrix.
        """
        for _, held, memory_rc in self._parts():
            common = box.common(held)
            if common.size:
                yield common, common.within(held).cut(memory_rc)

    def owned(self) -> Iterator[tuple[Box, Tensor]]:
        """The boxes that this rank, or its peer in another replica, writes, each with its memory, a matrix."""
        for piece, held, memory_rc in self._parts():
            if piece.is_owner and not self.is_copy:
                yield held, memory_rc

    def _parts(self) -> Iterator[tuple[Piece, Box, Tensor]]:
        """Every box of the whole tensor that the rank holds, with its piece and its memory, a matrix."""
        size = sum(piece.size for piece in self.pieces)
        own_shape = tuple(size if axis == self.axis else length for axis, length in enumerate(self.shape))
        stretches = list(self._stretches(Box.of(own_shape)))
        for piece, place in self._placed():
            own_box = Box.of(own_shape, self.axis, place, place + piece.size)
            whole_box = Box.of(self.shape, self.axis, piece.start, piece.stop)
            for stretch, memory_rc in stretches:
                common = stretch.common(own_box)
                if common.size:
                    rows, columns = (
                        whole_box.rows.start - own_box.rows.start,
                        whole_box.columns.start - own_box.columns.start,
                    )
                    yield piece, common.moved(rows, columns), common.within(stretch).cut(memory_rc)

    def _stretches(self, own: Box) -> Iterator[tuple[Box, Tensor]]:
        """The rank's memory as boxes of its ``own`` matrix: part of a first row, whole rows, part of a last row."""
        flat, width = self.tensor.detach().view(-1), len(own.columns)
        start = position = self.start or 0
        stop = start + len(flat)
        while position < stop:
            row, column = divmod(position, width)
            num_rows = 1 if column else max((stop - position) // width, 1)
            end = min((row + num_rows) * width, stop)
            num_columns = (end - position) // num_rows
            box = Box(range(row, row + num_rows), range(column, column + num_columns))
            yield box, flat[position - start : end - start].view(num_rows, num_columns)
            position = end

    def _placed(self) -> Iterator[tuple[Piece, int]]:
        """Every piece with its first index along the axis of the rank's own tensor."""
        place = 0
        for piece in self.pieces:
            yield piece, place
            place += piece.size


@dataclass(frozen=True, slots=True)
class HeldShard:
    """The parts of the ``declared`` tensors that ``shard`` of ``tp`` holds, keyed by the rank's own names: two of its
    stages may hold different rows of the same tensor. For tensors in ``starts`` it holds only a range of elements from
    that index on, since replicas divide them.
    """

    declared: Mapping[str, Parameter]
    tp: int
    shard: int
    starts: Mapping[str, int] = field(default_factory=dict)

    def held(self, name: str, tensor: Tensor) -> Held:
        """Describe the shard's ``tensor`` with this own name."""
        parameter, start = self.declared[name], self.starts.get(name)
        own_shape, shape = parameter.shard_shape(self.tp, self.shard), tuple(tensor.shape)
        if start is None:
            assert shape == own_shape, f"{name} has shape {list(shape)}, not {list(own_shape)}"
        else:
            assert start + len(tensor) <= math.prod(own_shape), f"{name} has no {len(tensor)} elements from {start} on"
        pieces = _joined(parameter.pieces(self.tp, self.shard))
        return Held(tensor, parameter.shape, parameter.axis, pieces, parameter.is_copy, start)

    def global_name(self, name: str) -> str:
        """The name in a checkpoint."""
        return self.declared[name].name


def _joined(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Join pieces that are adjacent in the whole tensor; drop empty ones."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and (last.stop, last.is_owner) == (piece.start, piece.is_owner):
            joined[-1] = Piece(last.start, piece.stop, piece.is_owner)
        elif piece.size:
            joined.append(piece)
    return tuple(joined)


def held_shard(stages: Mapping[int, StageParameters], tp: int, shard: int) -> HeldShard:
    """The parts of its stages' tensors that a rank holds, by the names of `rank_tensors`."""
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
    stages: Mapping[int, StageParameters], moments: Mapping[int, Mapping[str, Sequence[Tensor]]]
) -> dict[str, dict[str, Tensor]]:
    """The weights of a rank's stages and the optimizer ``moments`` that it updates, by kind, then by stage and global
    name.
    """
    tensors: dict[str, dict[str, Tensor]] = {}
    for number, parameters in stages.items():
        of_kinds = {"weights": parameters.masters, **moments[number]}
        for kind, flats in of_kinds.items():
            named = parameters.own_parts(flats).items()
            tensors.setdefault(kind, {}).update({_own_name(number, name): tensor for name, tensor in named})
    return tensors


def _own_name(stage: int, name: str) -> str:
    return f"{stage}:{name}"
