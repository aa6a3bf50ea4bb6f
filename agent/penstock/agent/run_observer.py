"""Observer of a run's progress. The base class ignores all events; `penstock.cli.local.progress` prints them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.agent.run_state import PhaseChange
from penstock.core.plan import Plan
from penstock.core.preparing import Reporter
from penstock.core.records import StepMetrics
from penstock.planner.worker.protocol import Progress


class RunObserver(Reporter):
    """Receiver of a run's progress events, and of those of the preparation of its data."""

    def warning(self, line: str) -> None:
        self.note(line)

    def entered(self, change: PhaseChange) -> None:
        """The run entered a phase."""

    def lost(self, last_words: Sequence[str]) -> None:
        """The attempt failed; ``last_words`` are the last lines of the rank at fault."""

    def launched(self, attempt: int, from_step: int) -> None:
        """An attempt begins after ``from_step`` steps."""

    def measured(self, done: int, total: int) -> None:
        """That many points of the machine's measurement are done; both are 0 before the first."""

    def searching(self, progress: Progress) -> None:
        """The search for a plan has this progress."""

    def planned(self, plan: Plan) -> None:
        """The search ended with ``plan``."""

    def stepped(self, metrics: StepMetrics) -> None:
        """A step was taken."""

    def note(self, line: str) -> None:
        """There is a warning or a hint for the user."""

    def close(self) -> None:
        """End of all reports."""
