"""Format of a folder of prepared data, which is written once and opened by every rank.

``prepared.json`` names for each split a range of a token file. The path is relative to the folder, or absolute for data
that came as a token file. ``tokenizer.json`` exists unless tokens are bytes or their tokenizer is unknown.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.core import jsontext
from penstock.core.errors import UserError
from penstock.trainer.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from penstock.trainer.data.tokens import TokenHeader, Tokens, open_tokens, read_header, verify_tokens

FORMAT = "penstock-data-1"
_RECORD = "prepared.json"
_TOKENIZER = "tokenizer.json"
_BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Data that is ready for training. Another process can open it by ``folder`` alone.

    ``tokenizer`` is None for token files that came without one. ``origin`` describes the source of the tokens.
    """

    folder: Path
    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer | None
    origin: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens [start, stop) of the token file ``path``, with the file's header at the time of preparation."""

    path: str
    header: TokenHeader
    start: int
    stop: int


def write_prepared(
    folder: Path, *, train: Part, validation: Part, tokenizer: Tokenizer | None, origin: dict[str, Any]
) -> None:
    """Write record and tokenizer to ``folder``, which already has the token files with relative paths."""
    kind: str | None = None
    if isinstance(tokenizer, ByteTokenizer):
        kind = _BYTES
    elif tokenizer is not None and (content := tokenizer.to_json()) is not None:
        (folder / _TOKENIZER).write_text(content, encoding="utf-8")
        kind = _sha256(folder / _TOKENIZER)
    record = {
        "format": FORMAT,
        "train": asdict(train),
        "validation": asdict(validation),
        "tokenizer": kind,
        "origin": origin,
    }
    record["sha256"] = _record_sha256(record)
    (folder / _RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def open_prepared(folder: Path) -> Prepared:
    """Map prepared data into memory. Checks the sizes of files, not their content.

    Raises:
        UserError: a file is missing or malformed.
    """
    record = _read_record(folder)
    try:
        return Prepared(
            folder=folder,
            train=_open_part(folder, **record["train"]),
            validation=_open_part(folder, **record["validation"]),
            tokenizer=_open_tokenizer(folder, record["tokenizer"]),
            origin=record["origin"],
        )
    except (KeyError, TypeError) as error:
        raise _malformed(folder, error) from error


def check_prepared(folder: Path) -> None:
    """Read all files of ``folder`` and compare their content with its digests.

    Raises:
        UserError: a file is missing or malformed, or has changed.
    """
    prepared = open_prepared(folder)
    for path in {prepared.train.path, prepared.validation.path}:
        if path.is_relative_to(folder):  # other files belong to the user and were verified at preparation
            verify_tokens(path)
    kind = _read_record(folder)["tokenizer"]
    if kind not in (None, _BYTES, _sha256(folder / _TOKENIZER)):
        raise _malformed(folder / _TOKENIZER, "its SHA-256 changed")


def _open_part(folder: Path, *, path: str, header: dict[str, Any], start: int, stop: int) -> Tokens:
    if asdict(read_header(folder / path)) != header:
        raise _malformed(folder / path, "its header changed")
    return open_tokens(folder / path).part(start, stop)


def _open_tokenizer(folder: Path, kind: str | None) -> Tokenizer | None:
    if kind is None:
        return None
    return ByteTokenizer() if kind == _BYTES else load_tokenizer(folder / _TOKENIZER)


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        record = jsontext.load((folder / _RECORD).read_bytes())
    except (OSError, ValueError) as error:
        raise _malformed(folder, error) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise _malformed(folder, f"format is not {FORMAT}")
    if record.pop("sha256", None) != _record_sha256(record):
        raise _malformed(folder / _RECORD, "its SHA-256 changed")
    return record


def _record_sha256(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _malformed(path: Path, reason: object) -> UserError:
    remedy = "remove it; the next run prepares the data again"
    return UserError(what=f"is not prepared data: {reason}", where=str(path), remedy=remedy)


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()
