"""Whether a training attempt takes steps: seen here, by the rule of the life cycle, where nobody else might look."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock.core.lifecycle import stall_seconds
from penstock.trainer.status import read_status


class Steps(Protocol):
    """What shows that steps are taken."""

    def seen(self) -> bool:
        """Whether any was since the last look."""
        ...


class RankSteps:
    """The steps that the ranks of this host are at, by their status files below ``folder``.

    Each shows in memory, while a file that another host writes may look unchanged for a minute.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps = self._present()

    def seen(self) -> bool:
        """See `Steps`."""
        before, self._steps = self._steps, self._present()
        return any(step >= 0 and before.get(name) != step for name, step in self._steps.items())

    def _present(self) -> dict[str, int]:
        found = ((path.name, read_status(path)) for path in self._folder.glob("rank-*") if not path.suffix)
        return {name: status.step for name, status in found if status is not None}


@dataclass
class StallWatch:
    """Measures silence since the last step; ``clock`` never goes back, and does not follow the time of day."""

    clock: Callable[[], float] = time.monotonic
    _stepped_at: float | None = field(default=None, init=False)

    def stepped(self) -> None:
        """A step was seen."""
        self._stepped_at = self.clock()

    def complaint(self, predicted_step_seconds: float | None) -> str:
        """What is wrong; empty if nothing is. Nothing is before the first step."""
        silent = stall_seconds(predicted_step_seconds)
        if self._stepped_at is None or self.clock() < self._stepped_at + silent:
            return ""
        return f"no step within {silent:.0f} s"
