"""Client for asyncio, with the same calls as `penstock.client.sync`."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx

from penstock.client import calls, planning
from penstock.client.calls import Call, Readable
from penstock.client.config import Target
from penstock.client.listening import Downloading, EventStream, Message, stream_path
from penstock.client.planning import PlanRequest
from penstock.client.sync import POLL_SECONDS, TIMEOUT_SECONDS, refused
from penstock.client.trust import trusted
from penstock.client.types import Job, LoginLink

P = ParamSpec("P")
T = TypeVar("T")


def _sent(call: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """The coroutine method that sends a call and returns its answer."""

    @functools.wraps(call)
    async def send(client: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await client.send(call(*args, **kwargs))

    del send.__wrapped__  # whose signature has no client
    return send


class AsyncClient:
    """`penstock.client.sync.Client` for asyncio: the same methods, as coroutines."""

    def __init__(
        self,
        target: Target,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._server, self._pause = target.server, pause
        headers = {"Authorization": f"Bearer {target.token}"}
        self._http = httpx.AsyncClient(
            base_url=target.server,
            headers=headers,
            timeout=TIMEOUT_SECONDS,
            transport=transport,
            verify=trusted(target.ca),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

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
        download = Downloading()
        while True:
            try:
                async with self._http.stream(
                    "GET", calls.artifact_path(place, name), headers=download.headers()
                ) as answer:
                    if answer.is_success:
                        download.begin(answer.status_code, answer.headers)
                        async for chunk in answer.aiter_raw():
                            yield download.take(chunk)
                        return
                    await answer.aread()
                    problem, hint = refused(answer)
            except httpx.TransportError as error:
                problem, hint = calls.unreachable(self._server, str(error)), None
            await self._pause(download.pause_after(problem, hint))

    async def listen(
        self, place: Readable | None = None, *, after: int | None = None, **query: Any
    ) -> AsyncIterator[Message]:
        """Yield the messages of a job after its event number ``after``, or of all jobs (namespace, label, name),
        without end.

        A connection that ends is followed by another; each begins with ``hello``, after which nothing is missed.
        """
        stream = EventStream(last_event=None if after is None else str(after))
        while True:
            problem, hint = None, None
            try:
                async with self._http.stream(
                    "GET", stream_path(place), params=query, headers=stream.headers()
                ) as answer:
                    if answer.is_success:
                        async for line in answer.aiter_lines():
                            if (message := stream.parse_line(line)) is not None:
                                yield message
                    else:
                        await answer.aread()
                        problem, hint = refused(answer)
            except httpx.TransportError as error:
                problem = calls.unreachable(self._server, str(error))
            await self._pause(stream.pause_after(problem, hint))

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
        for tries in itertools.count(1):
            try:
                answer = await self._http.request(
                    call.method, call.path, params=dict(call.query), content=call.body, headers=dict(call.headers)
                )
            except httpx.TransportError as error:
                problem, hint = calls.unreachable(self._server, str(error)), None
            else:
                if answer.is_success:
                    return call.read(answer.json())
                problem, hint = refused(answer)
            await self._pause(calls.pause_before(tries, problem, hint))
        raise AssertionError("the number of tries is unlimited here")
