"""Plays `penstock pod` where only the operator is tried: it heeds its binding, trains nothing, and ends as it is told.

How attempts end is in `ENDS`: the first fails, the second runs until it is asked to stop, and those after it succeed. A
test that sets `FOLDER_VARIABLE` writes an end into a file of that folder, named by the attempt, and until then the pods
run. Next to it, it plays `penstock report-pod`, which has nothing to report. It needs nothing but Python, so that it
starts in no time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

POD = Path("/etc/penstock/pod")
END = Path("/dev/termination-log")
LOOK_SECONDS = 0.05
TRAIN_EPOCH = 1
FOLDER_VARIABLE = "STUB_ENDS"
ENDS = ("fails", "runs on", "succeeds")
LAST_REPORTS = {
    "succeeds": (0, {"state": "succeeded"}),
    "fails": (1, {"state": "failed", "message": "as it always does"}),
    "is refused": (2, {"state": "failed", "message": "data: empty", "refused": True}),
    "stopped": (0, {"state": "stopped"}),
}
VANISHES = "vanishes"
"""The first pod of the attempt is killed, and leaves no report."""


def text(name: str) -> str:
    """What the operator told this pod."""
    path = POD / name
    return path.read_text().strip() if path.exists() else ""


def is_bound() -> bool:
    """Whether it was told to train, and not a pod before it."""
    found = json.loads(text("binding") or "{}")
    return (found.get("podUid"), found.get("epoch")) == (os.environ["PENSTOCK_POD_UID"], TRAIN_EPOCH)


def end_of(attempt: int) -> str:
    """How the attempt ends; empty while a test has not decided it."""
    if FOLDER_VARIABLE not in os.environ:
        return ENDS[min(attempt, len(ENDS)) - 1]
    path = Path(os.environ[FOLDER_VARIABLE]) / str(attempt)
    return path.read_text() if path.exists() else ""


def wait_until(happened: Callable[[], bool]) -> None:
    """Look again and again."""
    while not happened():
        time.sleep(LOOK_SECONDS)


def is_killed(attempt: int) -> bool:
    """Whether this pod is the one that vanishes."""
    return end_of(attempt) == VANISHES and os.environ["JOB_COMPLETION_INDEX"] == "0"


def main() -> int:
    """The exit code. The first process of a container hears no signal that it does not ask for."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if sys.argv[1] == "report-pod":
        signal.pause()
    attempt = int(sys.argv[sys.argv.index("--attempt") + 1])
    wait_until(lambda: is_bound() or bool(text("stop")))
    wait_until(lambda: end_of(attempt) in LAST_REPORTS or is_killed(attempt) or bool(text("stop")))
    if is_killed(attempt):
        os.kill(os.getpid(), signal.SIGKILL)
    code, report = LAST_REPORTS["stopped" if text("stop") else end_of(attempt)]
    END.write_text(json.dumps(report))
    return code


if __name__ == "__main__":
    sys.exit(main())
