"""Small files that one side writes and the other reads, always complete, also after a power cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from penstock.core import jsontext
from penstock.core.manifest import Manifest
from penstock.core.serialization.files import write_atomically

M = TypeVar("M", bound=Manifest)


def read(path: Path, kind: type[M]) -> M | None:
    """The contents; None if the file is missing or is not JSON. Raises `UserError` for JSON of another form."""
    try:
        return kind.from_manifest(jsontext.load(path.read_text()))
    except (FileNotFoundError, ValueError):
        return None


def write(path: Path, value: Manifest) -> None:
    """Replace the contents."""
    write_atomically(path, json.dumps(value.to_manifest()) + "\n")
