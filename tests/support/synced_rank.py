"""A rank that notes what it has the disk keep: ``python -m tests.support.synced_rank ...``, as ``penstock.trainer``.

Each fsync and each rename is a line of the file that `JOURNAL` names: what, the path, and the bytes of a file or the
names in a folder.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JOURNAL = "PENSTOCK_TEST_JOURNAL"


@dataclass(frozen=True, slots=True)
class Note:
    """One fsync or rename; of a rename ``path`` is the new name."""

    rank: int
    what: str
    path: Path
    num_bytes: int = 0
    names: frozenset[str] = frozenset()


def notes(journal: Path) -> list[Note]:
    """What was noted, in order."""
    lines = map(json.loads, journal.read_text().splitlines())
    return [
        Note(line["rank"], line["what"], Path(line["path"]), line["bytes"], frozenset(line["names"])) for line in lines
    ]


def _note(what: str, path: Path, num_bytes: int = 0) -> None:
    names = sorted(entry.name for entry in path.iterdir()) if what == "sync" and path.is_dir() else []
    rank = int(os.environ.get("RANK", "-1"))
    line = {"rank": rank, "what": what, "path": str(path), "bytes": num_bytes, "names": names}
    with Path(os.environ[JOURNAL]).open("a") as journal:
        journal.write(json.dumps(line) + "\n")


def watch() -> None:
    """Note from now on."""
    sync, rename = os.fsync, os.rename

    def noted_sync(descriptor: int) -> None:
        sync(descriptor)
        _note("sync", Path(f"/proc/self/fd/{descriptor}").readlink(), os.fstat(descriptor).st_size)

    def noted_rename(source: Any, target: Any, **options: Any) -> None:
        rename(source, target, **options)
        _note("rename", Path(target))

    setattr(os, "fsync", noted_sync)  # noqa: B010
    setattr(os, "rename", noted_rename)  # noqa: B010


if __name__ == "__main__":
    from penstock.trainer.__main__ import main

    watch()
    sys.exit(main())
