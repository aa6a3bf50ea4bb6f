"""Translation of the store and an attempt's files into the input of the life cycle. Nothing is changed here."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.store.jobs import StoredJob
from penstock.api.store.sanitize import cleaned
from penstock.core.lifecycle import AttemptState, Observed, Phase, Step
from penstock.core.supervision import AttemptReport

LOST = "supervisor exited without writing a result"
MOST_LAST_WORDS, MOST_LINE_CHARACTERS = 12, 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """State of a job's newest attempt, by its files. ``started`` is false until a supervisor has claimed it."""

    started: bool = False
    alive: bool = False
    stop_requested: bool = False
    report: AttemptReport | None = None


def observed(
    stored: StoredJob,
    seen: Seen,
    *,
    admitted: bool,
    plan: Step,
    plan_message: str,
    predicted_step_seconds: float | None,
    silent_since: float = 0.0,
) -> Observed:
    """The input of `penstock.core.lifecycle.decide`.

    ``silent_since`` is the service's start: no report could arrive before it.
    """
    report = seen.report
    heard_at = _heard_at(stored, report)
    state = attempt_state(stored, seen)
    of_plan = plan is Step.FAILED and state is not AttemptState.FAILED
    return Observed(
        phase=stored.phase,
        attempt=stored.attempt,
        attempt_state=state,
        attempt_gone=not seen.alive,
        attempt_ranks=report.num_ranks if report else 0,
        refused=report is not None and report.refused,
        stop_requested=seen.stop_requested,
        admitted=admitted,
        profile=report.profile if report else Step.MISSING,
        plan=plan,
        failures=stored.failures,
        message=plan_message if of_plan else _message(seen, state),
        active_since=stored.started_at,
        failed_at=stored.failed_at,
        finished_at=stored.finished_at,
        queued_at=stored.phase_entered_at if stored.phase is Phase.QUEUED else None,
        last_step_at=None if heard_at is None else max(heard_at, silent_since),
        predicted_step_seconds=predicted_step_seconds,
        last_checkpoint=report.last_checkpoint if report else None,
    )


def _heard_at(stored: StoredJob, report: AttemptReport | None) -> float | None:
    """Time of the last reported step, from its record or from the supervisor, which also reports while records wait."""
    reported_at = stored.progress.reported_at if stored.progress else None
    seen_at = report.last_step_at if report else None
    return max((at for at in (reported_at, seen_at) if at is not None), default=None)


def attempt_state(stored: StoredJob, seen: Seen) -> AttemptState:
    """The state of the newest attempt. Without a living supervisor it has failed, regardless of its last report."""
    if stored.attempt == 0:
        return AttemptState.NONE
    report = seen.report
    if report is not None and report.ended:
        return report.state
    if not seen.started or seen.alive:
        return report.state if report else AttemptState.STARTING
    return AttemptState.FAILED


def last_words(seen: Seen) -> tuple[str, ...]:
    """The last lines of the rank at fault, cut to the limits of an event."""
    said = seen.report.last_words if seen.report else ()
    return tuple(cleaned(line[:MOST_LINE_CHARACTERS]) for line in said[-MOST_LAST_WORDS:])


def _message(seen: Seen, state: AttemptState) -> str:
    if seen.report is not None and seen.report.message:
        return seen.report.message
    return LOST if state is AttemptState.FAILED else ""
