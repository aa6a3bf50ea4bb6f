"""Retention: a table of age limits, enforced in small slices.

The search for old rows runs outside of the writer. Only deletions go through it, in slices so small that they delay no
request. Each slice is complete in itself, so the work may be interrupted at any time, and several services may do it on
one database.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from penstock.api.service import Service
from penstock.api.store import audit, idempotency, jobs, plan_requests, plans, series, sessions
from penstock.api.store.series import Bucket
from penstock.api.store.writer import WriterClosedError

log = logging.getLogger(__name__)

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
    Limit(
        what="idempotency keys",
        seconds=DAY_SECONDS,
        find=lambda c, before, last, most: idempotency.old_keys(c, before, most),
        drop=idempotency.forget_keys,
    ),
    Limit(
        what="audit entries",
        seconds=90 * DAY_SECONDS,
        find=lambda c, before, last, most: audit.old_entries(c, before, most),
        drop=audit.forget,
    ),
    Limit(
        what="sessions",
        seconds=DAY_SECONDS,
        find=lambda c, before, last, most: sessions.expired(c, before, most),
        drop=sessions.forget,
    ),
    Limit(
        what="requests for plans",
        seconds=30 * DAY_SECONDS,
        find=lambda c, before, last, most: plan_requests.finished_before(c, before, most),
        drop=plan_requests.forget,
    ),
    Limit(  # after points and roll-ups, which are most of the rows of a job
        what="deleted jobs",
        seconds=90 * DAY_SECONDS,
        find=lambda c, before, last, most: jobs.deleted_before(c, before, most),
        drop=_forget_jobs,
        most=1,
    ),
    Limit(  # after the jobs that used them
        what="plans",
        seconds=90 * DAY_SECONDS,
        find=lambda c, before, last, most: plans.unused_since(c, before, most),
        drop=plans.forget,
    ),
)
"""All limits. Log lines have none: `penstock.api.store.lines` keeps the last ones of each rank as lines arrive."""


def forget_old(service: Service, stopping: Callable[[], bool] = lambda: False) -> None:
    """Delete all rows that are older than their limit, unless ``stopping``.

    An error leaves the rest to the next run.
    """
    now = service.clock()
    for limit in LIMITS:
        try:
            _forget(service, limit, now - limit.seconds, stopping)
        except SQLAlchemyError as error:
            log.warning("old %s could not be deleted: %s; retrying at the next run of retention", limit.what, error)
        except WriterClosedError:
            return


def _forget(service: Service, limit: Limit, before: float, stopping: Callable[[], bool]) -> None:
    last: Any = None
    while not stopping():
        old = service.read(lambda c, last=last: limit.find(c, before, last, limit.most))  # type: ignore[misc]
        if not old:
            return
        service.write("retention", lambda c, old=old: limit.drop(c, old))  # type: ignore[misc]
        last = old[-1]
