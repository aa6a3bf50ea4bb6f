"""Instants as manifests write them, RFC 3339 in UTC, and as code counts them, seconds since the epoch.

Only conversions: the current time is the caller's.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.core.errors import UserError
from penstock.core.manifest import mistyped

INSTANT_SCHEMA = {"type": "string", "format": "date-time"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def format_instant(seconds: float | None) -> str | None:
    """``1792345.678`` as ``1970-01-21T17:52:25.678Z``, to the millisecond."""
    if seconds is None:
        return None
    text = (_EPOCH + timedelta(milliseconds=round(seconds * 1000))).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def parse_instant(value: Any, path: str) -> float | None:
    """Parse the result of `format_instant`, and any other RFC 3339 text with an offset; raises `UserError`."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise mistyped(value, "an instant such as 2026-01-31T12:00:00Z", path)
    try:
        instant = datetime.fromisoformat(value)
        if instant.tzinfo is None:
            raise UserError(what=f"{value!r} names no time zone", where=path, remedy="end it with Z")
        seconds = (instant - _EPOCH) / timedelta(seconds=1)
        format_instant(seconds)
        return seconds
    except (ValueError, OverflowError):  # the offset may move the first or last day out of the calendar
        raise mistyped(value, "an instant such as 2026-01-31T12:00:00Z", path) from None


INSTANT = {"read": parse_instant, "write": format_instant, "schema": INSTANT_SCHEMA}
"""Metadata of a field that holds an instant."""
