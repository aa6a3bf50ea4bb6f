"""Queue of plan requests: a few run at a time, each in a separate planning process, round robin over namespaces.

Like the executor, the queue keeps no essential state. The store has the open requests and their workers, `next_steps`
decides, and the queue executes the steps. A restarted service reads its requests from the store and restarts them.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.api.service import Service
from penstock.api.store import plan_requests, profiles
from penstock.api.store.plan_requests import State, StoredRequest
from penstock.core.clocks import Ages
from penstock.core.host.clocks import boottime_seconds
from penstock.planner.worker.process import Planner
from penstock.planner.worker.protocol import Answer, PlanningRequest, Progress

log = logging.getLogger(__name__)

MOST_CONCURRENT = 2
MOST_SECONDS = 300.0
MOST_BEGINNINGS = 5
RENEW_SECONDS, LAPSE_SECONDS = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class Begin:
    """Claim a request that no worker processes, and start planning."""

    request: StoredRequest


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer the request with an error: it was started too often."""

    request: StoredRequest


@dataclass(frozen=True, slots=True)
class Poll:
    """Poll the process of the request."""

    request: StoredRequest


@dataclass(frozen=True, slots=True)
class Drop:
    """Stop the process of a request that was canceled, or that another service claimed."""

    id: str


Step = Begin | Fail | Poll | Drop


def next_steps(
    open_requests: Sequence[StoredRequest], busy: Collection[str], worker: str, lapsed: Collection[str]
) -> list[Step]:
    """Return the steps of ``worker``, which has a process for each request id in ``busy``.

    ``open_requests`` are ordered, oldest first. The claims of ``lapsed`` were not renewed for `LAPSE_SECONDS`.
    """
    mine = [request for request in open_requests if request.worker == worker and request.id in busy]
    kept = {request.id for request in mine}
    steps: list[Step] = [Drop(request) for request in busy if request not in kept]
    steps += [Poll(request) for request in mine]
    free = MOST_CONCURRENT - len(mine)
    waiting = [request for request in open_requests if request.id not in kept and _is_free(request, worker, lapsed)]
    for request in _round_robin(waiting, [request for request in open_requests if request not in waiting]):
        if request.begun >= MOST_BEGINNINGS:
            steps.append(Fail(request))
        elif free > 0:
            steps.append(Begin(request))
            free -= 1
    return steps


def _round_robin(waiting: Sequence[StoredRequest], working: Sequence[StoredRequest]) -> list[StoredRequest]:
    """Order waiting requests round robin: the second one of a namespace comes after the first one of every other."""
    taken = Counter(request.namespace for request in working)
    order: list[tuple[int, int]] = []
    for i, request in enumerate(waiting):
        order.append((taken[request.namespace], i))
        taken[request.namespace] += 1
    return [waiting[i] for _, i in sorted(order)]


def _is_free(request: StoredRequest, worker: str, lapsed: Collection[str]) -> bool:
    """Whether a request for which ``worker`` has no process may start.

    It may if it is queued, if ``worker`` claimed it but lost the process, or if the claim of another worker has lapsed.
    """
    return request.state is State.QUEUED or request.worker == worker or request.id in lapsed


class PlanQueue:
    """Runs the plan requests of ``service`` as the worker ``name``. ``boottime`` returns seconds since the boot.

    A claim lapses when its renewals have not changed for a while by this machine's clock; other workers' may be off.
    """

    def __init__(
        self, service: Service, planner: Planner, *, name: str, boottime: Callable[[], float] = boottime_seconds
    ) -> None:
        self._service, self._planner, self._name = service, planner, name
        self._boottime, self._ages = boottime, Ages()
        self._busy: set[str] = set()
        self._renewed: dict[str, tuple[float, Progress]] = {}

    def run_once(self) -> None:
        """Handle every open request once. Logs an error in one request, and continues with the others."""
        now = self._service.clock()
        open_requests = self._service.read(plan_requests.unfinished)
        for step in next_steps(open_requests, frozenset(self._busy), self._name, self._lapsed(open_requests)):
            with _surviving():
                self._do(step, now)

    def _lapsed(self, open_requests: Sequence[StoredRequest]) -> set[str]:
        now = self._boottime()
        self._ages.forget_all_but({request.id for request in open_requests})
        claims = {request.id: (request.worker, request.renewed_at) for request in open_requests}
        return {id_ for id_, claim in claims.items() if self._ages.seconds((id_, "claim"), claim, now) > LAPSE_SECONDS}

    def close(self) -> None:
        """Stop running requests; the next service restarts them."""
        for request in tuple(self._busy):
            self._drop(request)

    def _do(self, step: Step, now: float) -> None:
        match step:
            case Begin(request):
                self._begin(request, now)
            case Fail(request):
                self._fail(request, now)
            case Poll(request):
                self._poll(request.id, now)
            case Drop(request):
                self._drop(request)

    def _begin(self, request: StoredRequest, now: float) -> None:
        if not self._claim(request, now):
            return
        try:
            question = self._question(request.id)
        except Exception as error:  # of any kind: a retry would not fix the request
            remedy = "request the plan again: another version of penstock stored this request"
            answer = Answer(what=f"the request cannot be read: {error}", remedy=remedy)
            self._answer(request.id, answer, now)
            raise
        self._planner.start(request.id, question)
        self._busy.add(request.id)

    def _claim(self, request: StoredRequest, now: float) -> bool:
        return self._service.write(request.id, lambda c: plan_requests.claim(c, request, self._name, now))

    def _question(self, request: str) -> PlanningRequest:
        plan_input = self._service.read(lambda connection: plan_requests.plan_input(connection, request))
        digest = plan_input.profile
        profile = None if digest is None else self._service.read(lambda c: profiles.get(c, digest))[1]
        return PlanningRequest(
            spec=plan_input.job.spec,
            profile=profile,
            cluster=plan_input.cluster,
            what_if=plan_input.what_if,
            frontier=plan_input.frontier,
        )

    def _fail(self, request: StoredRequest, now: float) -> None:
        if self._claim(request, now):
            what = f"planning was started {request.begun} times, and the service was killed each time"
            remedy = "check the service's log and memory limit, then request the plan again"
            self._answer(request.id, Answer(what=what, remedy=remedy), now)

    def _poll(self, request: str, now: float) -> None:
        answer = self._planner.poll(request)
        if answer is None:
            self._renew(request, now)
            return
        self._busy.discard(request)
        self._renewed.pop(request, None)
        self._answer(request, answer, now)

    def _renew(self, request: str, now: float) -> None:
        """Renew the claim, but not at every poll: each renewal is a write to the store."""
        progress = self._planner.progress(request)
        renewed_at, renewed_progress = self._renewed.get(request, (-math.inf, Progress()))
        pause = RENEW_SECONDS if progress != renewed_progress else LAPSE_SECONDS / 4
        boottime = self._boottime()
        if boottime - renewed_at >= pause:
            self._renewed[request] = (boottime, progress)
            manifest = progress.to_manifest()
            self._service.write(request, lambda c: plan_requests.renew(c, request, self._name, manifest, now))

    def _answer(self, request: str, answer: Answer, now: float) -> None:
        plan = answer.plan
        if plan is not None:
            self._service.write(request, lambda c: plan_requests.succeed(c, request, self._name, plan, now))
            return
        error = {"what": answer.what, "where": answer.where, "remedy": answer.remedy}
        self._service.write(request, lambda c: plan_requests.fail(c, request, self._name, error, now))

    def _drop(self, request: str) -> None:
        self._planner.cancel(request)
        self._busy.discard(request)
        self._renewed.pop(request, None)


@contextmanager
def _surviving() -> Iterator[None]:
    """Log errors of one request, so that they do not affect others."""
    try:
        yield
    except Exception:  # of any kind: the other requests continue
        log.exception("handling a plan request failed; unless it has ended, retrying at the next poll")
