"""What somebody who may edit ConfigMaps can put where a packed document belongs."""

from __future__ import annotations

import base64
import gzip
import zlib
from collections.abc import Mapping
from typing import Any

from penstock.core.packing import pack


def poison(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Texts in base64 that are almost the packed ``manifest``, or large, or deep; by what is wrong with each."""
    good = pack(manifest)
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0x55
    contents = {
        "empty": b"",
        "cut": good[:-9],
        "half": good[: len(good) // 2],
        "flipped": bytes(flipped),
        "twice": good + good,
        "not gzip": b"plan",
        "zlib": zlib.compress(b"{}"),
        "not JSON": gzip.compress(b"{plan: 1}"),
        "not UTF-8": gzip.compress(b'"\xff\xfe"'),
        "long number": gzip.compress(b"9" * 5_000),
        "deep": gzip.compress(b"[" * 100_000 + b"]" * 100_000),
        "deep enough to parse": gzip.compress(b'{"model":' + b"[" * 500 + b"]" * 500 + b"}"),
        "zeros": gzip.compress(b"[" + b"0," * 30_000_000 + b"0]", compresslevel=1),
        "lists": gzip.compress(b"[" + b"[]," * 5_000_000 + b"[]]", compresslevel=1),
        "a number": gzip.compress(b"1"),
        "a list": gzip.compress(b"[]"),
        "null": gzip.compress(b"null"),
        "wrong types": pack({**manifest, "model": [], "stages": 5, "slices": {"a": 1}, "units": "x", "key": 3}),
        "not finite": gzip.compress(b'{"measuredAt": NaN, "receiveAhead": 1e308}'),
    }
    texts = {name: base64.b64encode(content).decode() for name, content in contents.items()}
    return {**texts, "not base64": "no base64!", "odd base64": "abcde", "not ASCII": "pläne"}
