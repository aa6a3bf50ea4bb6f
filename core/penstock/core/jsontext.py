"""JSON from users, other programs and files that may be damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def load(text: str | bytes, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value; raise `ValueError` if the text is not JSON, or is nested deeper than Python can read.

    For the latter `json.loads` raises `RecursionError`, at a depth that depends on the caller's.
    """
    try:
        return json.loads(text, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
