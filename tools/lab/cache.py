"""The folder that keeps what is built, each part by a key of what it was built from."""

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
    """Where it lies: below the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "lab"


def key_of(*parts: str | bytes) -> str:
    """A short text that changes with any of the parts."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8) + content)
    return digest.hexdigest()[:12]


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked() -> Iterator[None]:
    """Hold the cache's one lock, under which all is built, and remove what others left half built."""
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


def kept(name: str, key: str, make: Callable[[Path], None]) -> Path:
    """The folder of the part ``name`` with that key; ``make`` fills a new one, which appears whole or not at all."""
    target = folder() / f"{name}-{key}"
    if target.exists():
        return target
    started = time.monotonic()
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder()))
    try:
        make(partial)
        partial.chmod(0o755)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{name} is ready after {time.monotonic() - started:.0f} s")
    return target
