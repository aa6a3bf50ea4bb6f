"""Idle rank: a process for which the plan has no work. It waits until the run has a result, and then exits with 0.

It receives no messages, so it polls for the result file that the first rank writes. If the other ranks fail, there is
no result, and the program that started the ranks ends this one.
"""

from __future__ import annotations

import os
import signal
import time

from penstock.core.run.folder import RunDir
from penstock.core.run.rank_status import StatusFile, status_path
from penstock.trainer.parent_death import die_with_parent, launcher

POLL_SECONDS = 1.0


def wait_for_result(run: RunDir, rank: int) -> int:
    """Wait for the result of the run and return the exit code. Ignores requests to stop: the other ranks get them, too,
    and write a result when they stop.
    """
    die_with_parent(launcher(), signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    status = StatusFile(status_path(run.status, rank), os.getpid())
    status.start(())
    while not run.result.exists():
        time.sleep(POLL_SECONDS)
    status.finish(time.monotonic_ns())
    return 0
