"""The blocking client and the client for asyncio, with the same methods."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

import httpx

from penstock.client import calls, planning
from penstock.client.calls import FAILURES, Call, Readable, Retries
from penstock.client.config import Target, trusted
from penstock.client.listening import Download, EventStream, Message, stream_path
from penstock.client.planning import PlanRequest
from penstock.client.types import Job, LoginLink

P = ParamSpec("P")
T = TypeVar("T")

TIMEOUT_SECONDS = 30.0
POLL_SECONDS = 0.5


class _Sent(Generic[P, T]):
    """The method that sends a call and returns its answer; a coroutine method of `AsyncClient`."""

    def __init__(self, call: Callable[P, Call[T]]) -> None:
        self._call, self.__doc__ = call, call.__doc__

    @overload
    def __get__(self, client: None, owner: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        if client is None:
            return lambda client, *args, **kwargs: client.send(self._call(*args, **kwargs))

        @functools.wraps(self._call)
        def send(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.send(self._call(*args, **kwargs))

        return send


class _Methods:
    """Methods of both clients that send one call each."""

    submit = _Sent(calls.submit)
    get = _Sent(calls.get)
    suspend = _Sent(calls.suspend)
    resume = _Sent(calls.resume)
    delete = _Sent(calls.delete)
    events = _Sent(calls.events)
    retry = _Sent(calls.retry)
    reproduce = _Sent(calls.reproduce)
    logs = _Sent(calls.logs)
    metrics = _Sent(calls.metrics)
    timeline = _Sent(calls.timeline)
    plans_of = _Sent(calls.plans_of)
    checkpoints = _Sent(calls.checkpoints)
    export = _Sent(calls.export)
    artifacts = _Sent(calls.artifacts)
    version = _Sent(calls.version)
    plan = _Sent(planning.plan)
    planned = _Sent(planning.planned)
    plans = _Sent(planning.plans)
    cancel_plan = _Sent(planning.cancel_plan)
    profiles = _Sent(planning.profiles)
    profile = _Sent(planning.profile)


class Client(_Methods):
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
        self._http = httpx.Client(
            base_url=target.server,
            headers={"Authorization": f"Bearer {target.token}"},
            timeout=TIMEOUT_SECONDS,
            transport=transport,
            verify=trusted(target.ca),
            event_hooks={"response": [_require_success]},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

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
        path, download = calls.artifact_path(place, name), Download(self._server)
        while True:
            try:
                with self._http.stream("GET", path, headers=download.headers()) as answer:
                    download.begin(answer.status_code, answer.headers)
                    yield from map(download.take, answer.iter_raw())
                    return
            except FAILURES as failure:
                self._pause(download.pause_after(failure))

    def listen(self, place: Readable | None = None, *, after: int | None = None, **query: Any) -> Iterator[Message]:
        """Yield the messages of a job after its event number ``after``, or of all jobs (namespace, label, name),
        without end.

        A connection that ends is followed by another; each begins with ``hello``, after which nothing is missed.
        """
        stream = EventStream(self._server, last_event=None if after is None else str(after))
        while True:
            try:
                with self._http.stream("GET", stream_path(place), params=query, headers=stream.headers()) as answer:
                    yield from filter(None, map(stream.parse_line, answer.iter_lines()))
            except FAILURES as failure:
                self._pause(stream.pause_after(failure))
            else:
                self._pause(stream.retry_seconds)

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
        retries = Retries(self._server)
        while True:
            try:
                answer = self._http.request(
                    call.method, call.path, params=call.query, content=call.content, headers=call.all_headers
                )
                return call.read(answer.json())
            except FAILURES as failure:
                self._pause(retries.pause_after(failure))


class AsyncClient(_Methods):
    """`Client` for asyncio: the same methods, as coroutines."""

    def __init__(
        self,
        target: Target,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._server, self._pause = target.server, pause
        self._http = httpx.AsyncClient(
            base_url=target.server,
            headers={"Authorization": f"Bearer {target.token}"},
            timeout=TIMEOUT_SECONDS,
            transport=transport,
            verify=trusted(target.ca),
            event_hooks={"response": [_require_success_async]},
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def jobs(self, **query: Any) -> AsyncIterator[Job]:
        """Yield every job of the query, page by page."""
        cursor: str | None = None
        while True:
            page = await self.send(calls.page({**query, "cursor": cursor}))
            for job in page.items:
                yield job
            cursor = page.next
            if cursor is None:
                return

    async def login_link(self) -> LoginLink:
        """Create a link that signs a browser in, once, within a minute."""
        return await self.send(calls.login_link(self._server))

    async def download(self, place: Readable, name: str) -> AsyncIterator[bytes]:
        """Yield the content of a file in chunks; a broken connection is resumed."""
        path, download = calls.artifact_path(place, name), Download(self._server)
        while True:
            try:
                async with self._http.stream("GET", path, headers=download.headers()) as answer:
                    download.begin(answer.status_code, answer.headers)
                    async for chunk in answer.aiter_raw():
                        yield download.take(chunk)
                    return
            except FAILURES as failure:
                await self._pause(download.pause_after(failure))

    async def listen(
        self, place: Readable | None = None, *, after: int | None = None, **query: Any
    ) -> AsyncIterator[Message]:
        """Yield the messages of a job after its event number ``after``, or of all jobs (namespace, label, name),
        without end.

        A connection that ends is followed by another; each begins with ``hello``, after which nothing is missed.
        """
        stream = EventStream(self._server, last_event=None if after is None else str(after))
        while True:
            try:
                async with self._http.stream(
                    "GET", stream_path(place), params=query, headers=stream.headers()
                ) as answer:
                    async for line in answer.aiter_lines():
                        if (message := stream.parse_line(line)) is not None:
                            yield message
            except FAILURES as failure:
                await self._pause(stream.pause_after(failure))
            else:
                await self._pause(stream.retry_seconds)

    async def follow(self, place: Readable) -> AsyncIterator[Job]:
        """Yield the job, and again after every change, until it has ended, is suspended or deleted."""
        job = await self.get(place)
        yield job
        if job.resting:
            return
        async for message in self.listen(place):
            if message.kind != "job":
                continue
            now = job.updated(message.data) if message.data["uid"] == job.uid else await self.get(place)
            if (now.uid, now.status) != (job.uid, job.status):
                yield now
            job = now
            if job.resting or message.data["deletedAt"] is not None:
                return

    async def wait(self, place: Readable) -> Job:
        """Wait until the job has ended or is suspended, and return it."""
        return [job async for job in self.follow(place)][-1]

    async def follow_plan(self, request: str) -> AsyncIterator[PlanRequest]:
        """Yield a plan request, and again after every change, until it has ended."""
        previous: PlanRequest | None = None
        while previous is None or not previous.ended:
            current = await self.planned(request)
            if current != previous:
                yield current
            previous = current
            if not current.ended:
                await self._pause(POLL_SECONDS)

    async def send(self, call: Call[T]) -> T:
        """Send a call, again where a retry may help, and return its answer."""
        retries = Retries(self._server)
        while True:
            try:
                answer = await self._http.request(
                    call.method, call.path, params=call.query, content=call.content, headers=call.all_headers
                )
                return call.read(answer.json())
            except FAILURES as failure:
                await self._pause(retries.pause_after(failure))


def _require_success(answer: httpx.Response) -> None:
    """Raise `httpx.HTTPStatusError`, with the answer's body, for anything but success."""
    if not answer.is_success:
        answer.read()
        answer.raise_for_status()


async def _require_success_async(answer: httpx.Response) -> None:
    if not answer.is_success:
        await answer.aread()
        answer.raise_for_status()
