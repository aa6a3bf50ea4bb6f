"""The local executor: looks at every job, asks the life cycle what to do, and does it.

It remembers nothing that matters: the store and the attempts' files say where each job is, so a service that was
killed goes on with what it finds. What it decides is written to the store first, on the version it looked at, and then
done; whatever is done twice, because the service was killed in between, changes nothing the second time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert

from penstock.api.executor.admission import Demand, Waiting, admitted, demand_of
from penstock.api.executor.folder import AttemptFolder
from penstock.api.executor.observe import Seen, observed
from penstock.api.executor.planning import Planner, Question
from penstock.api.executor.supervisors import Supervisors
from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.api.store.jobs import ChangedMeanwhileError, StoredJob
from penstock.api.store.plans import keep_plan, keep_profile
from penstock.api.store.plans import plan as stored_plan
from penstock.api.store.schema import attempts
from penstock.core.errors import UserError
from penstock.core.lifecycle import (
    Bind,
    Decision,
    Delete,
    Expire,
    Launch,
    Phase,
    SetPhase,
    StartPlan,
    StartProfile,
    Step,
    Stop,
    Wait,
    decide,
)
from penstock.core.plan import Plan
from penstock.core.profile import Profile, digest
from penstock.core.supervision import Binding, Order, Wish
from penstock.planner import yamltext

log = logging.getLogger(__name__)

LOSSES = frozenset({"AttemptFailed", "BackoffLimitExceeded"})
"""The life cycle's reasons for counting one more failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reports:
    """Where attempts report to, and the file that holds the token for it."""

    server: str
    token_file: Path


class Executor:
    """Runs the jobs of ``service`` on this machine, which has ``capacity``."""

    def __init__(
        self,
        service: Service,
        supervisors: Supervisors,
        planner: Planner,
        *,
        capacity: Demand,
        name: str,
        reports: Reports,
    ) -> None:
        self._service, self._supervisors, self._planner = service, supervisors, planner
        self._capacity, self._name, self._reports = capacity, name, reports
        self._plans: dict[str, Plan] = {}
        self._no_plan: dict[str, str] = {}

    def turn(self) -> None:
        """Look at every job once."""
        found = self._service.read(jobs.unfinished)
        seen = {each.uid: self._look(each) for each in found}
        free = self._admitted(found, seen)
        for each in found:
            try:
                self._advance(each, seen[each.uid], each.uid in free)
            except ChangedMeanwhileError:
                continue  # somebody changed the job since it was read: the next turn sees it
            except (OSError, UserError) as error:
                log.error("job %s/%s (%s): %s", each.namespace, each.name, each.uid, error)

    # Looking

    def _folder(self, stored: StoredJob) -> AttemptFolder:
        return AttemptFolder(self._root(stored), stored.attempt)

    def _root(self, stored: StoredJob) -> Path:
        return self._service.settings.runs / stored.uid

    def _look(self, stored: StoredJob) -> Seen:
        if stored.attempt == 0:
            return Seen()
        folder, supervisors = self._folder(stored), self._supervisors
        alive = supervisors.alive(folder)  # before its report: one that ends in between has said so
        return Seen(
            started=supervisors.claimed(folder),
            alive=alive,
            stop_wished=supervisors.wished(folder, Wish.STOP),
            report=supervisors.report(folder),
        )

    def _admitted(self, found: list[StoredJob], seen: Mapping[str, Seen]) -> frozenset[str]:
        waiting = [
            Waiting(uid=each.uid, number=each.number, priority=each.priority, demand=demand_of(each.job.spec))
            for each in found
            if each.phase is Phase.QUEUED and not each.job.spec.run_policy.suspend
        ]
        running = [demand_of(each.job.spec) for each in found if self._holds(each, seen[each.uid])]
        return admitted(waiting, running, self._capacity)

    @staticmethod
    def _holds(stored: StoredJob, seen: Seen) -> bool:
        """Whether a job has its cores or devices: from its launch until nothing of it is left."""
        return seen.alive or stored.phase in (Phase.PROFILING, Phase.PLANNING, Phase.BINDING, Phase.RUNNING)

    # Deciding

    def _advance(self, stored: StoredJob, seen: Seen, free: bool) -> None:
        if stored.delete_requested_at is not None:
            self._delete(stored, seen)
            return
        plan, plan_message = self._plan_step(stored)
        predicted = self._plans.get(stored.plan_digest or "")
        now = self._service.clock()
        looked = observed(
            stored,
            seen,
            admitted=free,
            plan=plan,
            plan_message=plan_message,
            predicted_step_seconds=predicted.prediction.step_seconds if predicted and predicted.prediction else None,
        )
        if stored.attempt and not seen.started and not stored.phase.terminal:
            self._start(stored)
        for decision in decide(stored.job.spec, looked, now):
            stored = self._apply(stored, decision, now)

    def _plan_step(self, stored: StoredJob) -> tuple[Step, str]:
        """Where planning is, for the newest attempt."""
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
        self._keep(stored, answer.plan)
        return Step.WORKING, ""  # the next turn finds it in the store

    def _remember(self, plan_digest: str) -> None:
        if plan_digest not in self._plans:
            found = self._service.read(lambda connection: stored_plan(connection, plan_digest))
            if found is not None:
                self._plans[plan_digest] = found

    def _keep(self, stored: StoredJob, plan: Plan) -> None:
        now = self._service.clock()
        profile = _read_profile(self._root(stored))

        def change(connection: Connection) -> None:
            if profile is not None:
                key = digest([profile.key.to_manifest(), profile.model_digest])
                keep_profile(connection, key, profile)
            keep_plan(connection, stored.uid, stored.attempt, plan, now)

        self._service.write(stored.uid, change)

    # Doing

    def _apply(self, stored: StoredJob, decision: Decision, now: float) -> StoredJob:
        match decision:
            case SetPhase():
                return self._enter(stored, decision, now)
            case Launch():
                return self._launch(stored, decision, now)
            case StartProfile():
                self._supervisors.ask(self._folder(stored), Wish.MEASURE)
            case StartPlan():
                self._begin_planning(stored)
            case Bind():
                self._bind(stored)
            case Stop():
                self._supervisors.ask(self._folder(stored), Wish.STOP)
            case Delete():
                self._supervisors.end(self._folder(stored))
            case Expire():
                self._service.write(stored.uid, lambda c: jobs.mark_deleted(c, stored.uid, now))
            case Wait():
                pass  # every job is looked at again soon
        return stored

    def _enter(self, stored: StoredJob, decision: SetPhase, now: float) -> StoredJob:
        lost: dict[str, Any] = {"failures": stored.failures + 1, "failed_at": now} if decision.reason in LOSSES else {}
        if decision.phase.terminal or decision.phase is Phase.SUSPENDED:
            self._planner.cancel(stored.uid)

        def change(connection: Connection) -> StoredJob:
            jobs.require_version(connection, stored.uid, stored.version)
            phase, reason, message = decision.phase, decision.reason, decision.message
            return jobs.enter_phase(connection, stored.uid, phase, reason, message, now, **lost)

        return self._service.write(stored.uid, change)

    def _launch(self, stored: StoredJob, decision: Launch, now: float) -> StoredJob:
        """The attempt's number is kept before anything starts: it can never be given twice."""
        row = {
            "uid": stored.uid,
            "attempt": decision.attempt,
            "num_ranks": decision.ranks,
            "resume_from": decision.resume_from,
            "launched_at": now,
            "state": "starting",
            "message": "",
        }
        started = stored.started_at if stored.started_at is not None else now

        def change(connection: Connection) -> StoredJob:
            jobs.require_version(connection, stored.uid, stored.version)
            connection.execute(insert(attempts).values(row))
            body = {"attempt": decision.attempt, "ranks": decision.ranks, "resumeFrom": decision.resume_from}
            changes = {"attempt": decision.attempt, "started_at": started, "executor": self._name}
            jobs.add_event(connection, stored.uid, "launched", body, now, **changes)
            return jobs.get(connection, stored.uid)

        launched = self._service.write(stored.uid, change)
        self._start(launched)
        return launched

    def _start(self, stored: StoredJob) -> None:
        """Idempotent: an attempt that has a supervisor gets no other."""
        root = self._root(stored)
        root.mkdir(parents=True, exist_ok=True)
        (root / "job.yaml").write_text(yamltext.dump(stored.job.to_manifest()))
        limit = stored.job.spec.run_policy.active_deadline_seconds
        deadline = (stored.started_at or 0.0) + limit if limit else None
        order = Order(
            uid=stored.uid,
            attempt=stored.attempt,
            deadline_at=deadline,
            server=self._reports.server,
            token_file=str(self._reports.token_file),
        )
        self._supervisors.start(self._folder(stored), order)

    def _begin_planning(self, stored: StoredJob) -> None:
        profile = _read_profile(self._root(stored))
        if profile is None:
            self._no_plan[stored.uid] = "the measurement left no profile; submit the job anew"
            return
        self._planner.start(stored.uid, Question(spec=stored.job.spec, profile=profile))

    def _bind(self, stored: StoredJob) -> None:
        plan = self._plans[stored.plan_digest or ""]
        _write_json(self._root(stored) / "plan.json", plan.to_manifest())
        self._supervisors.bind(self._folder(stored), Binding(plan_digest=plan.digest))

    def _delete(self, stored: StoredJob, seen: Seen) -> None:
        self._planner.cancel(stored.uid)
        if seen.alive:
            self._supervisors.end(self._folder(stored))
        now = self._service.clock()
        self._service.write(stored.uid, lambda connection: jobs.mark_deleted(connection, stored.uid, now))


def _read_profile(root: Path) -> Profile | None:
    try:
        return Profile.from_manifest(json.loads((root / "profile.json").read_text()))
    except FileNotFoundError:
        return None


def _write_json(path: Path, manifest: Mapping[str, Any]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(manifest, indent=1) + "\n")
    partial.replace(path)
