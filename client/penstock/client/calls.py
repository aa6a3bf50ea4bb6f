"""Every call of the service as data: the request, and how to read the answer. Nothing is sent here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from penstock.client.run_types import (
    Artifact,
    Checkpoint,
    JobPlan,
    LinePage,
    Reproduction,
    SampledStep,
    Series,
)
from penstock.client.types import Event, Job, KnownFields, LoginLink, Page, ServiceError, Version
from penstock.core.job import PipelineJob

T = TypeVar("T")
A = TypeVar("A", bound=KnownFields)

MOST_LINES = 2_000
"""Of one call."""
MOST_POINTS = 500
"""Of one series."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0
MOST_TRIES = 6
TRY_AGAIN = frozenset({0, 408, 429, 502, 503, 504})
"""No answer, or one that a retry may change. Every call may be sent twice: changes carry an idempotency key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(Generic[T]):
    """One request; ``read`` converts its JSON answer."""

    method: str
    path: str
    read: Callable[[Any], T]
    query: Mapping[str, Any] = field(default_factory=dict)
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


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


def submit(job: PipelineJob, key: str, *, dry_run: bool = False) -> Call[Job]:
    """Submit a job; a repeated call with the same key has no effect. A dry run creates nothing."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    body, query = json.dumps(job.to_manifest()).encode(), {"dryRun": True} if dry_run else {}
    return Call(method="POST", path="/v1/jobs", read=Job.from_manifest, query=query, body=body, headers=headers)


def get(place: Readable) -> Call[Job]:
    """Get the job by its uid, or by its name the existing one, else the latest deleted one."""
    return Call(method="GET", path=place.path, read=Job.from_manifest)


def page(query: Mapping[str, Any]) -> Call[Page]:
    """Get one page of the jobs of a query."""
    given = {name: value for name, value in query.items() if value not in (None, "", [], ())}
    return Call(method="GET", path="/v1/jobs", read=Page.from_manifest, query=given)


def act(place: Place, action: str, key: str, etag: str | None = None) -> Call[Job]:
    """Suspend or resume a job; with ``etag`` only as it was when it had that."""
    return Call(method="POST", path=f"{place.path}/{action}", read=Job.from_manifest, headers=_guarded(key, etag))


def delete(place: Place, key: str, etag: str | None = None) -> Call[Job]:
    """Delete a job; with ``etag`` only in the state that had it."""
    return Call(method="DELETE", path=place.path, read=Job.from_manifest, headers=_guarded(key, etag))


def _guarded(key: str, etag: str | None) -> Mapping[str, str]:
    """Change a job. The key makes a repeated call succeed, although the first one has changed the ETag."""
    return {"Idempotency-Key": key, **({"If-Match": etag} if etag else {})}


def events(place: Readable, after: int) -> Call[tuple[Event, ...]]:
    """Get the events of a job after that number."""
    return Call(
        method="GET",
        path=f"{place.path}/events",
        read=_items(Event),
        query={"after": after, "limit": 1000},
    )


def retry(place: Place, name: str | None, key: str) -> Call[Job]:
    """Create a new job from one that has ended."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    body = json.dumps({} if name is None else {"name": name}).encode()
    return Call(method="POST", path=f"{place.path}/retry", read=Job.from_manifest, body=body, headers=headers)


def reproduce(place: Readable) -> Call[Reproduction]:
    """Get what repeats the run of a job."""
    return Call(method="GET", path=f"{place.path}/reproduce", read=Reproduction.from_manifest)


def logs(place: Readable, rank: int | None, cursor: str, tail: int | None) -> Call[LinePage]:
    """Get log lines after the cursor, or the last ones."""
    fields = {"rank": rank, "cursor": cursor or None, "tail": tail is not None or None, "limit": tail or MOST_LINES}
    query = {name: value for name, value in fields.items() if value is not None}
    return Call(method="GET", path=f"{place.path}/logs", read=LinePage.from_manifest, query=query)


def metrics(place: Readable, ranks: Sequence[int], points: int) -> Call[tuple[Series, ...]]:
    """Get a job's metrics over its steps, also of single ranks."""
    return Call(
        method="GET",
        path=f"{place.path}/metrics",
        read=lambda value: tuple(map(Series.from_manifest, value["series"])),
        query={"rank": list(ranks), "points": points},
    )


def timeline(place: Readable, step: int | None) -> Call[SampledStep]:
    """Get a sampled step, by default the newest."""
    query = {} if step is None else {"step": step}
    return Call(method="GET", path=f"{place.path}/timeline", read=SampledStep.from_manifest, query=query)


def plans(place: Readable) -> Call[tuple[JobPlan, ...]]:
    """Get every plan that a job used."""
    return Call(method="GET", path=f"{place.path}/plans", read=_items(JobPlan))


def version() -> Call[Version]:
    """Get the versions of the service."""
    return Call(method="GET", path="/version", read=Version.from_manifest)


def checkpoints(place: Readable) -> Call[tuple[Checkpoint, ...]]:
    """Get a job's checkpoints, newest first."""
    return Call(method="GET", path=f"{place.path}/checkpoints", read=_items(Checkpoint))


def export(place: Place, checkpoint: Checkpoint, key: str) -> Call[Checkpoint]:
    """Export a checkpoint for other programs."""
    path = f"{place.path}/checkpoints/{checkpoint.attempt}/{checkpoint.step}/export"
    return Call(method="POST", path=path, read=Checkpoint.from_manifest, headers={"Idempotency-Key": key})


def artifacts(place: Readable) -> Call[tuple[Artifact, ...]]:
    """Get a job's files, by name."""
    return Call(method="GET", path=f"{place.path}/artifacts", read=_items(Artifact))


def artifact_path(place: Readable, name: str) -> str:
    """Return the path of a file."""
    return f"{place.path}/artifacts/{quote(name)}"


def _items(kind: type[A]) -> Callable[[Any], tuple[A, ...]]:
    return lambda value: tuple(map(kind.from_manifest, value["items"]))


def login_link(server: str, key: str) -> Call[LoginLink]:
    """Create a link that signs a browser in."""
    return Call(
        method="POST",
        path="/v1/login-links",
        read=lambda value: LoginLink(url=server + value["path"], expires_at=value["expiresAt"]),
        headers={"Idempotency-Key": key},
    )


def refusal(status: int, document: Any) -> ServiceError:
    """Return the error of a problem document, or of an answer that is not one."""
    if not isinstance(document, Mapping):
        return ServiceError(status=status, kind="unknown", detail=f"the service answered {status} without a reason")
    return ServiceError(
        status=status,
        kind=str(document.get("type", "")).rpartition("/")[2] or "unknown",
        detail=str(document.get("detail", f"the service answered {status}")),
        where=str(document.get("where", "")),
        remedy=str(document.get("remedy", "")),
    )


def unreachable(server: str, reason: str) -> ServiceError:
    """Return the error of a service that does not answer."""
    return ServiceError(
        status=0,
        kind="unreachable",
        detail=f"{server} cannot be reached: {reason}",
        where="--server",
        remedy="start it with penstock serve, or name another",
    )


def pause_before(tries: int, problem: ServiceError, retry_after: str | None) -> float:
    """Return the seconds before the next try: the service's Retry-After, else 0.2, 0.4, ... up to 5.

    Raises:
        ServiceError: the problem, if a retry would not change it, or after too many tries.
    """
    if problem.status not in TRY_AGAIN or tries >= MOST_TRIES:
        raise problem
    if retry_after is not None and retry_after.isdecimal():
        return float(min(int(retry_after), 60))
    return float(min(FIRST_PAUSE_SECONDS * 2 ** (tries - 1), LONGEST_PAUSE_SECONDS))
