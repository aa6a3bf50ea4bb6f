"""Plans for many jobs: equal questions are asked once, few at a time, and answers are remembered for a while."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from penstock.core.lifecycle import Step
from penstock.core.profile import digest
from penstock.planning.process import Planner
from penstock.planning.questions import Answer, Question

MOST_REMEMBERED = 256


class Planning:
    """Asks ``planner``; threads may share it. ``num_planners`` questions are worked on at once, the others wait.

    ``took`` is told how many seconds each took.
    """

    def __init__(self, planner: Planner, num_planners: int = 1, took: Callable[[float], None] = lambda s: None) -> None:
        self._planner, self._num_planners, self._took = planner, num_planners, took
        self._lock = threading.Lock()
        self._working: dict[str, float] = {}
        self._waiting: OrderedDict[str, Question] = OrderedDict()
        self._answers: OrderedDict[str, Answer] = OrderedDict()
        self._answered: list[str] = []

    def ask(self, question: Question) -> str:
        """Have the question answered some time; its key."""
        key = digest(question.to_manifest())
        with self._lock:
            if key not in self._answers and key not in self._working:
                self._waiting.setdefault(key, question)
            self._turn()
        return key

    def look(self, key: str) -> tuple[Step, Answer | None]:
        """Where the question with that key is, and its answer once there is one."""
        with self._lock:
            self._turn()
            answer = self._answers.get(key)
            if answer is not None:
                return (Step.DONE if answer.plan is not None else Step.FAILED), answer
            known = key in self._working or key in self._waiting
            return (Step.WORKING if known else Step.MISSING), None

    def turn(self) -> list[str]:
        """The keys of the questions that were answered since this was called last."""
        with self._lock:
            self._turn()
            answered, self._answered = self._answered, []
            return answered

    def numbers(self) -> tuple[int, int]:
        """Questions that are worked on, and that wait."""
        with self._lock:
            return len(self._working), len(self._waiting)

    def close(self) -> None:
        """Answer nothing more."""
        with self._lock:
            self._waiting.clear()
            for key in self._working:
                self._planner.cancel(key)
            self._working.clear()

    def _turn(self) -> None:
        for key in list(self._working):
            answer = self._planner.poll(key)
            if answer is not None:
                self._took(time.monotonic() - self._working.pop(key))
                self._remember(key, answer)
                self._answered.append(key)
        while self._waiting and len(self._working) < self._num_planners:
            key, question = self._waiting.popitem(last=False)
            self._planner.start(key, question)
            self._working[key] = time.monotonic()

    def _remember(self, key: str, answer: Answer) -> None:
        self._answers[key] = replace(answer, timeline=None)  # large, and nobody here draws it
        while len(self._answers) > MOST_REMEMBERED:
            self._answers.popitem(last=False)
