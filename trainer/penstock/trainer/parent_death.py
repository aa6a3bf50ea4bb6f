"""Parent-death signal: processes that end when the process that started them ends.

As a program, ``python -m penstock.trainer.parent_death PARENT COMMAND...`` replaces itself with COMMAND, which gets
SIGTERM when its parent, the process PARENT, ends for any reason. Linux sends the signal when the *thread* that started
the process ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PARENT = "PENSTOCK_LAUNCHER"


def launcher() -> int:
    """Process id of the program that starts ranks.

    That program was this module before `execv`, and has put its id into the environment. The parent's id would be that
    of another process if the program has already ended.
    """
    return int(os.environ.get(_PARENT) or os.getppid())


def die_with_parent(parent: int, number: signal.Signals) -> None:
    """Request signal ``number`` for when ``parent`` ends (prctl(2)). Sends it now if ``parent`` has already ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.environ[_PARENT] = str(os.getpid())
    os.execv(sys.argv[2], sys.argv[2:])
