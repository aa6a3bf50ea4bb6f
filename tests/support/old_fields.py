"""Fields that version 0.1.0 knows of what this version sends to its supervisors and pods, whose readers are strict.

``tests/fixtures/fields_16853cd.json`` was made from the dataclasses of that commit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "fixtures" / "fields_16853cd.json"
OF_A_PLAN = ("Plan", "Prediction", "Alternative", "ModelSpec", "ScheduleSpec")


def unknown_fields(manifest: Any, *types: str) -> set[str]:
    """Fields of the manifest form that none of these types had."""
    known = json.loads(PATH.read_text())
    return set(_fields(manifest)) - {name for kind in types for name in known[kind]}


def _fields(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _fields(inner)
