"""The local executor plans a run again: in the same attempt, or in the next one after a checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from penstock.agent import replanner
from penstock.agent.run_state import PhaseChange
from penstock.core.lifecycle import Phase
from penstock.core.profile import Profile
from penstock.core.replanning import Drift, PlanOption, Replanning
from penstock.core.serialization.files import write_json
from penstock.planner.worker.protocol import Answer
from tests.support.fake_planner import FakePlanner
from tests.support.fake_workers import FakeWorkers, Script, killed
from tests.support.running_locally import STEPS, Bench
from tests.support.sample_run import sample_plan, sample_profile, sample_schedule, sample_timeline

MANY = 400
PLAN = sample_plan()
assert PLAN.prediction is not None
RIGHT = dataclasses.replace(PLAN.prediction, step_seconds=0.25)
OTHER = dataclasses.replace(PLAN, receive_ahead=3, prediction=RIGHT)
CORRECTED: Profile = dataclasses.replace(sample_profile(), slowness=(1.0, 2.0))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts' steps take no time of their own: the simulated clock gains a twentieth of a second with each."""
    monkeypatch.setattr(replanner, "PATIENCE_SECONDS", 1.0)


def drifted(root: Path, *reasons: str, **policy: Any) -> Bench:
    """A run whose steps are far slower than predicted, and a planner that knows another plan and predicts it well."""
    option = PlanOption(plan=OTHER, restart_reasons=reasons)
    replanning = Replanning(profile=CORRECTED, drift=Drift(devices=(1.0, 2.0)), step_seconds=1.0, options=(option,))
    planner = FakePlanner(answer=Answer(plan=PLAN, replanning=replanning))
    bench = Bench(root, FakeWorkers(), planner=planner, runPolicy={"replanOnDrift": True, **policy})
    training = dataclasses.replace(bench.job.spec.training, steps=MANY)
    bench.job = bench.job.with_spec(training=training)
    bench.decider.following = dataclasses.replace(PLAN, prediction=dataclasses.replace(RIGHT, step_seconds=0.05))
    bench.workers.scripts = [Script(before=lambda: sample(bench))]
    return bench


def sample(bench: Bench) -> None:
    """Write the timelines of an attempt."""
    for step in range(MANY):
        write_json(bench.run.timelines / f"step-{step}.json", sample_timeline(sample_schedule(2, 1, 1)).to_manifest())


def take(bench: Bench) -> bool:
    """The first rank takes the plan that it finds."""
    if not bench.run.next_plan.exists():
        return False
    write_json(bench.run.plan, bench.run.read_next_plan().to_manifest())
    bench.run.next_plan.unlink()
    return True


def test_an_attempt_ends_for_a_plan_that_needs_a_restart(tmp_path: Path) -> None:
    bench = drifted(tmp_path, "the stages")
    state = bench.execute()
    assert (state.phase, state.attempt, state.failures) == (Phase.SUCCEEDED, 2, 0)
    recovering = [change for change in state.history if change.phase is Phase.RECOVERING]
    assert [(change.reason, change.message) for change in recovering] == [("Drift", "stopped after a checkpoint")]
    assert bench.run.read_plan() == OTHER
    assert bench.run.read_profile() == CORRECTED
    assert bench.workers.started == ["prepare", "profile 1", "train 1 on 2", "train 2 on 2"]
    assert [line.partition(":")[0] for line in bench.show.notes][:2] == [
        "steps have drifted from the prediction",
        "the run continues with another plan",
    ]
    (_, (_, from_step)) = bench.show.launches
    assert from_step > 0
    assert [entry.step for entry in bench.run.read_metrics()] == list(range(MANY))


def test_ranks_that_can_take_the_plan_are_not_restarted(tmp_path: Path) -> None:
    bench = drifted(tmp_path)
    taken: list[bool] = []

    bench.meanwhile = lambda: taken.append(True) if take(bench) else None
    state = bench.execute()
    assert taken
    assert (state.phase, state.attempt) == (Phase.SUCCEEDED, 1)
    assert bench.run.read_profile() == CORRECTED
    assert bench.phases.count(Phase.RUNNING) == 1


def test_without_leave_nothing_is_planned_again(tmp_path: Path) -> None:
    bench = drifted(tmp_path, "the stages", replanOnDrift=False)
    state = bench.execute()
    assert state.attempt == 1
    assert bench.show.notes == []


def test_a_user_s_stop_is_no_drift(tmp_path: Path) -> None:
    """The better plan is kept for the next attempt."""
    bench = drifted(tmp_path, "the stages")

    def stop() -> None:
        if any("another plan:" in note for note in bench.show.notes) and not bench.requests.received:
            bench.requests.received.append(2)

    bench.meanwhile = stop
    state = bench.execute()
    last: PhaseChange = state.history[-1]
    assert (last.phase, state.failures) == (Phase.SUSPENDED, 0)
    assert bench.run.read_plan() == OTHER


def test_the_steps_of_the_usual_bench_are_too_few(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(), planner=FakePlanner(), runPolicy={"replanOnDrift": True})
    assert bench.execute().attempt == 1
    assert len(bench.show.steps) == STEPS


def searches(bench: Bench) -> int:
    return sum(note.startswith("steps have drifted") for note in bench.show.notes)


def test_ranks_that_take_the_plan_and_fail_at_once_resume_by_the_former_one(tmp_path: Path) -> None:
    bench = drifted(tmp_path)
    bench.workers.scripts = [Script(before=lambda: sample(bench), end=killed()), Script(before=lambda: sample(bench))]

    def fail() -> None:
        """Let the ranks take the plan, and fail, while their processes are polled."""
        if bench.run.next_plan.exists():
            bench.workers.ranks[-1]._step = lambda: take(bench) and False

    bench.meanwhile = fail
    state = bench.execute()
    assert (state.phase, state.attempt, state.failures) == (Phase.SUCCEEDED, 2, 1)
    assert bench.run.read_plan() == bench.decider.following
    assert bench.run.read_profile() == sample_profile()
    assert searches(bench) == 1, "the second attempt drifts as well, but is not planned again"


def test_a_plan_whose_attempt_fails_at_once_is_undone(tmp_path: Path) -> None:
    """For example if it needs more memory than predicted: the former plan ran."""
    bench = drifted(tmp_path, "the stages", backoffLimit=1)
    sampled, first = (lambda: sample(bench)), sample_profile()
    bench.workers.scripts = [Script(before=sampled), Script(until=0, end=killed()), Script(before=sampled)]
    state = bench.execute()
    assert (state.phase, state.attempt, state.failures) == (Phase.SUCCEEDED, 3, 1)
    assert (bench.run.read_plan(), bench.run.read_profile()) == (bench.decider.following, first)
    assert bench.show.notes[-1].startswith("the run returns to its former plan, since the other one failed")
    assert searches(bench) == 1


def test_a_plan_that_fails_after_some_steps_is_kept(tmp_path: Path) -> None:
    bench = drifted(tmp_path, "the stages", backoffLimit=1)
    bench.workers.scripts = [Script(before=lambda: sample(bench)), Script(until=MANY - 50, end=killed()), Script()]
    state = bench.execute()
    assert (state.phase, state.attempt, state.failures) == (Phase.SUCCEEDED, 3, 1)
    assert (bench.run.read_plan(), bench.run.read_profile()) == (OTHER, CORRECTED)
    assert not bench.run.former_plan.exists()


def test_a_user_s_stop_at_once_undoes_nothing(tmp_path: Path) -> None:
    bench = drifted(tmp_path, "the stages")

    def stop() -> None:
        if "train 2 on 2" in bench.workers.started and not bench.requests.received:
            bench.requests.received.append(2)

    bench.meanwhile = stop
    bench.workers.scripts = [Script(before=lambda: sample(bench)), Script(until=0, end=None)]
    assert bench.execute().phase is Phase.SUSPENDED
    assert bench.run.read_plan() == OTHER
    assert bench.run.former_plan.exists(), "the next attempt is the first one that runs by it"


def test_a_user_s_stop_before_the_ranks_run_undoes_nothing(tmp_path: Path) -> None:
    bench = drifted(tmp_path, "the stages")

    def stop() -> None:
        if bench.run.former_plan.exists() and not bench.requests.received:
            bench.requests.received.append(2)

    bench.meanwhile = stop
    assert bench.execute().phase is Phase.SUSPENDED
    assert bench.run.read_plan() == OTHER


def test_timelines_of_an_earlier_attempt_start_no_search(tmp_path: Path) -> None:
    bench = drifted(tmp_path, "the stages")
    bench.workers.scripts = [Script()]
    sample(bench)
    assert bench.execute().attempt == 1
    assert bench.show.notes == []


def test_a_run_survives_a_corrupt_profile(tmp_path: Path) -> None:
    bench = drifted(tmp_path, "the stages")

    def corrupt() -> None:
        sample(bench)
        bench.run.profile.write_text("{")

    bench.workers.scripts = [Script(before=corrupt)]
    state = bench.execute()
    assert (state.phase, state.attempt) == (Phase.SUCCEEDED, 1)
    assert any("planning again failed" in note and "profile.json" in note for note in bench.show.notes)
