"""Plans for many jobs: equal plan requests are computed once, few at a time, and answers are cached for a while.

A transient error, such as that of a killed planning process, is the answer to all equal requests made until then, but
not to later ones.

Namespaces are served round robin: another namespace's first request waits for at most one request of each, however
many one namespace makes.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from penstock.core.lifecycle import Step
from penstock.core.plan import Plan
from penstock.core.profile import digest
from penstock.planner.worker.process import Planner
from penstock.planner.worker.protocol import Answer, PlanningRequest

MOST_REMEMBERED = 256


class Planning:
    """Calls ``planner``; threads may share it. ``num_planners`` requests are computed concurrently, the others wait.

    ``observe_seconds`` is called with the duration of each, in seconds.
    """

    def __init__(
        self, planner: Planner, num_planners: int = 1, observe_seconds: Callable[[float], None] = lambda s: None
    ) -> None:
        self._planner, self._num_planners, self._observe_seconds = planner, num_planners, observe_seconds
        self._lock = threading.Lock()
        self._working: dict[str, float] = {}
        self._waiting: OrderedDict[str, OrderedDict[str, PlanningRequest]] = OrderedDict()
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._answered: list[str] = []

    def request(self, question: PlanningRequest, namespace: str = "") -> str:
        """Enqueue the plan request of that namespace; return its key.

        Equal requests share a key. After a transient error, later ones get a new key, and the old key keeps the error:
        a job that has it does not plan again.
        """
        key = digest(question.to_manifest())
        with self._lock:
            while (known := self._answers.get(key)) is not None and known.is_transient:
                key = digest(key)
            if key not in self._answers and key not in self._working:
                self._waiting.setdefault(namespace, OrderedDict()).setdefault(key, question)
            self._advance()
        return key

    def remember(self, plan: Plan) -> str:
        """Store an earlier plan as an answer; return the key of that answer, which is the plan's digest."""
        with self._lock:
            self._remember(plan.digest, Answer(plan=plan))
        return plan.digest

    def status(self, key: str) -> tuple[Step, Answer | None]:
        """Return the state of the request with that key, and its answer once there is one."""
        with self._lock:
            self._advance()
            answer = self._answers.get(key)
            if answer is not None:
                return (Step.DONE if answer.plan is not None else Step.FAILED), answer
            known = key in self._working or any(key in keys for keys in self._waiting.values())
            return (Step.WORKING if known else Step.MISSING), None

    def take_answered(self) -> list[str]:
        """Return the keys of requests that were answered since the last call."""
        with self._lock:
            self._advance()
            answered, self._answered = self._answered, []
            return answered

    @property
    def num_working(self) -> int:
        """Requests that are being computed."""
        with self._lock:
            return len(self._working)

    @property
    def num_waiting(self) -> int:
        """Requests that wait."""
        with self._lock:
            return len({key for keys in self._waiting.values() for key in keys})

    def close(self) -> None:
        """Cancel all requests."""
        with self._lock:
            self._waiting.clear()
            for key in self._working:
                self._planner.cancel(key)
            self._working.clear()

    def _advance(self) -> None:
        for key in list(self._working):
            answer = self._planner.poll(key)
            if answer is not None:
                self._observe_seconds(time.monotonic() - self._working.pop(key))
                self._remember(key, answer)
                self._answered.append(key)
        while self._waiting and len(self._working) < self._num_planners:
            key, question = self._next()
            self._planner.start(key, question)
            self._working[key] = time.monotonic()

    def _next(self) -> tuple[str, PlanningRequest]:
        """Remove and return the oldest request of the namespace that was served least recently."""
        namespace, keys = self._waiting.popitem(last=False)
        key, question = keys.popitem(last=False)
        self._waiting[namespace] = keys  # behind all others
        for others in self._waiting.values():
            others.pop(key, None)
        for drained in [namespace for namespace, others in self._waiting.items() if not others]:
            del self._waiting[drained]
        return key, question

    def _remember(self, key: str, answer: Answer) -> None:
        self._answers[key] = replace(answer, timeline=None)  # large, and not drawn here
        while len(self._answers) > MOST_REMEMBERED:
            self._answers.popitem(last=False)
