"""Values of JSON and YAML that no database keeps: NUL and lone surrogates in text, infinity and NaN.

SQLite would take some of it, PostgreSQL refuses it, and an answer could not contain it.
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
"""How JSON has to write such text."""


def require_storable(document: Any) -> None:
    """Raise `UserError` with the first place in plain data that cannot be kept."""
    for place, value in _leaves(document):
        if (what := _wrong(value)) is not None:
            raise UserError(
                what=what, where=_path(place), remedy="write text without NUL, and finite numbers of 64 bits"
            )


def is_nested_beyond(document: Any, most: int) -> bool:
    """Whether lists and objects of plain data lie more than ``most`` deep in one another."""
    level, depth = [document], 0
    while level := [inner for value in level for inner in _inside(value) if isinstance(inner, dict | list)]:
        depth += 1
        if depth > most:
            return True
    return False


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def cleaned(document: Any) -> Any:
    """The same data with a sign of replacement for each character that cannot be kept."""
    if isinstance(document, str):
        return UNSTORABLE.sub(REPLACEMENT, document)
    if isinstance(document, dict):
        return {cleaned(name): cleaned(value) for name, value in document.items()}
    return [cleaned(value) for value in document] if isinstance(document, list) else document


_Place = tuple[Any, str | int] | None
"""The place of the list or object around a value, and its index or name there; none at the top.

The path is written for what is wrong alone: a million values in a list that is nested 900 deep would have paths of
gigabytes.
"""


def _leaves(document: Any) -> Iterator[tuple[_Place, Any]]:
    """Every name and value with its place; not by recursion, since documents may be nested deeper than calls."""
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
        return None if match is None else f"holds the character U+{ord(match[0]):04X}, which cannot be kept"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a number"
    if isinstance(value, int) and abs(value) > LARGEST:
        return "is a number beyond 64 bits"
    return None
