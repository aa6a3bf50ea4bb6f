"""A process that the plan has no work for: it waits until the others have ended, and ends well with them.

It has no message to wait for, so it looks for the result that the first rank leaves. That the others failed is not told
to it: whoever started it ends it then.
"""

from __future__ import annotations

import os
import signal
import time

from penstock.core.run.folder import RunDir
from penstock.core.run.rank_status import StatusFile, status_path
from penstock.trainer.parent_death import die_with_parent, launcher

LOOK_SECONDS = 1.0


def stand_by(run: RunDir, rank: int) -> int:
    """Wait for the result of the run; the exit code. A request to stop is one to the others, who leave a result."""
    die_with_parent(launcher(), signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    status = StatusFile(status_path(run.status, rank), os.getpid())
    status.start(())
    while not run.result.exists():
        time.sleep(LOOK_SECONDS)
    status.finish(time.monotonic_ns())
    return 0
