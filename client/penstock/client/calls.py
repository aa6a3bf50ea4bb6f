"""Requests of both clients as data: a function returns a request as a `Call`, which also reads the answer.

Nothing is sent here. For most functions the clients have a method with the same name, arguments and docstring.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx

from penstock.client.types import (
    Artifact,
    Checkpoint,
    Event,
    Job,
    JobPlan,
    KnownFields,
    LinePage,
    LoginLink,
    Page,
    Reproduction,
    SampledStep,
    Series,
    ServiceError,
    Version,
)
from penstock.core.job import PipelineJob

T = TypeVar("T")
A = TypeVar("A", bound=KnownFields)

MOST_LINES = 2_000
"""Log lines that one call returns by default, and at most."""
MOST_POINTS = 500
"""Points of a series that one call returns by default."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0
MOST_TRIES = 6
TRY_AGAIN = frozenset({0, 408, 429, 502, 503, 504})
"""Status 0, for no answer, and those that a retry may change. Every call may be sent twice: changes carry an
idempotency key.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[T]):
    """One request, with ``json`` as its body; ``read`` converts its JSON answer."""

    method: str
    path: str
    read: Callable[[Any], T]
    query: Mapping[str, Any] = field(default_factory=dict)
    json: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes | None:
        """The body. It is ASCII, so that the service can say where a string is not valid Unicode."""
        return None if self.json is None else json.dumps(self.json).encode()

    @property
    def all_headers(self) -> Mapping[str, str]:
        """The headers, with that of a body."""
        return self.headers if self.json is None else {**self.headers, "Content-Type": "application/json"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A job's namespace and name."""

    name: str
    namespace: str = "default"

    @property
    def path(self) -> str:
        """Where the service has it."""
        return f"/v1/jobs/{quote(self.namespace, safe='')}/{quote(self.name, safe='')}"

    def __str__(self) -> str:
        return self.name if self.namespace == "default" else f"{self.namespace}/{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """A job by its uid, deleted or not; it can be read, and not changed."""

    uid: str

    @property
    def path(self) -> str:
        """Where the service has it."""
        return f"/v1/history/{quote(self.uid, safe='')}"


Readable = Place | Past


def submit(job: PipelineJob, *, dry_run: bool = False) -> Call[Job]:
    """Submit a job; a dry run returns the job that would be created, and creates nothing."""
    return Call(
        method="POST",
        path="/v1/jobs",
        read=Job.from_manifest,
        query={"dryRun": True} if dry_run else {},
        json=job.to_manifest(),
        headers=of_change(),
    )


def of_change(etag: str | None = None) -> Mapping[str, str]:
    """Headers of a change. A call that is sent twice has one key, so it takes effect once and succeeds both times, also
    if the first one has changed the ETag.
    """
    return {"Idempotency-Key": str(uuid.uuid4()), **({"If-Match": etag} if etag else {})}


def get(place: Readable) -> Call[Job]:
    """Return the existing job of this name, else the latest deleted one; by its uid any job."""
    return Call(method="GET", path=place.path, read=Job.from_manifest)


def page(query: Mapping[str, Any]) -> Call[Page]:
    """Get one page of the jobs of a query."""
    return Call(method="GET", path="/v1/jobs", read=Page.from_manifest, query=given(**query))


def given(**fields: Any) -> dict[str, Any]:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], ())}


def suspend(place: Place, *, etag: str | None = None) -> Call[Job]:
    """Suspend the job: it saves a checkpoint after the current step, and releases its devices."""
    return Call(method="POST", path=f"{place.path}/suspend", read=Job.from_manifest, headers=of_change(etag))


def resume(place: Place, *, etag: str | None = None) -> Call[Job]:
    """Resume a suspended job."""
    return Call(method="POST", path=f"{place.path}/resume", read=Job.from_manifest, headers=of_change(etag))


def delete(place: Place, *, etag: str | None = None) -> Call[Job]:
    """Delete a job: it ends, and its name is free."""
    return Call(method="DELETE", path=place.path, read=Job.from_manifest, headers=of_change(etag))


def events(place: Readable, after: int = 0) -> Call[tuple[Event, ...]]:
    """Return the events of a job after that number, oldest first."""
    query = {"after": after, "limit": 1000}
    return Call(method="GET", path=f"{place.path}/events", read=items_of(Event), query=query)


def retry(place: Place, name: str | None = None) -> Call[Job]:
    """Create a new job from one that has ended; it continues from the newest checkpoint."""
    body = {} if name is None else {"name": name}
    return Call(method="POST", path=f"{place.path}/retry", read=Job.from_manifest, json=body, headers=of_change())


def reproduce(place: Readable) -> Call[Reproduction]:
    """Return the manifest, versions and commands that repeat the run of a job."""
    return Call(method="GET", path=f"{place.path}/reproduce", read=Reproduction.from_manifest)


def logs(place: Readable, *, rank: int | None = None, cursor: str = "", tail: int | None = None) -> Call[LinePage]:
    """Return log lines: the first ones after the cursor, or the last ``tail`` ones."""
    query = given(rank=rank, cursor=cursor, tail=tail is not None or None, limit=tail or MOST_LINES)
    return Call(method="GET", path=f"{place.path}/logs", read=LinePage.from_manifest, query=query)


def metrics(place: Readable, *, ranks: Sequence[int] = (), points: int = MOST_POINTS) -> Call[tuple[Series, ...]]:
    """Return a job's metrics over its steps, over all ranks and of those named; at most ``points`` for a series."""
    query = {"rank": list(ranks), "points": points}
    return Call(method="GET", path=f"{place.path}/metrics", read=items_of(Series, "series"), query=query)


def timeline(place: Readable, step: int | None = None) -> Call[SampledStep]:
    """Return the timeline of a sampled step, by default of the newest."""
    query = {} if step is None else {"step": step}
    return Call(method="GET", path=f"{place.path}/timeline", read=SampledStep.from_manifest, query=query)


def plans_of(place: Readable) -> Call[tuple[JobPlan, ...]]:
    """Return every plan that a job used, oldest first."""
    return Call(method="GET", path=f"{place.path}/plans", read=items_of(JobPlan))


def version() -> Call[Version]:
    """Return the versions of the service."""
    return Call(method="GET", path="/version", read=Version.from_manifest)


def checkpoints(place: Readable) -> Call[tuple[Checkpoint, ...]]:
    """Return a job's checkpoints, newest first."""
    return Call(method="GET", path=f"{place.path}/checkpoints", read=items_of(Checkpoint))


def export(place: Place, checkpoint: Checkpoint) -> Call[Checkpoint]:
    """Export a checkpoint as safetensors; `checkpoints` returns the progress."""
    path = f"{place.path}/checkpoints/{checkpoint.attempt}/{checkpoint.step}/export"
    return Call(method="POST", path=path, read=Checkpoint.from_manifest, headers=of_change())


def artifacts(place: Readable) -> Call[tuple[Artifact, ...]]:
    """Return a job's files, by name."""
    return Call(method="GET", path=f"{place.path}/artifacts", read=items_of(Artifact))


def artifact_path(place: Readable, name: str) -> str:
    """Return the path of a file."""
    return f"{place.path}/artifacts/{quote(name)}"


def items_of(kind: type[A], name: str = "items") -> Callable[[Any], tuple[A, ...]]:
    """Return the function that reads the list ``name`` of an answer."""
    return lambda value: tuple(map(kind.from_manifest, value[name]))


def login_link(server: str) -> Call[LoginLink]:
    """Create a link that signs a browser in, once, within a minute."""
    return Call(
        method="POST",
        path="/v1/login-links",
        read=lambda value: LoginLink(url=server + value["path"], expires_at=value["expiresAt"]),
        headers=of_change(),
    )


FAILURES = (httpx.TransportError, httpx.HTTPStatusError)
"""The errors of a request without an answer, and with an answer other than success."""


@dataclass
class Retries:
    """Tries of a request to ``server``, and the number of those that failed in a row."""

    server: str
    failures: int = field(default=0, init=False)

    def pause_after(self, failure: httpx.TransportError | httpx.HTTPStatusError) -> float:
        """Return the seconds until the next try: the service's Retry-After, at most 60, else 0.2, 0.4, ... 3.2.

        Raises:
            ServiceError: the failure, if a retry would not change it, or after too many tries.
        """
        self.failures += 1
        if isinstance(failure, httpx.HTTPStatusError):
            problem, retry_after = _refusal(failure.response), failure.response.headers.get("retry-after", "")
        else:
            problem, retry_after = _unreachable(self.server, str(failure)), ""
        if problem.status not in TRY_AGAIN or self.failures >= MOST_TRIES:
            raise problem from None
        if retry_after.isdecimal():
            return float(min(int(retry_after), 60))
        return float(min(FIRST_PAUSE_SECONDS * 2 ** (self.failures - 1), LONGEST_PAUSE_SECONDS))


def _refusal(answer: httpx.Response) -> ServiceError:
    """Return the error of a problem document, or of an answer that is not one."""
    status = answer.status_code
    try:
        document = answer.json()
    except ValueError:
        document = None
    if not isinstance(document, Mapping):
        return ServiceError(status=status, kind="unknown", detail=f"the service answered {status} without a reason")
    return ServiceError(
        status=status,
        kind=str(document.get("type", "")).rpartition("/")[2] or "unknown",
        detail=str(document.get("detail", f"the service answered {status}")),
        where=str(document.get("where", "")),
        remedy=str(document.get("remedy", "")),
    )


def _unreachable(server: str, reason: str) -> ServiceError:
    return ServiceError(
        status=0,
        kind="unreachable",
        detail=f"{server} cannot be reached: {reason}",
        where="--server",
        remedy="start it with penstock serve, or name another",
    )
