"""A rank that takes memory and keeps it: ``python -m tests.support.hungry_rank FOLDER MEBIBYTES BEHAVIOUR``.

BEHAVIOUR is ``itself``; ``child``, if a process that the rank starts takes it; or ``file``, if it is the pages of a
file that is mapped. It leaves ``FOLDER/taken-RANK`` once it has all.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from pathlib import Path

from penstock.core.run.rank_status import StatusFile, status_path
from penstock.trainer.parent_death import die_with_parent, launcher

MEBIBYTE = 2**20


def take(folder: Path, rank: int, num_bytes: int, behaviour: str) -> bytearray | mmap.mmap:
    """The memory, every page of it in use."""
    if behaviour != "file":
        return bytearray(b"\1") * num_bytes
    path = folder / f"mapped-{rank}"
    path.write_bytes(bytes(num_bytes))
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert sum(mapped[:: mmap.PAGESIZE]) == 0
    return mapped


def main(folder: Path, num_bytes: int, behaviour: str) -> None:
    die_with_parent(launcher(), signal.SIGKILL)
    rank = int(os.environ["RANK"])
    status = StatusFile(status_path(folder, rank), os.getpid())
    status.start(["0F0.0"])
    if behaviour == "child" and os.fork():
        os.wait()
        return
    held = take(folder, rank, num_bytes, behaviour)
    (folder / f"taken-{rank}").touch()
    while len(held):
        signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) * MEBIBYTE, sys.argv[3])
