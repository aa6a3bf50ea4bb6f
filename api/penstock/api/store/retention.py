"""Retention: a table of age limits of rows.

Rows are deleted in slices so small that they delay no request. Each slice is complete in itself, so the work may be
interrupted at any time, and several services may do it on one database.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Table, delete, select, tuple_

from penstock.api.store import jobs, schema, series
from penstock.api.store.series import Bucket

DAY_SECONDS = 86_400.0
SLICE = 500

Find = Callable[[Connection, float, Any, int], Sequence[Any]]
"""Finds rows older than a time, after the last one of the slice before (none at first), up to a limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Retention rule: the maximum age, the search for old rows, and their deletion."""

    what: str
    seconds: float
    find: Find
    drop: Callable[[Connection, Sequence[Any]], None]
    most: int = SLICE


_FIRST: Bucket = (0, 0, 0, -1)
_UNUSED = schema.plans.c.digest.not_in(select(schema.job_plans.c.digest))


def _rows(what: str, days: float, table: Table, time: str, *conditions: ColumnElement[bool]) -> Limit:
    """Return the limit of the rows that meet the conditions, by the column with their ``time``."""
    key, at = tuple(table.primary_key), table.c[time]

    def find(connection: Connection, before: float, last: Any, most: int) -> list[tuple[Any, ...]]:
        old = select(*key).where(at < before, *conditions).order_by(at).limit(most)
        return [tuple(row) for row in connection.execute(old)]

    def drop(connection: Connection, keys: Sequence[tuple[Any, ...]]) -> None:
        connection.execute(delete(table).where(tuple_(*key).in_(keys), *conditions))

    return Limit(what=what, seconds=days * DAY_SECONDS, find=find, drop=drop)


def _forget_jobs(connection: Connection, uids: Sequence[str]) -> None:
    for uid in uids:
        jobs.forget(connection, uid)


LIMITS = (
    Limit(
        what="points",
        seconds=7 * DAY_SECONDS,
        find=lambda c, before, last, most: series.old_buckets(c, before, last or _FIRST, most, with_points=True),
        drop=series.forget_points,
    ),
    Limit(
        what="roll-ups",
        seconds=90 * DAY_SECONDS,
        find=lambda c, before, last, most: series.old_buckets(c, before, last or _FIRST, most),
        drop=series.forget_rollups,
    ),
    _rows("idempotency keys", 1, schema.idempotency, "created_at"),
    _rows("audit entries", 90, schema.audit, "at"),
    _rows("sessions", 1, schema.sessions, "expires_at"),
    _rows("requests for plans", 30, schema.plan_requests, "finished_at"),
    Limit(  # after points and roll-ups, which are most of the rows of a job
        what="deleted jobs",
        seconds=90 * DAY_SECONDS,
        find=lambda c, before, last, most: jobs.deleted_before(c, before, most),
        drop=_forget_jobs,
        most=1,
    ),
    _rows("plans", 90, schema.plans, "created_at", _UNUSED),  # after the jobs that used them
)
"""All limits. Log lines have none: `penstock.api.store.lines` keeps the last ones of each rank as lines arrive."""
