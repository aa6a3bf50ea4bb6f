"""How far an attempt is, by the files of its run directory; nothing is loaded that writes them."""

from __future__ import annotations

from penstock.core import jsontext
from penstock.core.run.folder import RunDir


def profile_progress(run: RunDir) -> tuple[int, int]:
    """How many points are measured, and of how many; zeros before the first."""
    try:
        progress = jsontext.load(run.profile_progress.read_text())
        return int(progress["done"]), int(progress["total"])
    except (OSError, ValueError, KeyError):
        return 0, 0


def newest_checkpoint(run: RunDir) -> tuple[int, int] | None:
    """Step and attempt of the newest complete checkpoint, without loading the code that reads it."""
    checkpoints = []
    for path in run.checkpoints.glob("a*/step-*/manifest.json"):
        step, attempt = path.parent.name.removeprefix("step-"), path.parents[1].name.removeprefix("a")
        if step.isdecimal() and attempt.isdecimal():
            checkpoints.append((int(step), int(attempt)))
    return max(checkpoints, default=None)


def newest_checkpoint_step(run: RunDir) -> int | None:
    """The step of the newest complete checkpoint."""
    newest = newest_checkpoint(run)
    return newest[0] if newest is not None else None
