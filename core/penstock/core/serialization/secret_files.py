"""Files that only this user may read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from penstock.core.serialization.files import sync_file, sync_folder


def write_secret(path: Path, text: str) -> None:
    """Write a file that only this user may read, from its creation on."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with writing_secret(path) as file:
        file.write(text.encode())


@contextmanager
def writing_secret(path: Path) -> Iterator[IO[bytes]]:
    """The file to write; it gets its name once it is complete, and is removed after an error."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
            sync_file(file)
        partial.replace(path)
        sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)
