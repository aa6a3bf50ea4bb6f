"""Re-planning next to a run, on simulated time and with a planner that answers as the test says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from penstock.agent.replanner import KEY, PATIENCE_SECONDS, NextPlan, Replanner
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.records import WARM_UP_STEPS
from penstock.core.replanning import WINDOW, PlanOption, Replanning
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from penstock.core.timeline import Timeline
from penstock.planner.worker.protocol import Answer
from tests.support.fake_planner import FakePlanner
from tests.support.fake_workers import fake_metrics
from tests.support.planning import job
from tests.support.sample_run import sample_plan, sample_profile, sample_schedule, sample_timeline

STEPS = 1000
PLAN = sample_plan()
assert PLAN.prediction is not None
PREDICTED = PLAN.prediction.step_seconds
OTHER = dataclasses.replace(
    PLAN, slices=(512, 512), prediction=dataclasses.replace(PLAN.prediction, step_seconds=1.2 * PREDICTED)
)
TIMELINE: Timeline = sample_timeline(sample_schedule(2, 2, 2))
CORRECTED: Profile = dataclasses.replace(sample_profile(), slowness=(1.0, 2.0))


def replanning(*reasons: str) -> Replanning:
    option = PlanOption(plan=OTHER, restart_reasons=reasons)
    return Replanning(profile=CORRECTED, factors=(1.0, 2.0), step_seconds=2 * PREDICTED, options=(option,))


class Scene:
    """A run whose steps take as long as the test says, each on one second of the clock."""

    def __init__(self, root: Path, *reasons: str) -> None:
        self.run = RunDir(root)
        self.run.create()
        write_json(self.run.plan, PLAN.to_manifest())
        write_json(self.run.profile, sample_profile().to_manifest())
        self.planner = FakePlanner(answer=Answer(plan=PLAN, replanning=replanning(*reasons)))
        self.now, self.step = 0.0, 0
        self.notes: list[str] = []
        spec = job(ranks=2)
        spec = dataclasses.replace(spec, training=dataclasses.replace(spec.training, steps=STEPS))
        self.replanner = Replanner(spec, self.run, self.planner, lambda: self.now, self.notes.append)
        self.replanner.begin(PLAN)

    def steps(self, count: int, ratio: float) -> NextPlan | None:
        """Take steps; the first plan for which the run has to end."""
        for _ in range(count):
            metrics = dataclasses.replace(fake_metrics(self.step), step_seconds=ratio * PREDICTED)
            write_json(self.run.timelines / f"step-{self.step}.json", TIMELINE.to_manifest())
            self.replanner.stepped(metrics)
            self.step, self.now = self.step + 1, self.now + 1.0
            following = self.replanner.poll()
            if following is not None:
                return following
        return None


LONG = WARM_UP_STEPS + WINDOW + round(PATIENCE_SECONDS) + 5


def test_without_drift_nothing_is_searched(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.steps(10 * LONG, 1.2) is None
    assert scene.planner.requests == []
    assert scene.notes == []


def test_a_drift_that_ends_soon_is_not_searched_for(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for _ in range(5):
        scene.steps(WINDOW + round(PATIENCE_SECONDS / 2), 2.0)
        scene.steps(2 * WINDOW, 1.0)
    assert scene.planner.requests == []


def test_a_plan_with_other_stages_ends_the_attempt(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "the stages")
    following = scene.steps(LONG, 2.0)
    assert following == NextPlan(plan=OTHER, profile=CORRECTED)
    (request,) = scene.planner.requests
    assert (request.plan, request.profile) == (PLAN, sample_profile())
    assert request.timelines == (TIMELINE,) * 3
    assert [note.partition(":")[0] for note in scene.notes] == [
        "steps have drifted from the prediction",
        "the run goes on by another plan",
    ]
    assert "for a restart, because it changes the stages" in scene.notes[1]
    assert not scene.run.next_plan.exists()


def test_a_plan_with_the_same_stages_is_left_for_the_ranks(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.steps(LONG, 2.0) is None
    assert scene.run.read_next_plan() == OTHER
    assert scene.replanner.changed() is None
    scene.steps(5, 2.0)
    write_json(scene.run.plan, OTHER.to_manifest())
    assert scene.replanner.changed() is None
    scene.run.next_plan.unlink()
    assert scene.replanner.changed() == NextPlan(plan=OTHER, profile=CORRECTED)
    assert scene.replanner.changed() is None


def test_a_plan_that_ranks_refused_is_not_the_run_s(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.steps(LONG, 2.0)
    scene.run.next_plan.unlink()
    assert scene.replanner.changed() is None


def test_after_each_search_the_next_drift_has_to_last_twice_as_long(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.planner.answer = Answer(what="nothing fits", remedy="use more ranks")
    begun: list[float] = []
    for _ in range(400):
        scene.steps(1, 2.0)
        if len(scene.planner.requests) > len(begun):
            begun.append(scene.now)
    drifted_at = begun[0] - PATIENCE_SECONDS
    assert [time - drifted_at for time in begun[:4]] == pytest.approx(
        [PATIENCE_SECONDS * 2**n for n in range(4)], abs=2.0
    )
    assert scene.notes[1].startswith("no other plan: nothing fits")


def test_without_timelines_or_measurements_nothing_is_searched(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.run.profile.unlink()
    assert scene.steps(LONG, 2.0) is None
    assert scene.planner.requests == []


def test_a_run_near_its_end_keeps_its_plan(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "the stages")
    scene.step = STEPS - LONG - 5
    assert scene.steps(LONG, 2.0) is None
    assert scene.notes[-1].startswith("the run keeps its plan: device 1 computes 2.00 times as long")


def test_the_end_of_an_attempt_ends_its_search(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    while not scene.planner.busy(KEY):
        scene.steps(1, 2.0)
    write_json(scene.run.next_plan, OTHER.to_manifest())
    scene.replanner.end()
    assert not scene.planner.busy(KEY)
    assert not scene.run.next_plan.exists()
    assert scene.steps(LONG, 2.0) is None


def test_a_plan_without_a_prediction_is_never_replaced(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    plan: Plan = dataclasses.replace(PLAN, prediction=None)
    scene.replanner.begin(plan)
    scene.steps(LONG, 2.0)
    assert scene.planner.requests == []
