"""A job's life cycle as one table and one pure function; the engine and the operator only observe and apply.

Problem. A job outlives the executors that manage it. They are killed at any time, miss events, and may have applied a
decision without recording it. Idea: nothing depends on events or on memory. `decide` is a pure function of what is
observed and of the time. Called again after its decisions were applied, or after a crash in between, it returns the
same ones or none. `TRANSITIONS` has every legal change of phase, and `enter` rejects all others; terminal phases are
final.

The first rule that returns a decision wins: deadline, suspension, loss, then the rule of the phase. So a job past its
deadline fails whatever its attempt does, and an attempt that ends during a suspension does not count as a failure.

Example: attempt 2 runs with a predicted step of 8 s and took its last step at 100 s, so the next one is due after
max(60, 10 * 8) = 80 s. At 130 s the decision is Wait(180), at 180 s SetPhase(Recovering, "AttemptFailed"). Then
Delete(2), and once the attempt is gone Wait(181), since the first backoff is 1 s. At 181 s follows SetPhase(Queued),
and then Launch(3). Each call takes constant time.

Rejected: handlers per event. An executor that was restarted has missed some, and two orders of the same events need two
rules.

    Pending -> Queued -> Profiling -> Planning -> Binding -> Running -> Succeeded
        |  ^       |         |            |          |          |
        +--|-------+---------+------------+----------+----------+---> Recovering, Suspended, Failed
           +---------------- Recovering, Suspended

Queued leads directly to Planning if there is a measurement, and Pending does not lead to Recovering.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from penstock.core.errors import PenstockError
from penstock.core.job import JobSpec


class Phase(enum.StrEnum):
    """State of a job in its life cycle."""

    PENDING = "Pending"
    QUEUED = "Queued"
    PROFILING = "Profiling"
    PLANNING = "Planning"
    BINDING = "Binding"
    RUNNING = "Running"
    RECOVERING = "Recovering"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"

    @property
    def terminal(self) -> bool:
        """Whether no phase follows."""
        return not TRANSITIONS[self]


_LIVE_ENDS = {Phase.RECOVERING, Phase.SUSPENDED, Phase.FAILED}

TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.PENDING: frozenset({Phase.QUEUED, Phase.SUSPENDED, Phase.FAILED}),
    Phase.QUEUED: frozenset({Phase.PROFILING, Phase.PLANNING, *_LIVE_ENDS}),
    Phase.PROFILING: frozenset({Phase.PLANNING, *_LIVE_ENDS}),
    Phase.PLANNING: frozenset({Phase.BINDING, *_LIVE_ENDS}),
    Phase.BINDING: frozenset({Phase.RUNNING, *_LIVE_ENDS}),
    Phase.RUNNING: frozenset({Phase.SUCCEEDED, *_LIVE_ENDS}),
    Phase.RECOVERING: frozenset({Phase.QUEUED, Phase.SUSPENDED, Phase.FAILED}),
    Phase.SUSPENDED: frozenset({Phase.QUEUED, Phase.FAILED}),
    Phase.SUCCEEDED: frozenset(),
    Phase.FAILED: frozenset(),
}

LIVE = frozenset({Phase.PROFILING, Phase.PLANNING, Phase.BINDING, Phase.RUNNING})
"""Phases in which an attempt holds devices."""

LOSSES = frozenset({"AttemptFailed", "BackoffLimitExceeded"})
"""Reasons for entering a phase that count as one more failure."""

PLACES_RELEASED = frozenset({"GaveWay", "PlacedInPart"})
"""Reasons for recovering of an attempt that was ended because it did not get all its places. They are no failures."""

MISTAKES = frozenset({"UserError", "NoPlan"})
"""Reasons for failing that the user can fix; a retry would not help."""

BACKOFF_BASE_SECONDS = 1.0
BACKOFF_MOST_SECONDS = 300.0
STALL_LEAST_SECONDS = 60.0
STALL_STEPS = 10.0
NO_STEP = "no step within"
"""Prefix of the message of a stalled run, in the life cycle and in a pod that applies the same rule."""
FIRST_STEP_SECONDS = 600.0
"""Longest time before an attempt's first step, which has `stall_seconds` more: to start processes and read a model."""
MEASURING_SECONDS = 1800.0
"""Longest time without news from an attempt that measures. A point takes seconds."""
PREPARING_SECONDS = 6 * 3600.0
"""The same while it prepares data, which reports nothing until it is done."""
SHRINK_AFTER_UNSCHEDULABLE_SECONDS = 120.0
SHRINK_AFTER_NODE_LOST_SECONDS = 60.0
GIVE_WAY_SECONDS = 5.0
"""By then a scheduler that can place a whole attempt has done so."""
PLACED_IN_PART_SECONDS = 120.0
PLACE_PAUSE_LEAST_SECONDS, PLACE_PAUSE_MOST_SECONDS = 5.0, 300.0
GROW_AFTER_STABLE_SECONDS = 300.0
REPLAN_AFTER_DRIFT_SECONDS = 1800.0
REPLAN_MOST_DOUBLINGS = 16


class AttemptState(enum.StrEnum):
    """State of the newest attempt, as the executor observes it.

    ``STOPPED`` ended after a checkpoint; ``DISRUPTED`` was preempted or evicted, which is not the job's failure.
    """

    NONE = "none"
    STARTING = "starting"
    READY = "ready"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
    DISRUPTED = "disrupted"


class Step(enum.StrEnum):
    """State of the executor's work next to the attempt: a profile or a plan."""

    MISSING = "missing"
    WORKING = "working"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What a backend observes of a job's newest attempt, of its measurement and of its plan.

    Times are seconds on the clock of ``decide``, None for events that have not happened. ``attempt_gone``: nothing of
    the newest attempt is left to write. ``refused``: it failed because of a mistake that only the user can fix.
    ``feasible_ranks`` is the largest number of ranks that the capacity admits now. ``last_step_at`` is None before the
    attempt's first step, whose limit counts from ``training_since``. Since ``drifted_since`` steps differ from the
    prediction because the hardware no longer is as it was measured; ``replans`` attempts have ended for that. A
    ``better_plan``: another plan exists, and it is worth ending the attempt for it (`penstock.core.replanning`).

    ``admitted`` allows a queued job to be launched. With ``attempts_queue``, as on a cluster, a job is launched first
    and its attempt waits for places itself: it is ready once all of it has places. Some of it has had none since
    ``short_since``, and a node with some of its ranks is lost since ``node_lost_since``.

    Places that several jobs want are given to one after the other. A job that is ``held`` for that reason is not
    launched. For an attempt without all its places, nothing was placed since ``placement_since``, and ``placed_ranks``
    have a place; ``gives_way_to`` names another job that wants the same and is ahead; it is ``followed`` if others wait
    for it. ``holders`` names the jobs that hold the missing places. An attempt whose places were released at
    ``places_released_at`` had waited for ``places_waited_seconds`` by then; ``jitter`` is a random number in [0, 1].

    An attempt that measures has to report progress by ``news_due_at``; None if it is watched in another way.

    Two fields are for the engine. ``unstarted``: the attempt is stored and nothing of it was ever there. ``fresh``: the
    observation was made just now, and not by a cache that may be behind.
    """

    attempt_state: AttemptState = AttemptState.NONE
    attempt_gone: bool = True
    attempt_ranks: int = 0
    unstarted: bool = False
    fresh: bool = True
    refused: bool = False
    stop_requested: bool = False
    stop_due_at: float | None = None
    admitted: bool = False
    attempts_queue: bool = False
    short_since: float | None = None
    node_lost_since: float | None = None
    held: str = ""
    placement_since: float | None = None
    placed_ranks: int = 0
    gives_way_to: str = ""
    followed: bool = False
    holders: str = ""
    places_released_at: float | None = None
    places_waited_seconds: float = 0.0
    jitter: float = 0.5
    profile: Step = Step.MISSING
    news_due_at: float | None = None
    plan: Step = Step.MISSING
    message: str = ""
    failed_at: float | None = None
    training_since: float | None = None
    last_step_at: float | None = None
    predicted_step_seconds: float | None = None
    last_checkpoint: int | None = None
    checkpoint_is_current: bool = False
    feasible_ranks: int | None = None
    capacity_stable_since: float | None = None
    growth_pays: bool = False
    drifted_since: float | None = None
    better_plan: bool = False
    replan_pays: bool = False
    replans: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed(Observation):
    """An observation with what is stored of the job. ``failures`` counts attempts that ended for a reason in `LOSSES`;
    a disrupted one, and one whose places were given up, do not count.

    ``active_since`` is the first launch, or the next one after a suspension or a wait in a queue, like the startTime of
    a Kubernetes Job (https://kubernetes.io/docs/concepts/workloads/controllers/job/#suspending-a-job).
    """

    phase: Phase = Phase.PENDING
    attempt: int = 0
    failures: int = 0
    active_since: float | None = None
    finished_at: float | None = None


@dataclass(frozen=True, slots=True)
class SetPhase:
    """Enter a phase, with a one-word reason and a sentence."""

    phase: Phase
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """Start attempt ``attempt`` on ``ranks`` ranks, from the step ``resume_from`` if there is one."""

    attempt: int
    ranks: int
    resume_from: int | None


@dataclass(frozen=True, slots=True)
class StartProfile:
    """Measure the missing points, with the attempt's ranks."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StartPlan:
    """Plan for the attempt's ranks."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Bind:
    """Send the attempt's ranks their places and the plan."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask the attempt to write a checkpoint after its step and end."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Delete:
    """End the remaining processes of the attempt, without asking."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Expire:
    """Remove the finished job."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing before this time unless something is observed."""

    until: float


Decision = SetPhase | Launch | StartProfile | StartPlan | Bind | Stop | Delete | Expire | Wait


class IllegalTransitionError(PenstockError):
    """A change of phase that is not in `TRANSITIONS`."""


def enter(current: Phase, following: Phase) -> Phase:
    """``following``, if the table allows it after ``current``; otherwise raises `IllegalTransitionError`."""
    if following not in TRANSITIONS[current]:
        raise IllegalTransitionError(f"a job cannot go from {current} to {following}")
    return following


def backoff_seconds(failures: int) -> float:
    """Pause after the given number of failures: 1, 2, 4, ... up to five minutes."""
    doublings = min(max(failures - 1, 0), 16)
    return float(min(BACKOFF_BASE_SECONDS * 2**doublings, BACKOFF_MOST_SECONDS))


def replan_patience_seconds(replans: int) -> float:
    """How long steps must have drifted before another plan is made: twice as long after each, so that hardware of
    varying speed costs a job only logarithmically many restarts.
    """
    return REPLAN_AFTER_DRIFT_SECONDS * float(2 ** min(replans, REPLAN_MOST_DOUBLINGS))


def place_pause_seconds(waited_seconds: float, jitter: float) -> float:
    """Pause before an attempt that did not get all its places is retried: half of the time waited so far, so that
    pauses grow, from 5 s to five minutes, times 0.5 to 1.5 by ``jitter``, so that jobs do not retry at the same time.
    """
    pause = min(max(waited_seconds / 2, PLACE_PAUSE_LEAST_SECONDS), PLACE_PAUSE_MOST_SECONDS)
    return pause * (0.5 + jitter)


def stall_seconds(predicted_step_seconds: float | None) -> float:
    """How long an attempt may take for a step after its first before it counts as lost."""
    return max(STALL_LEAST_SECONDS, STALL_STEPS * (predicted_step_seconds or 0.0))


def decide(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    """Decisions for now, by the first rule that returns any; an empty list means: wait for the next observation."""
    if observed.phase.terminal:
        return _after_the_end(spec, observed, now)
    for rule in (_deadline, _suspension, _loss):
        decisions = rule(spec, observed, now)
        if decisions:
            return decisions
    return _FORWARD[observed.phase](spec, observed, now)


def _after_the_end(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    if not observed.attempt_gone:
        return [Delete(observed.attempt)]
    seconds = spec.run_policy.ttl_seconds_after_finished
    if observed.finished_at is None or seconds is None:
        return []
    expiry = observed.finished_at + seconds
    return [Expire()] if now >= expiry else [Wait(expiry)]


def _deadline(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    limit = spec.run_policy.active_deadline_seconds
    if not limit or observed.active_since is None or observed.phase is Phase.SUSPENDED:
        return []
    if now < observed.active_since + limit:
        return []
    return _fail(observed, "DeadlineExceeded", f"ran longer than activeDeadlineSeconds {limit}")


def _fail(observed: Observed, reason: str, message: str) -> list[Decision]:
    ended: list[Decision] = [] if observed.attempt_gone else [Delete(observed.attempt)]
    return [*ended, SetPhase(Phase.FAILED, reason, message)]


def _suspension(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    if not spec.run_policy.suspend:
        return [SetPhase(Phase.QUEUED, "Resumed")] if observed.phase is Phase.SUSPENDED else []
    if observed.phase is Phase.SUSPENDED or observed.attempt_state is AttemptState.SUCCEEDED:
        return [] if observed.attempt_gone or observed.phase is not Phase.SUSPENDED else [Delete(observed.attempt)]
    if observed.phase is Phase.RUNNING and observed.attempt_state is AttemptState.RUNNING:
        return _stop(observed, now)
    if not observed.attempt_gone:
        return [Delete(observed.attempt)]
    return [SetPhase(Phase.SUSPENDED, "Suspended")]


def _stop(observed: Observed, now: float) -> list[Decision]:
    """Ask the attempt to stop, wait until the stop is due, then delete it."""
    if not observed.stop_requested:
        return [Stop(observed.attempt, "Suspended")]
    if observed.stop_due_at is None:
        return []
    return [Delete(observed.attempt)] if now >= observed.stop_due_at else [Wait(observed.stop_due_at)]


def _loss(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    waits_itself = observed.phase is Phase.QUEUED and observed.attempts_queue
    if observed.phase not in LIVE and not (waits_itself and observed.attempt_state is not AttemptState.NONE):
        return []
    if observed.attempt_state is AttemptState.DISRUPTED:
        return [SetPhase(Phase.RECOVERING, "Disrupted", observed.message)]
    if observed.refused and observed.attempt_state is AttemptState.FAILED:
        return _fail(observed, "UserError", observed.message)
    if observed.attempt_state is AttemptState.FAILED or (
        observed.attempt_state is AttemptState.NONE and observed.attempt
    ):
        return _lost(spec, observed, observed.message or "the attempt ended")
    if observed.attempt_state is AttemptState.STOPPED and not spec.run_policy.suspend:
        reason = _restart_reason(spec, observed, now) or "Stopped"
        return [SetPhase(Phase.RECOVERING, reason, observed.message or "stopped after a checkpoint")]
    due = _step_due(observed)
    if observed.attempt_state is AttemptState.RUNNING and due is not None and now >= due.at:
        return _lost(spec, observed, due.missed)
    return []


@dataclass(frozen=True, slots=True)
class _Due:
    at: float
    missed: str


def _step_due(observed: Observed) -> _Due | None:
    """The time by which the next step is due; None before steps can be reported."""
    if observed.last_step_at is not None:
        silent = stall_seconds(observed.predicted_step_seconds)
        return _Due(observed.last_step_at + silent, f"{NO_STEP} {silent:.0f} s")
    if observed.training_since is not None:
        patience = FIRST_STEP_SECONDS + stall_seconds(observed.predicted_step_seconds)
        return _Due(observed.training_since + patience, f"{NO_STEP} {patience:.0f} s of its start")
    return None


def _lost(spec: JobSpec, observed: Observed, message: str) -> list[Decision]:
    """Count one more failure: retry unless the limit is reached; ``observed.failures`` does not include it yet."""
    if observed.failures >= spec.run_policy.backoff_limit:
        return _fail(observed, "BackoffLimitExceeded", message)
    return [SetPhase(Phase.RECOVERING, "AttemptFailed", message)]


def _pending(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    return [SetPhase(Phase.QUEUED, "Accepted")]


def _queued(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    if observed.attempts_queue:
        return _queued_attempt(spec, observed, now)
    if not observed.admitted:
        return []
    launch = Launch(observed.attempt + 1, spec.resources.ranks, observed.last_checkpoint)
    if observed.profile is Step.DONE:
        return [launch, SetPhase(Phase.PLANNING, "Admitted", "the profile is fresh")]
    return [launch, SetPhase(Phase.PROFILING, "Admitted")]


def _queued_attempt(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    if observed.attempt_state is AttemptState.READY:
        if observed.profile is Step.DONE:
            return [SetPhase(Phase.PLANNING, "Admitted", "the profile is fresh")]
        return [SetPhase(Phase.PROFILING, "Admitted")]
    most = spec.resources.ranks
    least = spec.resources.min_ranks or most
    feasible = min(observed.feasible_ranks or most, most)
    if observed.attempt_state is AttemptState.NONE:
        launch = Launch(observed.attempt + 1, max(feasible, least), observed.last_checkpoint)
        return [launch] if observed.attempt_gone and not observed.held else []
    shrink_at = _shrink_at(observed) if least <= feasible < observed.attempt_ranks else None
    if shrink_at is not None and now >= shrink_at:
        message = f"{feasible} of {observed.attempt_ranks} ranks have a place"
        return [SetPhase(Phase.RECOVERING, "Shrink", message)]
    decisions = _release_places(observed, now)
    if shrink_at is None or any(isinstance(decision, SetPhase) for decision in decisions):
        return decisions
    return [*decisions, Wait(shrink_at)]


def _release_places(observed: Observed, now: float) -> list[Decision]:
    """Release the places of an attempt that cannot start, so that another that wants them can.

    An attempt that is not the first in order gives way soon. The first does so after a long stall, if it holds places,
    which jobs of others may want, or if others wait for it; otherwise it waits indefinitely.
    """
    since = observed.placement_since
    if since is None:
        return []
    give_way_at, stale_at = since + GIVE_WAY_SECONDS, since + PLACED_IN_PART_SECONDS
    if observed.gives_way_to and now >= give_way_at:
        message = f"{_places(observed)}; {observed.gives_way_to} wants the same and is ahead"
        return [SetPhase(Phase.RECOVERING, "GaveWay", message)]
    if not (observed.placed_ranks or observed.followed):
        return [Wait(give_way_at)] if observed.gives_way_to else []
    if now >= stale_at:
        holders = f"; {observed.holders}" if observed.holders else ""
        message = f"{_places(observed)} after {PLACED_IN_PART_SECONDS:.0f} s{holders}"
        return [SetPhase(Phase.RECOVERING, "PlacedInPart", message)]
    return [Wait(give_way_at if observed.gives_way_to else stale_at)]


def _places(observed: Observed) -> str:
    return f"{observed.placed_ranks} of {observed.attempt_ranks} ranks have a place"


def _shrink_at(observed: Observed) -> float | None:
    """The time at which the wait for ranks without a place is long enough; shorter after the loss of a node."""
    if observed.short_since is None:
        return None
    unschedulable = observed.short_since + SHRINK_AFTER_UNSCHEDULABLE_SECONDS
    if observed.node_lost_since is None:
        return unschedulable
    return min(unschedulable, max(observed.short_since, observed.node_lost_since + SHRINK_AFTER_NODE_LOST_SECONDS))


def _profiling(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    if observed.profile is Step.DONE:
        return [SetPhase(Phase.PLANNING, "Profiled")]
    if observed.profile is Step.FAILED:
        return _lost(spec, observed, observed.message or "profiling failed")
    if observed.news_due_at is not None and now >= observed.news_due_at:
        return _lost(
            spec, observed, f"the measurement reported no progress: {observed.message or 'the cause is not known'}"
        )
    waits: list[Decision] = [Wait(observed.news_due_at)] if observed.news_due_at is not None else []
    if observed.profile is Step.MISSING and observed.attempt_state is AttemptState.READY:
        return [StartProfile(observed.attempt), *waits]
    return waits


def _planning(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    if observed.plan is Step.DONE:
        return [SetPhase(Phase.BINDING, "Planned")]
    return _plan(spec, observed)


def _binding(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    if observed.attempt_state is AttemptState.READY:
        return [Bind(observed.attempt)] if observed.plan is Step.DONE else _plan(spec, observed)
    if observed.attempt_state in (AttemptState.RUNNING, AttemptState.SUCCEEDED):
        return [SetPhase(Phase.RUNNING, "Bound")]
    return []


def _plan(spec: JobSpec, observed: Observed) -> list[Decision]:
    """Plan; also while binding, since an executor that was killed there forgot the plan, and equal requests have equal
    answers.

    A measurement that was lost meanwhile has to be repeated.
    """
    if observed.profile is Step.FAILED and observed.plan is Step.MISSING:
        return _lost(spec, observed, observed.message or "what was measured is lost")
    if observed.plan is Step.FAILED:
        return _fail(observed, "NoPlan", observed.message or "nothing fits")
    return [StartPlan(observed.attempt)] if observed.plan is Step.MISSING else []


def _running(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    if observed.attempt_state is AttemptState.SUCCEEDED:
        return [SetPhase(Phase.SUCCEEDED, "Completed")]
    if observed.stop_requested:
        return _stop(observed, now)
    if reason := _restart_reason(spec, observed, now):
        return [Stop(observed.attempt, reason)]
    due = _step_due(observed)
    times = [time for time in (due.at if due is not None else None, _replan_at(spec, observed)) if time is not None]
    return [Wait(min(times))] if times else []


def _restart_reason(spec: JobSpec, observed: Observed, now: float) -> str:
    """The reason to end the attempt for a faster one, in one word; empty if there is none."""
    if _should_grow(spec, observed, now):
        return "Grow"
    replan_at = _replan_at(spec, observed)
    return "Drift" if observed.better_plan or (replan_at is not None and now >= replan_at) else ""


def _replan_at(spec: JobSpec, observed: Observed) -> float | None:
    """The time at which the attempt is ended for one that measures again; None if it is not."""
    if not spec.run_policy.replan_on_drift or not observed.replan_pays or observed.drifted_since is None:
        return None
    return observed.drifted_since + replan_patience_seconds(observed.replans)


def _should_grow(spec: JobSpec, observed: Observed, now: float) -> bool:
    """Only at a checkpoint, after more ranks have been free for long, and if the gain exceeds the restart."""
    stable = observed.capacity_stable_since
    return (
        0 < observed.attempt_ranks < min(observed.feasible_ranks or 0, spec.resources.ranks)
        and stable is not None
        and now >= stable + GROW_AFTER_STABLE_SECONDS
        and observed.checkpoint_is_current
        and observed.growth_pays
    )


def _recovering(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    if not observed.attempt_gone:
        return [Delete(observed.attempt)]
    if observed.failed_at is not None and now < (retry := observed.failed_at + backoff_seconds(observed.failures)):
        return [Wait(retry)]
    if observed.places_released_at is not None:
        retry = observed.places_released_at + place_pause_seconds(observed.places_waited_seconds, observed.jitter)
        if now < retry:
            return [Wait(retry)]
    return [SetPhase(Phase.QUEUED, "Retrying")]


def _suspended(spec: JobSpec, observed: Observed, now: float) -> list[Decision]:
    return [] if observed.attempt_gone else [Delete(observed.attempt)]


_FORWARD = {
    Phase.PENDING: _pending,
    Phase.QUEUED: _queued,
    Phase.PROFILING: _profiling,
    Phase.PLANNING: _planning,
    Phase.BINDING: _binding,
    Phase.RUNNING: _running,
    Phase.RECOVERING: _recovering,
    Phase.SUSPENDED: _suspended,
}
