"""ClusterProfiles that the operator of version 0.1.0 left, taken over: what was measured stays and serves."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core import limits
from penstock.core.cluster_profile import ClusterProfileStatus
from penstock.core.lifecycle import AttemptState, Phase
from penstock.core.profile import Profile
from penstock.core.status import Condition, ConditionStatus
from penstock.kube.names import PROFILE_FILE
from penstock.kube.packing import unpacked
from penstock.kube.resources import CLUSTER_PROFILES, JOBS, JOBSETS, PODS
from tests.support.fake_planner import FakePlanner
from tests.support.old_profiles import FOLDER, MEASURING, SCENES, USING, restored, uid_of
from tests.support.one_job import NODES, end_all, example
from tests.support.operating import Operating
from tests.support.sample_run import sample_profile


@pytest.fixture
def operating() -> Operating:
    return Operating(FakePlanner())


def profile_of(operating: Operating) -> dict[str, Any]:
    (found,) = operating.kube.all(CLUSTER_PROFILES)
    return found


def status_of(operating: Operating) -> ClusterProfileStatus:
    return ClusterProfileStatus.from_manifest(profile_of(operating)["status"], "status")


def condition_of(operating: Operating) -> Condition:
    (condition,) = status_of(operating).conditions
    return condition


def submitted(operating: Operating, image: str = "image@1") -> str:
    """A job with the profile's model, whose pods run that image; its uid."""
    uid = operating.kube.submit(example())
    operating.turn()
    operating.kube.start_pods(*NODES)
    for pod in operating.kube.all(PODS):
        for container in pod["status"]["containerStatuses"]:
            container["imageID"] = image
    operating.turn(12)
    return uid


def test_every_scene_is_there() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == set(SCENES)


@pytest.mark.parametrize("scene", ["measured", "used"])
def test_what_was_measured_stays_as_it_is(operating: Operating, scene: str) -> None:
    restored(scene, operating)
    before, measured = profile_of(operating)["status"], operating.kube.config_map(MEASURING)
    operating.turn(12)
    assert (profile_of(operating)["status"], operating.kube.config_map(MEASURING)) == (before, measured)
    assert not [write for write in operating.kube.writes if write.startswith(("create", "delete"))]
    assert Profile.from_manifest(unpacked(measured["binaryData"][PROFILE_FILE])) == sample_profile()


def test_a_job_need_not_measure_what_0_1_0_measured(operating: Operating) -> None:
    restored("measured", operating)
    uid = submitted(operating)
    status = operating.status(uid)
    assert status.profile is not None
    assert (status.phase, status.attempt) == (Phase.RUNNING, 1)
    assert status.profile.ref == f"default/{MEASURING}"


def test_a_job_with_another_image_measures_for_itself(operating: Operating) -> None:
    """The trainer's code is what was timed, and an upgrade brings another."""
    restored("measured", operating)
    assert operating.phase(submitted(operating, image="image@2")) is Phase.PROFILING


def test_a_job_that_trains_by_it_goes_on(operating: Operating) -> None:
    restored("used", operating)
    uid = uid_of(operating, USING)
    assert uid is not None
    pods = [pod["metadata"]["uid"] for pod in operating.kube.all(PODS)]
    operating.turn(12)
    assert [pod["metadata"]["uid"] for pod in operating.kube.all(PODS)] == pods
    assert (operating.phase(uid), operating.status(uid).attempt) == (Phase.RUNNING, 1)
    end_all(operating, AttemptState.SUCCEEDED)
    operating.turn(12)
    assert (operating.phase(uid), operating.status(uid).attempt) == (Phase.SUCCEEDED, 1)


def test_what_is_being_measured_is_measured_once(operating: Operating) -> None:
    restored("measuring", operating)
    job, pods = uid_of(operating, MEASURING), operating.kube.all(PODS)
    assert job is not None
    operating.turn(12)
    assert (uid_of(operating, MEASURING), operating.kube.all(PODS)) == (job, pods)
    assert (operating.phase(job), operating.status(job).attempt) == (Phase.PROFILING, 1)
    operating.measured(job, sample_profile())
    operating.turn(12)
    assert (condition_of(operating).status, condition_of(operating).reason) == (ConditionStatus.TRUE, "Measured")
    assert status_of(operating).profile_ref == f"default/{MEASURING}"
    assert not operating.kube.all(JOBS) + operating.kube.all(JOBSETS) + operating.kube.all(PODS)


def test_why_it_was_not_measured_stays_said_and_it_is_tried_again(operating: Operating) -> None:
    restored("failed", operating)
    before = condition_of(operating)
    operating.turn(12)
    assert condition_of(operating) == before
    assert (before.reason, "no luck" in before.message) == ("BackoffLimitExceeded", True)
    operating.now += 3_601.0
    operating.turn(12)
    job = uid_of(operating, MEASURING)
    assert job is not None
    operating.kube.start_pods(*NODES)
    operating.turn()
    operating.measured(job, sample_profile())
    operating.turn(12)
    assert condition_of(operating).reason == "Measured"


def test_one_beyond_a_newer_limit_says_so_and_serves_on(operating: Operating) -> None:
    restored("measured", operating)
    profile_of(operating)["spec"]["maxAgeSeconds"] = limits.EXACT + 1
    operating.turn(12)
    condition = condition_of(operating)
    assert (condition.status, condition.reason) == (ConditionStatus.FALSE, "InvalidSpec")
    assert "spec.maxAgeSeconds" in condition.message
    assert status_of(operating).profile_ref == f"default/{MEASURING}"
    assert operating.phase(submitted(operating)) is Phase.RUNNING
    operating.kube.delete(CLUSTER_PROFILES, "", "pool", profile_of(operating)["metadata"]["uid"])
    operating.turn()
    assert operating.kube.all(CLUSTER_PROFILES) == []
