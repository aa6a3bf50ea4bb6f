"""Jobs of a cluster in the store: rows that follow snapshots of PipelineJobs, also after missed updates.

A snapshot has the object's resource version; one that is older than the stored version changes nothing. So updates may
come from any source, repeatedly and in any order: the watch, a list, or the answer to a change.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from penstock.api.store import jobs as store
from penstock.api.store.engine import upsert
from penstock.api.store.jobs import StoredJob
from penstock.api.store.schema import attempts, job_labels, jobs, sightings
from penstock.core.status import Condition, JobStatus

UNKNOWN_USER = "cluster"
"""Author of a job or change whose author is unknown."""
MOST_PRIORITY = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSnapshot:
    """A job on its ``cluster`` at ``version``. ``manifest`` has the fields that users write, and the uid."""

    cluster: str
    uid: str
    namespace: str
    name: str
    version: int
    generation: int
    created_at: float
    manifest: Mapping[str, Any]
    status: JobStatus
    delete_requested_at: float | None = None

    @property
    def labels(self) -> Mapping[str, str]:
        """Labels by which lists filter."""
        written: Mapping[str, str] = self.manifest["metadata"].get("labels", {})
        return written

    @property
    def priority(self) -> int:
        """Priority in the manifest; 0 if it is not a number that the column holds."""
        priority = store.spec_part(self.manifest, "runPolicy").get("priority", 0)
        return priority if type(priority) is int and abs(priority) <= MOST_PRIORITY else 0

    @property
    def suspend(self) -> bool:
        """Whether the manifest requests suspension."""
        return store.is_suspended(self.manifest)


def put(connection: Connection, snapshot: JobSnapshot, now: float, by: str = UNKNOWN_USER) -> StoredJob:
    """Store the snapshot, with an event for each change; ``by`` is its author if that is known.

    An older version than the stored one changes nothing, nor does any snapshot of a deleted job.
    """
    version = _locked_version(connection, snapshot.uid)
    if version is None:
        _make(connection, snapshot, now, by)
    stored = store.get(connection, snapshot.uid)
    if stored.deleted_at is not None or (version is not None and snapshot.version <= version):
        return stored
    before = _last_status(connection, snapshot.uid)
    _store_spec(connection, stored, snapshot, now, by)
    _store_status(connection, stored, snapshot, now)
    _add_condition_events(connection, snapshot, before, now)
    if snapshot.delete_requested_at is not None and stored.delete_requested_at is None:
        at = snapshot.delete_requested_at
        store.add_event(connection, snapshot.uid, "delete-requested", {"by": by}, now, at=at, delete_requested_at=at)
    _store_version(connection, snapshot)
    return store.get(connection, snapshot.uid)


def mark_gone(connection: Connection, uid: str, now: float) -> None:
    """Mark the job as deleted from its cluster."""
    row = connection.execute(select(jobs.c.deleted_at).where(jobs.c.uid == uid).with_for_update()).one_or_none()
    if row is not None and row.deleted_at is None:
        store.mark_deleted(connection, uid, now)


def missing(connection: Connection, cluster: str, namespace: str, uids: Collection[str], version: int) -> list[str]:
    """Return existing jobs of the store that are missing from a list of the cluster at ``version``.

    An empty ``namespace`` means all. A job that was observed after the list was made is not missing.
    """
    chosen = select(jobs.c.uid).join(sightings, sightings.c.uid == jobs.c.uid)
    chosen = chosen.where(jobs.c.cluster == cluster, jobs.c.deleted_at.is_(None), sightings.c.version <= version)
    if namespace:
        chosen = chosen.where(jobs.c.namespace == namespace)
    kept = set(uids)
    return [uid for uid in connection.execute(chosen.order_by(jobs.c.number)).scalars() if uid not in kept]


def namespaces(connection: Connection) -> list[str]:
    """Return the namespaces with existing jobs."""
    chosen = select(jobs.c.namespace).where(jobs.c.deleted_at.is_(None)).distinct()
    return list(connection.execute(chosen.order_by(jobs.c.namespace)).scalars())


def _locked_version(connection: Connection, uid: str) -> int | None:
    """Lock the job; return the last stored version, none for a new job."""
    connection.execute(select(jobs.c.uid).where(jobs.c.uid == uid).with_for_update())
    return connection.execute(select(sightings.c.version).where(sightings.c.uid == uid)).scalar_one_or_none()


def _last_status(connection: Connection, uid: str) -> JobStatus:
    document = connection.execute(select(sightings.c.status).where(sightings.c.uid == uid)).scalar_one_or_none()
    return JobStatus.from_manifest(document or {})


def _make(connection: Connection, snapshot: JobSnapshot, now: float, by: str) -> None:
    """Insert a new job. An earlier one of its name has been deleted: names are unique on a cluster."""
    named = (jobs.c.cluster == snapshot.cluster, jobs.c.namespace == snapshot.namespace, jobs.c.name == snapshot.name)
    for uid in connection.execute(select(jobs.c.uid).where(*named, jobs.c.deleted_at.is_(None))).scalars().all():
        store.mark_deleted(connection, uid, now)
    row = store.first_row(snapshot.namespace, snapshot.name, snapshot.manifest, snapshot.uid, by, now)
    row |= {"cluster": snapshot.cluster, "created_at": snapshot.created_at, "phase_entered_at": snapshot.created_at}
    row |= {"generation": snapshot.generation, "priority": snapshot.priority}
    connection.execute(insert(jobs).values(row))
    store.write_labels(connection, snapshot.uid, snapshot.labels)
    store.add_event(connection, snapshot.uid, "created", {"by": by}, now, at=snapshot.created_at)


def _store_spec(connection: Connection, stored: StoredJob, snapshot: JobSnapshot, now: float, by: str) -> None:
    if stored.manifest == snapshot.manifest and stored.generation == snapshot.generation:
        return
    kind, body = "changed", {"by": by, "generation": snapshot.generation}
    if stored.suspend != snapshot.suspend:
        kind = "suspend-requested" if snapshot.suspend else "resume-requested"
    changes: dict[str, Any] = {
        "manifest": snapshot.manifest,
        "generation": snapshot.generation,
        "priority": snapshot.priority,
    }
    store.add_event(connection, snapshot.uid, kind, body, now, **changes)
    if stored.labels != snapshot.labels:
        connection.execute(delete(job_labels).where(job_labels.c.uid == snapshot.uid))
        store.write_labels(connection, snapshot.uid, snapshot.labels)


def _store_status(connection: Connection, stored: StoredJob, snapshot: JobSnapshot, now: float) -> None:
    status = snapshot.status
    if status.attempt > stored.attempt:
        launched = {"attempt": status.attempt, "ranks": status.ranks}
        store.add_event(connection, snapshot.uid, "launched", launched, now, attempt=status.attempt, plan_digest=None)
        _keep_attempt(connection, snapshot, now)
    entered = status.phase_entered_at if status.phase_entered_at is not None else snapshot.created_at
    changes: dict[str, Any] = {
        "phase_message": status.message,
        "failures": status.failures,
        "started_at": status.started_at,
        "failed_at": status.failed_at,
        "finished_at": status.finished_at,
    }
    if (status.phase, status.reason) != (stored.phase, stored.phase_reason) and status.phase_entered_at is not None:
        body = {"phase": status.phase.value, "reason": status.reason, "message": status.message}
        changes |= {"phase": status.phase.value, "phase_reason": status.reason, "phase_entered_at": entered}
        store.add_event(connection, snapshot.uid, "phase", body, now, at=entered, **changes)
    elif changes != {name: getattr(stored, name) for name in changes}:
        raised = {"version": jobs.c.version + 1, "changed_at": now}
        connection.execute(update(jobs).where(jobs.c.uid == snapshot.uid).values(**raised, **changes))


def _keep_attempt(connection: Connection, snapshot: JobSnapshot, now: float) -> None:
    row = {"uid": snapshot.uid, "attempt": snapshot.status.attempt, "num_ranks": snapshot.status.ranks, "devices": []}
    making = upsert(connection.dialect.name, attempts).values(**row, launched_at=now)
    connection.execute(making.on_conflict_do_nothing())


def _add_condition_events(connection: Connection, snapshot: JobSnapshot, before: JobStatus, now: float) -> None:
    for condition in snapshot.status.conditions:
        if _gist(before.condition(condition.type)) != _gist(condition):
            body = {"type": condition.type.value, "status": condition.status.value}
            body |= {"reason": condition.reason, "message": condition.message}
            at = condition.last_transition_time
            store.add_event(connection, snapshot.uid, "condition", body, now, at=at)


def _gist(condition: Condition | None) -> tuple[str, str] | None:
    return None if condition is None else (condition.status, condition.reason)


def _store_version(connection: Connection, snapshot: JobSnapshot) -> None:
    status = {name: value for name, value in snapshot.status.to_manifest().items() if name != "progress"}
    upserting = upsert(connection.dialect.name, sightings).values(
        uid=snapshot.uid, version=snapshot.version, status=status
    )
    new = {"version": upserting.excluded.version, "status": upserting.excluded.status}
    connection.execute(upserting.on_conflict_do_update(index_elements=[sightings.c.uid], set_=new))
