"""What the operator of version 0.1.0 left on a cluster, taken over: nothing lost, no attempt restarted."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.core.lifecycle import REPLAN_AFTER_DRIFT_SECONDS, AttemptState, Phase
from penstock.core.plan import Plan
from penstock.core.pod import PLAN_FILE, TRAIN_EPOCH, PodBinding
from penstock.core.status import ConditionStatus, ConditionType, JobStatus
from penstock.kube.names import STOP_ANNOTATION
from penstock.kube.packing import unpacked, unpacked_plan
from penstock.kube.resources import JOBS, JOBSETS, PODS
from penstock.planner.worker.protocol import Answer
from tests.support.fake_planner import FakePlanner
from tests.support.old_cluster import FOLDER, SCENES, restored
from tests.support.old_fields import unknown_fields
from tests.support.one_job import NODES, bindings, end_all
from tests.support.operating import Operating
from tests.support.sample_run import confident_plan, sample_profile

PHASES = {
    "pending": Phase.QUEUED,
    "announced": Phase.QUEUED,
    "queued": Phase.QUEUED,
    "profiling": Phase.PROFILING,
    "planning": Phase.RUNNING,
    "binding": Phase.RUNNING,
    "half-bound": Phase.RUNNING,
    "running": Phase.RUNNING,
    "drifted": Phase.RUNNING,
    "mispredicted": Phase.RUNNING,
    "recovering": Phase.RECOVERING,
    "suspended": Phase.SUSPENDED,
    "succeeded": Phase.SUCCEEDED,
    "failed": Phase.FAILED,
}
"""Where each scene is a few turns later, if nothing else happens."""

STABLE = ("profiling", "running", "drifted", "mispredicted", "suspended", "succeeded", "failed")
LIVE = ("profiling", "planning", "binding", "half-bound", "running", "drifted", "mispredicted")


@pytest.fixture
def operating() -> Operating:
    """Its planner gives other plans than that of 0.1.0."""
    return Operating(FakePlanner(answer=Answer(plan=replace(confident_plan(), receive_ahead=3))))


def uids(operating: Operating) -> list[str]:
    return [found["metadata"]["uid"] for kind in (JOBSETS, PODS) for found in operating.kube.all(kind)]


def ended_as_usual(operating: Operating, uid: str) -> None:
    """The job's pods end, and it has succeeded in its first attempt."""
    end_all(operating, AttemptState.SUCCEEDED)
    operating.turn(12)
    status = operating.status(uid)
    assert (status.phase, status.attempt, status.failures) == (Phase.SUCCEEDED, 1, 0)


def test_every_phase_has_its_scene() -> None:
    assert SCENES.keys() == PHASES.keys() == {path.stem for path in FOLDER.glob("*.json")}
    told = [json.loads((FOLDER / f"{scene}.json").read_text())["objects"] for scene in SCENES]
    jobs = [found for objects in told for plural, found in objects if plural == JOBS.plural]
    assert {job.get("status", {}).get("phase", "Pending") for job in jobs} == {phase.value for phase in Phase}


@pytest.mark.parametrize("scene", SCENES)
def test_it_goes_on_where_it_was(operating: Operating, scene: str) -> None:
    uid = restored(scene, operating)
    before, children = operating.status(uid), uids(operating)
    operating.turn(12)
    after = operating.status(uid)
    assert (after.phase, after.failures) == (PHASES[scene], before.failures), after.message
    assert (after.started_at or 0.0) >= (before.started_at or 0.0)
    assert after.attempt == max(before.attempt, 1)
    assert after.progress == before.progress
    if scene in LIVE or scene == "queued":
        assert uids(operating) == children
        assert not [write for write in operating.kube.writes if write.startswith(("delete", "create JobSet"))]


@pytest.mark.parametrize("scene", STABLE)
def test_what_its_status_says_stays(operating: Operating, scene: str) -> None:
    uid = restored(scene, operating)
    before = operating.status(uid)
    operating.turn(12)
    after = operating.status(uid)
    assert _as_0_1_0_had_it(after) == _as_0_1_0_had_it(before)


def _as_0_1_0_had_it(status: JobStatus) -> JobStatus:
    """Without fields that are new, and what is said of an attempt that measures: 0.1.0 said nothing."""
    if status.plan is not None:
        status = replace(status, plan=replace(status.plan, compared_since=None))
    if status.phase is Phase.PROFILING:
        silent = tuple(replace(each, message="") for each in status.conditions)
        status = replace(status, message="", conditions=silent)
    return replace(status, checkpoint=None, measurements=())


def test_an_attempt_that_measures_is_planned_for_and_trains(operating: Operating) -> None:
    uid = restored("profiling", operating)
    operating.turn()
    operating.measured(uid, sample_profile())
    operating.turn(12)
    assert operating.phase(uid) is Phase.RUNNING
    for binding in bindings(operating):
        assert unknown_fields(binding.to_manifest(), "PodBinding") == set()
    ended_as_usual(operating, uid)


def test_pods_of_the_old_image_are_asked_to_stop(operating: Operating) -> None:
    uid = restored("running", operating)
    operating.turn()
    operating.kube.change_spec(uid, runPolicy={"suspend": True})
    operating.turn()
    assert all(STOP_ANNOTATION in pod["metadata"]["annotations"] for pod in operating.kube.all(PODS))
    end_all(operating, AttemptState.STOPPED)
    operating.turn(12)
    status = operating.status(uid)
    assert (status.phase, status.attempt, status.failures) == (Phase.SUSPENDED, 1, 0)


def test_pods_that_wait_for_a_place_get_it(operating: Operating) -> None:
    uid = restored("queued", operating)
    operating.turn()
    for index, pod in enumerate(operating.kube.all(PODS)):
        pod["spec"] = {"nodeName": NODES[index]}
        state = {"name": "trainer", "imageID": "image@1", "state": {"running": {}}}
        pod["status"] = {"phase": "Running", "podIP": f"10.0.0.{index + 1}", "containerStatuses": [state]}
        operating.kube.touch(pod)
    operating.turn()
    assert (operating.phase(uid), operating.status(uid).attempt) == (Phase.PROFILING, 1)


@pytest.mark.parametrize("scene", ["planning", "binding", "half-bound", "running"])
def test_all_pods_are_bound_to_the_one_plan_that_lies_next_to_them(operating: Operating, scene: str) -> None:
    """Ranks that were bound by 0.1.0 have begun by its plan, and another version may plan otherwise."""
    uid = restored(scene, operating)
    bound = {each.plan_digest for each in bindings_of_ranks(operating)}
    operating.turn(12)
    plan = unpacked(operating.kube.config_map("stdlib-llama-a1")["binaryData"][PLAN_FILE])
    found = bindings(operating)
    assert {(each.epoch, each.plan_digest) for each in found} == {(TRAIN_EPOCH, Plan.from_manifest(plan).digest)}
    assert not bound or bound == {each.plan_digest for each in found}
    told = operating.status(uid).plan
    whole = unpacked_plan(operating.kube.config_map("stdlib-llama-a1")["binaryData"])
    assert told is not None
    assert whole is not None
    assert told.digest == whole.digest
    ended_as_usual(operating, uid)


def bindings_of_ranks(operating: Operating) -> list[PodBinding]:
    return [each for each in bindings(operating) if each.epoch == TRAIN_EPOCH]


def test_a_failed_attempt_is_followed_by_the_next(operating: Operating) -> None:
    uid = restored("recovering", operating)
    operating.turn(12)
    operating.now += 60.0
    operating.turn(12)
    status = operating.status(uid)
    assert (status.phase, status.attempt, status.failures) == (Phase.QUEUED, 2, 1)


def test_a_suspended_job_is_resumed(operating: Operating) -> None:
    uid = restored("suspended", operating)
    operating.turn()
    operating.kube.change_spec(uid, runPolicy={"suspend": False})
    operating.turn(12)
    status = operating.status(uid)
    assert (status.phase, status.attempt, status.failures) == (Phase.QUEUED, 2, 0)
    assert operating.names() == ["stdlib-llama-a2"]


@pytest.mark.parametrize(("scene", "is_wrong"), [("running", False), ("drifted", False), ("mispredicted", True)])
def test_the_verdict_on_a_prediction_stays(operating: Operating, scene: str, is_wrong: bool) -> None:
    """What had been as predicted for an hour is no wrong prediction, whenever it drifted; what was wrong stays so."""
    uid = restored(scene, operating)
    progress = operating.status(uid).progress
    assert progress is not None
    assert progress.step_seconds is not None
    end = operating.now + REPLAN_AFTER_DRIFT_SECONDS / 2
    while operating.now < end:
        operating.now += 50.0
        step = operating.kube.all(JOBS)[0]["status"]["progress"]["step"] + 1
        operating.kube.report(uid, **{**progress.to_manifest(), "step": step})
        operating.turn()
    plan, drifted = operating.status(uid).plan, operating.status(uid).condition(ConditionType.DRIFTED)
    assert plan is not None
    assert plan.mispredicted is is_wrong
    assert drifted is not None
    assert (drifted.status is ConditionStatus.TRUE) is (scene != "running")
