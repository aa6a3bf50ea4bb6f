"""The supervisor of an attempt: claimed once, and identified by its process number, its start and the machine's boot.

So a process with a reused number is never taken for a supervisor.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from penstock.core.host.clocks import boot_id
from penstock.core.run.attempt_folder import AttemptFolder
from penstock.core.serialization.files import make_folder, sync_file, sync_folder
from penstock.core.supervision import Claim

NOBODY = Claim(pid=0, started_ticks=0, boot_id="")


def take(folder: AttemptFolder, claim: Claim) -> bool:
    """Claim the attempt; False if it was claimed before, even if that process has ended.

    The claim survives a power cut. If it were lost, the attempt would be started again under its number, and the
    service, which has records of that attempt, would skip new ones with the same sequence numbers.
    """
    if folder.claim.exists():
        return False
    make_folder(folder.path)
    partial = folder.path / f".claim.{os.getpid()}"
    with partial.open("w") as file:
        file.write(json.dumps(claim.to_manifest()))
        sync_file(file)
    try:
        folder.claim.hardlink_to(partial)  # complete from the start, and never over another
    except FileExistsError:
        return False
    finally:
        partial.unlink()
    sync_folder(folder.path)
    return True


def this_process() -> Claim:
    """Identifies this process while the machine runs, and no other at any time."""
    _, ticks = _state_and_start("self")
    return Claim(pid=os.getpid(), started_ticks=ticks, boot_id=boot_id())


def is_alive(claim: Claim) -> bool:
    """Whether the process that made the claim still runs; a zombie does not."""
    try:
        state, ticks = _state_and_start(str(claim.pid))
    except (FileNotFoundError, ProcessLookupError):
        return False
    return ticks == claim.started_ticks and state not in "ZX" and claim.boot_id == boot_id()


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of that file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _state_and_start(process: str) -> tuple[str, int]:
    """From proc(5): the letter of the process's state, and its start in clock ticks since the boot."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])
