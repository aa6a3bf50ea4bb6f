"""The index of a checkpoint: which bytes of which file hold which tensor, or which part of one.

A checkpoint is data that one user may give to another, so reading one must not run code. PyTorch's distributed format
stores its index, ``.metadata``, as a pickle, and every tensor as a small archive with a pickle in it. Unpickling calls
functions that the file names.

Penstock therefore writes a JSON index, ``index.json``, in place of the pickle. The tensors are as PyTorch writes them,
one archive after the other in the ``.distcp`` file of a rank:

    {"tensors": [{"name": "weights/head.weight", "dtype": "float32", "shape": [257, 16],
                  "file": "__1_0.distcp", "offset": 4096, "numBytes": 17872}, ...]}

Where tensor parallelism divides a tensor, each shard writes the pieces that it owns. Their entries have the name and
the whole shape of the tensor, and the rows (axis 0) or columns (axis 1) that the archive holds:

    {"name": "weights/head.weight", "dtype": "float32", "shape": [257, 16],
     "part": {"axis": 0, "start": 128, "stop": 257}, "file": "__3_0.distcp", ...}

Where replicas divide the optimizer state, each writes a range of the elements of these pieces: some whole rows, and at
the ends parts of a row, whose entries also name the columns:

     "part": {"axis": 0, "start": 130, "stop": 131, "columns": [0, 12]}

Together the parts of a tensor must cover it, each element once. The index does not say which mesh wrote the parts: a
rank of any other mesh reads the parts that overlap with its own tensors (`penstock.trainer.checkpoint_shards`).

A tensor is read without its pickle. An archive is a zip file whose entry ``data/0`` is the uncompressed memory of the
tensor. Type and shape come from the index, and the entry must have exactly the size that they give. It is copied to its
target in small pieces, so reading needs no second copy of a tensor. Rows that are not needed are not read. Columns that
are far apart are read one by one. Columns with a small gap between them are read with the gap, since a file system
reads one long range faster than many short ones (data sieving: Thakur, Gropp and Lusk, "Data Sieving and Collective I/O
in ROMIO", 1999).

Checkpoints without ``index.json`` were written by version 0.1.0. `_MetadataReader` interprets their ``.metadata``. It
knows a list of allowed class names, and puts an inert record in place of an object of each class. It never imports or
calls anything that the file names. It uses the pickle interpreter that is written in Python: the one in C allocates
tables of any size that a file of a few bytes asks for.

Sizes are limited before anything is read. Shapes, offsets and parts are checked against the files and each other before
anything is allocated.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import struct
import zipfile
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from penstock.core import jsontext
from penstock.core.errors import UserError
from penstock.core.manifest import Manifest
from penstock.core.serialization.files import sync_file
from penstock.core.units import format_bytes
from penstock.trainer.checkpoint_shards import Box, Held
from penstock.trainer.collectives import FailedError

INDEX, OLD_INDEX = "index.json", ".metadata"

MAX_INDEX_BYTES = 64 * 2**20
"""About 300,000 parts: a gpt2 of 8,000 blocks with both moments, or a llama of 1,600 blocks divided over 8 shards."""

_PIECE_BYTES = 4 * 2**20
_GAP_BYTES = 256 * 2**10
"""Largest gap between two needed ranges that is read with them."""
_LOCAL_HEADER, _NAME_LENGTHS = 30, struct.Struct("<2H")
"""Bytes of a zip entry's header before its name. The last of them are the lengths of the name and of the extra field.
"""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\.metadata")
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Manifest):
    """Rows (axis 0) or columns (axis 1) [start, stop) of a tensor; with ``columns`` only columns [first, last) of the
    rows.
    """

    axis: int
    start: int
    stop: int
    columns: tuple[int, int] | None = None

    def __str__(self) -> str:
        columns = "" if self.columns is None else ", {} {} to {}".format(_LINES[1], *self.columns)
        return f"{_LINES[self.axis]} {self.start} to {self.stop}{columns}"


_LINES = ("rows", "columns")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor(Manifest):
    """A tensor, or a ``part`` of it, by global name and shape, and its archive: ``num_bytes`` of ``file`` from
    ``offset``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    part: Part | None = None
    file: str
    offset: int
    num_bytes: int

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise _wrong(f"holds {self.name} as {self.dtype!r}, not one of {', '.join(_DTYPES)}")
        if min((*self.shape, self.offset, self.num_bytes)) < 0:
            raise _wrong(f"gives {self.name} a negative size or place")
        if (part := self.part) is None:
            return
        if not 0 <= part.axis < min(len(self.shape), len(_LINES)):
            raise _wrong(f"divides {self.name} along axis {part.axis}, of {len(self.shape)}")
        if not 0 <= part.start < part.stop <= self.shape[part.axis]:
            raise _wrong(f"holds {part} of {self.name}, which has {self.shape[part.axis]}")
        if part.columns is not None:
            first, last = part.columns
            if part.axis != 0 or len(self.shape) != len(_LINES) or not 0 <= first < last <= self.shape[1]:
                raise _wrong(f"holds {part} of {self.name}, whose shape is {list(self.shape)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The data type of its elements."""
        return _DTYPES[self.dtype]

    @property
    def box(self) -> Box:
        """The rows and columns of the tensor that the archive holds."""
        if self.part is None:
            return Box.of(self.shape)
        box = Box.of(self.shape, self.part.axis, self.part.start, self.part.stop)
        return box if self.part.columns is None else Box(box.rows, range(*self.part.columns))

    @property
    def content_bytes(self) -> int:
        """Bytes of the elements in the archive."""
        return self.box.size * self.torch_dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensors(Manifest):
    """Everything that a checkpoint holds."""

    tensors: tuple[StoredTensor, ...]


Parts = tuple[StoredTensor, ...]
"""All archives of one tensor: one with all of it, or its parts in order."""


def _wrong(what: str) -> UserError:
    return UserError(what=what, remedy="name another checkpoint")


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is a file directly in the checkpoint's folder."""
    return _PLAIN_NAME.fullmatch(name) is not None


def read_limited(path: Path, limit: int) -> bytes:
    """Read a file of at most ``limit`` bytes; raises `FailedError` for a larger one, and OSError."""
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise FailedError(f"is corrupt: {path.name} has more than {format_bytes(limit)}")
    return content


# Writing


class IndexWriter(FileSystemWriter):
    """PyTorch's writer with a JSON index in place of the pickle."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of all ranks' tensors. PyTorch calls this on the first rank."""
        tensors = [_described(metadata, result) for written in results for result in written]
        index = StoredTensors(tensors=tuple(sorted(tensors, key=lambda tensor: (tensor.name, _start(tensor)))))
        with (Path(self.path) / INDEX).open("w") as file:
            file.write(json.dumps(index.to_manifest(), indent=0))
            sync_file(file)


def _described(metadata: Metadata, result: WriteResult) -> StoredTensor:
    stored = metadata.state_dict_metadata[result.index.fqn]
    assert isinstance(stored, TensorStorageMetadata), "a checkpoint holds tensors only"
    (chunk,) = (chunk for chunk in stored.chunks if chunk.offsets == result.index.offset)
    return StoredTensor(
        name=result.index.fqn,
        dtype=_DTYPE_NAMES[stored.properties.dtype],
        shape=tuple(stored.size),
        part=part_of(stored.size, chunk.offsets, chunk.sizes),
        file=result.storage_data.relative_path,
        offset=result.storage_data.offset,
        num_bytes=result.storage_data.length,
    )


def part_of(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> Part | None:
    """Describe a part of a tensor for the index; None for a whole tensor."""
    stops = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    divided = [axis for axis, size in enumerate(shape) if sizes[axis] != size]
    if not divided:
        return None
    axis, *others = divided
    return Part(axis=axis, start=offsets[axis], stop=stops[axis], columns=(offsets[1], stops[1]) if others else None)


class PiecePlanner(DefaultSavePlanner):
    """PyTorch's planner for ranks that hold parts of tensors: it writes every part that its rank owns. If ranks of
    several replicas own the same part, one of them writes it.
    """

    def __init__(self, held: Sequence[tuple[str, Held]]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._held = held
        self._memory: dict[tuple[str, torch.Size], Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """Plan the parts that this rank can write."""
        items = []
        for name, held in self._held:
            for box, memory_rc in held.owned():
                offsets, sizes = map(torch.Size, box.chunk(held.shape))
                memory = memory_rc.reshape(sizes)
                item = _item(name, torch.Size(held.shape), offsets, memory)
                assert item.index.offset is not None, "an index of a tensor has one"
                self._memory[name, item.index.offset] = memory
                items.append(item)
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the memory of a planned part."""
        assert index.offset is not None, "an index of a tensor has one"
        return _writable(self._memory[index.fqn, index.offset])


def _item(name: str, size: torch.Size, offsets: torch.Size, memory: Tensor) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.TENSOR if memory.shape == size else WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=memory.size()),
            properties=TensorProperties.create_from_tensor(memory),
            size=size,
        ),
    )


def _writable(tensor: Tensor) -> Tensor:
    """The same memory as a tensor with a storage of its own: PyTorch's writer copies views of larger storages.
    NumPy has no bf16, so the memory passes through it as bytes.
    """
    whole = tensor.contiguous()
    return torch.from_numpy(whole.view(torch.uint8).numpy()).view(whole.dtype) if whole.device.type == "cpu" else whole


# Reading


def read_index(folder: Path, sizes: Mapping[str, int]) -> dict[str, Parts]:
    """Return the tensors in ``folder`` by name; ``sizes`` are the actual sizes of its files in bytes.

    Raises `FailedError` for an index that is missing, malformed, or inconsistent with the files.
    """
    try:
        tensors = _read(folder, sizes)
    except OSError as error:
        raise FailedError(f"has no readable index ({error.strerror})") from None
    except UserError as error:
        raise FailedError(f"is corrupt: its index: {error.where} {error.what}") from None
    for tensor in tensors:
        _require_fit(tensor, sizes)
    if sum(tensor.content_bytes for tensor in tensors) > sum(sizes.values()):
        raise FailedError("is corrupt: its index names more than its files hold")
    by_name: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        by_name.setdefault(tensor.name, []).append(tensor)
    return {name: _in_order(parts) for name, parts in by_name.items()}


def _in_order(parts: Sequence[StoredTensor]) -> Parts:
    """Return the parts of a tensor in order; raises `FailedError` unless they cover it, each element once."""
    first = parts[0]
    if any((part.dtype, part.shape) != (first.dtype, first.shape) for part in parts):
        raise FailedError(f"is corrupt: its index gives {first.name} two types or shapes")
    ordered = sorted(parts, key=_start)
    divided = [stored.part for stored in ordered if stored.part is not None]
    if not divided and len(parts) == 1:
        return (first,)
    if len(divided) < len(parts):
        raise FailedError(f"is corrupt: its index names a tensor twice, {first.name}")
    if any(part.columns for part in divided):
        _require_tiling(first, [part.box for part in ordered])
        return tuple(ordered)
    if len({part.axis for part in divided}) > 1:
        raise FailedError(f"is corrupt: its index names a tensor twice, {first.name}")
    axis = divided[0].axis
    end, covered = first.shape[axis], 0
    for part in (*divided, Part(axis=axis, start=end, stop=end)):
        if part.start > covered:
            gap = Part(axis=axis, start=covered, stop=part.start)
            raise FailedError(f"is corrupt: its index lacks {gap} of {first.name}")
        if part.start < covered:
            both = Part(axis=axis, start=part.start, stop=min(part.stop, covered))
            raise FailedError(f"is corrupt: its index has {both} of {first.name} twice")
        covered = part.stop
    return tuple(ordered)


def _require_tiling(tensor: StoredTensor, boxes: Sequence[Box]) -> None:
    """Raise `FailedError` unless the boxes cover the whole tensor, each element once.

    The sweep goes over the rows and keeps the column ranges of the boxes in the current row, sorted: O(n log n) for n
    boxes, of which few share a row.
    """
    events = [(box.rows.start, 1, box.columns) for box in boxes] + [(box.rows.stop, 0, box.columns) for box in boxes]
    starts: list[int] = []
    stops: list[int] = []
    for _, is_begin, columns in sorted(events, key=lambda event: event[:2]):
        at = bisect_left(starts, columns.start)
        if not is_begin:
            del starts[at], stops[at]
            continue
        if (at and stops[at - 1] > columns.start) or (at < len(starts) and starts[at] < columns.stop):
            raise FailedError(f"is corrupt: its index has parts of {tensor.name} twice")
        starts.insert(at, columns.start)
        stops.insert(at, columns.stop)
    missing = Box.of(tensor.shape).size - sum(box.size for box in boxes)
    if missing:
        raise FailedError(f"is corrupt: its index lacks {missing} elements of {tensor.name}")


def _start(tensor: StoredTensor) -> tuple[int, int]:
    box = tensor.box
    return (box.rows.start, box.columns.start)


def _read(folder: Path, sizes: Mapping[str, int]) -> tuple[StoredTensor, ...]:
    if INDEX in sizes:
        return _read_new(folder / INDEX)
    if OLD_INDEX in sizes:
        return _read_old(folder / OLD_INDEX)
    raise FailedError(f"is corrupt: it has no {INDEX}")


def _require_fit(tensor: StoredTensor, sizes: Mapping[str, int]) -> None:
    available_bytes = sizes.get(tensor.file, 0) if is_plain_name(tensor.file) else 0
    if tensor.offset + tensor.num_bytes > available_bytes or tensor.content_bytes > tensor.num_bytes:
        raise FailedError(f"is corrupt: its index places {tensor.name} where no file of it has so many bytes")


def _read_new(path: Path) -> tuple[StoredTensor, ...]:
    try:
        content = jsontext.load(read_limited(path, MAX_INDEX_BYTES))
    except ValueError as error:
        raise FailedError(f"is corrupt: {path.name} is no JSON ({error})") from None
    return StoredTensors.from_manifest(content).tensors


def fill(folder: Path, stored: StoredTensor, held: Held) -> None:
    """Copy the elements that ``stored`` and ``held`` share from the file into the tensor of ``held``. Both are parts of
    a tensor of the same shape and type.

    Raises `FailedError` if the file does not hold the stored part at its offset, and OSError.
    """
    common = list(held.common(stored.box))
    if not common:
        return
    try:
        with (folder / stored.file).open("rb") as file:
            section = _Section(file, stored.offset, stored.num_bytes)
            with zipfile.ZipFile(section) as archive:
                (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != stored.content_bytes:
                    raise FailedError(f"is corrupt: {stored.name} is not of the size that its index says")
                with archive.open(entry) as content:
                    if [box for box, _ in common] == [stored.box]:
                        _copy(content, stored, *common[0])  # reading to the end checks the archive's checksum
                        return
                start = section.start + _content_start(section, entry)
            for box, target_rc in common:
                _copy(_Section(file, start, stored.content_bytes), stored, box, target_rc)
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        raise FailedError(f"is corrupt: {stored.name} cannot be read ({error})") from None


def _content_start(section: _Section, entry: zipfile.ZipInfo) -> int:
    """Offset of an entry's content: after its local header, which zipfile has compared with the central directory."""
    section.seek(entry.header_offset)
    name, extra = _NAME_LENGTHS.unpack(section.read(_LOCAL_HEADER)[-_NAME_LENGTHS.size :])
    start: int = entry.header_offset + _LOCAL_HEADER + name + extra
    return start


def _copy(content: IO[bytes] | _Section, stored: StoredTensor, box: Box, target_rc: Tensor) -> None:
    """Copy a box of the whole tensor from ``content``, which is the memory of the stored part, row by row."""
    within, width, dtype = box.within(stored.box), len(stored.box.columns), stored.torch_dtype
    for piece in _pieces(within, width, dtype.itemsize):
        num_rows, num_columns = len(piece.rows), len(piece.columns)
        place = (piece.rows.start * width + piece.columns.start) * dtype.itemsize
        if content.tell() != place:
            content.seek(place)
        memory = bytearray(content.read(((num_rows - 1) * width + num_columns) * dtype.itemsize))
        values_rc = torch.frombuffer(memory, dtype=dtype).as_strided((num_rows, num_columns), (width, 1))
        piece.within(within).cut(target_rc).copy_(values_rc)


def _pieces(box: Box, width: int, itemsize: int) -> Iterator[Box]:
    """The boxes that are read at once from rows of ``width`` elements, in file order: about `_PIECE_BYTES` each, and
    several rows only if the gap between their needed columns is at most `_GAP_BYTES`.
    """
    most = max(_PIECE_BYTES // itemsize, 1)
    is_sieved = (width - len(box.columns)) * itemsize <= _GAP_BYTES
    num_rows = max(most // width, 1) if is_sieved else 1
    num_columns = min(len(box.columns), most)
    for rows in _stretches(box.rows, num_rows):
        for columns in _stretches(box.columns, num_columns):
            yield Box(rows, columns)


def _stretches(lines: range, most: int) -> Iterator[range]:
    """Split a range into parts of at most ``most``."""
    for start in range(lines.start, lines.stop, most):
        yield range(start, min(start + most, lines.stop))


class _Section(io.RawIOBase):
    """``size`` bytes of a file, from ``start`` on, as a file of their own."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        self._file, self.start, self._size, self._place = file, start, size, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to another position."""
        place = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence] + offset
        if place < 0:
            raise ValueError("seek to a position before the start")
        self._place = place
        return place

    def tell(self) -> int:
        """The current position."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read as much as fits into ``buffer``."""
        num_bytes = max(min(len(buffer), self._size - self._place), 0)
        self._file.seek(self.start + self._place)
        content = self._file.read(num_bytes)
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)


# Reading what version 0.1.0 wrote

_CHECKPOINT = "torch.distributed.checkpoint"
_ALLOWED = {
    (f"{_CHECKPOINT}.metadata", "Metadata"),
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"),
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "TensorProperties"),
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "StorageMeta"),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    *(("torch", name) for name in _DTYPES),
}


class _Record:
    """An inert record in place of an object: its constructor arguments and its state."""

    def __new__(cls, *values: Any) -> _Record:
        record = super().__new__(cls)
        record.values, record.state = values, {}
        return record

    values: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """A field of the object that this record replaces."""
        return self.state[name]


class _MetadataReader(pickle._Unpickler):
    """Interpreter of a ``.metadata`` that imports and calls nothing that the file names."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._classes: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a record class, or the name of a data type; raises `FailedError` for a name that is not allowed."""
        if (module, name) not in _ALLOWED:
            raise FailedError(f"is refused: its {OLD_INDEX} names {module}.{name}, which no checkpoint needs")
        if name in _DTYPES:
            return name
        return self._classes.setdefault((module, name), type(name, (_Record,), {}))


def _read_old(path: Path) -> tuple[StoredTensor, ...]:
    content = read_limited(path, MAX_INDEX_BYTES)
    try:
        metadata = _MetadataReader(content).load()
        stored = metadata.field("state_dict_metadata")
        places = {key.field("fqn"): place for key, place in metadata.field("storage_data").items()}
        return tuple(_converted(name, stored[name], places[name]) for name in stored)
    except (FailedError, UserError):
        raise
    except Exception as error:  # a hostile file may fail anywhere
        raise FailedError(f"is corrupt: {path.name} is not what PyTorch writes ({type(error).__name__})") from None


def _converted(name: Any, stored: _Record, place: _Record) -> StoredTensor:
    """Convert a tensor of one chunk. The state of its properties begins with the data type."""
    (chunk,) = stored.field("chunks")
    shape = _size(stored.field("size"))
    if _size(chunk.field("sizes")) != shape or any(_size(chunk.field("offsets"))):
        raise FailedError(f"is corrupt: {name} is not stored whole")
    return StoredTensor.from_manifest(
        {
            "name": name,
            "dtype": stored.field("properties").state[0],
            "shape": shape,
            "file": place.field("relative_path"),
            "offset": place.field("offset"),
            "numBytes": place.field("length"),
        }
    )


def _size(size: _Record) -> list[int]:
    (lengths,) = size.values
    return list(lengths)
