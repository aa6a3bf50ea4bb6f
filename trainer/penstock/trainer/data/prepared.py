"""The folder of prepared data: what lies in it, written once, opened by every rank.

``prepared.json`` names the stretch of a token file that is each split, a path being relative to the folder or, for
data that came as a token file, absolute. ``tokenizer.json`` is there unless tokens are bytes or unknown.
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
    """Data ready for training; ``folder`` is all that another process needs to open the same.

    ``tokenizer`` is None for token files that came without one. ``origin`` says what the tokens were made from.
    """

    folder: Path
    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer | None
    origin: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens [start, stop) of the token file ``path``, which had this header when it was prepared."""

    path: str
    header: TokenHeader
    start: int
    stop: int


def write_prepared(
    folder: Path, *, train: Part, validation: Part, tokenizer: Tokenizer | None, origin: dict[str, Any]
) -> None:
    """Complete ``folder``, which already holds the token files named by relative paths."""
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
    """Map prepared data into memory; sizes are checked, contents are not.

    Raises:
        UserError: something is missing or malformed.
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
    """Read all content of ``folder`` and compare it with its digests.

    Raises:
        UserError: something is missing or malformed, or differs from when it was written.
    """
    prepared = open_prepared(folder)
    for path in {prepared.train.path, prepared.validation.path}:
        if path.is_relative_to(folder):  # others belong to the user and were verified when first referred to
            verify_tokens(path)
    kind = _read_record(folder)["tokenizer"]
    if kind not in (None, _BYTES, _sha256(folder / _TOKENIZER)):
        raise _malformed(folder / _TOKENIZER, "another SHA-256 than when it was made")


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
        raise _malformed(folder / _RECORD, "another SHA-256 than when it was made")
    return record


def _record_sha256(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _malformed(path: Path, reason: object) -> UserError:
    return UserError(what=f"is not prepared data: {reason}", where=str(path), remedy="remove it; it will be made again")


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()
