"""Files that only this user may read."""

from __future__ import annotations

import os
from pathlib import Path


def write_secret(path: Path, text: str) -> None:
    """Write what only this user may read, from its first moment on."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    partial.replace(path)
