"""Blocking client."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from penstock.client import calls, planning
from penstock.client.calls import Call, Readable
from penstock.client.config import Target
from penstock.client.listening import Downloading, EventStream, Message, stream_path
from penstock.client.planning import PlanRequest
from penstock.client.trust import trusted
from penstock.client.types import Job, LoginLink, ServiceError

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_SECONDS = 30.0
POLL_SECONDS = 0.5


def _sent(call: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """The method that sends a call and returns its answer."""

    @functools.wraps(call)
    def send(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client.send(call(*args, **kwargs))

    del send.__wrapped__  # whose signature has no client
    return send


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

    submit = _sent(calls.submit)
    get = _sent(calls.get)
    suspend = _sent(calls.suspend)
    resume = _sent(calls.resume)
    delete = _sent(calls.delete)
    events = _sent(calls.events)
    retry = _sent(calls.retry)
    reproduce = _sent(calls.reproduce)
    logs = _sent(calls.logs)
    metrics = _sent(calls.metrics)
    timeline = _sent(calls.timeline)
    plans_of = _sent(calls.plans_of)
    checkpoints = _sent(calls.checkpoints)
    export = _sent(calls.export)
    artifacts = _sent(calls.artifacts)
    version = _sent(calls.version)
    plan = _sent(planning.plan)
    planned = _sent(planning.planned)
    plans = _sent(planning.plans)
    cancel_plan = _sent(planning.cancel_plan)
    profiles = _sent(planning.profiles)
    profile = _sent(planning.profile)

    def jobs(self, **query: Any) -> Iterator[Job]:
        """Yield every job of the query (namespace, phase, label, name, sort), page by page."""
        cursor: str | None = None
        while True:
            page = self.send(calls.page({**query, "cursor": cursor}))
            yield from page.items
            cursor = page.next
            if cursor is None:
                return

    def login_link(self) -> LoginLink:
        """Create a link that signs a browser in, once, within a minute."""
        return self.send(calls.login_link(self._server))

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
        """Yield the messages of a job after its event number ``after``, or of all jobs (namespace, label, name),
        without end.

        A connection that ends is followed by another; each begins with ``hello``, after which nothing is missed.
        """
        stream = EventStream(last_event=None if after is None else str(after))
        while True:
            problem, hint = None, None
            try:
                with self._http.stream("GET", stream_path(place), params=query, headers=stream.headers()) as answer:
                    if answer.is_success:
                        yield from filter(None, map(stream.parse_line, answer.iter_lines()))
                    else:
                        answer.read()
                        problem, hint = refused(answer)
            except httpx.TransportError as error:
                problem = calls.unreachable(self._server, str(error))
            self._pause(stream.pause_after(problem, hint))

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

    def follow_plan(self, request: str) -> Iterator[PlanRequest]:
        """Yield a plan request, and again after every change, until it has ended."""
        previous: PlanRequest | None = None
        while previous is None or not previous.ended:
            current = self.planned(request)
            if current != previous:
                yield current
            previous = current
            if not current.ended:
                self._pause(POLL_SECONDS)

    def send(self, call: Call[T]) -> T:
        """Send a call, again where a retry may help, and return its answer."""
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
