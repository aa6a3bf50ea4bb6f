"""Plays `penstock pod` where only the operator is tried: it heeds its binding, trains nothing, and ends at once.

The first attempt fails, the second runs until it is asked to stop, and those after it succeed. Next to it, it plays
`penstock report-pod`, which has nothing to report. It needs nothing but Python, so that it starts in no time.
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


def text(name: str) -> str:
    """What the operator told this pod."""
    path = POD / name
    return path.read_text().strip() if path.exists() else ""


def is_bound() -> bool:
    """Whether it was told to train, and not a pod before it."""
    found = json.loads(text("binding") or "{}")
    return (found.get("podUid"), found.get("epoch")) == (os.environ["PENSTOCK_POD_UID"], TRAIN_EPOCH)


def wait_until(happened: Callable[[], bool]) -> None:
    """Look again and again."""
    while not happened():
        time.sleep(LOOK_SECONDS)


def main() -> int:
    """The exit code. The first process of a container hears no signal that it does not ask for."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    if sys.argv[1] == "report-pod":
        signal.pause()
    attempt = int(sys.argv[sys.argv.index("--attempt") + 1])
    wait_until(lambda: is_bound() or bool(text("stop")))
    if attempt == 2:
        wait_until(lambda: bool(text("stop")))
    state = "stopped" if text("stop") else "failed" if attempt == 1 else "succeeded"
    END.write_text(json.dumps({"state": state, "message": "as it always does" if attempt == 1 else ""}))
    return int(state == "failed")


if __name__ == "__main__":
    sys.exit(main())
