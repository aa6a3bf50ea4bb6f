"""The index of a checkpoint: which bytes of which file hold which tensor.

A checkpoint is data that one user may hand to another, so reading one must not run code. PyTorch's distributed format
keeps its index, ``.metadata``, as a pickle, and every tensor as a small archive with a pickle in it. Unpickling calls
what the file names.

Checkpoints are therefore written with a JSON index, ``index.json``, in place of the pickle. The tensors stay as
PyTorch writes them, one archive after the other in a rank's ``.distcp`` file:

    {"tensors": [{"name": "weights/head.weight", "dtype": "float32", "shape": [257, 16],
                  "file": "__1_0.distcp", "offset": 4096, "numBytes": 17872}, ...]}

A tensor is read without its pickle: an archive is a zip file, its entry ``data/0`` is the tensor's memory, stored as it
is. Type and shape come from the index. The entry must have exactly their size. It goes into the target in small pieces,
so that reading needs no second copy of a tensor.

Checkpoints without ``index.json`` are of version 0.1.0. Their ``.metadata`` is interpreted by `_MetadataReader`: the
names it may mention are listed, and each stands for an inert record instead of the class of that name. Nothing that the
file names is ever imported or called. The interpreter of pickles is the one that is written in Python, because the one
in C allocates tables of any size that a file of a few bytes asks for.

Sizes are limited before anything is read, shapes and places are compared with the files before anything is allocated.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from penstock.core import jsontext
from penstock.core.errors import UserError
from penstock.core.manifest import Manifest
from penstock.core.serialization.files import sync_file
from penstock.core.units import format_bytes
from penstock.trainer.together import FailedError

INDEX, OLD_INDEX = "index.json", ".metadata"

MAX_INDEX_BYTES = 64 * 2**20
"""A quarter of a million tensors, each with its two moments: a model of 7,000 blocks."""

_PIECE_BYTES = 4 * 2**20
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\.metadata")
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor(Manifest):
    """A tensor by its global name, and the archive that holds it: ``num_bytes`` of ``file`` from ``offset`` on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    num_bytes: int

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise _wrong(f"holds {self.name} as {self.dtype!r}, not one of {', '.join(_DTYPES)}")
        if min((*self.shape, self.offset, self.num_bytes)) < 0:
            raise _wrong(f"gives {self.name} a negative size or place")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of its numbers."""
        return _DTYPES[self.dtype]

    @property
    def content_bytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensors(Manifest):
    """Everything that a checkpoint holds."""

    tensors: tuple[StoredTensor, ...]


def _wrong(what: str) -> UserError:
    return UserError(what=what, remedy="name another checkpoint")


def is_plain_name(name: str) -> bool:
    """Whether a file of that name lies in the checkpoint's own folder."""
    return _PLAIN_NAME.fullmatch(name) is not None


def read_limited(path: Path, limit: int) -> bytes:
    """The content of a file of at most ``limit`` bytes; raises `FailedError` for a larger one, OSError as usual."""
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise FailedError(f"is corrupt: {path.name} has more than {format_bytes(limit)}")
    return content


# Writing


class IndexWriter(FileSystemWriter):
    """PyTorch's writer, with a JSON index in place of the pickle."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of all ranks' tensors; the first rank is asked to."""
        tensors = [_described(metadata, result) for written in results for result in written]
        index = StoredTensors(tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)))
        with (Path(self.path) / INDEX).open("w") as file:
            file.write(json.dumps(index.to_manifest(), indent=0))
            sync_file(file)


def _described(metadata: Metadata, result: WriteResult) -> StoredTensor:
    stored = metadata.state_dict_metadata[result.index.fqn]
    assert isinstance(stored, TensorStorageMetadata), "a checkpoint holds tensors only"
    assert len(stored.chunks) == 1, "every tensor is stored whole"
    return StoredTensor(
        name=result.index.fqn,
        dtype=_DTYPE_NAMES[stored.properties.dtype],
        shape=tuple(stored.size),
        file=result.storage_data.relative_path,
        offset=result.storage_data.offset,
        num_bytes=result.storage_data.length,
    )


def writable(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of its own: PyTorch's writer copies what is part of something larger."""
    return torch.from_numpy(tensor.numpy()) if tensor.device.type == "cpu" else tensor


# Reading


def read_index(folder: Path, sizes: Mapping[str, int]) -> dict[str, StoredTensor]:
    """The tensors in ``folder`` by name; ``sizes`` are those of its files, as they are.

    Raises `FailedError` for an index that is missing, is not what `penstock` writes, or does not fit the files.
    """
    try:
        tensors = _read(folder, sizes)
    except OSError as error:
        raise FailedError(f"has no readable index ({error.strerror})") from None
    except UserError as error:
        raise FailedError(f"is corrupt: its index: {error.where} {error.what}") from None
    for tensor in tensors:
        _require_fit(tensor, sizes)
    by_name = {tensor.name: tensor for tensor in tensors}
    if len(by_name) != len(tensors):
        raise FailedError("is corrupt: its index names a tensor twice")
    return by_name


def _read(folder: Path, sizes: Mapping[str, int]) -> tuple[StoredTensor, ...]:
    if INDEX in sizes:
        return _read_new(folder / INDEX)
    if OLD_INDEX in sizes:
        return _read_old(folder / OLD_INDEX)
    raise FailedError(f"is corrupt: it has no {INDEX}")


def _require_fit(tensor: StoredTensor, sizes: Mapping[str, int]) -> None:
    available = sizes.get(tensor.file, 0) if is_plain_name(tensor.file) else 0
    if tensor.offset + tensor.num_bytes > available or tensor.content_bytes > tensor.num_bytes:
        raise FailedError(f"is corrupt: its index places {tensor.name} where no file of it has so many bytes")


def _read_new(path: Path) -> tuple[StoredTensor, ...]:
    try:
        content = jsontext.load(read_limited(path, MAX_INDEX_BYTES))
    except ValueError as error:
        raise FailedError(f"is corrupt: {path.name} is no JSON ({error})") from None
    return StoredTensors.from_manifest(content).tensors


def fill(folder: Path, stored: StoredTensor, target: Tensor) -> None:
    """Read ``stored`` into ``target``, which has its shape and type and is contiguous.

    Raises `FailedError` if its place holds something else.
    """
    flat = target.detach().view(-1).view(torch.uint8)
    try:
        with (folder / stored.file).open("rb") as file, zipfile.ZipFile(_Part(file, stored)) as archive:
            (entry,) = (entry for entry in archive.infolist() if entry.filename.endswith("/data/0"))
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != stored.content_bytes:
                raise FailedError(f"is corrupt: {stored.name} is not of the size that its index says")
            with archive.open(entry) as content:
                for start in range(0, flat.numel(), _PIECE_BYTES):
                    piece = bytearray(content.read(min(_PIECE_BYTES, flat.numel() - start)))
                    flat[start : start + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))
    except (zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        raise FailedError(f"is corrupt: {stored.name} cannot be read ({error})") from None


class _Part(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: BinaryIO, stored: StoredTensor) -> None:
        self._file, self._start, self._size, self._place = file, stored.offset, stored.num_bytes, 0

    def readable(self) -> bool:
        """It can be read."""
        return True

    def seekable(self) -> bool:
        """It can be read from anywhere."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go on from another place."""
        place = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence] + offset
        if place < 0:
            raise ValueError("a place before the start")
        self._place = place
        return place

    def tell(self) -> int:
        """The place from which it goes on."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Read what fits."""
        wanted = max(min(len(buffer), self._size - self._place), 0)
        self._file.seek(self._start + self._place)
        content = self._file.read(wanted)
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
    """Stands for an object of a listed class: what it was made from, and its state."""

    def __new__(cls, *values: Any) -> _Record:
        record = super().__new__(cls)
        record.values, record.state = values, {}
        return record

    values: tuple[Any, ...]
    state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """A field of the object."""
        return self.state[name]


class _MetadataReader(pickle._Unpickler):
    """Interprets a ``.metadata`` without importing or calling anything that it names."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._classes: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A class of records, or the name of a type of numbers; raises `FailedError` for what is not listed."""
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
    """Of the tensor, which is one chunk: its properties' state begins with the type."""
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
