"""The client that waits."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

import httpx

from penstock.api.client import calls, planning
from penstock.api.client.calls import Call, Place
from penstock.api.client.config import Target
from penstock.api.client.planning import PlanRequest, ProfileEntry
from penstock.api.client.types import Event, Job
from penstock.core.cluster import ClusterSpec
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.profile import Profile

T = TypeVar("T")

TIMEOUT_SECONDS = 30.0
LOOK_SECONDS = 0.5


class Client:
    """Asks the service at ``target``; a context, since it keeps connections. ``pause`` lets some seconds pass.

    Every method raises `ServiceError` where the service refuses or, after some tries, cannot be reached.
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
        self._http = httpx.Client(base_url=target.server, headers=headers, timeout=TIMEOUT_SECONDS, transport=transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def submit(self, job: PipelineJob) -> Job:
        """Make a job."""
        return self._do(calls.submit(job, new_key()))

    def get(self, place: Place) -> Job:
        """The job that lives under this name, else the latest that did."""
        return self._do(calls.get(place))

    def jobs(self, **query: Any) -> Iterator[Job]:
        """Every job that the query asks for (namespace, phase, label, name, sort), page by page."""
        cursor: str | None = None
        while True:
            page = self._do(calls.page({**query, "cursor": cursor}))
            yield from page.items
            cursor = page.next
            if cursor is None:
                return

    def suspend(self, place: Place) -> Job:
        """Checkpoint after the step at hand, and free what the job holds."""
        return self._do(calls.act(place, "suspend", new_key()))

    def resume(self, place: Place) -> Job:
        """Go on with a suspended job."""
        return self._do(calls.act(place, "resume", new_key()))

    def delete(self, place: Place) -> Job:
        """End a job and free its name."""
        return self._do(calls.delete(place))

    def events(self, place: Place, after: int = 0) -> tuple[Event, ...]:
        """What happened to a job, oldest first."""
        return self._do(calls.events(place, after))

    def follow(self, place: Place) -> Iterator[Job]:
        """The job as it is, and again whenever it changed, until it has ended or is suspended."""
        seen: tuple[Any, ...] | None = None
        while True:
            job = self.get(place)
            now = (job.uid, job.status)
            if now != seen:
                yield job
                seen = now
            if job.status.phase.terminal or job.status.phase is Phase.SUSPENDED:
                return
            self._pause(LOOK_SECONDS)

    def wait(self, place: Place) -> Job:
        """The job once it has ended or is suspended."""
        *_, last = self.follow(place)
        return last

    def plan(self, job: PipelineJob, *, cluster: ClusterSpec | None = None, profile: str | None = None) -> PlanRequest:
        """Ask for a plan without running, for described hardware or a stored profile; else for its own machine."""
        return self._do(planning.ask(job, cluster, profile, new_key()))

    def planned(self, request: str) -> PlanRequest:
        """A request for a plan as it is."""
        return self._do(planning.get(request))

    def plans(self, **query: Any) -> tuple[PlanRequest, ...]:
        """The newest requests for plans (namespace, limit), newest first."""
        return self._do(planning.newest(query))

    def cancel_plan(self, request: str) -> PlanRequest:
        """Cancel a request for a plan, or forget one that has ended."""
        return self._do(planning.cancel(request))

    def follow_plan(self, request: str) -> Iterator[PlanRequest]:
        """A request for a plan as it is, and again whenever it changed, until it has ended."""
        seen: PlanRequest | None = None
        while seen is None or not seen.ended:
            found = self.planned(request)
            if found != seen:
                yield found
            seen = found
            if not found.ended:
                self._pause(LOOK_SECONDS)

    def profiles(self) -> tuple[ProfileEntry, ...]:
        """What was measured, newest first."""
        return self._do(planning.profiles())

    def profile(self, digest: str) -> Profile:
        """The measurements with this digest."""
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
                problem, hint = calls.refusal(answer.status_code, document(answer)), answer.headers.get("retry-after")
            self._pause(calls.pause_before(tries, problem, hint))
        raise AssertionError("tries are counted without end")


def document(answer: httpx.Response) -> Any:
    """The JSON of a refusal; none if it is something else."""
    try:
        return answer.json()
    except ValueError:
        return None


def new_key() -> str:
    """Names this one wish, however often it is sent."""
    return str(uuid.uuid4())
