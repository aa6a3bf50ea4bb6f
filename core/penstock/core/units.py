"""Quantities with units: parse what people write, format what people read."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from penstock.core.errors import UserError, shown

NANOSECONDS_PER_SECOND = 1_000_000_000
MEBIBYTE = 2**20

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_QUANTITY = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]i|[kKMGTP]?)(?:B)?\s*$")
_MOST_CHARACTERS = 64
BYTES_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": _QUANTITY.pattern, "maxLength": _MOST_CHARACTERS},
    ]
}


def parse_bytes(text: str | int, where: str = "") -> int:
    """Bytes from a Kubernetes quantity: ``4Gi``, ``500M``, ``1.5G`` or a plain integer."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _QUANTITY.match(text) if isinstance(text, str) and len(text) <= _MOST_CHARACTERS else None
    if match is None:
        raise UserError(
            what=f"{shown(text)} is not an amount of memory",
            where=where,
            remedy="write a number of bytes, or a number with Ki, Mi, Gi, Ti, k, M, G or T, such as 4Gi",
        )
    number, suffix = match.groups()
    return round(Fraction(number) * (_BINARY.get(suffix) or _DECIMAL[suffix]))


def format_bytes(count: float) -> str:
    """Text of ``count`` bytes: three digits and a binary unit."""
    for suffix in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or suffix == "TiB":
            return f"{count:.0f} {suffix}" if suffix == "B" else f"{_three_digits(count)} {suffix}"
        count /= 1024
    raise AssertionError("unreachable")


def bytes_apart(first: int, second: int) -> tuple[str, str]:
    """Texts of both amounts, in bytes if three digits do not distinguish them."""
    texts = format_bytes(first), format_bytes(second)
    return texts if texts[0] != texts[1] else (f"{first:,} bytes", f"{second:,} bytes")


def _three_digits(value: float) -> str:
    """Three significant digits; of a thousand and more the whole number, instead of an exponent."""
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def quantity(count: int) -> str:
    """``count`` bytes as an exact Kubernetes quantity, with the largest binary suffix that divides them: ``4Gi``."""
    for suffix, size in reversed(_BINARY.items()):
        if count and count % size == 0:
            return f"{count // size}{suffix}"
    return str(count)


BYTES = {"read": parse_bytes, "write": quantity, "schema": BYTES_SCHEMA}
"""Metadata of a field that holds an amount of memory."""


def format_age(seconds: float) -> str:
    """``12s``, ``5m``, ``3h`` or ``2d``, as ``kubectl`` writes it."""
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size:.0f}{unit}"
    return f"{max(seconds, 0):.0f}s"


def format_seconds(seconds: float) -> str:
    """Text of ``seconds``: 812 ns, 1.25 ms, 3.4 s, 2 min 5 s."""
    if not math.isfinite(seconds):
        return str(seconds)
    if abs(seconds) >= 120:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    for scale, suffix in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            return f"{_three_digits(seconds / scale)} {suffix}"
    return f"{_three_digits(seconds * 1e9)} ns" if seconds else "0 s"


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Text of ``count`` of something: 1 slice, 2 slices. ``plural`` is needed if it is not ``noun`` with an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"


def format_amount(amount: float) -> str:
    """Text of ``amount`` of money, in an unnamed currency: 1,234.50, 0.25, 0.0031."""
    return f"{amount:,.2f}" if abs(amount) >= 0.1 or not amount else f"{amount:.2g}"


def to_nanoseconds(seconds: float) -> int:
    """Seconds as whole nanoseconds, the unit of every plan and simulation."""
    return round(seconds * NANOSECONDS_PER_SECOND)


def to_seconds(nanoseconds: float) -> float:
    """Nanoseconds as seconds."""
    return nanoseconds / NANOSECONDS_PER_SECOND
