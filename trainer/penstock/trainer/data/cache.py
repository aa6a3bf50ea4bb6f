"""Cache of result folders by key. A folder is built once, atomically, by one process at a time, and checked on reuse.

Processes on several hosts may share a cache. A file lock on the file server lets one of them build a folder, while the
others wait. A process that loses its connection to the file server also loses the lock, so two may build at once. Then
the slower one discards its own folder, and uses that of the faster one.
"""

from __future__ import annotations

import fcntl
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.core.errors import UserError
from penstock.core.preparing import Reporter


def cached(
    cache: Path,
    key: str,
    *,
    build: Callable[[Path], None],
    check: Callable[[Path], None],
    reporter: Reporter,
) -> Path:
    """The folder ``cache / key``, filled by ``build`` unless it exists and passes ``check``.

    ``check`` raises `UserError` for a damaged folder. Folders of a read-only cache can be used if they exist.

    Raises:
        UserError: the cache cannot be written, or ``build`` raised it.
    """
    folder = cache / key
    if folder.is_dir() and _fault(folder, check) is None:
        return folder
    try:
        while True:
            try:
                with _lock(cache, key, reporter):
                    return _build_once(folder, build=build, check=check, reporter=reporter)
            except _RemovedError:
                reporter.warning("another process removed the unfinished data, and prepares it itself")
    except OSError as error:
        raise UserError(
            what=f"prepared data cannot be written: {error.strerror}",
            where=str(error.filename or cache),
            remedy="free space there, or name another cache folder",
        ) from error


class _RemovedError(Exception):
    """The folder under construction was removed by a process that builds the same one."""


def _build_once(
    folder: Path, *, build: Callable[[Path], None], check: Callable[[Path], None], reporter: Reporter
) -> Path:
    if folder.exists():
        fault = _fault(folder, check)
        if fault is None:
            return folder
        reporter.warning(f"prepared data is damaged and is prepared again: {fault}")
        shutil.rmtree(folder)
    for left in folder.parent.glob(f"{folder.name}.tmp*"):
        shutil.rmtree(left, ignore_errors=True)
    unfinished = folder.with_name(f"{folder.name}.tmp{uuid.uuid4().hex}")
    unfinished.mkdir()
    try:
        build(unfinished)
        _put(unfinished, folder, check)
    except FileNotFoundError:
        if unfinished.is_dir():
            raise
        raise _RemovedError from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _put(built: Path, folder: Path, check: Callable[[Path], None]) -> None:
    try:
        built.rename(folder)
    except OSError:
        if not folder.is_dir() or _fault(folder, check) is not None:
            raise


def _fault(folder: Path, check: Callable[[Path], None]) -> str | None:
    try:
        check(folder)
    except UserError as error:
        place = f"{error.where}: " if error.where else ""
        return place + error.what
    return None


@contextmanager
def _lock(cache: Path, key: str, reporter: Reporter) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{key}.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.warning("another process prepares the same data; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
