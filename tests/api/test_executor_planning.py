"""Planning in a process of its own: the planner's plan, or words about why there is none."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from penstock.api.executor.planning import Answer, ProcessPlanner, Question
from penstock.api.executor.planning_process import answer
from penstock.core.errors import PenstockError
from penstock.core.job import JobSpec
from penstock.planner.decide import decide
from penstock.planner.measured import problem_from_profile
from penstock.planner.problem import problem_from_cluster
from penstock.planner.replay import simulated
from tests.support.planning import cluster, job, profile

SLEEPS = (sys.executable, "-c", "import time; time.sleep(600)")


def ended(planner: ProcessPlanner, key: str = "a") -> Answer:
    while (found := planner.poll(key)) is None:
        time.sleep(0.02)
    return found


def asked(spec: JobSpec) -> Answer:
    """What a process says."""
    planner = ProcessPlanner()
    planner.start("a", Question(spec=spec, profile=profile()))
    return ended(planner)


def test_the_process_plans_as_the_planner_does() -> None:
    found = asked(job())
    assert found.plan is not None
    assert found.plan.digest == decide(problem_from_profile(job(), profile())).plan.digest
    assert found.timeline == simulated(found.plan, profile()).timeline
    assert found.error == ""


def test_a_described_cluster_is_planned_for() -> None:
    found = answer(Question(spec=job(), cluster=cluster()))
    assert found.plan == decide(problem_from_cluster(job(), cluster())).plan


def test_what_does_not_fit_is_said_with_place_and_remedy() -> None:
    found = asked(job(memory=2_000))
    assert found.plan is None
    assert "nothing fits" in found.what
    assert found.where == "spec.resources.memoryPerRank"
    assert found.remedy
    assert all(part in found.error for part in (found.what, found.where, found.remedy))


def test_a_question_about_no_hardware_is_answered() -> None:
    assert "neither" in answer(Question(spec=job())).what


@pytest.mark.parametrize(
    ("error", "said"),
    [(MemoryError(), "more memory"), (MemoryError("2 TiB"), "2 TiB"), (PenstockError("a cycle"), "a cycle")],
)
def test_planning_that_breaks_off_is_answered(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def broken(problem: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("penstock.api.executor.planning_process.decide", broken)
    assert said in answer(Question(spec=job(), profile=profile())).error


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("print('{')", 0),
        ("print('{\"foreign\": 1}')", 0),
        ("print('[]')", 0),
        ("print('{}')", 0),
    ],
)
def test_a_process_that_breaks_answers_with_its_code(program: str, code: int) -> None:
    planner = ProcessPlanner((sys.executable, "-c", program))
    planner.start("a", Question(spec=job()))
    found = ended(planner)
    assert (found.plan, found.what) == (None, f"planning ended with code {code}")
    assert found.error


def test_an_answer_is_told_once() -> None:
    planner = ProcessPlanner((sys.executable, "-c", ""))
    assert not planner.busy("a")
    planner.start("a", Question(spec=job()))
    assert planner.busy("a")
    ended(planner)
    assert not planner.busy("a")


def test_what_was_begun_is_not_begun_again(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    planner = ProcessPlanner((sys.executable, "-c", f"open({str(begun)!r}, 'a').write('x')"))
    for _ in range(3):
        planner.start("a", Question(spec=job()))
    ended(planner)
    assert begun.read_text() == "x"


def test_what_is_cancelled_is_ended_and_forgotten() -> None:
    planner = ProcessPlanner(SLEEPS)
    planner.start("a", Question(spec=job()))
    planner.start("b", Question(spec=job()))
    pids = {key: running.process.pid for key, running in planner._running.items()}
    planner.cancel("a")
    planner.cancel("a")
    assert (planner.busy("a"), planner.busy("b")) == (False, True)
    with pytest.raises(ProcessLookupError):
        os.kill(pids["a"], 0)
    os.kill(pids["b"], 0)
    planner.cancel("b")
