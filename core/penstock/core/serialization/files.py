"""Files that readers see complete or not at all, also after a power cut, and files that only grow."""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

SECRET = 0o600
"""The rights of a file that only this user may read."""


def complete_lines(path: Path) -> list[str]:
    """The lines of a file that is appended to, if it exists; an incomplete last line is left out."""
    return path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []


def append_lines(path: Path) -> TextIO:
    """Open for appending; an incomplete last line is removed, since it would corrupt the next one."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)
    return path.open("a")


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Write a file that readers see with the new text or the old one; if ``durable``, also after a power cut."""
    with writing(path, durable=durable) as file:
        file.write(text.encode())


def write_secret(path: Path, text: str) -> None:
    """Write a file that only this user may read, from its creation on."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with writing(path, mode=SECRET) as file:
        file.write(text.encode())


@contextmanager
def writing(path: Path, *, mode: int = 0o666, durable: bool = True) -> Iterator[IO[bytes]]:
    """The file to write, with the rights ``mode`` from its creation on. It gets its name once it is complete, and is
    removed after an error.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # hosts that share the folder share process numbers
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            if durable:
                sync_file(file)
        partial.replace(path)
        if durable:
            sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make ``folder`` and its missing parents, and flush their names to disk."""
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for created in missing:
        sync_folder(created.parent)


def sync_file(file: IO[Any]) -> None:
    """Flush everything written to ``file`` to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names of the files in ``folder`` to disk, if its file system can."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_json(path: Path, manifest: Any, *, durable: bool = True) -> None:
    """Write plain data as JSON, atomically."""
    write_atomically(path, json.dumps(manifest, indent=1) + "\n", durable=durable)
