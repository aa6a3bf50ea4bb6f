"""Token files: unsigned little-endian integers, memory-mapped, with a small JSON header in a second file.

``train.bin`` has its header in ``train.bin.json``: {"dtype": "uint16" | "uint32", "vocab", "count", "sha256"}.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.core import jsontext
from penstock.core.errors import UserError

Ids: TypeAlias = npt.NDArray[np.integer[Any]]

_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_CHUNK_TOKENS = 1 << 22
_REMEDY = "write the file again, or give the ids as a one-dimensional integer .npy file"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHeader:
    """Header of a token file: type and number of its integers. All ids are below ``vocab``."""

    dtype: str
    vocab: int
    count: int
    sha256: str

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, not one of {', '.join(_DTYPES)}")
        for name in ("vocab", "count"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"{name} is {value!r}, not a count")
        if not isinstance(self.sha256, str):
            raise ValueError("sha256 is not a string")

    @property
    def num_bytes(self) -> int:
        """Size of the token file itself."""
        return self.count * _DTYPES[self.dtype].itemsize

    def limit_count(self, limit_bytes: int | None) -> int:
        """Number of tokens in the first ``limit_bytes`` of the file, or in the whole file without a limit."""
        if limit_bytes is None:
            return self.count
        return min(self.count, limit_bytes // _DTYPES[self.dtype].itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A range of a token file. ``ids`` [count] is a view of the mapped file. Errors name ``path``."""

    ids: Ids
    vocab: int
    path: Path

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> Tokens:
        """Tokens [start, stop) without copying."""
        return Tokens(ids=self.ids[start:stop], vocab=self.vocab, path=self.path)

    def read(self, where: slice | npt.NDArray[np.int64], *, vocab: int) -> npt.NDArray[np.int64]:
        """Copy the ids at ``where``, in its shape.

        Raises:
            UserError: an id is not below ``vocab``.
        """
        ids = self.ids[where].astype(np.int64)
        _check_ids(ids, vocab=vocab, path=self.path)
        return ids


class TokenWriter:
    """Writes a token file. `finish` writes the header, without which the file does not count as a token file."""

    def __init__(self, path: Path, *, vocab: int) -> None:
        self._path = path
        self._vocab = vocab
        self._dtype = "uint16" if vocab <= 2**16 else "uint32"
        self._count = 0
        self._sha256 = hashlib.sha256()
        header_path(path).unlink(missing_ok=True)
        self._file = path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def append(self, ids: Ids) -> None:
        """Append ids to the file. Raises `UserError` for an id outside the vocabulary."""
        _check_ids(ids, vocab=self._vocab, path=self._path)
        data = ids.astype(_DTYPES[self._dtype]).tobytes()
        self._sha256.update(data)
        self._file.write(data)
        self._count += len(ids)

    def finish(self) -> TokenHeader:
        """Close the file and write its header."""
        self._file.close()
        header = TokenHeader(dtype=self._dtype, vocab=self._vocab, count=self._count, sha256=self._sha256.hexdigest())
        header_path(self._path).write_text(json.dumps(asdict(header), indent=2) + "\n", encoding="utf-8")
        return header


def header_path(path: Path) -> Path:
    """Path of the header of the token file ``path``."""
    return path.with_name(path.name + ".json")


def write_tokens(path: Path, chunks: Iterable[Ids], *, vocab: int) -> TokenHeader:
    """Write all ``chunks`` of ids as one token file.

    Raises:
        UserError: an id is not below ``vocab``.
    """
    with TokenWriter(path, vocab=vocab) as writer:
        for chunk in chunks:
            writer.append(chunk)
        return writer.finish()


def read_header(path: Path) -> TokenHeader:
    """Read the header of the token file ``path`` and compare its count with the file's size.

    Raises:
        UserError: the header or the file is missing or malformed, or they do not match.
    """
    header_file = header_path(path)
    try:
        header = TokenHeader(**jsontext.load(header_file.read_bytes()))
        num_bytes = path.stat().st_size
    except OSError as error:
        raise UserError(what=f"cannot be read: {error.strerror}", where=str(error.filename), remedy=_REMEDY) from error
    except (ValueError, TypeError) as error:
        raise UserError(
            what=f"is not a token file's header: {error}",
            where=str(header_file),
            remedy='a header is {"dtype": "uint16" or "uint32", "vocab": ..., "count": ..., "sha256": ...}',
        ) from error
    if num_bytes != header.num_bytes:
        raise UserError(
            what=f"holds {num_bytes} bytes where its header says {header.num_bytes}",
            where=str(path),
            remedy=_REMEDY,
        )
    return header


def open_tokens(path: Path) -> Tokens:
    """Map a token file into memory. Checks its size; `verify_tokens` checks its content.

    Raises:
        UserError: as `read_header`.
    """
    header = read_header(path)
    dtype = _DTYPES[header.dtype]
    ids: Ids = np.memmap(path, dtype=dtype, mode="r") if header.count else np.empty(0, dtype)
    return Tokens(ids=ids, vocab=header.vocab, path=path)


def verify_tokens(path: Path) -> TokenHeader:
    """Read the whole token file and compare it with its header.

    Raises:
        UserError: as `read_header`, or the content does not have the header's SHA-256.
    """
    header = read_header(path)
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 != header.sha256:
        raise UserError(what="has other content than its header's SHA-256 says", where=str(path), remedy=_REMEDY)
    return header


def read_npy(path: Path) -> Tokens:
    """Map the ids of a plain NumPy file into memory. Their vocabulary is the largest id plus one.

    Raises:
        UserError: the file is not a one-dimensional array of integers, is empty, or has a negative id.
    """
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise UserError(what=f"is not a .npy file: {error}", where=str(path), remedy=_REMEDY) from error
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or not len(ids):
        raise UserError(
            what=f"holds {ids.dtype} of shape {ids.shape}, not a row of token ids",
            where=str(path),
            remedy=_REMEDY,
        )
    vocab = int(ids.max()) + 1
    _check_ids(ids, vocab=vocab, path=path)
    return Tokens(ids=ids, vocab=vocab, path=path)


def chunked(tokens: Tokens) -> Iterable[Ids]:
    """The ids in chunks that fit in memory."""
    return (tokens.ids[i : i + _CHUNK_TOKENS] for i in range(0, len(tokens), _CHUNK_TOKENS))


def _check_ids(ids: Ids, *, vocab: int, path: Path) -> None:
    if not ids.size:
        return
    for id_ in (int(ids.min()), int(ids.max())):
        if not 0 <= id_ < vocab:
            raise UserError(
                what=f"token id {id_} lies outside the vocabulary of {vocab}",
                where=str(path),
                remedy="tokenise the data with the tokenizer that belongs to this vocabulary",
            )
