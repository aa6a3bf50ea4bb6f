"""Live streams: events and state of a job, and the states of all jobs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from penstock.api.http.dependencies import CallerIn, JobIn, ServiceIn, Viewer
from penstock.api.http.problems import LARGEST_NUMBER, READS, Problem
from penstock.api.http.routes.jobs import LabelQuery, NameQuery, NamespaceQuery, read_labels, visible
from penstock.api.live.listeners import Filter, JobListener, Listener, ListListener, Share
from penstock.api.live.messages import MEDIA_TYPE
from penstock.api.live.stream import EventStream
from penstock.api.schemas.jobs import EventPage, EventView
from penstock.api.schemas.wire import instant
from penstock.api.service import Service
from penstock.api.store import jobs

router, of_job = APIRouter(tags=["live"]), APIRouter(tags=["live"])

MESSAGE = {
    "type": "object",
    "required": ["event", "data"],
    "properties": {
        "event": {"type": "string", "enum": ["hello", "job", "event"]},
        "data": {"type": "string", "contentMediaType": "application/json"},
        "id": {"type": "string"},
        "retry": {"type": "integer"},
    },
}
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "With `Accept: text/event-stream` a stream: `hello`, then `job` (a JobRow: how a job is now) "
        "and `event` (an EventView, whose number is the id). It ends after some minutes; connect again "
        "with `Last-Event-ID`.",
        "content": {MEDIA_TYPE: {"schema": MESSAGE}},
    }
}
LastEventId = Annotated[
    str | None, Header(description="For a stream: send only events with a higher number.", pattern="^[0-9]{1,9}$")
]


@of_job.get("/events", response_model=EventPage, responses={**READS, **STREAM}, name="listJobEvents")
async def job_events(
    request: Request,
    service: ServiceIn,
    caller: CallerIn,
    job: JobIn,
    after: Annotated[int, Query(ge=0, le=LARGEST_NUMBER, description="Only events with a higher number.")] = 0,
    limit: Annotated[int, Query(ge=1, le=1000, description="Limit of the list; a stream has none.")] = 200,
    last_event_id: LastEventId = None,
) -> Response | EventPage:
    """List the job's events, oldest first; a stream continues with future events and the job's state."""
    if MEDIA_TYPE in request.headers.get("accept", ""):
        share = Share(token=caller.token, namespaces=(job.namespace,))
        return opened(service, JobListener(uid=job.uid, last_event=int(last_event_id or after), share=share))
    rows = await run_in_threadpool(service.read, lambda connection: jobs.history(connection, job.uid, after, limit))
    items = [EventView(number=row.number, at=instant(row.at), kind=row.kind, body=row.body) for row in rows]
    return EventPage(items=items)


@router.get(
    "/v1/events",
    status_code=200,
    response_class=Response,
    responses={**READS, **STREAM},
    operation_id="streamJobs",
)
async def list_events(
    service: ServiceIn,
    identity: Viewer,
    caller: CallerIn,
    namespace: NamespaceQuery = None,
    label: LabelQuery = [],  # noqa: B006, FastAPI copies it
    name: NameQuery = "",
) -> Response:
    """Stream every job that changes, as `job` messages, once a second.

    No change after `hello` is missed, so list the jobs once it has arrived.
    """
    job_filter = Filter.of(await run_in_threadpool(visible, identity, namespace), read_labels(label), name)
    return opened(
        service, ListListener(filter=job_filter, share=Share(token=caller.token, namespaces=job_filter.namespaces))
    )


def opened(service: Service, listener: Listener) -> EventStream:
    """Return a stream for the listener; raises `Problem` if too many are open.

    A token may have a third of all, and a namespace half of the rest, so that some are left for others.
    """
    feed, limits = service.feed, service.settings.limits
    remedy, retry = "close a stream, or poll GET /v1/jobs instead", {"Retry-After": "10"}
    num_open, (of_token, of_namespaces) = feed.num_listeners, feed.num_of(listener.share)
    if num_open >= limits.streams:
        raise Problem(
            kind="unavailable", detail=f"{limits.streams} live streams are open", remedy=remedy, headers=retry
        )
    if 3 * of_token >= limits.streams:
        raise Problem(
            kind="too-many-requests",
            detail=f"{of_token} live streams of this token are open",
            remedy=remedy,
            headers=retry,
        )
    if 2 * of_namespaces >= limits.streams - (num_open - of_namespaces):
        raise Problem(
            kind="too-many-requests",
            detail=f"{of_namespaces} live streams of the same namespaces are open, and the rest is reserved for others",
            remedy=remedy,
            headers=retry,
        )
    return EventStream(feed, listener, limits.stream_seconds)
