"""Plan requests in the store: queued, claimed by one service at a time, answered, canceled, deleted.

A worker renews the claim in the row of its request. A claim that was not renewed for a while has lapsed: its worker was
killed, and planning restarts, which gives the same plan for equal input.
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
    """State of a request."""

    QUEUED = "Queued"
    WORKING = "Working"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELED = "Canceled"

    @property
    def terminal(self) -> bool:
        """Whether the state is final."""
        return self not in OPEN


OPEN = (State.QUEUED, State.WORKING)


class NoSuchRequestError(PenstockError):
    """No request has this id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanInput(Manifest):
    """Input of a request: a job for described hardware, or for a machine by the digest of its profile.

    ``what_if`` also requests plans for changed jobs and hardware, ``frontier`` plans on fewer devices.
    """

    job: PipelineJob
    profile: str | None = None
    cluster: ClusterSpec | None = None
    what_if: bool = False
    frontier: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRequest:
    """Row of a request, without its large columns."""

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


def create(connection: Connection, plan_input: PlanInput, request: str, by: str, now: float) -> StoredRequest:
    """Insert a request, which is queued; ``request`` is its id."""
    meta = plan_input.job.metadata
    row = {
        "id": request,
        "namespace": meta.namespace,
        "name": meta.name,
        "body": pack(plan_input.to_manifest()),
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
    """Return the request with this id; raises `NoSuchRequestError`."""
    row = connection.execute(_LISTED.where(plan_requests.c.id == request)).one_or_none()
    if row is None:
        raise NoSuchRequestError(request)
    return _stored(row)


def plan_input(connection: Connection, request: str) -> PlanInput:
    """Return the request's input; no limits apply, because an older version may have had none.

    Raises `NoSuchRequestError`.
    """
    body = connection.execute(select(plan_requests.c.body).where(plan_requests.c.id == request)).scalar_one_or_none()
    if body is None:
        raise NoSuchRequestError(request)
    with limits_lifted():
        return PlanInput.from_manifest(unpack(body))


def plan(connection: Connection, request: str) -> Plan | None:
    """Return the plan, once there is one."""
    body = connection.execute(select(plan_requests.c.plan).where(plan_requests.c.id == request)).scalar_one_or_none()
    return None if body is None else Plan.from_manifest(unpack(body))


def newest(connection: Connection, namespaces: Sequence[str] | None, limit: int) -> list[StoredRequest]:
    """Return the newest requests of these namespaces, or of all."""
    chosen = _LISTED if namespaces is None else _LISTED.where(plan_requests.c.namespace.in_(namespaces))
    rows = connection.execute(chosen.order_by(plan_requests.c.number.desc()).limit(min(limit, MOST_PER_PAGE)))
    return [_stored(row) for row in rows]


def unfinished(connection: Connection) -> list[StoredRequest]:
    """Return queued and claimed requests, oldest first."""
    rows = connection.execute(_LISTED.where(_is_open()).order_by(plan_requests.c.number))
    return [_stored(row) for row in rows]


def num_waiting(connection: Connection) -> int:
    """Number of requests without a worker."""
    waiting = select(func.count()).where(plan_requests.c.state == State.QUEUED.value)
    return int(connection.execute(waiting).scalar_one())


def num_open(connection: Connection, namespace: str, by: str) -> tuple[int, int]:
    """Return the numbers of open requests: of a namespace, and of a requester in all namespaces."""
    conditions = (plan_requests.c.namespace == namespace, plan_requests.c.created_by == by)
    counts = select(*(func.count().filter(condition) for condition in conditions)).where(_is_open())
    row = connection.execute(counts).one()
    return int(row[0]), int(row[1])


def claim(connection: Connection, request: StoredRequest, worker: str, now: float) -> bool:
    """Claim the request for ``worker``; return false if it has changed since it was read."""
    row = {
        "state": State.WORKING.value,
        "worker": worker,
        "renewed_at": now,
        "begun": request.begun + 1,
        "progress": {},
    }
    same = (plan_requests.c.id == request.id, plan_requests.c.begun == request.begun, _is_open())
    return connection.execute(update(plan_requests).where(*same).values(row)).rowcount == 1


def renew(connection: Connection, request: str, worker: str, progress: Mapping[str, Any], now: float) -> None:
    """Renew the claim of ``worker``, and store its progress."""
    connection.execute(_of(request, worker).values(progress=dict(progress), renewed_at=now))


def succeed(connection: Connection, request: str, worker: str, plan: Plan, now: float) -> None:
    """Store the plan."""
    changes = {"plan": pack(plan.to_manifest()), "plan_digest": plan.digest}
    connection.execute(_of(request, worker).values(state=State.SUCCEEDED.value, finished_at=now, **changes))


def fail(connection: Connection, request: str, worker: str, error: Mapping[str, str], now: float) -> None:
    """Store the reason why there is no plan."""
    connection.execute(_of(request, worker).values(state=State.FAILED.value, finished_at=now, error=dict(error)))


def cancel(connection: Connection, request: str, now: float) -> StoredRequest:
    """Cancel an open request, or delete one that has ended; return its last state. Raises `NoSuchRequestError`."""
    stored = get(connection, request)
    this = plan_requests.c.id == request
    if stored.state.terminal:
        connection.execute(delete(plan_requests).where(this))
        return stored
    connection.execute(
        update(plan_requests).where(this, _is_open()).values(state=State.CANCELED.value, finished_at=now)
    )
    return get(connection, request)


def _is_open() -> ColumnElement[bool]:
    return plan_requests.c.state.in_([state.value for state in OPEN])


def _of(request: str, worker: str) -> Any:
    """Return an UPDATE of a request of ``worker``; without effect once it was canceled or claimed by another worker."""
    mine = (plan_requests.c.id == request, plan_requests.c.worker == worker)
    return update(plan_requests).where(*mine, plan_requests.c.state == State.WORKING.value)


def _stored(row: Row[Any]) -> StoredRequest:
    values = dict(row._mapping)
    return StoredRequest(**{**values, "state": State(values["state"])})
