"""Small files that one side writes and the other reads, always whole, also after a power cut."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import TypeVar

from penstock.core import jsontext
from penstock.core.manifest import Manifest

M = TypeVar("M", bound=Manifest)


def read(path: Path, kind: type[M]) -> M | None:
    """What lies there; none if nothing does, or nothing that can be read."""
    try:
        return kind.from_manifest(jsontext.load(path.read_text()))
    except (FileNotFoundError, ValueError):
        return None


def write(path: Path, value: Manifest) -> None:
    """Replace what lies there."""
    replace_text(path, json.dumps(value.to_manifest()) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a new file and rename it: a reader sees all of it or what was there before. It is on the disk on return."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make ``folder`` and those above it that are missing, and have the disk keep their names."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)


def sync_folder(folder: Path) -> None:
    """Have the disk keep which files are in ``folder``, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
