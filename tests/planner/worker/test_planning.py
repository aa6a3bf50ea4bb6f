"""Planning in a process of its own: the planner's plan, or words about why there is none."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.core.cluster import ClusterSpec
from penstock.core.errors import PenstockError
from penstock.core.job import JobSpec
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.planner.decide import decide
from penstock.planner.measured import problem_from_profile
from penstock.planner.problem import problem_from_cluster
from penstock.planner.replay import simulated
from penstock.planner.variations import CHANGES, same_plan_variations, with_variations
from penstock.planner.worker.__main__ import Counter, answer
from penstock.planner.worker.process import ProcessPlanner
from penstock.planner.worker.protocol import Answer, PlanningRequest, Progress
from tests.support.planning import cluster, job, profile

SLEEPS = (sys.executable, "-c", "import time; time.sleep(600)")


def ended(planner: ProcessPlanner, key: str = "a") -> Answer:
    while (found := planner.poll(key)) is None:
        time.sleep(0.02)
    return found


def answer_to(spec: JobSpec) -> Answer:
    """Return the answer of a planning process."""
    planner = ProcessPlanner()
    planner.start("a", PlanningRequest(spec=spec, profile=profile()))
    return ended(planner)


def test_the_process_plans_as_the_planner_does() -> None:
    found = answer_to(job())
    assert found.plan is not None
    assert found.plan == explained(decide(problem_from_profile(job(), profile())).plan, profile())
    assert found.timeline == simulated(found.plan, profile()).timeline
    assert found.error == ""


@pytest.mark.parametrize("name", ["penstock.planner.worker", "penstock.planning.worker"])
def test_a_tighter_limit_of_the_machine_is_kept(name: str) -> None:
    """A site may limit all processes; a limit cannot be raised, and need not be. By the old name too."""
    command = f"ulimit -v {3 * 2**20}; exec {sys.executable} -m {name}"
    request = json.dumps(PlanningRequest(spec=job(), profile=profile()).to_manifest())
    reports = subprocess.run(["bash", "-c", command], input=request, capture_output=True, text=True, check=False)
    assert reports.returncode == 0, reports.stderr
    assert json.loads(reports.stdout.splitlines()[-1])["answer"]["plan"]


def test_a_described_cluster_is_planned_for() -> None:
    found = answer(PlanningRequest(spec=job(), cluster=cluster()))
    assert found.plan == explained(decide(problem_from_cluster(job(), cluster())).plan, cluster())


def test_more_plans_are_answered_best_first_and_each_says_what_would_help_it() -> None:
    found = answer(PlanningRequest(spec=job(ranks=4, global_batch=4), cluster=cluster(), num_plans=3))
    assert found.plan is not None
    plans = (found.plan, *found.others)
    assert len(plans) == 3
    predictions = [plan.prediction for plan in plans if plan.prediction is not None]
    assert [each.step_seconds for each in predictions] == sorted(each.step_seconds for each in predictions)
    assert all(each.explanation and each.explanation.variations for each in predictions)


def test_variations_are_planned_on_request_with_separate_progress() -> None:
    reports: list[Progress] = []
    found = answer(PlanningRequest(spec=job(), cluster=cluster(), what_if=True), Counter(reports.append))
    assert found.plan is not None
    assert found.plan.prediction is not None
    assert found.plan.prediction.explanation is not None
    assert len(found.plan.prediction.explanation.variations) == len(CHANGES) - 1, "there is one node"
    searches = itertools.groupby(reports, key=lambda each: each.change)
    assert [next(progress).candidates for _, progress in searches] == [1] * len(CHANGES)


def explained(plan: Plan, hardware: Profile | ClusterSpec) -> Plan:
    """The plan with what it gains from changes."""
    return with_variations(plan, same_plan_variations(plan, job(), hardware))


def test_a_job_that_does_not_fit_gets_an_error_with_field_and_remedy() -> None:
    found = answer_to(job(memory=2_000))
    assert found.plan is None
    assert "nothing fits" in found.what
    assert found.where == "spec.resources.memoryPerRank"
    assert found.remedy
    assert all(part in found.error for part in (found.what, found.where, found.remedy))


def test_a_question_about_no_hardware_is_answered() -> None:
    assert "neither" in answer(PlanningRequest(spec=job())).what


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "planning needs more memory than it may have"),
        (MemoryError("Unable to allocate 2 TiB for an array"), "planning needs more memory than it may have"),
        (PenstockError("a cycle"), "a cycle"),
        (ValueError("has a negative entry"), "these numbers: has a negative entry"),
        (OverflowError("too large"), "these numbers: too large"),
    ],
)
def test_planning_that_breaks_off_is_answered(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("penstock.planner.worker.__main__.choose", broken)
    assert said in answer(PlanningRequest(spec=job(), profile=profile())).error


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("print('{')", 0),
        ("print('{\"foreign\": 1}')", 0),
        ("print('[]')", 0),
        ("print('{}')", 0),
        ("print('{\"answer\": {}}')", 0),
        ('print(\'{"progress": {"candidates": 3}}\')', 0),
        ('import sys; sys.stdout.write(\'{"answer": {"what": "cut off"}}\')', 0),
    ],
)
def test_a_process_that_breaks_answers_with_its_code(program: str, code: int) -> None:
    planner = ProcessPlanner((sys.executable, "-c", program))
    planner.start("a", PlanningRequest(spec=job()))
    found = ended(planner)
    assert (found.plan, found.what, found.is_transient) == (None, f"planning ended with code {code}", True)
    assert found.error


DIES = """
import os, pathlib, signal, sys
begun = pathlib.Path(sys.argv[1])
begun.write_text(begun.read_text() + "x")
if len(begun.read_text()) <= int(sys.argv[2]):
    os.kill(os.getpid(), signal.SIGKILL)
print('{"answer": {"what": "nothing fits"}}')
"""


@pytest.mark.parametrize(
    ("deaths", "message"), [(1, "nothing fits"), (2, "nothing fits"), (3, "ended by signal 9, 3 times")]
)
def test_a_killed_process_is_restarted_and_reported_as_killed_after_three_times(
    tmp_path: Path, deaths: int, message: str
) -> None:
    """The kernel kills processes that use too much memory, which is not an error of the job."""
    begun = tmp_path / "begun"
    begun.write_text("")
    planner = ProcessPlanner((sys.executable, "-c", DIES, str(begun), str(deaths)))
    planner.start("a", PlanningRequest(spec=job()))
    found = ended(planner)
    assert message in found.what
    assert ("memory" in found.remedy, found.is_transient) == (deaths == 3, deaths == 3)
    assert len(begun.read_text()) == min(deaths + 1, 3)
    assert not planner.busy("a")


def test_an_answer_is_returned_once() -> None:
    planner = ProcessPlanner((sys.executable, "-c", ""))
    assert not planner.busy("a")
    planner.start("a", PlanningRequest(spec=job()))
    assert planner.busy("a")
    ended(planner)
    assert not planner.busy("a")


def test_a_started_question_is_not_started_twice(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    planner = ProcessPlanner((sys.executable, "-c", f"open({str(begun)!r}, 'a').write('x')"))
    for _ in range(3):
        planner.start("a", PlanningRequest(spec=job()))
    ended(planner)
    assert begun.read_text() == "x"


def test_a_cancelled_question_ends_and_leaves_no_answer() -> None:
    planner = ProcessPlanner(SLEEPS)
    planner.start("a", PlanningRequest(spec=job()))
    planner.start("b", PlanningRequest(spec=job()))
    pids = {key: running.process.pid for key, running in planner._running.items()}
    planner.cancel("a")
    planner.cancel("a")
    assert (planner.busy("a"), planner.busy("b")) == (False, True)
    with pytest.raises(ProcessLookupError):
        os.kill(pids["a"], 0)
    os.kill(pids["b"], 0)
    planner.cancel("b")


TELLS = """
import sys, time
for line in ('{"progress": {"candidates": 1}}', 'noise', '{"progress": {"candidates": 2, "best": "b"}}', '{"progr'):
    sys.stdout.write(line + "\\n" * (line[-4:] != "rogr"))
    sys.stdout.flush()
time.sleep(600)
"""


def test_progress_is_heard_while_it_works() -> None:
    planner = ProcessPlanner((sys.executable, "-c", TELLS))
    planner.start("a", PlanningRequest(spec=job()))
    end = time.monotonic() + 30
    while planner.progress("a").candidates < 2 and time.monotonic() < end:
        time.sleep(0.02)
    assert planner.progress("a") == Progress(candidates=2, best="b")
    assert planner.poll("a") is None
    planner.cancel("a")


def test_the_search_is_counted() -> None:
    reports: list[Progress] = []
    found = answer(PlanningRequest(spec=job(ranks=4), cluster=cluster()), Counter(reports.append))
    assert found.plan is not None
    assert found.plan.prediction is not None
    last = reports[-1]
    assert (last.candidates > 0, last.divisions > 0) == (True, True)
    assert [each.candidates for each in reports] == sorted(each.candidates for each in reports)
    assert last.best_step_seconds == found.plan.prediction.step_seconds
    assert last.best_speed == found.plan.speed()
    assert last.best


@pytest.mark.parametrize(("most", "plans"), [(0, False), (100, True)])
def test_a_search_ends_by_its_count(most: int, plans: bool) -> None:
    """A search without a plan continues beyond its time budget, until its limit on candidates."""
    found = answer(PlanningRequest(spec=job(), cluster=cluster()), Counter(lambda progress: None, most_candidates=most))
    assert (found.plan is not None) == plans
    assert plans or ("the search did not end within 0 candidates" in found.what and found.remedy)


def test_time_runs_by_the_clock_that_was_given() -> None:
    now = [0.0]
    planner = ProcessPlanner(SLEEPS, seconds=10, clock=lambda: now[0])
    planner.start("a", PlanningRequest(spec=job()))
    now[0] = 10.0
    assert planner.poll("a") is None
    now[0] = 10.1
    found = planner.poll("a")
    assert found is not None
    assert (found.what, bool(found.remedy), planner.busy("a")) == ("planning took over 10 s", True, False)
    assert found.is_transient


def test_a_process_ends_after_its_parent(tmp_path: Path) -> None:
    """A killed service or command leaves no planning process, even if a search reports no progress for long."""
    (tmp_path / "request").write_text(json.dumps(PlanningRequest(spec=job(), profile=profile()).to_manifest()))
    program = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {ORPHAN!r}], stdin=open("request"))
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
while not os.path.exists({str(tmp_path / "searching")!r}):
    pass
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False, timeout=60)
    pid = int((tmp_path / "pid").read_text())
    end = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and "Z" not in _state(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists() or "Z" in _state(pid)


ORPHAN = """
from penstock.planner.worker import __main__ as worker
def searching(*arguments, **options):
    open("searching", "w").close()
    while True:
        pass
worker.choose = searching
worker.main()
"""


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
