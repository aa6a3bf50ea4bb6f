"""Client for asyncio, with the same calls as `penstock.client.sync`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
from penstock.client.sync import LOOK_SECONDS, TIMEOUT_SECONDS, new_key, refused
from penstock.client.trust import trusted
from penstock.client.types import Event, Job, LoginLink, Version
from penstock.core.cluster import ClusterSpec
from penstock.core.job import PipelineJob
from penstock.core.profile import Profile

T = TypeVar("T")


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

    async def submit(self, job: PipelineJob, *, dry_run: bool = False) -> Job:
        """Submit a job; a dry run only returns the result."""
        return await self._do(calls.submit(job, new_key(), dry_run=dry_run))

    async def get(self, place: Readable) -> Job:
        """Return the existing job of this name, else the latest deleted one."""
        return await self._do(calls.get(place))

    async def jobs(self, **query: Any) -> AsyncIterator[Job]:
        """Yield every job of the query, page by page."""
        cursor: str | None = None
        while True:
            page = await self._do(calls.page({**query, "cursor": cursor}))
            for job in page.items:
                yield job
            cursor = page.next
            if cursor is None:
                return

    async def suspend(self, place: Place, *, etag: str | None = None) -> Job:
        """Suspend the job: it saves a checkpoint after the current step, and releases its devices."""
        return await self._do(calls.act(place, "suspend", new_key(), etag))

    async def resume(self, place: Place, *, etag: str | None = None) -> Job:
        """Resume a suspended job."""
        return await self._do(calls.act(place, "resume", new_key(), etag))

    async def delete(self, place: Place, *, etag: str | None = None) -> Job:
        """Delete a job: it ends, and its name is free."""
        return await self._do(calls.delete(place, new_key(), etag))

    async def events(self, place: Readable, after: int = 0) -> tuple[Event, ...]:
        """Return the events of a job, oldest first."""
        return await self._do(calls.events(place, after))

    async def retry(self, place: Place, name: str | None = None) -> Job:
        """Create a new job from one that has ended; it continues from the newest checkpoint."""
        return await self._do(calls.retry(place, name, new_key()))

    async def reproduce(self, place: Readable) -> Reproduction:
        """Return what repeats the run of a job."""
        return await self._do(calls.reproduce(place))

    async def logs(
        self, place: Readable, *, rank: int | None = None, cursor: str = "", tail: int | None = None
    ) -> LinePage:
        """Return log lines: the first ones after the cursor, or the last ``tail`` ones."""
        return await self._do(calls.logs(place, rank, cursor, tail))

    async def metrics(
        self, place: Readable, *, ranks: Sequence[int] = (), points: int = calls.MOST_POINTS
    ) -> tuple[Series, ...]:
        """Return a job's metrics over its steps, over all ranks and of those named; at most ``points`` for a series."""
        return await self._do(calls.metrics(place, ranks, points))

    async def timeline(self, place: Readable, step: int | None = None) -> SampledStep:
        """Return the timeline of a sampled step, by default of the newest."""
        return await self._do(calls.timeline(place, step))

    async def plans_of(self, place: Readable) -> tuple[JobPlan, ...]:
        """Return every plan that a job used, oldest first."""
        return await self._do(calls.plans(place))

    async def checkpoints(self, place: Readable) -> tuple[Checkpoint, ...]:
        """Return a job's checkpoints, newest first."""
        return await self._do(calls.checkpoints(place))

    async def export(self, place: Place, checkpoint: Checkpoint) -> Checkpoint:
        """Export a checkpoint as safetensors; `checkpoints` returns the progress."""
        return await self._do(calls.export(place, checkpoint, new_key()))

    async def artifacts(self, place: Readable) -> tuple[Artifact, ...]:
        """Return a job's files, by name."""
        return await self._do(calls.artifacts(place))

    async def version(self) -> Version:
        """Return the versions of the service."""
        return await self._do(calls.version())

    async def login_link(self) -> LoginLink:
        """Create a link that signs a browser in, once, within a minute."""
        return await self._do(calls.login_link(self._server, new_key()))

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
        """Yield what happens to a job after its event number ``after``, or to all jobs (namespace, label, name),
        without end.

        A connection that ends is followed by another; each begins with ``hello``, after which nothing is missed.
        """
        listening = Listening(last_event=None if after is None else str(after))
        while True:
            problem, hint = None, None
            try:
                async with self._http.stream(
                    "GET", stream_path(place), params=query, headers=listening.headers()
                ) as answer:
                    if answer.is_success:
                        async for line in answer.aiter_lines():
                            if (message := listening.hear(line)) is not None:
                                yield message
                    else:
                        await answer.aread()
                        problem, hint = refused(answer)
            except httpx.TransportError as error:
                problem = calls.unreachable(self._server, str(error))
            await self._pause(listening.pause_after(problem, hint))

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

    async def plan(
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
        return await self._do(planning.ask(job, cluster, profile, new_key(), what_if=what_if))

    async def planned(self, request: str) -> PlanRequest:
        """Return a plan request."""
        return await self._do(planning.get(request))

    async def plans(self, **query: Any) -> tuple[PlanRequest, ...]:
        """Return the newest plan requests (namespace, limit), newest first."""
        return await self._do(planning.newest(query))

    async def cancel_plan(self, request: str) -> PlanRequest:
        """Cancel a plan request, or delete one that has ended."""
        return await self._do(planning.cancel(request))

    async def follow_plan(self, request: str) -> AsyncIterator[PlanRequest]:
        """Yield a plan request, and again after every change, until it has ended."""
        seen: PlanRequest | None = None
        while seen is None or not seen.ended:
            current = await self.planned(request)
            if current != seen:
                yield current
            seen = current
            if not current.ended:
                await self._pause(LOOK_SECONDS)

    async def profiles(self) -> tuple[ProfileEntry, ...]:
        """Return all profiles, newest first."""
        return await self._do(planning.profiles())

    async def profile(self, digest: str) -> Profile:
        """Return the profile with this digest."""
        return await self._do(planning.profile(digest))

    async def _do(self, call: Call[T]) -> T:
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
