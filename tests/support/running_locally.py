"""The local executor on simulated time, with workers that follow scripts; the test is its user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.agent.executor import Executor
from penstock.agent.run_observer import RunObserver
from penstock.agent.run_state import PhaseChange, RunState
from penstock.core.clocks import Reading
from penstock.core.errors import UserError
from penstock.core.host.stopping import StopRequests
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.plan import Plan
from penstock.core.records import StepMetrics
from penstock.core.run.folder import RunDir
from penstock.planner.worker.process import Planner
from penstock.planner.worker.searching import Report
from tests.support.fake_workers import FakeWorkers
from tests.support.manifests import example
from tests.support.sample_run import sample_plan

STEPS = 20
EVERY = 5


class Recording(RunObserver):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.phases: list[PhaseChange] = []
        self.launches: list[tuple[int, int]] = []
        self.steps: list[StepMetrics] = []
        self.last_words: list[str] = []
        self.notes: list[str] = []
        self.closed = False

    def entered(self, change: PhaseChange) -> None:
        self.phases.append(change)

    def launched(self, attempt: int, from_step: int) -> None:
        self.launches.append((attempt, from_step))

    def stepped(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)

    def lost(self, last_words: Sequence[str]) -> None:
        self.last_words.extend(last_words)

    def note(self, line: str) -> None:
        self.notes.append(line)

    def close(self) -> None:
        self.closed = True


class FakeDecider:
    """A profile is found or not; a plan is always the same one, or a mistake."""

    def __init__(self, *, has_profile: bool = False, mistake: UserError | None = None) -> None:
        self.has_profile, self.mistake = has_profile, mistake
        self.kept = 0
        self.planned = 0
        self._plan: Plan | None = None
        self.following = sample_plan()

    def find_profile(self) -> bool:
        return self.has_profile

    def keep_profile(self) -> None:
        self.kept += 1

    def find_plan(self) -> Plan | None:
        return self._plan

    def plan(self, report: Report) -> Plan:
        if self.mistake is not None:
            raise self.mistake
        self.planned += 1
        self._plan = self.following
        return self._plan


class Bench:
    """An executor on simulated time, whose wall clock is ``ahead_seconds`` of it; ``pause`` runs ``meanwhile``."""

    def __init__(
        self,
        root: Path,
        workers: FakeWorkers,
        *,
        decider: FakeDecider | None = None,
        planner: Planner | None = None,
        **changes: Any,
    ) -> None:
        self.run = RunDir(root)
        self.run.create()
        manifest = example(training__steps=STEPS, checkpoint={"everySteps": EVERY}, **changes)
        self.job = PipelineJob.from_manifest(manifest)
        self.workers, self.decider, self.planner = workers, decider or FakeDecider(), planner
        self.show, self.requests = Recording(), StopRequests()
        self.now, self.ahead_seconds = 1000.0, 0.0
        self.state = RunState()
        self.meanwhile: Callable[[], None] = lambda: None
        self.pauses = 0

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        assert self.pauses < 10_000, "the run does not end"
        self.now += seconds
        self.meanwhile()

    def execute(self, state: RunState | None = None) -> RunState:
        executor = Executor(
            self.job,
            self.run,
            state or RunState(),
            workers=self.workers,
            decider=self.decider,
            show=self.show,
            requests=self.requests,
            planner=self.planner,
            clock=lambda: Reading(wall=self.now + self.ahead_seconds, boot_id="boot", boottime=self.now),
            pause=self.pause,
        )
        try:
            return executor.run()
        finally:
            self.state = executor.state
            assert not self.workers.alive
            assert self.show.closed

    @property
    def phases(self) -> list[Phase]:
        return [change.phase for change in self.show.phases]

    @property
    def losses(self) -> list[float]:
        return [entry.loss for entry in self.run.read_metrics()]
