"""Large documents in little space: JSON, compressed with gzip (RFC 1952).

ConfigMaps hold plans and measurements in this form, and all editors of ConfigMaps in a namespace can write other
contents. `unpack` is therefore the one place that decodes them. It bounds the document before it builds it: a megabyte
of gzip can stand for a gigabyte of zeros, and each byte of ``[[],[],`` for twenty bytes of lists. Every failure is an
`UnpackError`.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

from penstock.core import jsontext
from penstock.core.errors import PenstockError

MOST_PACKED_BYTES = 4 * 2**20
"""Several times the capacity of a ConfigMap; files of a pod hold no more."""
MOST_BYTES = 32 * 2**20
"""Of the JSON. A profile of 256 ranks, the largest that a ConfigMap holds, takes 7 MB."""
MOST_ITEMS = 1_000_000
"""Items of lists and fields of objects. A profile of 256 ranks has 400,000."""
MOST_DEPTH = 32
"""Of nested lists and objects. A plan has 5: plan, recompute, stage, unit, operations."""

_GZIP = 16 + zlib.MAX_WBITS
_MARK = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{]|[\]}]|,', re.DOTALL)


class UnpackError(PenstockError):
    """The bytes are not a document, or a larger one than penstock ever writes."""


def pack(manifest: Mapping[str, Any]) -> bytes:
    """Plain data as compressed JSON; equal data always gives equal bytes."""
    return gzip.compress(json.dumps(manifest, separators=(",", ":")).encode(), compresslevel=6, mtime=0)


def unpack(packed: bytes) -> Any:
    """The data that was given to `pack`; raises `UnpackError` for anything else."""
    text = _decompressed(packed)
    _require_modest(text)
    try:
        return jsontext.load(text)
    except ValueError as error:  # a UnicodeDecodeError is a ValueError
        raise UnpackError(f"is not JSON: {error}") from None


def _decompressed(packed: bytes) -> bytes:
    if len(packed) > MOST_PACKED_BYTES:
        raise UnpackError(f"has {len(packed):,} bytes; a document has at most {MOST_PACKED_BYTES:,}")
    stream = zlib.decompressobj(wbits=_GZIP)
    try:
        text = stream.decompress(packed, MOST_BYTES)
    except zlib.error as error:
        raise UnpackError(f"is not gzip: {error}") from None
    if stream.unconsumed_tail:
        raise UnpackError(f"holds more than {MOST_BYTES:,} bytes")
    if not stream.eof:
        raise UnpackError("is not gzip: it is cut short")
    if stream.unused_data:
        raise UnpackError("is not gzip: something follows its end")
    return text


def _require_modest(text: bytes) -> None:
    """Limit the items and the depth, by counting brackets and commas outside of strings."""
    depth = items = 0
    for match in _MARK.finditer(text):
        mark = text[match.start()]
        if mark in b"[{":
            depth += 1
            items += 1
        elif mark in b"]}":
            depth -= 1
        elif mark in b",":
            items += 1
        if depth > MOST_DEPTH:
            raise UnpackError(f"is nested more than {MOST_DEPTH} deep")
        if items > MOST_ITEMS:
            raise UnpackError(f"holds more than {MOST_ITEMS:,} values")
