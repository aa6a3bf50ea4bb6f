"""One step of a job where its attempts are processes: observe, decide by the life cycle, and apply.

Problem. ``penstock run`` and the service run the same jobs on one machine. Each of them is killed at any time, between
any two of its actions. A job must go on all the same, must never have two attempts at once, and must go the same way in
both places: the same retries, the same limits, the same answer to a supervisor that vanished.

Idea. `step` is the only way from an observation to an action, and keeps nothing. It asks the `Backend` for the job's
newest attempt, joins that with what is stored of the job (`Record`), lets the pure function
`penstock.core.lifecycle.decide` decide, and has the backend carry the decisions out. A backend knows how to do things
and never whether. Loops, polls and queues stay with the callers, which call `step` for a job whenever they like.

    caller (loop, queue)           calls step for a job      `penstock run`               the service
    engine                         observe -> decide -> apply
    backend                        acts and stores           own children, state.json     supervisors, database

Three rules of applying make a step that was cut short harmless:

1. *Stored before done.* A new phase is stored before anything that follows from it, the number of a new attempt
   together with its phase before anything of it starts. So no number is used twice.
2. *What leaves a live phase leaves nothing behind.* After such a phase is stored, the attempt is deleted, also one that
   was only about to start, and once more before the next launch.
3. *Started until it is there.* An attempt that is stored as live, and of which there is nothing yet, is started
   again. `Backend.start` is idempotent, as are all actions but `Backend.enter` and `Backend.launch`, which the store
   refuses if the job is not as observed.

Example of a service that is killed. ``enter``, ``launch`` and so on are calls of the backend:

    observed                              decided                          applied
    Queued, may start                     Launch(1), SetPhase(Profiling)   delete none, launch 1   (killed here)
    Profiling, attempt 1 never came up    none                             start
    ready, no profile                     StartProfile                     measure
    supervisor vanished                   SetPhase(Recovering)             enter, delete
    Recovering for 0.4 s of 1 s           Wait                             none; next step in 0.6 s

Clocks (`penstock.core.clocks`). Deadlines and the time to live of a finished job are by the wall clock. Pauses before a
retry and silence are ages, by CLOCK_BOOTTIME of the observer: silence since the mark of the attempt's progress last
changed. So an hour more or less on the wall clock makes no retry and no loss. A stored time in the future counts as
now, so nothing is due later than its full duration from now.

Complexity. A step is one observation and constant work.

Rejected designs: transitions that act themselves would have to know, after a crash, which of their actions happened. A
loop in the engine would have to know about terminals, databases and queues. The operator has a loop of its own
(`penstock.operator.reconcile`): it confirms decisions with the cluster and merges them into one status, and what it
observes is not a process (ADR 0051).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from penstock.core.clocks import Ages, Reading
from penstock.core.job import JobSpec
from penstock.core.lifecycle import (
    LIVE,
    LOSSES,
    AttemptState,
    Bind,
    Decision,
    Delete,
    Expire,
    Launch,
    Observed,
    Phase,
    SetPhase,
    StartPlan,
    StartProfile,
    Step,
    Stop,
    Wait,
    decide,
)
from penstock.core.supervision import AttemptReport

LOST = "supervisor exited without writing a result"


class Record(Protocol):
    """What is stored of a job between steps. Times are seconds since the epoch."""

    @property
    def phase(self) -> Phase:
        """Phase that was entered last."""

    @property
    def attempt(self) -> int:
        """Number of the newest attempt, 0 before the first."""

    @property
    def failures(self) -> int:
        """Attempts that ended without being asked to."""

    @property
    def started_at(self) -> float | None:
        """First launch, since when a deadline counts."""

    @property
    def finished_at(self) -> float | None:
        """Entry of the terminal phase."""

    @property
    def failed_at(self) -> float | None:
        """Time of the last failure."""

    @property
    def failed_boot_id(self) -> str | None:
        """Boot during which that was; none or empty if it was not stored."""

    @property
    def failed_boottime(self) -> float | None:
        """Its time since that boot."""


R = TypeVar("R", bound=Record, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Job(Generic[R]):
    """A job at the time of a step, with the spec in effect. No other job of the backend has the same ``key``."""

    spec: JobSpec
    record: R
    key: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """The newest attempt and the plan. ``claimed``: a supervisor has or had it. ``alive``: something of it is left.

    ``mark`` changes with every step that the attempt takes, and is None before the first. ``plan_error`` is the reason
    of a failed plan.
    """

    claimed: bool = False
    alive: bool = False
    stop_requested: bool = False
    report: AttemptReport | None = None
    mark: Hashable = None
    plan: Step = Step.MISSING
    plan_error: str = ""
    predicted_step_seconds: float | None = None


J = TypeVar("J", bound=Job[Record])


class Backend(Protocol[J]):
    """A place that runs attempts and stores their jobs. Every action may be repeated after a crash."""

    @property
    def ages(self) -> Ages:
        """Memory of this observer."""

    def observe(self, job: J) -> Observation:
        """Observe the newest attempt and its plan."""

    def has_capacity(self, job: J) -> bool:
        """Whether the job may start now."""

    def enter(self, job: J, entered: SetPhase, observation: Observation, now: Reading) -> None:
        """Store the phase, with the changes of `failure_changes`."""

    def launch(self, job: J, launch: Launch, entered: SetPhase, now: Reading) -> J:
        """Store the attempt's number with the phase; return the job as stored. Nothing starts yet."""

    def start(self, job: J) -> None:
        """Start the newest attempt, unless it was started before."""

    def measure(self, job: J) -> None:
        """Request the attempt's measurement."""

    def plan(self, job: J) -> None:
        """Begin to plan."""

    def bind(self, job: J) -> None:
        """Let the attempt train by the plan."""

    def stop(self, job: J) -> None:
        """Request a checkpoint and the attempt's end."""

    def delete(self, job: J) -> None:
        """End what is left of the newest attempt; nothing of it runs or can start after that."""

    def expire(self, job: J) -> None:
        """Remove the finished job."""


def step(backend: Backend[J], job: J, now: Reading) -> float | None:
    """Observe, decide and apply once; return the seconds until the next step at the latest.

    0 means that another may follow at once, None that only something observed changes anything.
    """
    observation = backend.observe(job)
    decisions = decide(job.spec, _observed(backend, job, observation, now), now.wall)
    match decisions:
        case [Launch() as launch, SetPhase() as entered]:
            _delete(backend, job)
            backend.start(backend.launch(job, launch, entered, now))
        case [*_, SetPhase() as entered]:
            backend.enter(job, entered, observation, now)
            if entered.phase not in LIVE:
                _delete(backend, job)
        case [] if job.record.phase in LIVE and _has_nothing(observation):
            backend.start(job)
            return 0.0
        case _:
            for decision in decisions:
                _apply(backend, job, decision)
    waits = [decision.until - now.wall for decision in decisions if isinstance(decision, Wait)]
    return min(waits, default=None) if len(waits) == len(decisions) else 0.0


def _apply(backend: Backend[J], job: J, decision: Decision) -> None:
    match decision:
        case StartProfile():
            backend.measure(job)
        case StartPlan():
            backend.plan(job)
        case Bind():
            backend.bind(job)
        case Stop():
            backend.stop(job)
        case Delete():
            backend.delete(job)
        case Expire():
            backend.expire(job)


def _delete(backend: Backend[J], job: J) -> None:
    if job.record.attempt:
        backend.delete(job)


def _has_nothing(observation: Observation) -> bool:
    return observation.report is None and not observation.claimed and not observation.alive


def _observed(backend: Backend[J], job: J, observation: Observation, now: Reading) -> Observed:
    record, report = job.record, observation.report
    state = attempt_state(record, observation)
    has_no_plan = observation.plan is Step.FAILED and state is not AttemptState.FAILED
    return Observed(
        phase=record.phase,
        attempt=record.attempt,
        attempt_state=state,
        attempt_gone=not observation.alive,
        attempt_ranks=report.num_ranks if report else 0,
        refused=report is not None and report.refused,
        stop_requested=observation.stop_requested,
        admitted=backend.has_capacity(job),
        profile=report.profile if report else Step.MISSING,
        plan=observation.plan,
        failures=record.failures,
        message=observation.plan_error if has_no_plan else _message(observation, state),
        active_since=_past(record.started_at, now),
        failed_at=_failed_at(backend, job, now),
        finished_at=_past(record.finished_at, now),
        last_step_at=_last_step_at(backend, job, observation, now),
        predicted_step_seconds=observation.predicted_step_seconds,
        last_checkpoint=report.last_checkpoint if report else None,
    )


def attempt_state(record: Record, observation: Observation) -> AttemptState:
    """The state of the newest attempt. Without a living supervisor it has failed, regardless of its last report."""
    report = observation.report
    if record.attempt == 0:
        return AttemptState.NONE
    if report is not None and report.ended:
        return report.state
    if observation.alive or not observation.claimed:
        return report.state if report else AttemptState.STARTING
    return AttemptState.FAILED


def _message(observation: Observation, state: AttemptState) -> str:
    if observation.report is not None and observation.report.message:
        return observation.report.message
    return LOST if state is AttemptState.FAILED else ""


def failure_changes(record: Record, entered: SetPhase, now: Reading) -> dict[str, Any]:
    """Return the fields of the record that change because the phase is entered for a failure; empty if it is not."""
    if entered.reason not in LOSSES:
        return {}
    return {
        "failures": record.failures + 1,
        "failed_at": now.wall,
        "failed_boot_id": now.boot_id,
        "failed_boottime": now.boottime,
    }


def _past(at: float | None, now: Reading) -> float | None:
    """A stored time in the future, by a clock that went back since, counts as now."""
    return None if at is None else min(at, now.wall)


def _failed_at(backend: Backend[J], job: J, now: Reading) -> float | None:
    record = job.record
    if record.failed_at is None:
        return None
    failed = Reading(wall=record.failed_at, boot_id=record.failed_boot_id or "", boottime=record.failed_boottime or 0.0)
    return now.wall - backend.ages.seconds((job.key, "failure"), failed, now.boottime, failed.age(now))


def _last_step_at(backend: Backend[J], job: J, observation: Observation, now: Reading) -> float | None:
    if observation.mark is None:
        return None
    mark = (job.record.attempt, observation.mark)
    return now.wall - backend.ages.seconds((job.key, "step"), mark, now.boottime)
