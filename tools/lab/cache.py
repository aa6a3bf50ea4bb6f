"""Cache of built parts: a folder per part, whose name contains a hash of the inputs of the build."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.lab.console import say


def folder() -> Path:
    """Return the folder of the cache, below the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "lab"


def key_of(*parts: str | bytes) -> str:
    """Return a short hash of the parts. It also depends on where one part ends and the next begins."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8) + content)
    return digest.hexdigest()[:12]


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock of all builds, and remove partial results of builds that were interrupted."""
    folder().mkdir(parents=True, exist_ok=True)
    with (folder() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another lab is building; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for partial in folder().glob("partial-*"):
            shutil.rmtree(partial)
        yield


def get_or_build(name: str, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder of the part ``name`` with that key.

    If the cache lacks it, ``build`` fills a temporary folder, which is renamed when it is complete.
    """
    target = folder() / f"{name}-{key}"
    if target.exists():
        return target
    started = time.monotonic()
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder()))
    try:
        build(partial)
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{name} is ready after {time.monotonic() - started:.0f} s")
    return target
