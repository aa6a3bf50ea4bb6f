"""A ClusterProfile is measured by a job of its own, told in its status, and used by jobs wherever they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from penstock.core.cluster_profile import ClusterProfile, ClusterProfileStatus
from penstock.core.lifecycle import Phase
from penstock.core.pod import MEASURES_LABEL
from penstock.core.profile import LinkRecord, Profile
from penstock.core.status import Condition, ConditionStatus
from penstock.kube.names import PROFILE_FILE
from penstock.kube.packing import unpacked
from penstock.kube.resources import CLUSTER_PROFILES, CONFIG_MAPS, JOBS, JOBSETS, PODS, Resource
from penstock.kube.transport import KubeError, Object
from penstock.operator.measuring import measuring_job, summarize
from tests.support.crashing import CrashError
from tests.support.fake_planner import FakePlanner
from tests.support.manifests import example
from tests.support.operating import Operating
from tests.support.sample_run import sample_profile

NODES = ("east", "west")
PROFILE = sample_profile()
MODEL = {"family": "llama", "layers": 8, "hidden": 256, "heads": 8, "kvHeads": 4, "vocab": 4096}
SPEC = {"model": MODEL, "sequenceLength": 1024, "ranks": 2, "maxAgeSeconds": 600}
JOB = "pool-profile"


@pytest.fixture
def operating() -> Operating:
    return with_profile(Operating(FakePlanner()))


def with_profile(operating: Operating, **changes: Any) -> Operating:
    """Somebody applied one, to a cluster of two nodes."""
    for node in NODES:
        operating.kube.add_node(node)
    operating.kube.add(CLUSTER_PROFILES, {"metadata": {"name": "pool"}, "spec": {**SPEC, **changes}})
    return operating


def profile_of(operating: Operating) -> dict[str, Any]:
    (found,) = operating.kube.all(CLUSTER_PROFILES)
    return found


def status_of(operating: Operating) -> ClusterProfileStatus:
    return ClusterProfileStatus.from_manifest(profile_of(operating).get("status") or {})


def profiled(operating: Operating) -> Condition:
    (condition,) = status_of(operating).conditions
    return condition


def job_of(operating: Operating) -> dict[str, Any] | None:
    """The job that measures, if there is one."""
    return next((each for each in operating.kube.all(JOBS) if each["metadata"]["name"] == JOB), None)


def measure(operating: Operating) -> None:
    """Pods come, and measure."""
    operating.turn()
    job = job_of(operating)
    assert job is not None
    operating.kube.start_pods(*NODES)
    operating.turn()
    operating.measured(job["metadata"]["uid"], PROFILE)
    operating.turn()


def closed(operating: Operating, closed_namespace: str) -> Callable[[Resource, str, str], Object]:
    """How the cluster answers an operator that may not read ConfigMaps there."""
    get = operating.kube.get

    def get_or_fail(resource: Resource, namespace: str, name: str) -> Object:
        if (resource, namespace) == (CONFIG_MAPS, closed_namespace):
            raise KubeError(403, "Forbidden", f"configmaps {name} is forbidden")
        return get(resource, namespace, name)

    return get_or_fail


class TestMeasuring:
    def test_a_job_measures_and_goes(self, operating: Operating) -> None:
        operating.turn()
        job = job_of(operating)
        assert job is not None
        assert job["metadata"]["labels"] == {MEASURES_LABEL: "pool"}
        assert job["metadata"]["ownerReferences"][0]["uid"] == profile_of(operating)["metadata"]["uid"]
        assert (profiled(operating).status, profiled(operating).reason) == (ConditionStatus.FALSE, "Measuring")
        measure(operating)
        condition, status = profiled(operating), status_of(operating)
        assert (condition.status, condition.reason) == (ConditionStatus.TRUE, "Measured")
        assert (status.profile_ref, status.measured_at) == (f"default/{JOB}", operating.now)
        assert status.links == summarize(PROFILE.links)
        assert job_of(operating) is None
        assert not operating.kube.all(PODS)
        found = operating.kube.config_map(JOB)
        assert Profile.from_manifest(unpacked(found["binaryData"][PROFILE_FILE])) == PROFILE
        assert found["metadata"]["ownerReferences"][0]["uid"] == profile_of(operating)["metadata"]["uid"]

    def test_nothing_is_planned_for_it(self) -> None:
        planner = FakePlanner()
        measure(with_profile(Operating(planner)))
        assert planner.asked == []

    def test_what_was_measured_is_left_alone(self, operating: Operating) -> None:
        measure(operating)
        before = list(operating.kube.writes)
        operating.now += 599.0
        operating.turn()
        assert operating.kube.writes == before

    def test_what_is_old_is_measured_again(self, operating: Operating) -> None:
        measure(operating)
        operating.now += 600.0
        measure(operating)
        assert status_of(operating).measured_at == operating.now

    def test_nothing_is_ever_too_old_without_an_age(self) -> None:
        operating = with_profile(Operating(FakePlanner()), maxAgeSeconds=0)
        measure(operating)
        operating.now += 10**9
        operating.turn()
        assert job_of(operating) is None

    def test_another_spec_is_measured_again_and_not_what_was_begun(self, operating: Operating) -> None:
        operating.turn()
        profile_of(operating)["spec"] = {**SPEC, "sequenceLength": 512}
        profile_of(operating)["metadata"]["generation"] = 2
        operating.turn()
        job = job_of(operating)
        assert job is not None
        assert job["spec"]["data"]["sequenceLength"] == 512
        measure(operating)
        assert status_of(operating).observed_generation == 2

    def test_what_somebody_deleted_is_measured_again(self, operating: Operating) -> None:
        measure(operating)
        operating.kube.remove(operating.kube.config_map(JOB))
        measure(operating)
        assert operating.kube.config_map(JOB)

    @pytest.mark.parametrize("moment", ["before", "after"])
    def test_an_operator_that_ends_anywhere_is_followed_by_one_that_goes_on(self, moment: str) -> None:
        for crash_at in itertools.count(1):
            operating = with_profile(Operating(FakePlanner()))
            came = crashing(operating, moment, crash_at)
            status = status_of(operating)
            assert (profiled(operating).status, status.profile_ref) == (ConditionStatus.TRUE, f"default/{JOB}")
            assert job_of(operating) is None
            assert [each for each in operating.kube.writes if each == f"create PipelineJob {JOB}"] == [
                f"create PipelineJob {JOB}"
            ]
            if not came:
                assert crash_at > 10
                return


def crashing(operating: Operating, moment: str, crash_at: int) -> bool:
    """Have it measured by an operator that is killed at one write, and by the next one; whether it came to that."""
    count = itertools.count(1)

    def crash(write: str) -> None:
        if next(count) == crash_at:
            raise CrashError

    setattr(operating.kube, "hook" if moment == "before" else "after", crash)
    came = False
    for act in (operating.turn, lambda: start(operating), operating.turn, lambda: report(operating), operating.turn):
        try:
            act()
        except CrashError:
            came = True
            operating.restart()
            operating.turn()
            act()
    operating.turn()
    return came


def start(operating: Operating) -> None:
    if not operating.kube.all(PODS):
        operating.kube.start_pods(*NODES)


def report(operating: Operating) -> None:
    job = job_of(operating)
    assert job is not None
    operating.measured(job["metadata"]["uid"], PROFILE)


class TestWhatGoesWrong:
    def test_what_keeps_the_job_waiting_is_said_of_the_profile(self, operating: Operating) -> None:
        operating.turn()
        operating.kube.start_pods(*NODES)
        operating.kube.hinder_pod(1, "Unschedulable", "0/2 nodes are available", at=operating.now)
        operating.turn()
        assert "Queued: pod pool-profile-a1-ranks-0-1: Unschedulable" in profiled(operating).message
        assert "add nodes" in profiled(operating).message

    def test_a_job_that_failed_says_why_and_is_tried_again_later(self, operating: Operating) -> None:
        operating.turn()
        for _ in range(4):
            operating.kube.start_pods(*NODES)
            operating.turn()
            operating.kube.end_pod(0, code=1, word="no luck", at=operating.now)
            operating.turn()
            operating.now += 10.0
            operating.turn()
        assert (profiled(operating).status, profiled(operating).reason) == (
            ConditionStatus.FALSE,
            "BackoffLimitExceeded",
        )
        assert "no luck" in profiled(operating).message
        operating.now += 3_601.0
        operating.turn()
        measure(operating)
        assert profiled(operating).reason == "Measured"

    def test_a_job_of_that_name_is_left_to_its_owner(self, operating: Operating) -> None:
        operating.kube.submit({**example(), "metadata": {"name": JOB}})
        operating.turn()
        assert profiled(operating).reason == "NameTaken"
        assert JOB in profiled(operating).message

    def test_nor_is_it_removed_once_the_profile_is_measured(self, operating: Operating) -> None:
        measure(operating)
        operating.kube.submit({**example(), "metadata": {"name": JOB}})
        operating.turn()
        assert job_of(operating) is not None

    def test_a_config_map_of_that_name_is_left_to_its_owner(self, operating: Operating) -> None:
        operating.kube.add(CONFIG_MAPS, {"metadata": {"name": JOB, "namespace": "default"}, "data": {"a": "b"}})
        measure(operating)
        assert operating.kube.config_map(JOB)["data"] == {"a": "b"}
        assert profiled(operating).reason == "NameTaken"
        assert "ConfigMap" in profiled(operating).message

    def test_a_spec_that_the_cluster_let_pass_is_refused_with_its_place(self) -> None:
        operating = with_profile(Operating(FakePlanner()), ranksPerPod=3)
        operating.turn()
        assert profiled(operating).reason == "InvalidSpec"
        assert "spec.ranksPerPod" in profiled(operating).message

    def test_what_the_cluster_refuses_is_told(self, operating: Operating) -> None:
        operating.kube.refusals["pipelinejobs"] = KubeError(403, "Forbidden", "exceeded quota")
        operating.profiles.reconcile_all()
        assert (profiled(operating).reason, profiled(operating).message) == ("Forbidden", "exceeded quota")

    def test_a_cluster_without_the_definition_has_none(self) -> None:
        operating = Operating(FakePlanner())
        operating.kube.refusals["clusterprofiles"] = KubeError(404, "Not Found", "404 page not found")
        operating.profiles.reconcile_all()
        assert operating.kube.writes == []


class TestUse:
    def submitted(self, operating: Operating, **changes: Any) -> str:
        kubernetes = {"volumes": {"out": {"claim": "shared"}}}
        manifest = example(kubernetes=kubernetes, **changes)
        manifest["metadata"]["namespace"] = "team"
        uid = operating.kube.submit(manifest)
        operating.turn()
        operating.kube.start_pods(*NODES)
        operating.turn()
        return uid

    @pytest.mark.parametrize(
        "changes", [{}, {"training__globalBatch": 6}, {"resources__minRanks": 1}, {"model__layers": 4}]
    )
    def test_a_job_of_any_namespace_need_not_measure(self, operating: Operating, changes: dict[str, Any]) -> None:
        measure(operating)
        uid = self.submitted(operating, **changes)
        operating.turn(12)
        status = operating.status(uid)
        assert status.profile is not None
        assert (status.phase, status.profile.ref) == (Phase.RUNNING, f"default/{JOB}")
        assert status.attempt == 1

    @pytest.mark.parametrize(
        "changes",
        [
            {"model__hidden": 128},
            {"data__sequenceLength": 512},
            {"training__precision": "bf16"},
            {"resources__threadsPerRank": 2},
        ],
    )
    def test_other_work_is_measured(self, operating: Operating, changes: dict[str, Any]) -> None:
        measure(operating)
        assert operating.phase(self.submitted(operating, **changes)) is Phase.PROFILING

    def test_what_another_operator_measured_is_left_to_it(
        self, operating: Operating, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two that see to one namespace each measure a profile once between them."""
        measure(operating)
        told = profile_of(operating)["status"]
        told["profileRef"] = f"elsewhere/{JOB}"
        monkeypatch.setattr(operating.kube, "get", closed(operating, "elsewhere"))
        for _ in range(3):
            operating.now += 60.0
            operating.profiles.reconcile_all()
        assert profile_of(operating)["status"] == told

    def test_what_it_may_not_read_in_its_own_namespace_is_told(
        self, operating: Operating, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measure(operating)
        monkeypatch.setattr(operating.kube, "get", closed(operating, "default"))
        operating.profiles.reconcile_all()
        assert profiled(operating).reason == "Forbidden"

    def test_one_that_never_ages_is_used_after_a_month(self, operating: Operating) -> None:
        profile_of(operating)["spec"]["maxAgeSeconds"] = 0
        operating.now = PROFILE.measured_at
        measure(operating)
        operating.now += 30 * 86_400.0
        uid = self.submitted(operating)
        operating.turn(12)
        assert operating.phase(uid) is Phase.RUNNING

    def test_other_hosts_are_measured(self, operating: Operating) -> None:
        measure(operating)
        operating.kube.add_node("north")
        uid = operating.kube.submit(example(kubernetes={"volumes": {"out": {"claim": "shared"}}}))
        operating.turn()
        operating.kube.start_pods("east", "north")
        operating.turn()
        assert operating.phase(uid) is Phase.PROFILING

    def test_one_that_is_gone_is_measured_by_the_job_itself(self, operating: Operating) -> None:
        measure(operating)
        operating.profiles.reconcile_all()
        operating.kube.remove(operating.kube.config_map(JOB))
        profile_of(operating)["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        uid = self.submitted(operating)
        operating.now += 10.0
        operating.turn(8)
        operating.kube.start_pods(*NODES)
        operating.turn()
        assert (operating.phase(uid), operating.status(uid).attempt) == (Phase.PROFILING, 1)

    def test_one_that_may_not_be_read_is_measured_by_the_job_itself(
        self, operating: Operating, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An operator of one namespace alone, next to another that measured."""
        measure(operating)
        monkeypatch.setattr(operating.kube, "get", closed(operating, "default"))
        uid = self.submitted(operating)
        operating.turn(8)
        assert (operating.phase(uid), operating.status(uid).attempt) == (Phase.PROFILING, 1)


def test_the_job_says_what_the_profile_does() -> None:
    named = {"apiVersion": "penstock.dev/v1alpha1", "kind": "ClusterProfile", "metadata": {"name": "a" * 40}}
    spec = {
        **SPEC,
        "precision": "bf16",
        "device": "cuda",
        "ranks": 4,
        "ranksPerPod": 2,
        "nodeSelector": {"pool": "a"},
        "tolerations": [{"operator": "Exists"}],
        "acceleratorResource": "example.com/gpu",
        "image": "trainer:2",
    }
    found = measuring_job(ClusterProfile.from_manifest({**named, "spec": spec}), "own").to_manifest()
    assert found["metadata"]["name"] == "a" * 32 + "-profile"
    assert found["spec"]["kubernetes"] == {
        "image": "trainer:2",
        "ranksPerPod": 2,
        "nodeSelector": {"pool": "a"},
        "tolerations": [{"operator": "Exists"}],
        "acceleratorResource": "example.com/gpu",
    }
    assert found["spec"]["resources"] == {"device": "cuda", "ranks": 4}
    assert found["spec"]["training"]["precision"] == "bf16"


def test_links_in_short() -> None:
    def link(source: int, speed: float) -> LinkRecord:
        return LinkRecord(source=source, target=9, latency_seconds=1e-3, bytes_per_second=speed, error=0.0)

    found = summarize((link(0, 5.0), link(1, 1.0), link(2, 3.0)))
    assert found is not None
    assert (found.num_links, found.median_bytes_per_second) == (3, 3.0)
    assert (found.slowest.source, found.fastest.source) == (1, 0)
    assert summarize(()) is None


def test_jobs_that_measure_need_no_shared_output(operating: Operating) -> None:
    operating.turn()
    (jobset,) = operating.kube.all(JOBSETS)
    volumes = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["volumes"]
    assert {"name": "root-out", "emptyDir": {}} in volumes


@pytest.mark.parametrize(
    "status", [{"phase": "Asleep"}, {"progress": {"attempt": 1, "loss": "nothing"}}, {"attempt": []}]
)
def test_a_job_whose_status_cannot_be_read_keeps_no_other_profile_waiting(
    operating: Operating, status: dict[str, Any]
) -> None:
    operating.profiles.reconcile_all()
    job = job_of(operating)
    assert job is not None
    job["status"] = status
    operating.kube.add(CLUSTER_PROFILES, {"metadata": {"name": "second"}, "spec": SPEC})
    operating.profiles.reconcile_all()
    names = {each["metadata"]["name"] for each in operating.kube.all(JOBS)}
    assert names == {JOB, "second-profile"}
    (first, _) = operating.kube.all(CLUSTER_PROFILES)
    (condition,) = ClusterProfileStatus.from_manifest(first["status"]).conditions
    assert condition.reason == "UnreadableStatus"
    assert JOB in condition.message
