"""Check of documents for values that no database stores: NUL and lone surrogates in text, infinity and NaN.

SQLite would accept some of them, PostgreSQL refuses them, and a JSON answer cannot contain them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.core.errors import UserError

UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
LARGEST = 2**63 - 1
REPLACEMENT = "\ufffd"
ESCAPED = re.compile(rb"\\u(0000|[dD][89a-fA-F])")
"""Such characters in JSON."""


def require_storable(document: Any) -> None:
    """Raise `UserError` with the path of the first value that cannot be stored."""
    for place, value in _leaves(document):
        if (what := _wrong(value)) is not None:
            raise UserError(
                what=what, where=_path(place), remedy="remove NUL and lone surrogates; write finite numbers of 64 bits"
            )


def is_nested_beyond(document: Any, most: int) -> bool:
    """Whether lists and objects of plain data are nested more than ``most`` deep."""
    level, depth = [document], 0
    while level := [inner for value in level for inner in _inside(value) if isinstance(inner, dict | list)]:
        depth += 1
        if depth > most:
            return True
    return False


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def cleaned(document: Any) -> Any:
    """Return the data with U+FFFD in place of each character that cannot be stored."""
    if isinstance(document, str):
        return UNSTORABLE.sub(REPLACEMENT, document)
    if isinstance(document, dict):
        return {cleaned(name): cleaned(value) for name, value in document.items()}
    return [cleaned(value) for value in document] if isinstance(document, list) else document


_Place = tuple[Any, str | int] | None
"""Place of the list or object around a value, and its index or name there; none at the top.

Only the path of a wrong value is formatted: a million values in a list that is nested 900 deep would have paths of
gigabytes.
"""


def _leaves(document: Any) -> Iterator[tuple[_Place, Any]]:
    """Yield every name and value with its place, without recursion: documents may be nested deeper than calls."""
    waiting: list[tuple[_Place, Any]] = [(None, document)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, dict):
            yield from ((place, name) for name in value)
            waiting += [((place, name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [((place, i), inner) for i, inner in enumerate(value)]
        else:
            yield place, value


def _path(place: _Place) -> str:
    steps = []
    while place is not None:
        place, step = place
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step}")
    return "".join(reversed(steps)).lstrip(".")


def _wrong(value: Any) -> str | None:
    if isinstance(value, str):
        match = UNSTORABLE.search(value)
        return None if match is None else f"holds the character U+{ord(match[0]):04X}, which cannot be stored"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a number"
    if isinstance(value, int) and abs(value) > LARGEST:
        return "is a number beyond 64 bits"
    return None
