"""Processes that do not outlive the one that wanted them.

As a program, ``python -m penstock.trainer.parent_death PARENT COMMAND...`` becomes COMMAND, which gets SIGTERM when the
process PARENT, its parent, ends however suddenly. Linux ties this to the *thread* that started the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PARENT = "PENSTOCK_LAUNCHER"


def launcher() -> int:
    """Who starts ranks: the program below, by its own word, because who asks late may have another parent by then."""
    return int(os.environ.get(_PARENT) or os.getppid())


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Have the kernel send this process ``number`` when ``parent`` ends (prctl(2)); at once if it has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.environ[_PARENT] = str(os.getpid())
    os.execv(sys.argv[2], sys.argv[2:])
