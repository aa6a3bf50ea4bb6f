"""A backend of the engine in memory, whose store and attempts outlive the process that steps, as real ones do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.core.clocks import Ages, Reading
from penstock.core.engine import Job, step
from penstock.core.job import JobSpec, PipelineJob
from penstock.core.lifecycle import AttemptState, Launch, Observation, Phase, SetPhase, Step, enter
from penstock.core.processes import ProcessState, failure_changes, observation
from penstock.core.supervision import AttemptReport
from tests.support.crashing import Crash, CrashError
from tests.support.engine_cases import Case, End, Outcome
from tests.support.manifests import example

MOST_STEPS = 400
STEP_SECONDS = 0.5
NUM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class StoredRecord:
    """What is stored of the job."""

    phase: Phase = Phase.PENDING
    attempt: int = 0
    failures: int = 0
    started_at: float | None = None
    finished_at: float | None = None
    failed_at: float | None = None
    failed_boot_id: str | None = None
    failed_boottime: float | None = None
    message: str = ""


MemoryJob = Job[StoredRecord]


@dataclass
class MemoryAttempt:
    """A supervisor with its attempt, which goes on by one state at a time."""

    end: End
    report: AttemptReport = field(default_factory=lambda: AttemptReport(state=AttemptState.STARTING))
    alive: bool = True
    measures: bool = False
    bound: bool = False
    stop_requested: bool = False
    num_steps: int = 0

    def go_on(self) -> None:
        state = self.report.state
        if not self.alive:
            return
        if state is AttemptState.STARTING:
            self._become(AttemptState.READY)
        elif self.stop_requested:
            self._finish(AttemptState.STOPPED)
        elif state is AttemptState.RUNNING:
            self._train()
        elif self.bound:
            self._become(AttemptState.RUNNING)
        elif self.measures:
            self.report = replace(self.report, profile=Step.DONE)

    def _train(self) -> None:
        if self.num_steps < NUM_STEPS or self.end is End.RUNS_ON:
            self.num_steps += 1
        elif self.end is End.VANISHES:
            self.alive = False
        elif self.end is End.IS_REFUSED:
            self.report = replace(self.report, refused=True)
            self._finish(AttemptState.FAILED)
        elif self.end is not End.FALLS_SILENT:
            self._finish(AttemptState.SUCCEEDED if self.end is End.SUCCEEDS else AttemptState.FAILED)

    def _become(self, state: AttemptState) -> None:
        self.report = replace(self.report, state=state)

    def _finish(self, state: AttemptState) -> None:
        self._become(state)
        self.alive = False


@dataclass
class Durable:
    """All that outlives the process: the store with the plan, the attempts, and what happened."""

    ends: tuple[End, ...]
    record: StoredRecord = field(default_factory=StoredRecord)
    attempts: dict[int, MemoryAttempt] = field(default_factory=dict)
    closed: set[int] = field(default_factory=set)
    is_planned: bool = False
    expired: bool = False
    life: list[tuple[Phase, str]] = field(default_factory=list)


class MemoryBackend:
    """One job's backend. The process may be killed before and after everything that it changes."""

    def __init__(self, durable: Durable, crash: Crash | None = None) -> None:
        self.durable, self.crash = durable, crash or Crash(at=-1)
        self.ages = Ages()

    def observe(self, job: MemoryJob, now: Reading, *, fresh: bool = False) -> Observation:
        return observation(job, self._state(job), self.ages, now)

    def _state(self, job: MemoryJob) -> ProcessState:
        attempt = self.durable.attempts.get(job.record.attempt)
        plan = Step.DONE if self.durable.is_planned else Step.MISSING
        if attempt is None:
            return ProcessState(claimed=job.record.attempt in self.durable.closed, plan=plan, admitted=True)
        return ProcessState(
            claimed=True,
            admitted=True,
            alive=attempt.alive,
            stop_requested=attempt.stop_requested,
            report=attempt.report,
            mark=attempt.num_steps or None,
            plan=plan,
        )

    def enter(self, job: MemoryJob, entered: SetPhase, now: Reading) -> None:
        self.crash.around(lambda: self._store(job.record, entered, now))

    def launch(self, job: MemoryJob, launch: Launch, entered: SetPhase | None, now: Reading) -> MemoryJob:
        assert entered is not None
        self._require_no_attempt()
        record = job.record
        started = now.wall if record.started_at is None else record.started_at
        launched = replace(record, attempt=launch.attempt, started_at=started)
        self.crash.around(lambda: self._store(launched, entered, now))
        return replace(job, record=self.durable.record)

    def start(self, job: MemoryJob) -> None:
        self.crash.around(lambda: self._start(job.record.attempt))

    def measure(self, job: MemoryJob) -> None:
        self.crash.around(lambda: setattr(self._current, "measures", True))

    def plan(self, job: MemoryJob) -> None:
        self.crash.around(lambda: setattr(self.durable, "is_planned", True))

    def bind(self, job: MemoryJob) -> None:
        self.crash.around(lambda: setattr(self._current, "bound", True))

    def stop(self, job: MemoryJob, reason: str) -> None:
        self.crash.around(lambda: setattr(self._current, "stop_requested", True))

    def delete(self, job: MemoryJob) -> None:
        self.crash.around(lambda: self._end(job.record.attempt))

    def expire(self, job: MemoryJob) -> None:
        self.crash.around(lambda: setattr(self.durable, "expired", True))

    @property
    def _current(self) -> MemoryAttempt:
        return self.durable.attempts[self.durable.record.attempt]

    def _store(self, record: StoredRecord, entered: SetPhase, now: Reading) -> None:
        phase = enter(self.durable.record.phase, entered.phase)
        record = replace(record, **failure_changes(record, entered, now))
        finished_at = now.wall if phase.terminal else None
        self.durable.record = replace(record, phase=phase, finished_at=finished_at, message=entered.message)
        self.durable.life.append((phase, entered.reason))

    def _start(self, number: int) -> None:
        if number in self.durable.attempts or number in self.durable.closed:
            return
        self._require_no_attempt()
        self.durable.attempts[number] = MemoryAttempt(self.durable.ends[number - 1])

    def _require_no_attempt(self) -> None:
        alive = [number for number, attempt in self.durable.attempts.items() if attempt.alive]
        assert not alive, f"attempts {alive} are alive"

    def _end(self, number: int) -> None:
        self.durable.closed.add(number)
        if number in self.durable.attempts:
            self.durable.attempts[number].alive = False


@functools.cache
def spec_of(**policy: Any) -> JobSpec:
    """The example's spec with this policy of the run."""
    return PipelineJob.from_manifest(example(runPolicy=policy)).spec


def memory_outcome(case: Case, crash: Crash | None = None) -> Outcome:
    """Step the case's job to its end, in another process once the first is killed."""
    durable = Durable(case.ends)
    backend = MemoryBackend(durable, crash)
    boottime, ahead, suspended = 100.0, 1e9, False
    is_pending = True
    for _ in range(MOST_STEPS):
        job = MemoryJob(spec=spec_of(**case.policy, suspend=suspended), record=durable.record)
        try:
            step(backend, job, Reading(wall=boottime + ahead, boot_id="boot", boottime=boottime))
        except CrashError:
            backend = MemoryBackend(durable)
        for attempt in durable.attempts.values():
            attempt.go_on()
        boottime += STEP_SECONDS
        if is_pending and durable.attempts and durable.attempts[1].num_steps == NUM_STEPS:
            is_pending, suspended = False, case.suspends
            boottime, ahead = boottime + case.passes_seconds, ahead + case.jump_seconds
        if durable.record.phase.terminal or (suspended and durable.record.phase is Phase.SUSPENDED):
            break
    step_until_gone(backend, durable, Reading(wall=boottime + ahead, boot_id="boot", boottime=boottime))
    return Outcome(life=tuple(durable.life), started=tuple(durable.attempts), failures=durable.record.failures)


def step_until_gone(backend: MemoryBackend, durable: Durable, now: Reading) -> None:
    """Whatever the killed process left, the next step deletes."""
    spec = spec_of(suspend=durable.record.phase is Phase.SUSPENDED)
    step(backend, MemoryJob(spec=spec, record=durable.record), now)
    assert not any(attempt.alive for attempt in durable.attempts.values())


def on_every_crash(run: Callable[[Crash], Outcome]) -> list[Outcome]:
    """The outcomes of a life that is cut short at each of its moments in turn, and once not at all."""
    outcomes = []
    for at in range(1, 1000):
        crash = Crash(at)
        outcomes.append(run(crash))
        if not crash.came:
            return outcomes
    raise AssertionError("there are more moments than were tried")
