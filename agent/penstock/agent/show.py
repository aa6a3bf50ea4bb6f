"""What a run tells while it goes on. The base is silent; `progress` shows it to people."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.agent.run_state import PhaseChange
from penstock.core.plan import Plan
from penstock.core.preparing import Reporter as DataReporter
from penstock.core.records import StepMetrics
from penstock.planner.worker.questions import Progress


class Show:
    """Hears how a run goes."""

    @property
    def data(self) -> DataReporter:
        """What preparing the data tells."""
        return DataReporter()

    def entered(self, change: PhaseChange) -> None:
        """The run entered a phase."""

    def lost(self, last_words: Sequence[str]) -> None:
        """The attempt failed; ``last_words`` are what the rank at fault printed at the end."""

    def launched(self, attempt: int, from_step: int) -> None:
        """An attempt begins after ``from_step`` steps."""

    def measured(self, done: int, total: int) -> None:
        """That many points of the machine's measurement are done; both are 0 before the first."""

    def searching(self, progress: Progress) -> None:
        """How far the search for a plan is."""

    def planned(self, plan: Plan) -> None:
        """The search ended with ``plan``."""

    def stepped(self, metrics: StepMetrics) -> None:
        """A step was taken."""

    def note(self, line: str) -> None:
        """Something else that people should know."""

    def close(self) -> None:
        """Nothing more is told."""
