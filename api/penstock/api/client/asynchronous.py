"""The client that awaits; the same calls as `penstock.api.client.sync`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Self, TypeVar

import httpx

from penstock.api.client import calls, planning
from penstock.api.client.calls import Call, Place
from penstock.api.client.config import Target
from penstock.api.client.planning import PlanRequest, ProfileEntry
from penstock.api.client.sync import LOOK_SECONDS, TIMEOUT_SECONDS, document, new_key
from penstock.api.client.types import Event, Job
from penstock.core.cluster import ClusterSpec
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.profile import Profile

T = TypeVar("T")


class AsyncClient:
    """See `penstock.api.client.sync.Client`."""

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
            base_url=target.server, headers=headers, timeout=TIMEOUT_SECONDS, transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def submit(self, job: PipelineJob) -> Job:
        """Make a job."""
        return await self._do(calls.submit(job, new_key()))

    async def get(self, place: Place) -> Job:
        """The job that lives under this name, else the latest that did."""
        return await self._do(calls.get(place))

    async def jobs(self, **query: Any) -> AsyncIterator[Job]:
        """Every job that the query asks for, page by page."""
        cursor: str | None = None
        while True:
            page = await self._do(calls.page({**query, "cursor": cursor}))
            for job in page.items:
                yield job
            cursor = page.next
            if cursor is None:
                return

    async def suspend(self, place: Place) -> Job:
        """Checkpoint after the step at hand, and free what the job holds."""
        return await self._do(calls.act(place, "suspend", new_key()))

    async def resume(self, place: Place) -> Job:
        """Go on with a suspended job."""
        return await self._do(calls.act(place, "resume", new_key()))

    async def delete(self, place: Place) -> Job:
        """End a job and free its name."""
        return await self._do(calls.delete(place))

    async def events(self, place: Place, after: int = 0) -> tuple[Event, ...]:
        """What happened to a job, oldest first."""
        return await self._do(calls.events(place, after))

    async def follow(self, place: Place) -> AsyncIterator[Job]:
        """The job as it is, and again whenever it changed, until it has ended or is suspended."""
        seen: tuple[Any, ...] | None = None
        while True:
            job = await self.get(place)
            now = (job.uid, job.status)
            if now != seen:
                yield job
                seen = now
            if job.status.phase.terminal or job.status.phase is Phase.SUSPENDED:
                return
            await self._pause(LOOK_SECONDS)

    async def wait(self, place: Place) -> Job:
        """The job once it has ended or is suspended."""
        return [job async for job in self.follow(place)][-1]

    async def plan(
        self, job: PipelineJob, *, cluster: ClusterSpec | None = None, profile: str | None = None
    ) -> PlanRequest:
        """Ask for a plan without running, for described hardware or a stored profile; else for its own machine."""
        return await self._do(planning.ask(job, cluster, profile, new_key()))

    async def planned(self, request: str) -> PlanRequest:
        """A request for a plan as it is."""
        return await self._do(planning.get(request))

    async def plans(self, **query: Any) -> tuple[PlanRequest, ...]:
        """The newest requests for plans (namespace, limit), newest first."""
        return await self._do(planning.newest(query))

    async def cancel_plan(self, request: str) -> PlanRequest:
        """Cancel a request for a plan, or forget one that has ended."""
        return await self._do(planning.cancel(request))

    async def follow_plan(self, request: str) -> AsyncIterator[PlanRequest]:
        """A request for a plan as it is, and again whenever it changed, until it has ended."""
        seen: PlanRequest | None = None
        while seen is None or not seen.ended:
            found = await self.planned(request)
            if found != seen:
                yield found
            seen = found
            if not found.ended:
                await self._pause(LOOK_SECONDS)

    async def profiles(self) -> tuple[ProfileEntry, ...]:
        """What was measured, newest first."""
        return await self._do(planning.profiles())

    async def profile(self, digest: str) -> Profile:
        """The measurements with this digest."""
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
                problem, hint = calls.refusal(answer.status_code, document(answer)), answer.headers.get("retry-after")
            await self._pause(calls.pause_before(tries, problem, hint))
        raise AssertionError("tries are counted without end")
