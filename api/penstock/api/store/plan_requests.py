"""Requests for plans in the store: asked, worked on by one service at a time, answered, canceled, forgotten.

What works on a request renews its row. A request that was not renewed for a while is free again: whoever worked on it
was killed, and planning begins anew, which by equal inputs gives the same plan.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, delete, func, insert, select, update

from penstock.api.store.documents import pack, unpack
from penstock.api.store.schema import plan_requests
from penstock.core.cluster import ClusterSpec
from penstock.core.errors import PenstockError
from penstock.core.job import PipelineJob
from penstock.core.manifest import Manifest, limits_lifted
from penstock.core.plan import Plan

MOST_PER_PAGE = 200


class State(enum.StrEnum):
    """Where a request is."""

    QUEUED = "Queued"
    WORKING = "Working"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELED = "Canceled"

    @property
    def terminal(self) -> bool:
        """Whether nothing follows."""
        return self not in OPEN


OPEN = (State.QUEUED, State.WORKING)


class NoSuchRequestError(PenstockError):
    """No request has this id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted(Manifest):
    """What is to be planned: a job for described hardware, or for a machine by its profile's digest; with ``what_if``
    changed jobs and hardware, too.
    """

    job: PipelineJob
    profile: str | None = None
    cluster: ClusterSpec | None = None
    what_if: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRequest:
    """A request's row, without what is large."""

    number: int
    id: str
    namespace: str
    name: str
    created_by: str
    created_at: float
    state: State
    begun: int = 0
    worker: str | None = None
    renewed_at: float | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    finished_at: float | None = None
    error: Mapping[str, str] = field(default_factory=dict)
    plan_digest: str | None = None


_LISTED = select(*[column for column in plan_requests.c if column.name not in ("body", "plan")])


def create(connection: Connection, wanted: Wanted, request: str, by: str, now: float) -> StoredRequest:
    """A new request, which waits; ``request`` is its id."""
    meta = wanted.job.metadata
    row = {
        "id": request,
        "namespace": meta.namespace,
        "name": meta.name,
        "body": pack(wanted.to_manifest()),
        "created_by": by,
        "created_at": now,
        "state": State.QUEUED.value,
        "begun": 0,
        "progress": {},
        "error": {},
    }
    connection.execute(insert(plan_requests).values(row))
    return get(connection, request)


def get(connection: Connection, request: str) -> StoredRequest:
    """The request with this id; raises `NoSuchRequestError`."""
    row = connection.execute(_LISTED.where(plan_requests.c.id == request)).one_or_none()
    if row is None:
        raise NoSuchRequestError(request)
    return _stored(row)


def wanted(connection: Connection, request: str) -> Wanted:
    """What it asks for, held to no limits, as an older version may have had none; raises `NoSuchRequestError`."""
    body = connection.execute(select(plan_requests.c.body).where(plan_requests.c.id == request)).scalar_one_or_none()
    if body is None:
        raise NoSuchRequestError(request)
    with limits_lifted():
        return Wanted.from_manifest(unpack(body))


def plan(connection: Connection, request: str) -> Plan | None:
    """Its plan, once there is one."""
    body = connection.execute(select(plan_requests.c.plan).where(plan_requests.c.id == request)).scalar_one_or_none()
    return None if body is None else Plan.from_manifest(unpack(body))


def newest(connection: Connection, namespaces: Sequence[str] | None, limit: int) -> list[StoredRequest]:
    """The newest requests of these namespaces, or of all."""
    chosen = _LISTED if namespaces is None else _LISTED.where(plan_requests.c.namespace.in_(namespaces))
    rows = connection.execute(chosen.order_by(plan_requests.c.number.desc()).limit(min(limit, MOST_PER_PAGE)))
    return [_stored(row) for row in rows]


def unfinished(connection: Connection) -> list[StoredRequest]:
    """Those that wait or are worked on, oldest first."""
    rows = connection.execute(_LISTED.where(_is_open()).order_by(plan_requests.c.number))
    return [_stored(row) for row in rows]


def num_waiting(connection: Connection) -> int:
    """How many nobody has set about."""
    waiting = select(func.count()).where(plan_requests.c.state == State.QUEUED.value)
    return int(connection.execute(waiting).scalar_one())


def num_open(connection: Connection, namespace: str, by: str) -> tuple[int, int]:
    """How many of a namespace wait or are worked on, and how many that somebody asked for, wherever."""
    conditions = (plan_requests.c.namespace == namespace, plan_requests.c.created_by == by)
    counts = select(*(func.count().filter(each) for each in conditions)).where(_is_open())
    found = connection.execute(counts).one()
    return int(found[0]), int(found[1])


def claim(connection: Connection, found: StoredRequest, worker: str, now: float) -> bool:
    """Work on it as ``worker``; false if it is no longer as it was ``found``."""
    row = {
        "state": State.WORKING.value,
        "worker": worker,
        "renewed_at": now,
        "begun": found.begun + 1,
        "progress": {},
    }
    same = (plan_requests.c.id == found.id, plan_requests.c.begun == found.begun, _is_open())
    return connection.execute(update(plan_requests).where(*same).values(row)).rowcount == 1


def renew(connection: Connection, request: str, worker: str, progress: Mapping[str, Any], now: float) -> None:
    """Say that ``worker`` is still at it, and how far."""
    connection.execute(_of(request, worker).values(progress=dict(progress), renewed_at=now))


def succeed(connection: Connection, request: str, worker: str, found: Plan, now: float) -> None:
    """Keep the plan."""
    changes = {"plan": pack(found.to_manifest()), "plan_digest": found.digest}
    connection.execute(_of(request, worker).values(state=State.SUCCEEDED.value, finished_at=now, **changes))


def fail(connection: Connection, request: str, worker: str, error: Mapping[str, str], now: float) -> None:
    """Keep why there is no plan."""
    connection.execute(_of(request, worker).values(state=State.FAILED.value, finished_at=now, error=dict(error)))


def cancel(connection: Connection, request: str, now: float) -> StoredRequest:
    """End one that is open, and forget one that has ended; how it is now, or was. Raises `NoSuchRequestError`."""
    found = get(connection, request)
    this = plan_requests.c.id == request
    if found.state.terminal:
        connection.execute(delete(plan_requests).where(this))
        return found
    connection.execute(
        update(plan_requests).where(this, _is_open()).values(state=State.CANCELED.value, finished_at=now)
    )
    return get(connection, request)


def finished_before(connection: Connection, before: float, most: int) -> list[str]:
    """The ids of requests that ended before that time."""
    chosen = select(plan_requests.c.id).where(plan_requests.c.finished_at < before)
    return list(connection.execute(chosen.order_by(plan_requests.c.number).limit(most)).scalars())


def forget(connection: Connection, ids: Sequence[str]) -> None:
    """Remove these requests and their plans."""
    connection.execute(delete(plan_requests).where(plan_requests.c.id.in_(ids)))


def _is_open() -> ColumnElement[bool]:
    return plan_requests.c.state.in_([state.value for state in OPEN])


def _of(request: str, worker: str) -> Any:
    """A change of what ``worker`` works on; of nothing, once it was canceled or another took it."""
    mine = (plan_requests.c.id == request, plan_requests.c.worker == worker)
    return update(plan_requests).where(*mine, plan_requests.c.state == State.WORKING.value)


def _stored(row: Row[Any]) -> StoredRequest:
    values = dict(row._mapping)
    return StoredRequest(**{**values, "state": State(values["state"])})
