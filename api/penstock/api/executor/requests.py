"""The desk that answers requests for plans: a few at a time, each in a planning process of its own. Namespaces take
turns, and in each the oldest request comes first.

Like the executor it remembers nothing that matters. The store says what is open and who is at it; `due` decides what to
do about it, and the desk does that. A service that was killed finds its requests again and begins them anew.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy.exc import SQLAlchemyError

from penstock.api.service import Service
from penstock.api.store import plan_requests, profiles
from penstock.api.store.plan_requests import State, StoredRequest
from penstock.planner.worker.process import Planner
from penstock.planner.worker.questions import Answer, Progress, Question

log = logging.getLogger(__name__)

AT_ONCE = 2
MOST_SECONDS = 300.0
MOST_BEGINNINGS = 5
RENEW_SECONDS, LAPSE_SECONDS = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class Begin:
    """Set about the request, which nobody works on."""

    request: StoredRequest


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Answer the request with an error: it was begun often enough."""

    request: StoredRequest


@dataclass(frozen=True, slots=True)
class Hear:
    """Ask how far the request's process is."""

    request: StoredRequest


@dataclass(frozen=True, slots=True)
class Drop:
    """End the process of a request that nobody waits for, or that another service took."""

    id: str


Step = Begin | GiveUp | Hear | Drop


def due(found: Sequence[StoredRequest], busy: Collection[str], worker: str, now: float) -> list[Step]:
    """What ``worker`` has to do, which has processes for ``busy``; ``found`` are the open requests, oldest first."""
    mine = [each for each in found if each.worker == worker and each.id in busy]
    kept = {each.id for each in mine}
    steps: list[Step] = [Drop(each) for each in busy if each not in kept]
    steps += [Hear(each) for each in mine]
    free = AT_ONCE - len(mine)
    waiting = [each for each in found if each.id not in kept and _is_free(each, worker, now)]
    for each in _in_turns(waiting, [each for each in found if each not in waiting]):
        if each.begun >= MOST_BEGINNINGS:
            steps.append(GiveUp(each))
        elif free > 0:
            steps.append(Begin(each))
            free -= 1
    return steps


def _in_turns(waiting: Sequence[StoredRequest], working: Sequence[StoredRequest]) -> list[StoredRequest]:
    """Those that wait: before the second request of a namespace comes the first one of every other."""
    taken = Counter(each.namespace for each in working)
    turns: list[tuple[int, int]] = []
    for i, each in enumerate(waiting):
        turns.append((taken[each.namespace], i))
        taken[each.namespace] += 1
    return [waiting[i] for _, i in sorted(turns)]


def _is_free(request: StoredRequest, worker: str, now: float) -> bool:
    """Whether it waits, or whoever worked on it is gone; what this worker has no process for was lost with it."""
    if request.state is State.QUEUED or request.worker == worker:
        return True
    return now - (request.renewed_at or 0.0) > LAPSE_SECONDS


class Desk:
    """Answers the requests of ``service`` as ``name``."""

    def __init__(self, service: Service, planner: Planner, *, name: str) -> None:
        self._service, self._planner, self._name = service, planner, name
        self._busy: set[str] = set()
        self._told: dict[str, tuple[float, Progress]] = {}

    def turn(self) -> None:
        """Look at every open request once. What goes wrong with one is told, and the others go on."""
        now = self._service.clock()
        try:
            found = self._service.read(plan_requests.unfinished)
        except SQLAlchemyError:
            log.exception("the requests for plans cannot be read")
            return
        for step in due(found, frozenset(self._busy), self._name, now):
            with _surviving():
                self._do(step, now)

    def close(self) -> None:
        """End what is under way; the next service begins it anew."""
        for each in tuple(self._busy):
            self._drop(each)

    def _do(self, step: Step, now: float) -> None:
        match step:
            case Begin(request):
                self._begin(request, now)
            case GiveUp(request):
                self._give_up(request, now)
            case Hear(request):
                self._hear(request.id, now)
            case Drop(request):
                self._drop(request)

    def _begin(self, request: StoredRequest, now: float) -> None:
        if not self._claim(request, now):
            return
        try:
            question = self._question(request.id)
        except Exception as error:  # whatever is wrong with what was asked, it will not mend by itself
            self._answer(request.id, Answer(what=f"the request cannot be read: {error}", remedy="ask anew"), now)
            raise
        self._planner.start(request.id, question)
        self._busy.add(request.id)

    def _claim(self, request: StoredRequest, now: float) -> bool:
        return self._service.write(request.id, lambda c: plan_requests.claim(c, request, self._name, now))

    def _question(self, request: str) -> Question:
        wanted = self._service.read(lambda connection: plan_requests.wanted(connection, request))
        digest = wanted.profile
        profile = None if digest is None else self._service.read(lambda c: profiles.get(c, digest))[1]
        return Question(spec=wanted.job.spec, profile=profile, cluster=wanted.cluster, what_if=wanted.what_if)

    def _give_up(self, request: StoredRequest, now: float) -> None:
        if self._claim(request, now):
            what = f"planning was begun {request.begun} times, and the service ended each time"
            self._answer(request.id, Answer(what=what, remedy="see the service's log, and ask anew"), now)

    def _hear(self, request: str, now: float) -> None:
        answer = self._planner.poll(request)
        if answer is None:
            self._renew(request, now)
            return
        self._busy.discard(request)
        self._told.pop(request, None)
        self._answer(request, answer, now)

    def _renew(self, request: str, now: float) -> None:
        """Not at every turn: each is a write that nobody may be waiting for."""
        progress = self._planner.progress(request)
        told_at, told = self._told.get(request, (0.0, Progress()))
        pause = RENEW_SECONDS if progress != told else LAPSE_SECONDS / 4
        if now - told_at >= pause:
            self._told[request] = (now, progress)
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
        self._told.pop(request, None)


@contextmanager
def _surviving() -> Iterator[None]:
    """What goes wrong with one request is told, and takes no other along."""
    try:
        yield
    except Exception:  # whatever it is, the other requests are not to wait for its end
        log.exception("a request for a plan")
