"""How far an attempt is, by the files of its run directory; nothing is loaded that writes them."""

from __future__ import annotations

import json

from penstock.trainer.rundir import RunDir


def profile_progress(run: RunDir) -> tuple[int, int]:
    """How many points are measured, and of how many; zeros before the first."""
    try:
        progress = json.loads(run.profile_progress.read_text())
        return int(progress["done"]), int(progress["total"])
    except (OSError, ValueError, KeyError):
        return 0, 0


def newest_checkpoint_step(run: RunDir) -> int | None:
    """The step of the newest complete checkpoint, without loading what reads it."""
    steps = (path.parent.name.removeprefix("step-") for path in run.checkpoints.glob("a*/step-*/manifest.json"))
    return max(map(int, filter(str.isdecimal, steps)), default=None)
