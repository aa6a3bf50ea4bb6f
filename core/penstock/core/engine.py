"""One step of a job, wherever it runs: observe, decide by the life cycle, and apply.

Problem. ``penstock run``, the service and the operator run the same jobs. Each of them may be killed at any time,
between any two of its actions. The job must continue nevertheless, must never have two attempts at once, and must be
treated alike by all three: the same retries, the same limits, the same answer to an attempt that vanished.

Idea. `step` is the only way from an observation to an action, and keeps nothing. It asks the `Backend` for an
observation of the job, joins that with what is stored of the job (`Record`), lets the pure function
`penstock.core.lifecycle.decide` decide, and has the backend carry the decisions out. A backend knows how to do things
and never whether. Loops, polls and queues stay with the callers, which call `step` for a job whenever they like.

    caller (loop, queue)   calls step for a job      `penstock run`             the service             the operator
    engine                 observe -> decide -> apply
    backend                acts and stores           own children, state.json   supervisors, database   objects, status

An attempt of the first two is processes of one machine, which `penstock.core.processes` translates into an observation;
`penstock.operator.observe` does so for pods.

Four rules of applying make a step that was cut short, or that knew too little, harmless:

1. *Stored before done.* A new phase is stored before anything that follows from it, the number of a new attempt
   together with its phase before anything of it starts. So no number is used twice.
2. *No attempt without a live phase.* After a phase that is not live is stored, the attempt is deleted, even if it was
   only about to start. It is deleted once more before the next launch.
3. *Started until it is there.* An attempt that is stored as live or queued, and of which there is nothing yet, is
   started again. `Backend.start` is idempotent, as are all actions but `Backend.enter` and `Backend.launch`, which the
   store refuses if the job is not as observed.
4. *Final only if fresh.* The end of an attempt, and a launch after an earlier one, cannot be undone. If they follow
   from a cache, the backend observes the place itself, and that observation counts. A first launch needs none: the
   store refuses its number if the job has changed.

Example of a service that is killed. ``enter``, ``launch`` and so on are calls of the backend:

    observed                              decided                          applied
    Queued, may start                     Launch(1), SetPhase(Profiling)   delete none, launch 1   (killed here)
    Profiling, attempt 1 never came up    none                             start
    ready, no profile                     StartProfile                     measure
    supervisor vanished                   SetPhase(Recovering)             enter, delete
    Recovering for 0.4 s of 1 s           Wait                             none; next step in 0.6 s

Deadlines and the time to live of a finished job are by the clock of the call. A stored time in the future counts as
now, so a step never waits for longer than the full duration. So that waits also end, backends store such times again as
now, or count by a clock that does not jump (`penstock.core.clocks`).

Complexity. A step is one observation, or two by rule 4, and constant work.

Rejected designs: transitions that act themselves would have to know, after a crash, which of their actions happened. A
loop in the engine would have to know about terminals, databases and queues (ADR 0051).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, Protocol, TypeVar

from penstock.core.clocks import Reading
from penstock.core.errors import UserError
from penstock.core.job import JobSpec
from penstock.core.lifecycle import (
    LIVE,
    Bind,
    Decision,
    Delete,
    Expire,
    Launch,
    Observation,
    Observed,
    Phase,
    SetPhase,
    StartPlan,
    StartProfile,
    Stop,
    Wait,
    decide,
)


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
        """Attempts that failed; a disrupted one, preempted or evicted, does not count."""

    @property
    def started_at(self) -> float | None:
        """Start of the deadline: the first launch, or the next one after a suspension or a wait in a queue."""

    @property
    def finished_at(self) -> float | None:
        """Entry of the terminal phase."""


class AnyJob(Protocol):
    """A job at the time of a step."""

    @property
    def spec(self) -> JobSpec:
        """The spec in effect."""

    @property
    def record(self) -> Record:
        """What is stored of the job."""


R = TypeVar("R", bound=Record, covariant=True)


@dataclass(frozen=True, kw_only=True)
class Job(Generic[R]):
    """A job that is read once for each step. No other job of the backend has the same ``key``."""

    spec: JobSpec
    record: R
    key: str = ""


J = TypeVar("J", bound=AnyJob)


class Backend(Protocol[J]):
    """A place that runs attempts and stores their jobs. Every action but `enter` and `launch` is idempotent."""

    def observe(self, job: J, now: Reading, *, fresh: bool = False) -> Observation:
        """Observe the newest attempt and its plan; a ``fresh`` observation is made without a cache."""

    def enter(self, job: J, entered: SetPhase, now: Reading) -> None:
        """Store the phase, unless its input, such as a measurement, proves unusable, which the next step observes."""

    def launch(self, job: J, launch: Launch, entered: SetPhase | None, now: Reading) -> J:
        """Store the attempt's number with the phase, if one is entered; return the job as stored. Nothing starts yet.

        Raises `UserError` for a mistake in the job, because of which the job fails.
        """

    def start(self, job: J) -> None:
        """Start the newest attempt, unless it was started before; raises `UserError` as `launch` does."""

    def measure(self, job: J) -> None:
        """Request the attempt's measurement."""

    def plan(self, job: J) -> None:
        """Begin to plan."""

    def bind(self, job: J) -> None:
        """Let the attempt train by the plan."""

    def stop(self, job: J, reason: str) -> None:
        """Request a checkpoint and the attempt's end."""

    def delete(self, job: J) -> None:
        """End what is left of the newest attempt; nothing of it runs or can start after that."""

    def expire(self, job: J) -> None:
        """Remove the finished job."""


def step(backend: Backend[J], job: J, now: Reading) -> float | None:
    """Observe, decide and apply once; return the seconds until the next step at the latest.

    0 means that another may follow at once; None that only a change in the next observation requires another step, such
    as the end of deleted processes.
    """
    observation, decisions = _decide(backend, job, now)
    actions = [decision for decision in decisions if not isinstance(decision, Wait)]
    match actions:
        case [] if observation.unstarted:
            _start(backend, job, now)
            return 0.0
        case [Launch() as launch, *_]:
            entered = next((action for action in actions if isinstance(action, SetPhase)), None)
            _delete(backend, job)
            _start(backend, job, now, launch, entered)
        case [*_, SetPhase() as entered]:
            _enter(backend, job, entered, now)
        case _:
            for action in actions:
                _apply(backend, job, action)
    if any(not isinstance(action, Delete | Expire) for action in actions):
        return 0.0
    return min((decision.until - now.wall for decision in decisions if isinstance(decision, Wait)), default=None)


def _decide(backend: Backend[J], job: J, now: Reading, *, fresh: bool = False) -> tuple[Observation, list[Decision]]:
    """Observe and decide, again by a fresh observation if a decision needs one."""
    observation = backend.observe(job, now, fresh=fresh)
    decisions = decide(job.spec, _observed(job.record, observation, now), now.wall)
    if observation.fresh or not any(_is_final(decision, job.record) for decision in decisions):
        return observation, decisions
    return _decide(backend, job, now, fresh=True)


def _is_final(decision: Decision, record: Record) -> bool:
    if isinstance(decision, SetPhase):
        return decision.phase.terminal or decision.phase is Phase.RECOVERING
    return isinstance(decision, Launch) and record.attempt > 0


def _observed(record: Record, observation: Observation, now: Reading) -> Observed:
    """Join both. A stored time in the future, by a clock that went back since, counts as now."""
    return Observed(
        **{field.name: getattr(observation, field.name) for field in fields(Observation)},
        phase=record.phase,
        attempt=record.attempt,
        failures=record.failures,
        active_since=_past(record.started_at, now),
        finished_at=_past(record.finished_at, now),
    )


def _past(at: float | None, now: Reading) -> float | None:
    return None if at is None else min(at, now.wall)


def _start(
    backend: Backend[J], job: J, now: Reading, launch: Launch | None = None, entered: SetPhase | None = None
) -> None:
    """Launch, if there is a launch, and start the attempt; a mistake of the user fails the job."""
    try:
        if launch is not None:
            job = backend.launch(job, launch, entered, now)
        backend.start(job)
    except UserError as mistake:
        _enter(backend, job, SetPhase(Phase.FAILED, "UserError", str(mistake)), now)


def _enter(backend: Backend[J], job: J, entered: SetPhase, now: Reading) -> None:
    backend.enter(job, entered, now)
    if entered.phase not in LIVE:
        _delete(backend, job)


def _delete(backend: Backend[J], job: J) -> None:
    if job.record.attempt:
        backend.delete(job)


def _apply(backend: Backend[J], job: J, action: Decision) -> None:
    match action:
        case StartProfile():
            backend.measure(job)
        case StartPlan():
            backend.plan(job)
        case Bind():
            backend.bind(job)
        case Stop():
            backend.stop(job, action.reason)
        case Delete():
            backend.delete(job)
        case Expire():
            backend.expire(job)
