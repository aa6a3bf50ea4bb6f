"""Changed jobs and their changes, for live streams."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, and_, or_, select

from penstock.api.store.jobs import StoredJob, select_jobs
from penstock.api.store.rows import in_parts
from penstock.api.store.schema import events, jobs, progress

Signature = tuple[int, int | None, float | None]
"""Signature that differs after every visible change of a job: version, and step and time of its newest report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A job and its events since the last one that a listener has, oldest first."""

    job: StoredJob
    events: Sequence[Row[Any]] = ()


def signature(job: StoredJob) -> Signature:
    """Return the signature of the job."""
    latest = job.progress
    return job.version, latest.step if latest else None, latest.reported_at if latest else None


def changed_since(connection: Connection, since: float) -> dict[str, Signature]:
    """Return the jobs that changed or reported at ``since`` or later, by uid."""
    reports = and_(progress.c.uid == jobs.c.uid, progress.c.attempt == jobs.c.attempt)
    columns = (jobs.c.uid, jobs.c.version, progress.c.step, progress.c.reported_at)
    joined = select(*columns).select_from(jobs.outerjoin(progress, reports))
    recent = joined.where(or_(jobs.c.changed_at >= since, progress.c.reported_at >= since))
    return {uid: (version, step, at) for uid, version, step, at in connection.execute(recent)}


def read_changes(connection: Connection, uids: Collection[str], after: Mapping[str, int]) -> list[Change]:
    """Return these jobs, each with its events above the number in ``after``; without a number, no events."""
    listed = [job for part in in_parts(uids) for job in select_jobs(connection, jobs.c.uid.in_(part))]
    return [Change(job=job, events=_events(connection, job, after.get(job.uid, job.last_event))) for job in listed]


def _events(connection: Connection, job: StoredJob, after: int) -> Sequence[Row[Any]]:
    if after >= job.last_event:
        return ()
    following = select(events).where(events.c.uid == job.uid, events.c.number > after)
    return connection.execute(following.order_by(events.c.number)).all()
