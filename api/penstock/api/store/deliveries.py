"""Deliveries of jobs' ends to the webhook.

A delivery has a row from its first try on. The row is changed before each try, so that a service that dies during the
try leaves the time of the next one, and two services never try at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select, update

from penstock.api.store.engine import upsert
from penstock.api.store.jobs import StoredJob, select_jobs
from penstock.api.store.schema import deliveries, jobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Due:
    """A job whose end has to be delivered, with the number of tries."""

    job: StoredJob
    tries: int


def due(connection: Connection, now: float, since: float) -> Due | None:
    """Return the oldest due delivery of a job that ended at ``since`` or later."""
    tries = func.coalesce(deliveries.c.tries, 0)
    joined = select(jobs.c.uid, tries).select_from(jobs.outerjoin(deliveries, deliveries.c.uid == jobs.c.uid))
    waiting = joined.where(
        jobs.c.finished_at >= since,  # set only for ended jobs; a condition on the phase would mislead SQLite's planner
        deliveries.c.delivered_at.is_(None),
        func.coalesce(deliveries.c.next_try_at, 0.0) <= now,
    )
    oldest_first = func.coalesce(deliveries.c.next_try_at, jobs.c.finished_at)
    waiting_longest = connection.execute(waiting.order_by(oldest_first).limit(1)).one_or_none()
    if waiting_longest is None:
        return None
    (job,) = select_jobs(connection, jobs.c.uid == waiting_longest[0])
    return Due(job=job, tries=waiting_longest[1])


def claim(connection: Connection, uid: str, tries: int, next_try_at: float) -> bool:
    """Count one more try; return false if another service has done so since."""
    connection.execute(
        upsert(connection.dialect.name, deliveries).values(uid=uid, tries=0, next_try_at=0.0).on_conflict_do_nothing()
    )
    same = (deliveries.c.uid == uid, deliveries.c.tries == tries, deliveries.c.delivered_at.is_(None))
    counted = update(deliveries).where(*same).values(tries=tries + 1, next_try_at=next_try_at)
    return connection.execute(counted).rowcount == 1


def postpone(connection: Connection, uid: str, next_try_at: float) -> None:
    """Store the time of the next try, after a failure."""
    connection.execute(update(deliveries).where(deliveries.c.uid == uid).values(next_try_at=next_try_at))


def mark_delivered(connection: Connection, uid: str, now: float) -> None:
    """Store that the receiver has the message."""
    connection.execute(update(deliveries).where(deliveries.c.uid == uid).values(delivered_at=now))
