"""A planner without a process."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.planner.worker.protocol import Answer, PlanningRequest, Progress
from tests.support.sample_run import sample_plan


@dataclass
class FakePlanner:
    """Answers at the second poll. ``asked`` holds the keys of what was begun, ``requests`` what was asked."""

    answer: Answer = field(default_factory=lambda: Answer(plan=sample_plan()))
    asked: list[str] = field(default_factory=list)
    requests: list[PlanningRequest] = field(default_factory=list)
    polls: dict[str, int] = field(default_factory=dict)

    def start(self, key: str, request: PlanningRequest) -> None:
        if key not in self.polls:
            self.asked.append(key)
            self.requests.append(request)
            self.polls[key] = 0

    def poll(self, key: str) -> Answer | None:
        self.polls[key] += 1
        if self.polls[key] < 2:
            return None
        del self.polls[key]
        return self.answer

    def busy(self, key: str) -> bool:
        return key in self.polls

    def progress(self, key: str) -> Progress:
        return Progress(candidates=self.polls[key])

    def cancel(self, key: str) -> None:
        self.polls.pop(key, None)
