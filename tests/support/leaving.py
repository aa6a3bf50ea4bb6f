"""A process that another one left behind: forked twice, in a session of its own, as daemons are made."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

LEAVING = """
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    left = os.fork()
    if left == 0:
        signal.pause()
    with open(sys.argv[1], "w") as file:
        file.write(str(left))
    os._exit(0)
os.wait()
"""


def leave_behind(folder: Path) -> int:
    """The number of a process whose parent and grandparent have ended; it runs on."""
    path = folder / f"left-{uuid.uuid4()}"
    subprocess.run([sys.executable, "-c", LEAVING, str(path)], check=True)
    return int(path.read_text())


def runs(pid: int) -> bool:
    """Whether it does, or ended and nobody waited for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def ended_after(left: Sequence[int]) -> Iterator[None]:
    """Whatever becomes of the block, these do not outlive it."""
    try:
        yield
    finally:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
