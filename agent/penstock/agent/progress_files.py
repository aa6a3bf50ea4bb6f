"""Progress of an attempt, read from the files of its run directory without importing the code that writes them."""

from __future__ import annotations

from penstock.core import jsontext
from penstock.core.run.folder import RunDir


def profile_progress(run: RunDir) -> tuple[int, int]:
    """Return the numbers of measured points and of all points; zeros before the first."""
    try:
        progress = jsontext.load(run.profile_progress.read_text())
        return int(progress["done"]), int(progress["total"])
    except (OSError, ValueError, KeyError):
        return 0, 0


def newest_checkpoint(run: RunDir) -> tuple[int, int] | None:
    """Return step and attempt of the newest complete checkpoint."""
    checkpoints = []
    for path in run.checkpoints.glob("a*/step-*/manifest.json"):
        step, attempt = path.parent.name.removeprefix("step-"), path.parents[1].name.removeprefix("a")
        if step.isdecimal() and attempt.isdecimal():
            checkpoints.append((int(step), int(attempt)))
    return max(checkpoints, default=None)


def newest_checkpoint_step(run: RunDir) -> int | None:
    """Return the step of the newest complete checkpoint."""
    newest = newest_checkpoint(run)
    return newest[0] if newest is not None else None
