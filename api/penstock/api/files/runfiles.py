"""Files in a job's run directory for users: checkpoints, and files to download.

Only files that `artifacts` lists are opened, and only if their real path is below the run directory: links and dots
that lead out of it are ignored.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

EXPORTS = "exports"
_ARTIFACT = re.compile(
    r"report\.html|trace\.json|metrics\.jsonl|plan\.json|profile\.json|timeline(-\w+)?\.json|result\.json"
    r"|logs/[\w-]+(/[\w-]+)*\.log|attempts/\d+/supervisor\.log|exports/a\d+-step-\d+/\w[\w.-]*",
    re.ASCII,
)
_FOLDERS = ("logs", "attempts", EXPORTS)
_CHECKPOINT = re.compile(r"(?P<partial>\.partial-)?step-(?P<step>\d+)")


@dataclass(frozen=True, kw_only=True, order=True, slots=True)
class Checkpoint:
    """A checkpoint after ``step`` steps; ``complete`` once its manifest is written."""

    step: int
    attempt: int
    complete: bool
    num_bytes: int
    created_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A file; ``name`` is its path below the run directory."""

    name: str
    num_bytes: int
    modified_at: float


def checkpoints(root: Path) -> list[Checkpoint]:
    """Return the checkpoints below the run directory, newest first, including one that is being written."""
    checkpoints_found = []
    for folder in root.glob("checkpoints/a*/*"):
        attempt, match = folder.parent.name.removeprefix("a"), _CHECKPOINT.fullmatch(folder.name)
        if match and attempt.isdecimal():
            complete = not match["partial"] and (folder / "manifest.json").is_file()
            files = [info for info in map(_info, folder.iterdir()) if info is not None] if folder.is_dir() else []
            checkpoints_found.append(
                Checkpoint(
                    step=int(match["step"]),
                    attempt=int(attempt),
                    complete=complete,
                    num_bytes=sum(info.st_size for info in files),
                    created_at=max((info.st_mtime for info in files), default=0.0),
                )
            )
    return sorted(checkpoints_found, reverse=True)


def newest_checkpoint(root: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint."""
    return next((checkpoint for checkpoint in checkpoints(root) if checkpoint.complete), None)


def artifacts(root: Path) -> list[Artifact]:
    """Return the files that may be downloaded, by name."""
    files = []
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        info = _info(path) if _ARTIFACT.fullmatch(name) else None
        if info is not None:
            files.append(Artifact(name=name, num_bytes=info.st_size, modified_at=info.st_mtime))
    return sorted(files, key=lambda artifact: artifact.name)


def _files(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from root.iterdir()
    for top in _FOLDERS:
        for folder, _, names in os.walk(root / top):  # follows no links
            yield from (Path(folder, name) for name in names)


def _info(path: Path) -> os.stat_result | None:
    """Return the status of a regular file; none for other kinds and missing files."""
    try:
        info = path.lstat()
    except OSError:
        return None
    return info if stat.S_ISREG(info.st_mode) else None


def open_artifact(root: Path, name: str) -> BinaryIO | None:
    """Open the artifact of that name for reading; return none if there is none.

    The path is checked on the open file, so that a concurrent move or link cannot lead to another file.
    """
    if not _ARTIFACT.fullmatch(name):
        return None
    try:
        place = root.resolve(strict=True) / name
        number = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(number).st_mode) and Path(f"/proc/self/fd/{number}").readlink() == place:
        return os.fdopen(number, "rb")
    os.close(number)
    return None


def export_folder(root: Path, attempt: int, step: int) -> Path:
    """Return the folder of a checkpoint's exported model."""
    return root / EXPORTS / f"a{attempt}-step-{step}"
