"""Re-planning next to a run, on simulated time and with a planner that answers as the test says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.agent.replanner import KEY, PATIENCE_SECONDS, RESTART_STARTS, NextPlan, Replanner
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.records import WARM_UP_STEPS
from penstock.core.replanning import MOST_TIMELINES, NUM_TIMELINES, WINDOW, Drift, PlanOption, Replanning
from penstock.core.run.folder import RunDir
from penstock.core.serialization.files import write_json
from penstock.core.timeline import Timeline
from penstock.planner.worker.protocol import Answer, PlanningRequest
from tests.support.fake_planner import FakePlanner
from tests.support.fake_workers import fake_metrics
from tests.support.planning import job
from tests.support.sample_run import sample_plan, sample_profile, sample_schedule, sample_timeline

STEPS = 1000
START_SECONDS = 15.0
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
    return Replanning(profile=CORRECTED, drift=Drift(devices=(1.0, 2.0)), step_seconds=2 * PREDICTED, options=(option,))


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
        self.timeline: Any = TIMELINE.to_manifest()
        spec = job(ranks=2)
        spec = dataclasses.replace(
            spec,
            training=dataclasses.replace(spec.training, steps=STEPS),
            run_policy=dataclasses.replace(spec.run_policy, replan_on_drift=True),
        )
        self.replanner = Replanner(spec, self.run, self.planner, lambda: self.now, self.notes.append)
        self.replanner.begin(PLAN)
        self.now += START_SECONDS

    def steps(self, count: int, ratio: float) -> NextPlan | None:
        """Take steps; the first plan for which the run has to end."""
        for _ in range(count):
            metrics = dataclasses.replace(fake_metrics(self.step), step_seconds=ratio * PREDICTED)
            if self.timeline is not None:
                write_json(self.run.timelines / f"step-{self.step}.json", self.timeline)
            self.replanner.stepped(metrics)
            self.step, self.now = self.step + 1, self.now + 1.0
            self.replanner.poll()
            if self.replanner.better is not None:
                break
        return self.replanner.better


def ended(scene: Scene) -> Plan | None:
    """The plan of the next attempt, after the user has stopped this one."""
    return scene.replanner.end(has_failed=False, has_succeeded=False)


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
    assert following == NextPlan(plan=OTHER, profile=CORRECTED, former=PLAN)
    (request,) = scene.planner.requests
    assert (request.plan, request.profile) == (PLAN, sample_profile())
    assert request.timelines == (TIMELINE,) * MOST_TIMELINES
    assert [note.partition(":")[0] for note in scene.notes] == [
        "steps have drifted from the prediction",
        "the run continues with another plan",
    ]
    assert "for the restart that it needs because it changes the stages" in scene.notes[1]
    assert not scene.run.next_plan.exists()


def test_a_plan_with_the_same_stages_is_left_for_the_ranks(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    assert scene.steps(LONG, 2.0) is None
    assert scene.run.read_next_plan() == OTHER
    assert scene.replanner.poll() is None
    scene.steps(5, 2.0)
    write_json(scene.run.plan, OTHER.to_manifest())
    assert scene.replanner.poll() is None
    scene.run.next_plan.unlink()
    assert scene.replanner.poll() == OTHER
    assert scene.run.read_profile() == CORRECTED
    former = scene.run.read_former_plan()
    assert (former.plan, former.profile, former.successor_digest) == (PLAN, sample_profile(), OTHER.digest)
    assert scene.replanner.poll() is None


def test_a_plan_that_ranks_refused_is_not_the_run_s(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.steps(LONG, 2.0)
    scene.run.next_plan.unlink()
    assert scene.replanner.poll() is None
    assert scene.notes[-1] == "the run keeps its plan: its ranks refused the other one, and their log has the reason"


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
    assert scene.notes[1].startswith("the run keeps its plan: the search found no other one: nothing fits")


def test_without_timelines_or_measurements_nothing_is_searched(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.run.profile.unlink()
    assert scene.steps(LONG, 2.0) is None
    assert scene.planner.requests == []


def test_a_run_near_its_end_keeps_its_plan(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "the stages")
    scene.step = STEPS - LONG - 5
    assert scene.steps(LONG, 2.0) is None
    assert scene.notes[-1].startswith("the run keeps its plan: device 1 takes 2.00 times as long as measured")
    assert f"{RESTART_STARTS * START_SECONDS:.0f} s for the restart" in scene.notes[-1]


def test_the_end_of_an_attempt_ends_its_search(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    while not scene.planner.busy(KEY):
        scene.steps(1, 2.0)
    write_json(scene.run.next_plan, OTHER.to_manifest())
    assert ended(scene) is None
    assert not scene.planner.busy(KEY)
    assert not scene.run.next_plan.exists()
    assert scene.steps(LONG, 2.0) is None


def test_a_plan_without_a_prediction_is_never_replaced(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    plan: Plan = dataclasses.replace(PLAN, prediction=None)
    scene.replanner.begin(plan)
    scene.steps(LONG, 2.0)
    assert scene.planner.requests == []


def searching(scene: Scene) -> Scene:
    """The scene, once a search has begun; its answer comes after more than two windows of steps."""
    while not scene.planner.busy(KEY):
        scene.steps(1, 2.0)
    scene.planner.polls[KEY] = -3 * WINDOW
    return scene


@pytest.mark.parametrize("restart", [(), ("the stages",)])
@pytest.mark.parametrize("later_ratio", [1.0, 2.0])
def test_a_drift_that_ends_during_the_search_keeps_the_plan(
    tmp_path: Path, restart: tuple[str, ...], later_ratio: float
) -> None:
    """Also if another one has begun: its cause may be another one."""
    scene = searching(Scene(tmp_path, *restart))
    assert scene.steps(WINDOW, 1.0) is None
    assert scene.steps(3 * WINDOW, later_ratio) is None
    assert not scene.planner.busy(KEY)
    assert scene.notes[-1] == "the run keeps its plan: the drift ended during the search"
    assert not scene.run.next_plan.exists()


def test_a_drift_that_lasts_through_the_search_changes_the_plan(tmp_path: Path) -> None:
    scene = searching(Scene(tmp_path, "the stages"))
    assert scene.steps(4 * WINDOW, 2.0) == NextPlan(plan=OTHER, profile=CORRECTED, former=PLAN)


def test_without_a_profile_no_timeline_is_read(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.run.profile.unlink()
    scene.timeline = {}
    assert scene.steps(LONG, 2.0) is None
    assert scene.notes == []


def test_a_file_that_no_step_wrote_is_no_timeline(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.run.timelines.mkdir(parents=True, exist_ok=True)
    (scene.run.timelines / "step-copy.json").write_text("{")
    scene.steps(LONG, 2.0)
    (request,) = scene.planner.requests
    assert request.timelines == (TIMELINE,) * MOST_TIMELINES


def test_timelines_of_an_earlier_attempt_are_not_those_of_this_plan(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    earlier = dataclasses.replace(TIMELINE, step_ns=2 * TIMELINE.step_ns)
    for step in range(4 * LONG):
        write_json(scene.run.timelines / f"step-{step}.json", earlier.to_manifest())
    scene.replanner.begin(PLAN)
    scene.timeline = None
    assert scene.steps(2 * LONG, 2.0) is None
    assert scene.planner.requests == []
    scene.timeline = TIMELINE.to_manifest()
    scene.steps(5, 2.0)
    (request,) = scene.planner.requests
    assert request.timelines == (TIMELINE,) * NUM_TIMELINES
    assert len(list(scene.run.timelines.iterdir())) == 4 * LONG, "all timelines are kept"


def test_a_plan_that_cannot_be_written_is_not_taken(tmp_path: Path) -> None:
    """The disk is full, or as here a folder has the file's name."""
    scene = Scene(tmp_path, "the stages")
    assert scene.steps(LONG, 2.0) is not None
    scene.run.plan.unlink()
    scene.run.plan.mkdir()
    assert ended(scene) is None
    assert scene.notes[-1].startswith("cannot write the other plan and its profile to the run directory: ")


class FailingPlanner(FakePlanner):
    """Its process cannot be started."""

    def start(self, key: str, request: PlanningRequest) -> None:
        raise OSError(12, "Cannot allocate memory")


class LostPlanner(FakePlanner):
    """Its process ends, and cannot be started again."""

    def poll(self, key: str) -> Answer | None:
        del self.polls[key]
        raise OSError(12, "Cannot allocate memory")


def corrupt_profile(scene: Scene) -> None:
    scene.run.profile.write_text("{")


def corrupt_timelines(scene: Scene) -> None:
    scene.timeline = {"source": "measured"}


def not_json(scene: Scene) -> None:
    scene.timeline = None
    for step in range(LONG):
        (scene.run.timelines / f"step-{step}.json").write_text("{")


def without_memory(scene: Scene) -> None:
    scene.replanner._planner = FailingPlanner(answer=scene.planner.answer)


def losing_processes(scene: Scene) -> None:
    scene.replanner._planner = LostPlanner(answer=scene.planner.answer)


def next_plan_is_a_folder(scene: Scene) -> None:
    scene.run.next_plan.mkdir()


FAULTS = {
    "profile.json": corrupt_profile,
    "is corrupt": not_json,
    "step-": corrupt_timelines,
    "Cannot allocate memory": without_memory,
    "[Errno 12]": losing_processes,
    "next-plan": next_plan_is_a_folder,
}


@pytest.mark.parametrize("message", FAULTS)
def test_an_error_of_planning_again_is_a_note_and_the_run_keeps_its_plan(tmp_path: Path, message: str) -> None:
    scene = Scene(tmp_path)
    fault: Callable[[Scene], None] = FAULTS[message]
    fault(scene)
    assert scene.steps(LONG, 2.0) is None
    (note,) = [note for note in scene.notes if note.startswith("the run keeps its plan, since planning again failed: ")]
    assert message in note
    assert scene.replanner.poll() is None


def test_after_an_error_the_next_search_is_made_later(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "the stages")
    corrupt_profile(scene)
    scene.steps(LONG, 2.0)
    write_json(scene.run.profile, sample_profile().to_manifest())
    assert scene.steps(3 * LONG, 2.0) == NextPlan(plan=OTHER, profile=CORRECTED, former=PLAN)


def test_a_corrupt_plan_after_a_change_is_a_note(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.steps(LONG, 2.0)
    scene.run.plan.write_text("{")
    scene.run.next_plan.unlink()
    assert scene.replanner.poll() is None
    assert "plan.json" in scene.notes[-1]
    scene.steps(LONG, 1.0)


@pytest.mark.parametrize("is_announced", [True, False])
def test_a_plan_that_ranks_took_before_they_ended_is_returned(tmp_path: Path, is_announced: bool) -> None:
    """Also if the first rank was killed between its two writes."""
    scene = Scene(tmp_path)
    scene.steps(LONG, 2.0)
    write_json(scene.run.plan, OTHER.to_manifest())
    if is_announced:
        scene.run.next_plan.unlink()
    assert ended(scene) == OTHER
    assert (scene.run.read_plan(), scene.run.read_profile()) == (OTHER, CORRECTED)
    assert ended(scene) is None


def test_a_plan_that_ranks_never_took_is_not_returned_at_their_end(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.steps(LONG, 2.0)
    assert scene.run.next_plan.exists()
    assert ended(scene) is None
    assert not scene.run.next_plan.exists()
