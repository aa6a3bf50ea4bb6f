"""What lies in a job's run directory that people may want: checkpoints, and files to download.

Only what `artifacts` names is ever opened, and only where it really lies below the run directory: a link or a dot that
leads out of it is as good as not there.
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
    """A model after ``step`` steps; ``complete`` once its manifest is written."""

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
    """Those below the run directory, newest first; also one that is being written."""
    found = []
    for folder in root.glob("checkpoints/a*/*"):
        attempt, match = folder.parent.name.removeprefix("a"), _CHECKPOINT.fullmatch(folder.name)
        if match and attempt.isdecimal():
            complete = not match["partial"] and (folder / "manifest.json").is_file()
            files = [info for info in map(_info, folder.iterdir()) if info is not None] if folder.is_dir() else []
            found.append(
                Checkpoint(
                    step=int(match["step"]),
                    attempt=int(attempt),
                    complete=complete,
                    num_bytes=sum(info.st_size for info in files),
                    created_at=max((info.st_mtime for info in files), default=0.0),
                )
            )
    return sorted(found, reverse=True)


def newest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest that is complete."""
    return next((each for each in checkpoints(root) if each.complete), None)


def artifacts(root: Path) -> list[Artifact]:
    """What may be downloaded, by name."""
    found = []
    for path in _files(root):
        name = path.relative_to(root).as_posix()
        info = _info(path) if _ARTIFACT.fullmatch(name) else None
        if info is not None:
            found.append(Artifact(name=name, num_bytes=info.st_size, modified_at=info.st_mtime))
    return sorted(found, key=lambda artifact: artifact.name)


def _files(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from root.iterdir()
    for top in _FOLDERS:
        for folder, _, names in os.walk(root / top):  # follows no links
            yield from (Path(folder, name) for name in names)


def _info(path: Path) -> os.stat_result | None:
    """Of a regular file; none of anything else, and of what is gone by now."""
    try:
        info = path.lstat()
    except OSError:
        return None
    return info if stat.S_ISREG(info.st_mode) else None


def open_artifact(root: Path, name: str) -> BinaryIO | None:
    """The artifact of that name, open for reading; none if there is none.

    What was opened is asked where it lies: whatever is moved or linked meanwhile, nothing else is ever read.
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
    """Where the exported model of a checkpoint lies."""
    return root / EXPORTS / f"a{attempt}-step-{step}"
