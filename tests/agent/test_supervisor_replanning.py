"""A supervisor plans a running attempt again, and its report has the decision, and the plan for the service."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from penstock.agent import replanner
from penstock.agent.launch import Outcome
from penstock.core.errors import UserError
from penstock.core.lifecycle import AttemptState
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.replanning import Drift, PlanOption, Replanning
from penstock.core.run.former_plan import FormerPlan
from penstock.core.serialization.files import write_json
from penstock.core.supervision import AttemptReport, SupervisorRequest
from penstock.planner.worker.protocol import Answer
from tests.support.fake_planner import FakePlanner
from tests.support.fake_workers import FakeWorkers, Script, killed, refused
from tests.support.sample_run import sample_plan, sample_profile, sample_schedule, sample_timeline
from tests.support.supervising import Bench

MANY = 400
PLAN = sample_plan()
assert PLAN.prediction is not None
FAST: Plan = dataclasses.replace(PLAN, prediction=dataclasses.replace(PLAN.prediction, step_seconds=0.05))
OTHER: Plan = dataclasses.replace(
    PLAN, receive_ahead=3, prediction=dataclasses.replace(PLAN.prediction, step_seconds=0.25)
)
CORRECTED: Profile = dataclasses.replace(sample_profile(), slowness=(1.0, 2.0))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replanner, "PATIENCE_SECONDS", 1.0)


def drifted(root: Path, *reasons: str) -> Bench:
    """An attempt whose steps are far slower than predicted, and a planner that knows another plan."""
    option = PlanOption(plan=OTHER, restart_reasons=reasons)
    found = Replanning(profile=CORRECTED, drift=Drift(devices=(1.0, 2.0)), step_seconds=1.0, options=(option,))
    bench = Bench(root, FakeWorkers(), planner=FakePlanner(answer=Answer(plan=PLAN, replanning=found)), plan=FAST)
    training = dataclasses.replace(bench.job.spec.training, steps=MANY)
    policy = dataclasses.replace(bench.job.spec.run_policy, replan_on_drift=True)
    bench.job = bench.job.with_spec(training=training, run_policy=policy)
    timeline = sample_timeline(sample_schedule(2, 1, 1)).to_manifest()

    def sample() -> None:
        write_json(bench.run.profile, sample_profile().to_manifest())
        for step in range(MANY):
            write_json(bench.run.timelines / f"step-{step}.json", timeline)

    bench.workers.scripts = [Script(before=sample)]
    return bench


def test_an_attempt_that_has_to_end_leaves_the_plan_to_the_next_one(tmp_path: Path) -> None:
    bench = drifted(tmp_path, "the stages")

    def serve(report: AttemptReport) -> None:
        bench.serve(report)
        if report.better_plan and not report.ended:
            assert report.plan_digest == ""
            assert bench.run.read_plan() == FAST
            bench.request(SupervisorRequest.STOP)

    bench.meanwhile = serve
    report = bench.supervise()
    assert (report.state, report.better_plan, report.plan_digest) == (AttemptState.STOPPED, True, OTHER.digest)
    assert report.replanning.startswith("the run continues with another plan: device 1 takes 2.00 times as long")
    assert (bench.run.read_plan(), bench.run.read_profile()) == (OTHER, CORRECTED)
    assert bench.report == report


def test_a_plan_for_which_the_attempt_did_not_end_is_dropped(tmp_path: Path) -> None:
    """The service was away, and the attempt ran to its end."""
    bench = drifted(tmp_path, "the stages")
    report = bench.supervise()
    assert any(seen.better_plan for seen in bench.seen)
    assert (report.state, report.plan_digest) == (AttemptState.SUCCEEDED, "")
    assert bench.run.read_plan() == FAST


def test_what_prevents_the_other_plan_is_the_last_decision(tmp_path: Path) -> None:
    bench = drifted(tmp_path, "the stages")

    def serve(report: AttemptReport) -> None:
        bench.serve(report)
        if report.better_plan and not report.ended:
            bench.run.profile.unlink(missing_ok=True)
            bench.run.profile.mkdir(exist_ok=True)
            bench.request(SupervisorRequest.STOP)

    bench.meanwhile = serve
    report = bench.supervise()
    assert (report.state, report.plan_digest) == (AttemptState.STOPPED, "")
    assert report.replanning.startswith("cannot write the other plan and its profile to the run directory: ")


def test_ranks_that_change_their_plan_are_followed(tmp_path: Path) -> None:
    bench = drifted(tmp_path)

    def serve(report: AttemptReport) -> None:
        bench.serve(report)
        if bench.run.next_plan.exists():
            write_json(bench.run.plan, bench.run.read_next_plan().to_manifest())
            bench.run.next_plan.unlink()

    bench.meanwhile = serve
    report = bench.supervise()
    assert (report.state, report.better_plan, report.plan_digest) == (AttemptState.SUCCEEDED, False, OTHER.digest)
    assert any(seen.state is AttemptState.RUNNING and seen.plan_digest == OTHER.digest for seen in bench.seen)
    assert bench.run.read_profile() == CORRECTED


def test_a_plan_that_fails_at_once_is_undone(tmp_path: Path) -> None:
    """The next attempt's supervisor finds the former plan in the run directory, and the service learns its digest."""
    bench = failing_at_once(tmp_path, OTHER, killed())
    report = bench.supervise()
    assert (report.state, report.plan_digest) == (AttemptState.FAILED, FAST.digest)
    assert report.replanning.startswith("the run returns to its former plan")
    assert (bench.run.read_plan(), bench.run.read_profile()) == (FAST, sample_profile())


def test_a_run_that_returned_to_its_plan_is_not_planned_again(tmp_path: Path) -> None:
    bench = drifted(tmp_path, "the stages")
    write_former(bench, has_returned=True)
    report = bench.supervise()
    assert (report.state, report.plan_digest, report.replanning) == (AttemptState.SUCCEEDED, "", "")


def test_a_former_plan_of_another_plan_is_not_returned_to(tmp_path: Path) -> None:
    """The job was planned again since, for example for other hosts."""
    bench = failing_at_once(tmp_path, PLAN, killed())
    report = bench.supervise()
    assert (report.state, report.plan_digest, report.replanning) == (AttemptState.FAILED, "", "")
    assert bench.run.read_plan() == PLAN


def test_a_failure_before_the_ranks_start_undoes_nothing(tmp_path: Path) -> None:
    bench = drifted(tmp_path, "the stages")
    write_former(bench)
    bench.plan = OTHER
    bench.workers.prepare = refuse  # type: ignore[method-assign, assignment]
    write_json(bench.run.plan, OTHER.to_manifest())
    report = bench.supervise()
    assert (report.state, report.message.partition(":")[0], report.plan_digest) == (AttemptState.FAILED, "data", "")
    assert bench.run.read_plan() == OTHER


def refuse(*_: object) -> None:
    raise UserError(what="cannot be read", where="data")


def test_a_better_plan_stays_if_the_attempt_fails_before_it_is_stopped(tmp_path: Path) -> None:
    """It has not run yet, so it has not failed."""
    bench = drifted(tmp_path, "the stages")

    def serve(report: AttemptReport) -> None:
        bench.serve(report)
        if report.better_plan and not report.ended:
            bench.workers.ranks[-1]._script = Script(until=0, end=killed())

    bench.meanwhile = serve
    report = bench.supervise()
    assert (report.state, report.plan_digest) == (AttemptState.FAILED, OTHER.digest)
    assert (bench.run.read_plan(), bench.run.read_profile()) == (OTHER, CORRECTED)
    assert report.replanning.startswith("the run continues with another plan")


def test_a_user_error_of_the_ranks_undoes_the_plan_in_the_last_report(tmp_path: Path) -> None:
    """The service learns of it only there."""
    bench = failing_at_once(tmp_path, OTHER, refused("holds no tokens", "add text"))
    report = bench.supervise()
    assert (report.state, report.plan_digest) == (AttemptState.FAILED, FAST.digest)
    assert bench.report == report
    assert bench.run.read_plan() == FAST


def test_a_short_attempt_that_succeeds_keeps_its_plan(tmp_path: Path) -> None:
    bench = drifted(tmp_path, "the stages")
    bench.job = bench.job.with_spec(training=dataclasses.replace(bench.job.spec.training, steps=1))
    write_former(bench)
    bench.plan = OTHER
    bench.workers.scripts = [Script()]
    report = bench.supervise()
    assert (report.state, report.plan_digest) == (AttemptState.SUCCEEDED, "")
    assert bench.run.read_plan() == OTHER


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"plan": {}}'])
def test_a_damaged_former_plan_is_a_note(tmp_path: Path, content: str) -> None:
    bench = drifted(tmp_path, "the stages")
    bench.run.former_plan.write_text(content)
    bench.plan = OTHER
    bench.workers.scripts = [Script(until=0, end=killed())]
    report = bench.supervise()
    assert (report.state, report.plan_digest) == (AttemptState.FAILED, "")
    assert report.replanning.startswith(
        "cannot read the former plan, so a failure of the present one will not be undone: "
    )
    assert str(bench.run.former_plan) in report.replanning
    assert bench.run.read_plan() == OTHER


def failing_at_once(root: Path, plan: Plan, end: Outcome) -> Bench:
    """An attempt by that plan which fails before its first step; `OTHER` replaced the former plan."""
    bench = drifted(root, "the stages")
    write_former(bench)
    bench.plan = plan
    bench.workers.scripts = [Script(until=0, end=end)]
    return bench


def write_former(bench: Bench, *, has_returned: bool = False) -> None:
    """The state of a run whose plan was replaced by another one, and made no step since or has returned."""
    former = FormerPlan(plan=FAST, profile=sample_profile(), successor_digest=OTHER.digest, has_returned=has_returned)
    write_json(bench.run.former_plan, former.to_manifest())
    write_json(bench.run.profile, CORRECTED.to_manifest())


def test_without_a_planner_nothing_is_planned_again(tmp_path: Path) -> None:
    bench = drifted(tmp_path, "the stages")
    bench.planner = None
    report = bench.supervise()
    assert (report.state, report.better_plan, report.replanning) == (AttemptState.SUCCEEDED, False, "")
    assert bench.run.read_plan() == FAST
