"""Detection of a stalled training attempt by the life cycle's rule, on its own host."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from penstock.core.lifecycle import NO_STEP, stall_seconds
from penstock.core.run.rank_status import RankStatus, State, read_status

STOP_LEAST_SECONDS = 5.0
STOP_STEPS = 3.0


def stop_seconds(predicted_step_seconds: float | None) -> float:
    """Time limit of the current step after a stop request.

    It is far below the limit of a stall: a stop is often requested because a peer is lost, and the requester waits.
    """
    return max(STOP_LEAST_SECONDS, STOP_STEPS * (predicted_step_seconds or 0.0))


class Steps:
    """Evidence of progress in steps. The base class observes none."""

    def has_advanced(self) -> bool:
        """Whether a step was taken since the last call."""
        return False

    def record_stop_request(self) -> None:
        """Record that ranks were requested to stop after the current step."""

    def stall_message(self, predicted_step_seconds: float | None) -> str:
        """Return how the attempt is stalled; empty if it is not, or if another process watches for that."""
        return ""


class RankSteps(Steps):
    """Current steps of the ranks of this host, by their status files below ``folder``; ``clock`` is monotonic.

    Local files show every step at once, while NFS may cache a file of another host for a minute.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._steps = self._present()
        self._stepped_at: float | None = None
        self._stop_requested_at: float | None = None

    def has_advanced(self) -> bool:
        before, self._steps = self._steps, self._present()
        if not any(step >= 0 and before.get(name) != step for name, step in self._steps.items()):
            return False
        self._stepped_at = self._clock()
        return True

    def record_stop_request(self) -> None:
        self._stop_requested_at = self._clock()

    def stall_message(self, predicted_step_seconds: float | None) -> str:
        """Return how the attempt is stalled; empty if it is not, as before the first step.

        The limit after a stop request applies only inside a step: work between two steps, such as a checkpoint, may
        take longer.
        """
        if self._stepped_at is None:
            return ""
        silent = stall_seconds(predicted_step_seconds)
        if self._clock() >= self._stepped_at + silent:
            return f"{NO_STEP} {silent:.0f} s"
        hurried, requested_at = stop_seconds(predicted_step_seconds), self._stop_requested_at
        is_late = requested_at is not None and self._clock() >= max(self._stepped_at, requested_at) + hurried
        return f"{NO_STEP} {hurried:.0f} s of the stop request" if is_late and self._is_inside_step() else ""

    def _is_inside_step(self) -> bool:
        return any(status.action and status.state is State.RUNNING for status in self._statuses().values())

    def _present(self) -> dict[str, int]:
        return {name: status.step for name, status in self._statuses().items()}

    def _statuses(self) -> dict[str, RankStatus]:
        statuses = ((path.name, read_status(path)) for path in self._folder.glob("rank-*") if not path.suffix)
        return {name: status for name, status in statuses if status is not None}
