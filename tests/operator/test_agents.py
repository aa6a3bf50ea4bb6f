"""Who asks which agent when: few at once of one namespace, and never a look at a job that waits for a pod."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from penstock.core.lifecycle import AttemptState
from penstock.core.packing import pack
from penstock.core.pod import AgentReport
from penstock.operator.agents import MOST_OF_A_NAMESPACE, PAUSE_SECONDS, SELDOM_SECONDS, Agents
from penstock.operator.fetching import AgentError
from penstock.operator.snapshots import PodSnapshot

POD = PodSnapshot(
    namespace="team",
    name="p",
    uid="pod",
    job_uid="j",
    attempt=1,
    index=0,
    node="east",
    address="10.0.0.1",
    running=True,
    being_deleted=False,
)
REPORT = AgentReport(pod_uid="pod", job_uid="j", attempt=1, state=AttemptState.READY)


class Bench:
    """Agents whose requests wait until the test lets them go."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waiting: list[Callable[[], None]] = []
        self.told: list[str] = []
        self.answer: bytes | Exception = pack(REPORT.to_manifest())
        self.agents = Agents(self.fetch, lambda: self.now, self.waiting.append, self.told.append)

    def fetch(self, address: str, name: str) -> bytes:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def go(self) -> None:
        waiting, self.waiting[:] = list(self.waiting), []
        for act in waiting:
            act()


def test_a_look_waits_for_no_pod() -> None:
    bench = Bench()
    news = bench.agents.poll(POD, measures=True)
    assert (news.report, news.problem, len(bench.waiting)) == (None, "", 1)
    bench.agents.poll(POD, measures=True)
    assert len(bench.waiting) == 1, "one request of a job is on its way at once"
    bench.go()
    assert bench.told == ["j"]
    assert bench.agents.poll(POD, measures=True).report == REPORT


def test_the_same_again_is_no_news() -> None:
    bench = Bench()
    for _ in range(5):
        bench.agents.poll(POD, measures=True)
        bench.go()
        bench.now += PAUSE_SECONDS
    assert bench.told == ["j"]
    assert bench.agents.poll(POD, measures=True).since == 1000.0


def test_one_namespace_does_not_keep_another_waiting() -> None:
    bench = Bench()
    for number in range(MOST_OF_A_NAMESPACE + 5):
        bench.agents.poll(replace(POD, job_uid=f"j{number}", namespace="slow"), measures=True)
    assert len(bench.waiting) == MOST_OF_A_NAMESPACE
    bench.agents.poll(POD, measures=True)
    assert len(bench.waiting) == MOST_OF_A_NAMESPACE + 1
    bench.go()
    bench.agents.poll(replace(POD, job_uid=f"j{MOST_OF_A_NAMESPACE}", namespace="slow"), measures=True)
    assert len(bench.waiting) == 1


def test_failures_are_followed_by_growing_pauses() -> None:
    bench = Bench()
    bench.answer = AgentError("cannot be reached")
    asked = []
    for _ in range(600):
        bench.agents.poll(POD, measures=True)
        if bench.waiting:
            asked.append(bench.now)
            bench.go()
        bench.now += 1.0
    pauses = [after - before for before, after in pairwise(asked)]
    assert pauses[:4] == [10.0, 20.0, 40.0, 60.0]
    assert set(pauses[4:]) == {SELDOM_SECONDS}
    assert bench.told == ["j"]


def test_what_another_pod_of_the_job_said_counts_no_more() -> None:
    """Also if it answers late."""
    bench = Bench()
    bench.agents.poll(POD, measures=True)
    following = replace(POD, uid="next", attempt=2)
    assert bench.agents.poll(following, measures=True).report is None
    bench.waiting.pop()
    bench.go()
    assert bench.agents.poll(following, measures=True).report is None
    bench.agents.poll(replace(POD, job_uid="gone"), measures=True)
    bench.agents.forget("gone")
    bench.go()
    assert bench.told == []


def test_an_unexpected_error_is_a_problem_of_its_job() -> None:
    bench = Bench()
    bench.answer = RuntimeError("what?")
    bench.agents.poll(POD, measures=True)
    bench.go()
    assert "RuntimeError" in bench.agents.poll(POD, measures=True).problem
