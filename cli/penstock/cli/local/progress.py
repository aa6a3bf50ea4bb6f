"""Display of a run: a line per phase with its duration, and progress within the current phase."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.agent.run_observer import RunObserver
from penstock.agent.run_state import PhaseChange
from penstock.cli import output
from penstock.cli.lines import Line
from penstock.cli.summary import search_text
from penstock.core.lifecycle import Phase
from penstock.core.plan import Plan
from penstock.core.records import StepMetrics
from penstock.core.units import format_bytes, format_seconds
from penstock.planner.worker.protocol import Progress

SHORTEST_SECONDS = 0.2
"""Phases shorter than this, whose work was already done, get no line."""
RECENT_STEPS = 20

NAMES = {
    Phase.QUEUED: "prepare",
    Phase.PROFILING: "measure",
    Phase.PLANNING: "plan",
    Phase.BINDING: "start",
    Phase.RUNNING: "train",
    Phase.RECOVERING: "recover",
}
"""Display names of phases with a duration."""


class RunDisplay(RunObserver):
    """Prints the progress of a run of ``num_steps`` steps."""

    def __init__(self, num_steps: int, line: Line) -> None:
        self._num_steps, self._line = num_steps, line
        self._phase: PhaseChange | None = None
        self._detail = ""
        self._recent: list[StepMetrics] = []

    def working(self, text: str, done: float | None = None, *, result: str = "") -> None:
        """Show progress within the current phase; ``result`` stays when the phase ends."""
        self._detail = result or self._detail
        self._line.update(text, done)

    def entered(self, change: PhaseChange) -> None:
        self._line.close()
        self._end_phase(change.at)
        self._phase, self._detail = change, ""
        if change.phase is Phase.RECOVERING:
            output.say(f"  {change.message}", style="bold red" if change.reason != "Stopped" else "yellow")
        elif change.phase in NAMES:
            self._line.update(f"{NAMES[change.phase]} ...", None)

    def _end_phase(self, now: float) -> None:
        phase = self._phase
        if phase is None or phase.phase not in NAMES or phase.phase is Phase.RECOVERING:
            return
        if self._detail or now - phase.at >= SHORTEST_SECONDS:
            output.say(f"  {NAMES[phase.phase]:<9}{self._detail:<48} {format_seconds(now - phase.at):>10}")

    def lost(self, last_words: Sequence[str]) -> None:
        for line in last_words:
            output.say(f"    {line}", style="dim")

    def launched(self, attempt: int, from_step: int) -> None:
        self._recent.clear()
        if attempt > 1:
            output.say(f"  attempt {attempt}, from step {from_step}")

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        text = f"{stage} {format_bytes(done_bytes)} of {format_bytes(total_bytes)}"
        share = done_bytes / total_bytes if total_bytes else None
        self.working(text, share, result=format_bytes(total_bytes) + " of text")

    def measured(self, done: int, total: int) -> None:
        if total:
            self.working(f"measure {done}/{total} points", done / total, result=f"{total} points")

    def searching(self, progress: Progress) -> None:
        """Show how many candidates were simulated, and the best so far."""
        self.working(search_text(progress.candidates, progress.best_step_seconds, progress.best_speed))

    def planned(self, plan: Plan) -> None:
        """Keep the predicted step as the result of the phase."""
        if plan.prediction is not None:
            speed = plan.speed()
            speed_note = "" if speed is None else f", {speed.text}"
            self._detail = f"predicted step {format_seconds(plan.prediction.step_seconds)}{speed_note}"

    def stepped(self, metrics: StepMetrics) -> None:
        self._recent = [*self._recent[-RECENT_STEPS + 1 :], metrics]
        done = metrics.step + 1
        seconds = sum(recent.step_seconds for recent in self._recent) / len(self._recent)
        left = (self._num_steps - done) * seconds
        ending = f"{format_seconds(left)} left" if left else "validating"
        loss = f"loss {metrics.loss:.3f}"
        text = f"step {done}/{self._num_steps}  {loss}  {metrics.tokens_per_second:,.0f} tokens/s  {ending}"
        self.working(text, done / self._num_steps, result=f"{done} steps, {loss}")

    def note(self, line: str) -> None:
        output.say(f"  {line}", style="yellow")

    def close(self) -> None:
        self._line.close()
