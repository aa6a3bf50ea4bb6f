"""Files that programs of version 0.1.0 left, kept as a fixture with nothing in them of the machine that made them."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

PLACE = "@FOLDER@"
"""Stands for the folder that the files were in."""


def put(kept: Path, folder: Path) -> None:
    """Copy what was kept into ``folder``; its files name that folder."""
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    for path in _readable(folder):
        path.write_text(path.read_text().replace(PLACE, str(folder)))


def keep(folder: Path, kept: Path, *ignored: str) -> None:
    """Copy what is to be kept, but for names that match a pattern in ``ignored``."""
    shutil.copytree(folder, kept, ignore=shutil.ignore_patterns(*ignored))
    for path in _readable(kept):
        path.write_text(neutral(path.read_text(), folder))


def neutral(content: str, folder: Path) -> str:
    """The content with other paths of the same length, because places in logs were noted."""
    content = content.replace(str(folder), PLACE)
    for path, name in ((str(Path(__file__).parents[2]), "/source"), (sys.base_prefix, "/python")):
        content = content.replace(path, name.ljust(len(path), "/"))
    return content


def _readable(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(UnicodeDecodeError):
            if path.is_file() and path.read_text():
                yield path
