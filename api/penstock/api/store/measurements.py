"""Measurements of attempts: their profiles, and the ConfigMaps that hold them for planners."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, select, update

from penstock.api.store import profiles
from penstock.api.store.engine import upsert
from penstock.api.store.schema import jobs, measurements
from penstock.core.profile import Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Measurement of an attempt that has no ConfigMap yet."""

    uid: str
    namespace: str
    name: str
    attempt: int
    digest: str


def keep(connection: Connection, measured: Iterable[tuple[str, int, Profile]], now: float) -> None:
    """Store attempts' profiles, each by uid and number; the first of an attempt is kept, because plans use it."""
    for uid, attempt, profile in measured:
        profiles.keep(connection, profile)
        row = {"uid": uid, "attempt": attempt, "digest": profile.digest, "reported_at": now, "ref": ""}
        connection.execute(upsert(connection.dialect.name, measurements).values(row).on_conflict_do_nothing())


def unpublished(connection: Connection, cluster: str, most: int = 100) -> list[Measurement]:
    """Return unpublished measurements of the newest attempts of the cluster's jobs, oldest first."""
    mine = (jobs.c.uid == measurements.c.uid) & (jobs.c.attempt == measurements.c.attempt)
    columns = (jobs.c.uid, jobs.c.namespace, jobs.c.name, measurements.c.attempt, measurements.c.digest)
    chosen = select(*columns).select_from(measurements.join(jobs, mine))
    chosen = chosen.where(measurements.c.ref == "", jobs.c.cluster == cluster, jobs.c.deleted_at.is_(None))
    rows = connection.execute(chosen.order_by(measurements.c.reported_at).limit(most))
    return [Measurement(**row._mapping) for row in rows]


def mark_published(connection: Connection, uid: str, attempt: int, ref: str) -> None:
    """Store that the ConfigMap ``ref`` holds the measurement."""
    mine = (measurements.c.uid == uid, measurements.c.attempt == attempt)
    connection.execute(update(measurements).where(*mine).values(ref=ref))
