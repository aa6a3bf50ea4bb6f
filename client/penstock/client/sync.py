"""Blocking client."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeVar

import httpx

from penstock.client import calls, planning
from penstock.client.calls import Call, Place, Readable
from penstock.client.config import Target
from penstock.client.listening import Downloading, Listening, Message, stream_path
from penstock.client.planning import PlanRequest, ProfileEntry
from penstock.client.run_types import (
    Artifact,
    Checkpoint,
    JobPlan,
    LinePage,
    Reproduction,
    SampledStep,
    Series,
)
from penstock.client.trust import trusted
from penstock.client.types import Event, Job, LoginLink, ServiceError, Version
from penstock.core.cluster import ClusterSpec
from penstock.core.job import PipelineJob
from penstock.core.profile import Profile

T = TypeVar("T")

TIMEOUT_SECONDS = 30.0
LOOK_SECONDS = 0.5


class Client:
    """Client of the service at ``target``; a context manager, since it keeps connections. ``pause`` sleeps.

    Every method raises `ServiceError` where the service refuses or, after some tries, cannot be reached. A change that
    is given the ``etag`` of a job is refused (kind ``changed-meanwhile``) once the job is no longer as it was then.
    """

    def __init__(
        self,
        target: Target,
        *,
        transport: httpx.BaseTransport | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._server, self._pause = target.server, pause
        headers = {"Authorization": f"Bearer {target.token}"}
        self._http = httpx.Client(
            base_url=target.server,
            headers=headers,
            timeout=TIMEOUT_SECONDS,
            transport=transport,
            verify=trusted(target.ca),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def submit(self, job: PipelineJob, *, dry_run: bool = False) -> Job:
        """Submit a job; a dry run only returns the result."""
        return self._do(calls.submit(job, new_key(), dry_run=dry_run))

    def get(self, place: Readable) -> Job:
        """Return the existing job of this name, else the latest deleted one."""
        return self._do(calls.get(place))

    def jobs(self, **query: Any) -> Iterator[Job]:
        """Yield every job of the query (namespace, phase, label, name, sort), page by page."""
        cursor: str | None = None
        while True:
            page = self._do(calls.page({**query, "cursor": cursor}))
            yield from page.items
            cursor = page.next
            if cursor is None:
                return

    def suspend(self, place: Place, *, etag: str | None = None) -> Job:
        """Suspend the job: it saves a checkpoint after the current step, and releases its devices."""
        return self._do(calls.act(place, "suspend", new_key(), etag))

    def resume(self, place: Place, *, etag: str | None = None) -> Job:
        """Resume a suspended job."""
        return self._do(calls.act(place, "resume", new_key(), etag))

    def delete(self, place: Place, *, etag: str | None = None) -> Job:
        """Delete a job: it ends, and its name is free."""
        return self._do(calls.delete(place, new_key(), etag))

    def events(self, place: Readable, after: int = 0) -> tuple[Event, ...]:
        """Return the events of a job, oldest first."""
        return self._do(calls.events(place, after))

    def retry(self, place: Place, name: str | None = None) -> Job:
        """Create a new job from one that has ended; it continues from the newest checkpoint."""
        return self._do(calls.retry(place, name, new_key()))

    def reproduce(self, place: Readable) -> Reproduction:
        """Return what repeats the run of a job."""
        return self._do(calls.reproduce(place))

    def logs(self, place: Readable, *, rank: int | None = None, cursor: str = "", tail: int | None = None) -> LinePage:
        """Return log lines: the first ones after the cursor, or the last ``tail`` ones."""
        return self._do(calls.logs(place, rank, cursor, tail))

    def metrics(
        self, place: Readable, *, ranks: Sequence[int] = (), points: int = calls.MOST_POINTS
    ) -> tuple[Series, ...]:
        """Return a job's metrics over its steps, over all ranks and of those named; at most ``points`` for a series."""
        return self._do(calls.metrics(place, ranks, points))

    def timeline(self, place: Readable, step: int | None = None) -> SampledStep:
        """Return the timeline of a sampled step, by default of the newest."""
        return self._do(calls.timeline(place, step))

    def plans_of(self, place: Readable) -> tuple[JobPlan, ...]:
        """Return every plan that a job used, oldest first."""
        return self._do(calls.plans(place))

    def checkpoints(self, place: Readable) -> tuple[Checkpoint, ...]:
        """Return a job's checkpoints, newest first."""
        return self._do(calls.checkpoints(place))

    def export(self, place: Place, checkpoint: Checkpoint) -> Checkpoint:
        """Export a checkpoint as safetensors; `checkpoints` returns the progress."""
        return self._do(calls.export(place, checkpoint, new_key()))

    def artifacts(self, place: Readable) -> tuple[Artifact, ...]:
        """Return a job's files, by name."""
        return self._do(calls.artifacts(place))

    def version(self) -> Version:
        """Return the versions of the service."""
        return self._do(calls.version())

    def login_link(self) -> LoginLink:
        """Create a link that signs a browser in, once, within a minute."""
        return self._do(calls.login_link(self._server, new_key()))

    def download(self, place: Readable, name: str) -> Iterator[bytes]:
        """Yield the content of a file in chunks; a broken connection is resumed."""
        download = Downloading()
        while True:
            try:
                with self._http.stream("GET", calls.artifact_path(place, name), headers=download.headers()) as answer:
                    if answer.is_success:
                        download.begin(answer.status_code, answer.headers)
                        yield from map(download.take, answer.iter_raw())
                        return
                    answer.read()
                    problem, hint = refused(answer)
            except httpx.TransportError as error:
                problem, hint = calls.unreachable(self._server, str(error)), None
            self._pause(download.pause_after(problem, hint))

    def listen(self, place: Readable | None = None, *, after: int | None = None, **query: Any) -> Iterator[Message]:
        """Yield what happens to a job after its event number ``after``, or to all jobs (namespace, label, name),
        without end.

        A connection that ends is followed by another; each begins with ``hello``, after which nothing is missed.
        """
        listening = Listening(last_event=None if after is None else str(after))
        while True:
            problem, hint = None, None
            try:
                with self._http.stream("GET", stream_path(place), params=query, headers=listening.headers()) as answer:
                    if answer.is_success:
                        yield from filter(None, map(listening.hear, answer.iter_lines()))
                    else:
                        answer.read()
                        problem, hint = refused(answer)
            except httpx.TransportError as error:
                problem = calls.unreachable(self._server, str(error))
            self._pause(listening.pause_after(problem, hint))

    def follow(self, place: Readable) -> Iterator[Job]:
        """Yield the job, and again after every change, until it has ended, is suspended or deleted."""
        job = self.get(place)
        yield job
        if job.resting:
            return
        for message in self.listen(place):
            if message.kind != "job":
                continue
            now = job.updated(message.data) if message.data["uid"] == job.uid else self.get(place)
            if (now.uid, now.status) != (job.uid, job.status):
                yield now
            job = now
            if job.resting or message.data["deletedAt"] is not None:
                return

    def wait(self, place: Readable) -> Job:
        """Wait until the job has ended or is suspended, and return it."""
        *_, last = self.follow(place)
        return last

    def plan(
        self,
        job: PipelineJob,
        *,
        cluster: ClusterSpec | None = None,
        profile: str | None = None,
        what_if: bool = False,
    ) -> PlanRequest:
        """Request a plan without running it, for described hardware or a stored profile; else for the service's
        machine.

        With ``what_if`` changed jobs and hardware are planned as well: the plan's explanation has what each gives.
        """
        return self._do(planning.ask(job, cluster, profile, new_key(), what_if=what_if))

    def planned(self, request: str) -> PlanRequest:
        """Return a plan request."""
        return self._do(planning.get(request))

    def plans(self, **query: Any) -> tuple[PlanRequest, ...]:
        """Return the newest plan requests (namespace, limit), newest first."""
        return self._do(planning.newest(query))

    def cancel_plan(self, request: str) -> PlanRequest:
        """Cancel a plan request, or delete one that has ended."""
        return self._do(planning.cancel(request))

    def follow_plan(self, request: str) -> Iterator[PlanRequest]:
        """Yield a plan request, and again after every change, until it has ended."""
        seen: PlanRequest | None = None
        while seen is None or not seen.ended:
            current = self.planned(request)
            if current != seen:
                yield current
            seen = current
            if not current.ended:
                self._pause(LOOK_SECONDS)

    def profiles(self) -> tuple[ProfileEntry, ...]:
        """Return all profiles, newest first."""
        return self._do(planning.profiles())

    def profile(self, digest: str) -> Profile:
        """Return the profile with this digest."""
        return self._do(planning.profile(digest))

    def _do(self, call: Call[T]) -> T:
        for tries in itertools.count(1):
            try:
                answer = self._http.request(
                    call.method, call.path, params=dict(call.query), content=call.body, headers=dict(call.headers)
                )
            except httpx.TransportError as error:
                problem, hint = calls.unreachable(self._server, str(error)), None
            else:
                if answer.is_success:
                    return call.read(answer.json())
                problem, hint = refused(answer)
            self._pause(calls.pause_before(tries, problem, hint))
        raise AssertionError("the number of tries is unlimited here")


def refused(answer: httpx.Response) -> tuple[ServiceError, str | None]:
    """Return the error in an answer, and its Retry-After header if it has one."""
    try:
        document = answer.json()
    except ValueError:
        document = None
    return calls.refusal(answer.status_code, document), answer.headers.get("retry-after")


def new_key() -> str:
    """Return a new idempotency key: a repeated request with it takes effect once."""
    return str(uuid.uuid4())
