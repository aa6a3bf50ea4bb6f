"""Jobs in the store: create, find, list, change. Every change increments the row's version and adds an event.

Every change of a job locks its row first (in `add_event`), so two services never give events the same number.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Insert,
    Row,
    Select,
    and_,
    case,
    delete,
    func,
    insert,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.exc import IntegrityError

from penstock.api.store.engine import upsert
from penstock.api.store.rows import in_parts, put
from penstock.api.store.schema import events, job_labels, jobs, log_lines, points, progress, rollups, series, sources
from penstock.api.store.step_predictions import StepPredictions, speed_of_step, step_predictions
from penstock.core import jsontext
from penstock.core.errors import MistakesError, PenstockError, UserError, mistakes_in
from penstock.core.failure import LAST_OUTPUT
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import LIVE, Phase, enter
from penstock.core.manifest import limits_lifted
from penstock.core.speed import Speed

MOST_PER_PAGE = 500
KEPT_OF_REPORTS = ("loss", "step_seconds", "last_checkpoint")
"""Fields that a report may omit."""


class NoSuchJobError(PenstockError):
    """No job has this uid, or this namespace and name."""


class NameTakenError(PenstockError):
    """A job of that name exists already."""


class ChangedMeanwhileError(PenstockError):
    """The job has changed since it was read."""


def num_steps(manifest: Mapping[str, Any]) -> int:
    """Number of steps of a stored manifest, which core may refuse although a cluster accepted it; 0 without one."""
    steps = spec_part(manifest, "training").get("steps")
    return steps if type(steps) is int and steps >= 0 else 0


def is_suspended(manifest: Mapping[str, Any]) -> bool:
    """Whether a stored manifest sets ``suspend``."""
    return spec_part(manifest, "runPolicy").get("suspend") is True


def spec_part(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Part of a stored manifest's spec; empty if a cluster accepted something other than fields for it."""
    spec = manifest["spec"]
    part = spec.get(name) if isinstance(spec, Mapping) else None
    return part if isinstance(part, Mapping) else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredJob:
    """A job's row and its progress. ``version`` changes with everything but progress, ``generation`` with the spec.

    ``speed`` is that of the reported step. ``cluster`` is where the job runs; it is empty for one of a machine.
    """

    number: int
    uid: str
    namespace: str
    name: str
    manifest: Mapping[str, Any]
    cluster: str
    version: int
    generation: int
    created_by: str
    created_at: float
    changed_at: float
    phase: Phase
    phase_reason: str
    phase_message: str
    phase_entered_at: float
    priority: int
    attempt: int
    failures: int
    started_at: float | None
    failed_at: float | None
    finished_at: float | None
    delete_requested_at: float | None
    deleted_at: float | None
    executor: str | None
    plan_digest: str | None
    last_event: int
    failed_boot_id: str | None = None
    failed_boottime: float | None = None
    progress: Reported | None = None
    speed: Speed | None = None

    @property
    def job(self) -> PipelineJob:
        """Return the job for its current attempt; raises `OutdatedJobError` for one that this version does not accept.

        While an attempt is live, limits that were introduced after its launch do not apply.
        """
        return self.recorded_job if self.phase in LIVE else self.next_job

    @property
    def next_job(self) -> PipelineJob:
        """Like `job`, but for a new attempt or a retry as another job: all limits of this version apply."""
        return _understood(self.manifest)

    @property
    def recorded_job(self) -> PipelineJob:
        """Return the job for display: no limits apply, because an older version may have had none."""
        with limits_lifted():
            return _understood(self.manifest)

    @property
    def mistakes(self) -> tuple[UserError, ...]:
        """Reasons why this version starts no attempt of the job; empty for a job that it accepts."""
        try:
            _understood(self.manifest)
        except OutdatedJobError as mistake:
            return mistake.errors
        return ()

    @property
    def num_steps(self) -> int:
        """Number of steps of the job; 0 if its cluster accepted something other than a number."""
        return num_steps(self.manifest)

    @property
    def suspend(self) -> bool:
        """Whether suspension is requested."""
        return is_suspended(self.manifest)

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels by which lists filter."""
        return dict(self.manifest["metadata"].get("labels", {}))


class OutdatedJobError(MistakesError):
    """A stored job that another version or a cluster accepted, and this version does not, for the reasons in
    ``errors``.
    """


def _understood(manifest: Mapping[str, Any]) -> PipelineJob:
    try:
        return PipelineJob.from_manifest(manifest)
    except UserError as mistake:
        raise OutdatedJobError(mistakes_in(mistake)) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """Newest report of a job's ranks; fields in the order of the table's columns."""

    attempt: int
    step: int
    loss: float | None = None
    step_seconds: float | None = None
    last_checkpoint: int | None = None
    reported_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Query of jobs and their order. All ``labels`` must match; deleted jobs are included only on request."""

    namespaces: tuple[str, ...] | None = None
    phases: tuple[Phase, ...] = ()
    labels: Mapping[str, str] | None = None
    name: str = ""
    deleted: bool = False
    sort: str = "-created"
    limit: int = 50
    cursor: str | None = None


SORTS = {"created": jobs.c.number, "name": jobs.c.name, "priority": jobs.c.priority, "phase": jobs.c.phase}

_JOB_COLUMNS = list(jobs.columns)
_PROGRESS_COLUMNS = [column.label(f"progress_{column.name}") for column in progress.columns]
_JOINED = select(*_JOB_COLUMNS, *_PROGRESS_COLUMNS).select_from(
    jobs.outerjoin(progress, and_(progress.c.uid == jobs.c.uid, progress.c.attempt == jobs.c.attempt))
)


def create(
    connection: Connection, job: PipelineJob, uid: str, by: str, now: float, executor: str | None = None
) -> StoredJob:
    """Insert a new job in phase Pending, for this ``executor`` or any; raises `NameTakenError` while one of that name
    exists.
    """
    manifest = job.to_manifest()
    manifest["metadata"] = {**manifest["metadata"], "uid": uid}
    meta = job.metadata
    row = first_row(meta.namespace, meta.name, manifest, uid, by, now)
    row |= {"priority": job.spec.run_policy.priority, "executor": executor}
    try:
        with connection.begin_nested():
            connection.execute(insert(jobs).values(row))
    except IntegrityError:
        raise NameTakenError(f"{meta.namespace}/{meta.name}") from None
    write_labels(connection, uid, meta.labels)
    add_event(connection, uid, "created", {"by": by}, now)
    return get(connection, uid)


def first_row(namespace: str, name: str, manifest: Mapping[str, Any], uid: str, by: str, now: float) -> dict[str, Any]:
    """Return the row of a new job."""
    return {
        "uid": uid,
        "namespace": namespace,
        "name": name,
        "manifest": manifest,
        "version": 1,
        "generation": 1,
        "created_by": by,
        "created_at": now,
        "changed_at": now,
        "phase": Phase.PENDING.value,
        "phase_reason": "Submitted",
        "phase_message": "",
        "phase_entered_at": now,
        "priority": 0,
        "attempt": 0,
        "failures": 0,
        "last_event": 0,
    }


def write_labels(connection: Connection, uid: str, labels: Mapping[str, str]) -> None:
    """Insert the labels of a job without labels, for the filters of lists."""
    if labels:
        rows = [{"uid": uid, "key": key, "value": value} for key, value in labels.items()]
        connection.execute(insert(job_labels), rows)


def proposed(
    connection: Connection, job: PipelineJob, uid: str, by: str, now: float, executor: str | None = None
) -> StoredJob:
    """Return the job that `create` would insert, or raise its errors, without storing anything."""
    trial = connection.begin_nested()
    try:
        return create(connection, job, uid, by, now, executor)
    finally:
        trial.rollback()


def get(connection: Connection, uid: str) -> StoredJob:
    """Return the job with this uid, deleted or not; raises `NoSuchJobError`."""
    row = connection.execute(_JOINED.where(jobs.c.uid == uid)).one_or_none()
    if row is None:
        raise NoSuchJobError(uid)
    return _stored(connection, [row])[0]


def namespace_of(connection: Connection, uid: str) -> str | None:
    """Return the namespace of the job with this uid, deleted or not; none if the store does not have it."""
    return connection.execute(select(jobs.c.namespace).where(jobs.c.uid == uid)).scalar_one_or_none()


def find(connection: Connection, namespace: str, name: str) -> StoredJob:
    """Return the existing job of this name, else the latest deleted one; raises `NoSuchJobError`."""
    named = _JOINED.where(jobs.c.namespace == namespace, jobs.c.name == name)
    newest = named.order_by(jobs.c.deleted_at.is_not(None), jobs.c.number.desc())
    row = connection.execute(newest.limit(1)).one_or_none()
    if row is None:
        raise NoSuchJobError(f"{namespace}/{name}")
    return _stored(connection, [row])[0]


def names(connection: Connection, namespace: str, stem: str) -> frozenset[str]:
    """Return names with that prefix in the namespace, of existing and deleted jobs."""
    chosen = select(jobs.c.name).where(jobs.c.namespace == namespace, jobs.c.name.startswith(stem, autoescape=True))
    return frozenset(connection.execute(chosen).scalars())


def page(connection: Connection, query: Query) -> tuple[list[StoredJob], str | None]:
    """Return a page of jobs in order, and the cursor of the next page, if there is one.

    Raises:
        UserError: the sort or the cursor is invalid.
    """
    descending = query.sort.startswith("-")
    column = SORTS.get(query.sort.removeprefix("-"))
    if column is None:
        known = ", ".join(sorted(SORTS))
        raise UserError(
            what=f"{query.sort[:60]!r} is not an order",
            where="sort",
            remedy=f"write one of {known}, with a minus for descending order",
        )
    chosen = _filtered(select(jobs.c.number), query)
    if query.cursor is not None:
        place = tuple_(column, jobs.c.number)
        last_seen = tuple_(*_read_cursor(query.cursor, query.sort))
        chosen = chosen.where(place < last_seen if descending else place > last_seen)
    directed = [key_column.desc() if descending else key_column.asc() for key_column in (column, jobs.c.number)]
    limit = min(query.limit, MOST_PER_PAGE)
    # Sort only numbers, which indexes have: whole rows are large.
    numbers = chosen.order_by(*directed).limit(limit + 1)
    rows = connection.execute(_JOINED.where(jobs.c.number.in_(numbers)).order_by(*directed)).all()
    page_jobs = _stored(connection, rows[:limit])
    if len(rows) <= limit:
        return page_jobs, None
    last = rows[limit - 1]._mapping
    return page_jobs, _write_cursor(query.sort, last[column.name], last["number"])


def select_jobs(connection: Connection, *conditions: ColumnElement[bool]) -> list[StoredJob]:
    """Return the jobs that match all conditions, oldest first."""
    return _stored(connection, connection.execute(_JOINED.where(*conditions).order_by(jobs.c.number)).all())


def unfinished(
    connection: Connection, executor: str, *, ended: bool = True, waiting: Mapping[str, StoredJob] | None = None
) -> list[StoredJob]:
    """Return the jobs of an executor, oldest first: all that are not deleted, and are its own or have no executor yet.

    Without ``ended``, jobs that have ended and have no deletion request are left out. ``waiting`` are earlier read jobs
    without an attempt, by uid: one whose version is unchanged is not read again. Ten thousand queued manifests, read
    twice a second, would take a whole core.
    """
    free = or_(jobs.c.executor.is_(None), jobs.c.executor == executor)
    conditions: list[ColumnElement[bool]] = [jobs.c.deleted_at.is_(None), jobs.c.cluster == "", free]
    if not ended:
        terminal = [phase.value for phase in Phase if phase.terminal]
        conditions.append(or_(jobs.c.phase.not_in(terminal), jobs.c.delete_requested_at.is_not(None)))
    if not waiting:
        return select_jobs(connection, *conditions)
    heads = connection.execute(select(jobs.c.uid, jobs.c.version).where(*conditions).order_by(jobs.c.number)).all()
    unchanged = {uid: job for uid, version in heads if (job := waiting.get(uid)) is not None and job.version == version}
    for part in in_parts(uid for uid, _ in heads if uid not in unchanged):
        read = select_jobs(connection, jobs.c.uid.in_(part))
        unchanged.update((job.uid, job) for job in read)
    return [unchanged[uid] for uid, _ in heads if uid in unchanged]


def _filtered(chosen: Select[Any], query: Query) -> Select[Any]:
    if not query.deleted:
        chosen = chosen.where(jobs.c.deleted_at.is_(None))
    if query.namespaces is not None:
        chosen = chosen.where(jobs.c.namespace.in_(query.namespaces))
    if query.phases:
        chosen = chosen.where(jobs.c.phase.in_([phase.value for phase in query.phases]))
    if query.name:
        chosen = chosen.where(jobs.c.name.contains(query.name, autoescape=True))
    for key, value in (query.labels or {}).items():
        labelled = select(job_labels.c.uid).where(job_labels.c.key == key, job_labels.c.value == value)
        chosen = chosen.where(jobs.c.uid.in_(labelled))
    return chosen


def _write_cursor(sort: str, value: Any, number: int) -> str:
    return base64.urlsafe_b64encode(json.dumps([sort, value, number]).encode()).decode().rstrip("=")


def _read_cursor(text: str, sort: str) -> tuple[str | int, int]:
    try:
        of, value, number = jsontext.load(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (ValueError, TypeError):
        of, value, number = None, None, None
    kind = SORTS[sort.removeprefix("-")].type.python_type
    fits = isinstance(value, kind) and isinstance(number, int) and "\x00" not in str(value)
    if of != sort or not fits or max(number, value if kind is int else 0) >= 2**31:
        raise UserError(
            what="is not a valid cursor",
            where="cursor",
            remedy="pass the last page's `next` unchanged, with the same sort; or leave it out for the first page",
        )
    return value, number


def _stored(connection: Connection, rows: Sequence[Row[Any]]) -> list[StoredJob]:
    digests = {row.plan_digest for row in rows if row.plan_digest and row.progress_step_seconds}
    predictions = step_predictions(connection, digests)
    return [_one_stored(dict(row._mapping), predictions) for row in rows]


def _one_stored(values: dict[str, Any], predictions: StepPredictions) -> StoredJob:
    reported = {name: values.pop(f"progress_{name}") for name in [column.name for column in progress.columns]}
    reported.pop("uid")
    values["phase"] = Phase(values["phase"])
    return StoredJob(
        **values,
        progress=Reported(**reported) if reported["step"] is not None else None,
        speed=speed_of_step(predictions, values["plan_digest"], reported["step_seconds"]),
    )


# Changes


def add_event(
    connection: Connection,
    uid: str,
    kind: str,
    body: Mapping[str, Any],
    now: float,
    *,
    at: float | None = None,
    **changes: Any,
) -> int:
    """Add an event of the job with the next number, together with changes of the row; raises `NoSuchJobError`.

    An event on a cluster may have happened ``at`` an earlier time than it was observed here.
    """
    raised = {"last_event": jobs.c.last_event + 1, "version": jobs.c.version + 1, "changed_at": now}
    changing = update(jobs).where(jobs.c.uid == uid).values(**raised, **changes)
    number = connection.execute(changing.returning(jobs.c.last_event)).scalar_one_or_none()
    if number is None:
        raise NoSuchJobError(uid)
    row = {"uid": uid, "number": number, "at": now if at is None else at, "kind": kind, "body": dict(body)}
    connection.execute(insert(events).values(row))
    return int(number)


def require_version(connection: Connection, uid: str, version: int | None) -> StoredJob:
    """Lock the job until the transaction ends, and return it; raises `ChangedMeanwhileError` for another version."""
    current = connection.execute(select(jobs.c.version).where(jobs.c.uid == uid).with_for_update()).scalar_one_or_none()
    if current is None:
        raise NoSuchJobError(uid)
    if version is not None and current != version:
        raise ChangedMeanwhileError(f"version {current}, not {version}")
    return get(connection, uid)


def set_suspend(connection: Connection, uid: str, suspend: bool, by: str, now: float) -> StoredJob:
    """Set or clear ``suspend``; no change of a job that has ended or has the same value."""
    job = require_version(connection, uid, None)
    if job.phase.terminal or job.suspend == suspend:
        return job
    manifest = dict(job.manifest)
    spec = dict(manifest["spec"])
    spec["runPolicy"] = {**spec.get("runPolicy", {}), "suspend": suspend}
    manifest["spec"] = spec
    kind = "suspend-requested" if suspend else "resume-requested"
    add_event(connection, uid, kind, {"by": by}, now, manifest=manifest, generation=job.generation + 1)
    return get(connection, uid)


def request_delete(connection: Connection, uid: str, by: str, now: float) -> StoredJob:
    """Request the job's deletion; its executor marks it as deleted once none of its processes runs.

    A cluster may have reported the end before the requester is stored.
    """
    job = require_version(connection, uid, None)
    if job.delete_requested_at is None:
        add_event(connection, uid, "delete-requested", {"by": by}, now, delete_requested_at=now)
    return get(connection, uid)


def mark_deleted(connection: Connection, uid: str, now: float) -> None:
    """Mark the job as deleted: its name is free, and its history stays until its retention ends."""
    add_event(connection, uid, "deleted", {}, now, deleted_at=now)


def enter_phase(
    connection: Connection,
    uid: str,
    phase: Phase,
    reason: str,
    message: str,
    now: float,
    *,
    last_lines: Sequence[str] = (),
    **changes: Any,
) -> StoredJob:
    """Enter the phase; raises `IllegalTransitionError` for an illegal change.

    ``last_lines``, the last lines of the rank at fault, are stored only in the event: the row that lists read stays
    small.
    """
    job = require_version(connection, uid, None)
    entered = enter(job.phase, phase)
    body: dict[str, Any] = {"phase": entered.value, "reason": reason, "message": message}
    if last_lines:
        body[LAST_OUTPUT] = list(last_lines)
    if entered is Phase.SUSPENDED:
        changes["started_at"] = None  # its time limit restarts
    add_event(
        connection,
        uid,
        "phase",
        body,
        now,
        phase=entered.value,
        phase_reason=reason,
        phase_message=message,
        phase_entered_at=now,
        finished_at=now if entered.terminal else None,
        **changes,
    )
    return get(connection, uid)


def last_lines(events: Iterable[Row[Any]]) -> tuple[str, ...]:
    """Return the last lines of the rank at fault from the event of the current phase; ``events`` are oldest first."""
    phases = [row.body for row in events if row.kind == "phase"]
    return tuple(phases[-1].get(LAST_OUTPUT, ())) if phases else ()


def report(connection: Connection, reports: Iterable[tuple[str, Reported]]) -> None:
    """Store attempts' reports, by uid; ``step`` is the number of finished steps.

    Omitted fields keep the attempt's earlier values; fields of another attempt are dropped. A report of an attempt that
    is not the newest changes nothing: its records may arrive late.
    """
    newest: dict[str, Reported] = {}
    for uid, reported in reports:
        newest[uid] = _after_report(newest.get(uid), reported)
    put(connection, _upsert_progress, [(uid, *astuple(newest[uid])) for uid in sorted(newest)])


def _after_report(before: Reported | None, new: Reported) -> Reported:
    if before is None or before.attempt < new.attempt:
        return new
    if before.attempt > new.attempt:
        return before
    kept = {name: getattr(before, name) for name in KEPT_OF_REPORTS if getattr(new, name) is None}
    return replace(new, **kept) if kept else new


@functools.cache
def _upsert_progress(dialect: str) -> Insert:
    insertion = upsert(dialect, progress)
    new, old = insertion.excluded, progress.c
    same = old.attempt == new.attempt
    kept = {name: func.coalesce(new[name], case((same, old[name]))) for name in KEPT_OF_REPORTS}
    always = {name: new[name] for name in ("attempt", "step", "reported_at")}
    newest = new.attempt >= old.attempt
    return insertion.on_conflict_do_update(index_elements=[old.uid], set_={**kept, **always}, where=newest)


def history(connection: Connection, uid: str, after: int = 0, limit: int = 1000) -> Sequence[Row[Any]]:
    """Return the job's events with a number above ``after``, oldest first."""
    following = select(events).where(events.c.uid == uid, events.c.number > after)
    return connection.execute(following.order_by(events.c.number).limit(limit)).all()


def deleted_before(connection: Connection, before: float, most: int) -> list[str]:
    """Return the uids of jobs that were deleted before that time, oldest first."""
    chosen = select(jobs.c.uid).where(jobs.c.deleted_at < before)
    return list(connection.execute(chosen.order_by(jobs.c.number).limit(most)).scalars())


def forget(connection: Connection, uid: str) -> None:
    """Delete a job and all its records. Ingestion of a report locks the row too."""
    connection.execute(select(jobs.c.uid).where(jobs.c.uid == uid).with_for_update())
    mine = select(series.c.id).where(series.c.uid == uid)
    for numbers in (points, rollups):
        connection.execute(delete(numbers).where(numbers.c.series.in_(mine)))
    for table in (sources, log_lines, jobs):
        connection.execute(delete(table).where(table.c.uid == uid))
