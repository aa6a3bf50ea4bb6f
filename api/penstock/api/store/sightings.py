"""Jobs of a cluster in the store: rows that follow observed objects, also after missed updates.

A sighting carries the version that the cluster gave the object; an older one than was kept changes nothing. So
updates may come from any source, repeatedly and in any order: the watch, a list, or the request for the change.
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

SOMEBODY = "cluster"
"""The author of a job or change, if it is unknown."""
MOST_PRIORITY = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Sighting:
    """A job as its ``cluster`` has it at ``version``. ``manifest`` holds what people write, with the uid."""

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
        """As the manifest says it; 0 if that is no number that a column holds."""
        priority = store.spec_part(self.manifest, "runPolicy").get("priority", 0)
        return priority if type(priority) is int and abs(priority) <= MOST_PRIORITY else 0

    @property
    def suspend(self) -> bool:
        """As the manifest says it."""
        return store.is_suspended(self.manifest)


def see(connection: Connection, seen: Sighting, now: float, by: str = SOMEBODY) -> StoredJob:
    """Store the job as observed, with an event for each change; ``by`` its author if that is known.

    An older version than the stored one changes nothing, nor does any of a job that is gone.
    """
    version = _locked_version(connection, seen.uid)
    if version is None:
        _make(connection, seen, now, by)
    stored = store.get(connection, seen.uid)
    if stored.deleted_at is not None or (version is not None and seen.version <= version):
        return stored
    before = _last_status(connection, seen.uid)
    _store_spec(connection, stored, seen, now, by)
    _store_status(connection, stored, seen, now)
    _tell_conditions(connection, seen, before, now)
    if seen.delete_requested_at is not None and stored.delete_requested_at is None:
        at = seen.delete_requested_at
        store.add_event(connection, seen.uid, "delete-requested", {"by": by}, now, at=at, delete_requested_at=at)
    _remember(connection, seen)
    return store.get(connection, seen.uid)


def gone(connection: Connection, uid: str, now: float) -> None:
    """The job is no longer on its cluster."""
    row = connection.execute(select(jobs.c.deleted_at).where(jobs.c.uid == uid).with_for_update()).one_or_none()
    if row is not None and row.deleted_at is None:
        store.mark_deleted(connection, uid, now)


def missing(connection: Connection, cluster: str, namespace: str, uids: Collection[str], version: int) -> list[str]:
    """Jobs that live here and that a list of the cluster at ``version`` did not hold; of all namespaces if none is
    named. A job that was observed after the list was made is not missing.
    """
    chosen = select(jobs.c.uid).join(sightings, sightings.c.uid == jobs.c.uid)
    chosen = chosen.where(jobs.c.cluster == cluster, jobs.c.deleted_at.is_(None), sightings.c.version <= version)
    if namespace:
        chosen = chosen.where(jobs.c.namespace == namespace)
    kept = set(uids)
    return [uid for uid in connection.execute(chosen.order_by(jobs.c.number)).scalars() if uid not in kept]


def namespaces(connection: Connection) -> list[str]:
    """Where there are jobs that live."""
    chosen = select(jobs.c.namespace).where(jobs.c.deleted_at.is_(None)).distinct()
    return list(connection.execute(chosen.order_by(jobs.c.namespace)).scalars())


def _locked_version(connection: Connection, uid: str) -> int | None:
    """The last observed version, none of a job that was not observed yet."""
    connection.execute(select(jobs.c.uid).where(jobs.c.uid == uid).with_for_update())
    return connection.execute(select(sightings.c.version).where(sightings.c.uid == uid)).scalar_one_or_none()


def _last_status(connection: Connection, uid: str) -> JobStatus:
    document = connection.execute(select(sightings.c.status).where(sightings.c.uid == uid)).scalar_one_or_none()
    return JobStatus.from_manifest(document or {})


def _make(connection: Connection, seen: Sighting, now: float, by: str) -> None:
    """Insert a job that was not observed yet. An earlier one of its name is gone: names are unique on a cluster."""
    named = (jobs.c.cluster == seen.cluster, jobs.c.namespace == seen.namespace, jobs.c.name == seen.name)
    for uid in connection.execute(select(jobs.c.uid).where(*named, jobs.c.deleted_at.is_(None))).scalars().all():
        store.mark_deleted(connection, uid, now)
    row = store.first_row(seen.namespace, seen.name, seen.manifest, seen.uid, by, now)
    row |= {"cluster": seen.cluster, "created_at": seen.created_at, "phase_entered_at": seen.created_at}
    row |= {"generation": seen.generation, "priority": seen.priority}
    connection.execute(insert(jobs).values(row))
    store.write_labels(connection, seen.uid, seen.labels)
    store.add_event(connection, seen.uid, "created", {"by": by}, now, at=seen.created_at)


def _store_spec(connection: Connection, stored: StoredJob, seen: Sighting, now: float, by: str) -> None:
    if stored.manifest == seen.manifest and stored.generation == seen.generation:
        return
    kind, body = "changed", {"by": by, "generation": seen.generation}
    if stored.suspend != seen.suspend:
        kind = "suspend-requested" if seen.suspend else "resume-requested"
    changes: dict[str, Any] = {"manifest": seen.manifest, "generation": seen.generation, "priority": seen.priority}
    store.add_event(connection, seen.uid, kind, body, now, **changes)
    if stored.labels != seen.labels:
        connection.execute(delete(job_labels).where(job_labels.c.uid == seen.uid))
        store.write_labels(connection, seen.uid, seen.labels)


def _store_status(connection: Connection, stored: StoredJob, seen: Sighting, now: float) -> None:
    status = seen.status
    if status.attempt > stored.attempt:
        launched = {"attempt": status.attempt, "ranks": status.ranks}
        store.add_event(connection, seen.uid, "launched", launched, now, attempt=status.attempt, plan_digest=None)
        _keep_attempt(connection, seen, now)
    entered = status.phase_entered_at if status.phase_entered_at is not None else seen.created_at
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
        store.add_event(connection, seen.uid, "phase", body, now, at=entered, **changes)
    elif changes != {name: getattr(stored, name) for name in changes}:
        raised = {"version": jobs.c.version + 1, "changed_at": now}
        connection.execute(update(jobs).where(jobs.c.uid == seen.uid).values(**raised, **changes))


def _keep_attempt(connection: Connection, seen: Sighting, now: float) -> None:
    row = {"uid": seen.uid, "attempt": seen.status.attempt, "num_ranks": seen.status.ranks, "devices": []}
    making = upsert(connection.dialect.name, attempts).values(**row, launched_at=now)
    connection.execute(making.on_conflict_do_nothing())


def _tell_conditions(connection: Connection, seen: Sighting, before: JobStatus, now: float) -> None:
    for condition in seen.status.conditions:
        if _gist(before.condition(condition.type)) != _gist(condition):
            body = {"type": condition.type.value, "status": condition.status.value}
            body |= {"reason": condition.reason, "message": condition.message}
            at = condition.last_transition_time
            store.add_event(connection, seen.uid, "condition", body, now, at=at)


def _gist(condition: Condition | None) -> tuple[str, str] | None:
    return None if condition is None else (condition.status, condition.reason)


def _remember(connection: Connection, seen: Sighting) -> None:
    status = {name: value for name, value in seen.status.to_manifest().items() if name != "progress"}
    seeing = upsert(connection.dialect.name, sightings).values(uid=seen.uid, version=seen.version, status=status)
    new = {"version": seeing.excluded.version, "status": seeing.excluded.status}
    connection.execute(seeing.on_conflict_do_update(index_elements=[sightings.c.uid], set_=new))
