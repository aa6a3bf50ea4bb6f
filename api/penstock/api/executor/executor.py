"""The local executor: reconciles every job by the engine, of which it is the backend.

It keeps no essential state: the store and the attempts' files have the state of each job, from which a service that was
killed goes on. A decision is written to the store first, on the version that was observed, and then carried out;
actions are idempotent, in case the service was killed in between.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from penstock import core
from penstock.api.executor.admission import Waiting, admitted, assigned
from penstock.api.executor.supervisors import Supervisors
from penstock.api.service import Service
from penstock.api.store import attempts, jobs, profiles
from penstock.api.store.jobs import ChangedMeanwhileError, StoredJob
from penstock.api.store.plans import keep_plan, keep_replanning
from penstock.api.store.plans import plan as stored_plan
from penstock.api.store.sanitize import cleaned
from penstock.core import jsontext
from penstock.core.capacity import Demand, Machine, demand_of, lacking
from penstock.core.clocks import Ages, Reading
from penstock.core.engine import Job, step
from penstock.core.errors import UserError
from penstock.core.host.clocks import boot_id, boottime_seconds
from penstock.core.host.launches import Holding, Launches
from penstock.core.job import JobSpec
from penstock.core.lifecycle import LIVE, LOSSES, Launch, Observation, Phase, SetPhase, Step
from penstock.core.plan import Plan
from penstock.core.processes import ProcessState, failure_changes, observation
from penstock.core.profile import Profile
from penstock.core.run.attempt_folder import AttemptFolder
from penstock.core.run.folder import RunDir
from penstock.core.serialization import yamltext
from penstock.core.serialization.files import make_folder, write_atomically
from penstock.core.supervision import AttemptReport, Binding, Order, SupervisorRequest
from penstock.core.timeline import Timeline
from penstock.planner.worker.process import Planner
from penstock.planner.worker.protocol import PlanningRequest

log = logging.getLogger(__name__)

EXPIRY_POLL_SECONDS = 30.0
MOST_LAST_LINES, MOST_LINE_CHARACTERS = 12, 500
VERSION = core.__version__


@dataclass(frozen=True, kw_only=True, slots=True)
class Reports:
    """Files for attempts with this service's address (`penstock.core.supervision.Address`), and the token for it."""

    address_file: Path
    token_file: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class _ObservedJob(Job[StoredJob]):
    """A job as observed in one call of `Executor.run_once`, and its demand.

    ``process_state`` is none if the attempt's files could not be read.
    """

    demand: Demand
    process_state: ProcessState | None

    @property
    def rests(self) -> bool:
        """Whether the job needs no step until it changes or may start, as most jobs in a queue."""
        is_new = self.record.phase is Phase.QUEUED and self.record.attempt == 0
        return is_new and not self.spec.run_policy.suspend


class Executor:
    """Runs the jobs of ``service`` on this ``machine``.

    A launched job has this executor's ``name`` and belongs to no other: the attempts' files are here. The executor
    launches only while ``may_launch`` returns true, which means that the machine is its own; jobs that it has launched
    before go on to their end. Capacity that other programs of the user hold by ``launches`` is left to them.
    ``boottime`` returns seconds since the boot.

    It is the `penstock.core.engine.Backend` of these jobs.
    """

    def __init__(
        self,
        service: Service,
        supervisors: Supervisors,
        planner: Planner,
        *,
        machine: Machine,
        name: str,
        reports: Reports,
        may_launch: Callable[[], bool],
        launches: Launches | None = None,
        boottime: Callable[[], float] = boottime_seconds,
    ) -> None:
        self._service, self._supervisors, self._planner = service, supervisors, planner
        self._machine, self._name, self._reports, self._may_launch = machine, name, reports, may_launch
        self._launches, self._logged_holdings = launches, ""
        self._plans: dict[str, Plan] = {}
        self._no_plan: dict[str, str] = {}
        self._specs: dict[str, tuple[tuple[int, bool], JobSpec]] = {}
        self._resting: dict[str, _ObservedJob] = {}
        self._free: Mapping[str, tuple[str, ...]] = {}
        self._boottime, self._boot_id = boottime, boot_id()
        self._replannings: dict[str, tuple[int, str]] = {}
        self._unreadable_plans: set[str] = set()
        self._ages = Ages()
        self._expiry_poll_at = boottime()

    def run_once(self) -> None:
        """Reconcile every job that this executor or none has launched, once. An error in one is logged, and the others
        go on.
        """
        stored_jobs = self._read_jobs()
        for stored in stored_jobs:
            if stored.delete_requested_at is not None:
                with _surviving(stored):
                    self._delete(stored)
        kept = [self._observe_job(stored) for stored in stored_jobs if stored.delete_requested_at is None]
        observed_jobs = [observed for observed in kept if observed is not None]
        self._free, resting = self._starting(observed_jobs), {}
        for observed in observed_jobs:
            uid = observed.record.uid
            with _surviving(observed.record):
                if uid in self._free or observed is not self._resting.get(uid):
                    self._advance(observed)
                if observed.rests and uid not in self._free:
                    resting[uid] = observed
        self._resting = resting

    # Observation

    def _read_jobs(self) -> list[StoredJob]:
        """Return the jobs to reconcile. Ended jobs are many and can only expire, so they are included less often."""
        now = self._boottime()
        expiry = now >= self._expiry_poll_at
        if expiry:
            self._expiry_poll_at = now + EXPIRY_POLL_SECONDS
        waiting = {uid: observed.record for uid, observed in self._resting.items()}
        stored_jobs = self._service.read(
            lambda connection: jobs.unfinished(connection, self._name, ended=expiry, waiting=waiting)
        )
        if expiry:
            self._forget_all_but(stored_jobs)
        return stored_jobs

    def _forget_all_but(self, stored_jobs: Sequence[StoredJob]) -> None:
        uids = {stored.uid for stored in stored_jobs}
        self._ages.forget_all_but(uids)
        digests = {stored.plan_digest for stored in stored_jobs if not stored.phase.terminal}
        self._specs = {uid: spec for uid, spec in self._specs.items() if uid in uids}
        self._plans = {digest: plan for digest, plan in self._plans.items() if digest in digests}

    def _observe_job(self, stored: StoredJob) -> _ObservedJob | None:
        """Return the job as observed now; none if its manifest cannot be read, or observing it failed.

        A resting job is returned as observed before, unless it was read from the store again since.
        """
        resting = self._resting.get(stored.uid)
        if resting is not None and resting.record is stored:
            return resting
        with _surviving(stored):
            try:
                spec, process_state = self._spec(stored), None
            except UserError as mistake:
                if not stored.phase.terminal:  # another version accepted the job, and this one does not
                    self._fail(stored, "InvalidSpec", mistake)
                return None
            with _surviving(stored):
                process_state = self._supervisors.observe(self._folder(stored)) if stored.attempt else ProcessState()
            return _ObservedJob(
                key=stored.uid, record=stored, spec=spec, demand=demand_of(spec), process_state=process_state
            )
        return None

    def _spec(self, stored: StoredJob) -> JobSpec:
        """Return the job's spec, from a cache: parsing specs would be most of the cost of a poll.

        A spec changes only with its generation. Limits of this version apply unless an attempt is live.
        """
        key, known = (stored.generation, stored.phase in LIVE), self._specs.get(stored.uid)
        if known is None or known[0] != key:
            known = self._specs[stored.uid] = (key, stored.job.spec)
        return known[1]

    def _folder(self, stored: StoredJob) -> AttemptFolder:
        return AttemptFolder(self._root(stored), stored.attempt)

    def _root(self, stored: StoredJob) -> Path:
        return self._service.settings.runs / stored.uid

    def _starting(self, observed_jobs: Sequence[_ObservedJob]) -> Mapping[str, tuple[str, ...]]:
        """The jobs that may start, by uid, each with the devices that it gets."""
        if not self._may_launch():
            return {}
        if not any(observed.record.phase is Phase.QUEUED for observed in observed_jobs):
            return {}
        holding = [observed for observed in observed_jobs if self._holds(observed)]
        own = [observed.record.uid for observed in observed_jobs]
        others = self._launches.others(own) if self._launches else []
        starting = self._admitted(observed_jobs, [*(observed.demand for observed in holding), *self._demands(others)])
        held: tuple[str, ...] = ()
        if any(job.demand.cuda_devices for job in starting):
            newest = [(observed.record.uid, observed.record.attempt) for observed in holding]
            try:
                held = self._service.read(lambda connection: attempts.devices_of(connection, newest))
            except SQLAlchemyError:
                log.exception("the devices that are held cannot be read, so nothing starts")
                return {}
        elsewhere = self._launches.devices_of(others) if self._launches else ()
        return assigned(starting, (*held, *elsewhere), self._machine.devices)

    def _demands(self, others: Sequence[Holding]) -> list[Demand]:
        """Return the demands of other programs; log them when they change while jobs wait."""
        line = ", ".join(map(str, others))
        if line and line != self._logged_holdings:
            log.warning("%s; jobs that do not fit next to them stay queued", line)
        self._logged_holdings = line
        return [self._launches.demand_of(holding) for holding in others] if self._launches else []

    def _admitted(self, observed_jobs: Sequence[_ObservedJob], running: Sequence[Demand]) -> list[Waiting]:
        waiting = [
            Waiting(
                uid=observed.record.uid,
                number=observed.record.number,
                priority=observed.record.priority,
                demand=observed.demand,
            )
            for observed in observed_jobs
            if observed.record.phase is Phase.QUEUED and not observed.spec.run_policy.suspend
        ]
        uids = admitted(waiting, running, self._machine.capacity)
        return [job for job in waiting if job.uid in uids]

    @staticmethod
    def _holds(observed: _ObservedJob) -> bool:
        """Whether the job holds its cores or devices: from its launch until none of its processes is left, and while it
        continues with another plan.
        """
        record, state = observed.record, observed.process_state
        is_replanned = record.phase is Phase.RECOVERING and record.phase_reason == "Drift"
        return record.phase in LIVE or is_replanned or (state is not None and state.alive)

    def _advance(self, observed: _ObservedJob) -> None:
        """Take a step of the job, or fail it if it needs more than the machine has."""
        stored = observed.record
        short = lacking(observed.demand, self._machine.capacity)
        if short and stored.phase is Phase.QUEUED:
            remedy = "lower it, or use a larger machine"
            self._fail(stored, "UserError", UserError(what=f"needs {short}", where="spec.resources", remedy=remedy))
        elif observed.process_state is not None:
            step(self, observed, self._now())

    def _now(self) -> Reading:
        return Reading(wall=self._service.clock(), boot_id=self._boot_id, boottime=self._boottime())

    # Backend: observation

    def observe(self, observed: _ObservedJob, now: Reading, *, fresh: bool = False) -> Observation:
        """Return the observation of the attempt, with the state of its plan and whether the job may start."""
        stored = observed.record
        assert observed.process_state is not None, "a job whose attempt cannot be observed takes no step"
        self._keep_replanning(stored, observed.process_state.report)
        plan, error = self._plan_step(stored)
        planned = self._plans.get(stored.plan_digest or "")
        state = replace(
            observed.process_state,
            admitted=observed.key in self._free,
            mark=_mark(stored, observed.process_state),
            plan=plan,
            plan_error=error,
            predicted_step_seconds=planned.prediction.step_seconds if planned and planned.prediction else None,
        )
        return observation(observed, state, self._ages, now)

    def _plan_step(self, stored: StoredJob) -> tuple[Step, str]:
        """Return the state of planning for the newest attempt, and its error; missing outside of live phases."""
        if stored.phase not in LIVE:
            return Step.MISSING, ""
        if stored.uid in self._no_plan:
            return Step.FAILED, self._no_plan[stored.uid]
        if stored.plan_digest is not None:
            self._remember(stored.plan_digest)
            return Step.DONE, ""
        if not self._planner.busy(stored.uid):
            return Step.MISSING, ""
        answer = self._planner.poll(stored.uid)
        if answer is None:
            return Step.WORKING, ""
        if answer.plan is None:
            self._no_plan[stored.uid] = answer.error
            return Step.FAILED, answer.error
        self._keep(stored, answer.plan, answer.timeline)
        return Step.WORKING, ""  # the next turn finds it in the store

    def _remember(self, plan_digest: str) -> None:
        if plan_digest not in self._plans:
            plan = self._service.read(lambda connection: stored_plan(connection, plan_digest))
            if plan is not None:
                self._plans[plan_digest] = plan

    def _keep(self, stored: StoredJob, plan: Plan, timeline: Timeline | None) -> None:
        now = self._service.clock()
        self._service.write(stored.uid, lambda c: keep_plan(c, stored.uid, stored.attempt, plan, now, timeline))

    def _keep_replanning(self, stored: StoredJob, report: AttemptReport | None) -> None:
        """Store what a supervisor reports of planning again: its last decision, and the plan that the ranks have
        changed to or that the next attempt runs. A stored plan changes the job's version, so the next turn takes the
        step.
        """
        if report is None or stored.phase not in LIVE:
            return
        uid, attempt, now = stored.uid, stored.attempt, self._service.clock()
        if report.replanning and self._replannings.get(uid) != (attempt, report.replanning):
            self._service.write(uid, lambda c: keep_replanning(c, uid, attempt, cleaned(report.replanning), now))
            self._replannings[uid] = (attempt, report.replanning)
            raise ChangedMeanwhileError("a decision of planning again was stored")
        if report.plan_digest in ("", stored.plan_digest):
            return
        try:
            plan = RunDir(self._root(stored)).read_plan()
        except UserError as error:
            if report.plan_digest not in self._unreadable_plans:
                log.error("job %s: the plan of its ranks, or of its next attempt, cannot be read: %s", uid, error)
            self._unreadable_plans.add(report.plan_digest)
            return
        if plan.digest == report.plan_digest:
            self._service.write(uid, lambda c: keep_plan(c, uid, attempt + report.ended, plan, now))
            raise ChangedMeanwhileError("a plan was stored")

    # Backend: actions

    def enter(self, observed: _ObservedJob, entered: SetPhase, now: Reading) -> None:
        """Store the phase. If the store refuses it, the attempt is unaffected: the engine ends it only afterwards.

        If the service is killed in between, the next one ends what is still alive. A launch also ends the attempt
        before it.
        """
        lines = last_lines(observed.process_state) if observed.process_state and entered.reason in LOSSES else ()
        changes = failure_changes(observed.record, entered, now)
        self._enter(observed.record, entered, now.wall, last_lines=lines, **changes)

    def _enter(self, stored: StoredJob, entered: SetPhase, now: float, **changes: Any) -> None:
        def change(connection: Connection) -> None:
            jobs.require_version(connection, stored.uid, stored.version)
            jobs.enter_phase(connection, stored.uid, entered.phase, entered.reason, entered.message, now, **changes)

        self._service.write(stored.uid, change)
        if entered.phase.terminal or entered.phase is Phase.SUSPENDED:
            self._forget_planning(stored)

    def _fail(self, stored: StoredJob, reason: str, mistake: UserError) -> None:
        self._enter(stored, SetPhase(Phase.FAILED, reason, str(mistake)), self._service.clock())
        self._close(stored)

    def _close(self, stored: StoredJob) -> None:
        """End the newest attempt: when this returns, none of its processes runs, and none can start later."""
        if stored.attempt:
            self._supervisors.end(self._folder(stored))

    def _forget_planning(self, stored: StoredJob) -> None:
        self._planner.cancel(stored.uid)
        self._no_plan.pop(stored.uid, None)
        self._replannings.pop(stored.uid, None)

    def launch(self, observed: _ObservedJob, launch: Launch, entered: SetPhase | None, now: Reading) -> _ObservedJob:
        """Store the attempt's number, its devices and the phase in one transaction before anything starts, so that no
        number and no device is given twice.
        """
        assert entered is not None, "a job waits for its devices before it is launched"
        stored, at = observed.record, now.wall
        started = stored.started_at if stored.started_at is not None else at

        def change(connection: Connection) -> StoredJob:
            jobs.require_version(connection, stored.uid, stored.version)
            attempts.add(connection, stored.uid, launch, self._free.get(stored.uid, ()), at)
            body = {
                "attempt": launch.attempt,
                "ranks": launch.ranks,
                "resumeFrom": launch.resume_from,
                "penstock": VERSION,
            }
            changes: dict[str, Any] = {"attempt": launch.attempt, "started_at": started, "executor": self._name}
            jobs.add_event(connection, stored.uid, "launched", body, at, **changes)
            return jobs.enter_phase(connection, stored.uid, entered.phase, entered.reason, entered.message, at)

        return replace(observed, record=self._service.write(stored.uid, change))

    def start(self, observed: _ObservedJob) -> None:
        """Write the job and start the attempt's supervisor, unless the attempt has one."""
        stored = observed.record
        # Any checkpoint to begin from is readable: that was checked at the submission.
        job = self._service.settings.locations.resolved(stored.job, readable=lambda uid: True)
        root = self._root(stored)
        make_folder(root)
        write_atomically(root / "job.yaml", yamltext.dump(job.to_manifest()))
        limit = observed.spec.run_policy.active_deadline_seconds
        deadline = (stored.started_at or 0.0) + limit if limit else None
        order = Order(
            uid=stored.uid,
            attempt=stored.attempt,
            deadline_at=deadline,
            address_file=str(self._reports.address_file),
            token_file=str(self._reports.token_file),
            devices=self._service.read(lambda c: attempts.devices_of(c, [(stored.uid, stored.attempt)])),
        )
        self._supervisors.start(self._folder(stored), order)

    def measure(self, observed: _ObservedJob) -> None:
        """Request the measurement from the supervisor."""
        self._supervisors.request(self._folder(observed.record), SupervisorRequest.MEASURE)

    def stop(self, observed: _ObservedJob, reason: str) -> None:
        """Request a checkpoint and the end from the supervisor."""
        self._supervisors.request(self._folder(observed.record), SupervisorRequest.STOP)

    def delete(self, observed: _ObservedJob) -> None:
        """End the newest attempt."""
        self._close(observed.record)

    def expire(self, observed: _ObservedJob) -> None:
        """Delete the job."""
        self._delete(observed.record)

    def plan(self, observed: _ObservedJob) -> None:
        """Start planning by the measured profile. A missing or unreadable profile counts as a failed plan, because a
        retry would not fix it.
        """
        stored = observed.record
        try:
            profile = Profile.from_manifest(jsontext.load((self._root(stored) / "profile.json").read_text()))
        except FileNotFoundError:
            self._no_plan[stored.uid] = "the measurement left no profile; submit the job again"
            return
        except (UserError, ValueError) as error:
            self._no_plan[stored.uid] = f"the profile cannot be read: {error}"
            return
        self._service.write("profiles", lambda connection: profiles.keep(connection, profile))
        report = observed.process_state.report if observed.process_state else None
        spec = observed.spec.to_plan(has_checkpoint=report is not None and report.last_checkpoint is not None)
        self._planner.start(stored.uid, PlanningRequest(spec=spec, profile=profile))

    def bind(self, observed: _ObservedJob) -> None:
        """Write the plan, and then the binding that makes the supervisor read it."""
        stored = observed.record
        plan = self._plans[stored.plan_digest or ""].for_ranks
        write_atomically(self._root(stored) / "plan.json", json.dumps(plan.to_manifest(), indent=1) + "\n")
        self._supervisors.bind(self._folder(stored), Binding(plan_digest=plan.digest))

    def _delete(self, stored: StoredJob) -> None:
        self._forget_planning(stored)
        self._close(stored)
        now = self._service.clock()
        self._service.write(stored.uid, lambda connection: jobs.mark_deleted(connection, stored.uid, now))


@contextmanager
def _surviving(stored: StoredJob) -> Iterator[None]:
    """Log errors of this job, so that they do not affect others."""
    try:
        yield
    except ChangedMeanwhileError:
        pass  # the job was changed since it was read: the next turn handles it
    except Exception:  # of any kind: the other jobs do not wait for it
        log.exception(
            "job %s/%s (%s): reconcile failed; retrying at the next poll", stored.namespace, stored.name, stored.uid
        )


def _mark(stored: StoredJob, process_state: ProcessState) -> tuple[int | None, float | None] | None:
    """Return the last step in the records, and the time of the last step in the supervisor's report; none while there
    is neither.

    The report changes even while records cannot be sent. Its time is only compared for equality.
    """
    progress = stored.progress
    step = progress.step if progress is not None and progress.attempt == stored.attempt else None
    at = process_state.report.last_step_at if process_state.report else None
    return None if step is None and at is None else (step, at)


def last_lines(state: ProcessState) -> tuple[str, ...]:
    """The last lines of the rank at fault, cut to the limits of an event."""
    lines = state.report.last_words if state.report else ()
    return tuple(cleaned(line[:MOST_LINE_CHARACTERS]) for line in lines[-MOST_LAST_LINES:])
