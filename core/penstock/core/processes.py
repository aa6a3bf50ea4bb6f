"""Observation of an attempt that is processes of one machine: its supervisor's claim and report, and its progress.

`penstock run` observes its own children, and the service observes the files of supervisors. Both make a `ProcessState`.
From it and the stored record of the job, `observation` derives the input of the life cycle.

Two durations are measured by CLOCK_BOOTTIME of the observer (`penstock.core.clocks`): the pause before a retry, and the
time since the mark of the attempt's progress last changed. So a wall clock that is set an hour forwards or backwards
causes no early retry and no loss.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.core.clocks import Ages, Reading
from penstock.core.engine import Job, Record
from penstock.core.lifecycle import LIVE, LOSSES, AttemptState, Observation, SetPhase, Step
from penstock.core.supervision import AttemptReport

LOST = "supervisor exited without writing a result"


class ProcessRecord(Record, Protocol):
    """Record of a job on a machine; also has the time of the last failure by both clocks."""

    @property
    def failed_at(self) -> float | None:
        """Time of the last failure."""

    @property
    def failed_boot_id(self) -> str | None:
        """Id of the boot during which it failed; none or empty if it was not stored."""

    @property
    def failed_boottime(self) -> float | None:
        """Seconds from that boot to the failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessState:
    """The newest attempt and the plan. ``claimed``: a supervisor has or had it. ``alive``: its supervisor or its
    shipper still runs.

    ``mark`` changes with every step that the attempt takes, and is None before the first. ``plan_error`` is the reason
    of a failed plan. ``better_plan``: another plan exists, and the attempt should end for it; a supervisor reports it.
    """

    claimed: bool = False
    alive: bool = False
    admitted: bool = False
    stop_requested: bool = False
    report: AttemptReport | None = None
    mark: Hashable = None
    plan: Step = Step.MISSING
    plan_error: str = ""
    predicted_step_seconds: float | None = None
    better_plan: bool = False


def observation(job: Job[ProcessRecord], state: ProcessState, ages: Ages, now: Reading) -> Observation:
    """The observation of a job whose newest attempt is in that state."""
    record, report = job.record, state.report
    attempt = attempt_state(record, state)
    has_no_plan = state.plan is Step.FAILED and attempt is not AttemptState.FAILED
    return Observation(
        attempt_state=attempt,
        attempt_gone=not state.alive,
        attempt_ranks=report.num_ranks if report else 0,
        unstarted=record.phase in LIVE and not (state.report or state.claimed or state.alive),
        refused=report is not None and report.refused,
        stop_requested=state.stop_requested,
        admitted=state.admitted,
        profile=report.profile if report else Step.MISSING,
        plan=state.plan,
        message=state.plan_error if has_no_plan else _message(state, attempt),
        failed_at=_failed_at(job, ages, now),
        last_step_at=_last_step_at(job, state, ages, now),
        predicted_step_seconds=state.predicted_step_seconds,
        better_plan=state.better_plan or (report is not None and report.better_plan),
        last_checkpoint=report.last_checkpoint if report else None,
    )


def attempt_state(record: Record, state: ProcessState) -> AttemptState:
    """The state of the newest attempt. One that was claimed has failed if its supervisor is gone and no report says how
    it ended.
    """
    report = state.report
    if record.attempt == 0:
        return AttemptState.NONE
    if report is not None and report.ended:
        return report.state
    if state.alive or not state.claimed:
        return report.state if report else AttemptState.STARTING
    return AttemptState.FAILED


def _message(state: ProcessState, attempt: AttemptState) -> str:
    if state.report is not None and state.report.message:
        return state.report.message
    return LOST if attempt is AttemptState.FAILED else ""


def _failed_at(job: Job[ProcessRecord], ages: Ages, now: Reading) -> float | None:
    record = job.record
    if record.failed_at is None:
        return None
    failed = Reading(wall=record.failed_at, boot_id=record.failed_boot_id or "", boottime=record.failed_boottime or 0.0)
    return now.wall - ages.seconds((job.key, "failure"), failed, now.boottime, failed.age(now))


def _last_step_at(job: Job[ProcessRecord], state: ProcessState, ages: Ages, now: Reading) -> float | None:
    if state.mark is None:
        return None
    return now.wall - ages.seconds((job.key, "step"), (job.record.attempt, state.mark), now.boottime)


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
