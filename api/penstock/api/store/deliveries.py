"""Deliveries of jobs' ends to the webhook.

A delivery has a row from its first try on. The row is changed before each try, so that a service that dies during the
try leaves the time of the next one. That time is by the clock of the service that tried, so another service does not
compare it with its own: it waits from when it first read the row (`penstock.api.webhook`).
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select, update

from penstock.api.store.engine import upsert
from penstock.api.store.schema import deliveries, jobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """An end that is not delivered yet: the job's uid, the number of tries, and when the next one is due."""

    uid: str
    tries: int
    next_try_at: float


def pending(connection: Connection, since: float) -> list[Pending]:
    """Return the deliveries of jobs that ended at ``since`` or later, the oldest first."""
    tries, next_try_at = func.coalesce(deliveries.c.tries, 0), func.coalesce(deliveries.c.next_try_at, 0.0)
    joined = select(jobs.c.uid, tries.label("tries"), next_try_at.label("next_try_at"))
    joined = joined.select_from(jobs.outerjoin(deliveries, deliveries.c.uid == jobs.c.uid))
    waiting = joined.where(
        jobs.c.finished_at >= since,  # set only for ended jobs; a condition on the phase would mislead SQLite's planner
        deliveries.c.delivered_at.is_(None),
    )
    oldest_first = func.coalesce(deliveries.c.next_try_at, jobs.c.finished_at)
    return [Pending(**row._mapping) for row in connection.execute(waiting.order_by(oldest_first))]


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
