"""The objects of an attempt: what JobSet and the restricted Pod Security Standard ask, and what a pod has to find."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.job import PipelineJob
from penstock.core.plan import Plan
from penstock.core.pod import (
    ADDRESS_FILE,
    ATTEMPT_FILES,
    CA_FILE,
    CONFIDENCE_FILE,
    JOB_FILE,
    PLAN_FILE,
    POD_FILES,
    TOKEN_FILE,
)
from penstock.kube.packing import packed, unpacked
from penstock.operator.manifests import claims, config_map, jobset, num_pods
from penstock.operator.podspec import AGENT_BYTES, REPORTER_LIMITS, REPORTER_REQUESTS, pod_spec
from penstock.operator.settings import Settings
from tests.support.manifest_strategies import valid
from tests.support.manifests import FULL, example, loaded
from tests.support.old_fields import OF_A_PLAN, unknown_fields
from tests.support.sample_run import confident_plan, sample_plan

SETTINGS = Settings(image="penstock/trainer:1", service="https://service:8470", service_ca="-----BEGIN")
GRACE = 75
TOKEN = TOKEN_FILE.rpartition("/")[0]
Container = Callable[[PipelineJob], dict[str, Any]]
MOST_NAME = 63
ALLOWED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"
}  # fmt: skip


def job(**changes: Any) -> PipelineJob:
    manifest = example(**changes)
    manifest["metadata"] = {"name": "a", "namespace": "team", "uid": "u"}
    return PipelineJob.from_manifest(manifest)


def full() -> PipelineJob:
    """A job that says all that can be said."""
    return PipelineJob.from_manifest(loaded(FULL))


def spec_of(told: PipelineJob) -> dict[str, Any]:
    return pod_spec(told, 1, SETTINGS, GRACE)


JOBS = {"small": job(), "full": full(), "cuda": job(resources__device="cuda")}
everywhere = pytest.mark.parametrize("told", JOBS.values(), ids=JOBS)


def trainer_of(told: PipelineJob) -> dict[str, Any]:
    (found,) = spec_of(told)["containers"]
    assert isinstance(found, dict)
    return found


def reporter_of(told: PipelineJob) -> dict[str, Any]:
    (found,) = spec_of(told)["initContainers"]
    assert isinstance(found, dict)
    return found


@everywhere
@pytest.mark.parametrize("container", [trainer_of, reporter_of])
class TestRestrictedContainers:
    """Each rule of https://kubernetes.io/docs/concepts/security/pod-security-standards#restricted for containers."""

    def test_not_privileged_and_not_escalating(self, container: Container, told: PipelineJob) -> None:
        context = container(told)["securityContext"]
        assert not context.get("privileged")
        assert context["allowPrivilegeEscalation"] is False

    def test_all_capabilities_are_dropped_and_none_added(self, container: Container, told: PipelineJob) -> None:
        assert container(told)["securityContext"]["capabilities"] == {"drop": ["ALL"]}

    def test_no_host_ports(self, container: Container, told: PipelineJob) -> None:
        assert not any("hostPort" in port for port in container(told).get("ports", ()))

    def test_no_profile_of_its_own(self, container: Container, told: PipelineJob) -> None:
        for context in (spec_of(told)["securityContext"], container(told)["securityContext"]):
            assert not {"appArmorProfile", "seLinuxOptions", "procMount", "sysctls"} & context.keys()

    def test_not_as_root(self, container: Container, told: PipelineJob) -> None:
        assert "runAsUser" not in container(told)["securityContext"]

    def test_beyond_the_standard(self, container: Container, told: PipelineJob) -> None:
        assert container(told)["securityContext"]["readOnlyRootFilesystem"] is True


@everywhere
class TestRestricted:
    """Each rule of the same for pods."""

    def test_no_host_namespaces(self, told: PipelineJob) -> None:
        assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & spec_of(told).keys()

    def test_volumes_are_of_the_kinds_that_are_allowed(self, told: PipelineJob) -> None:
        kinds = {kind for volume in spec_of(told)["volumes"] for kind in volume if kind != "name"}
        assert kinds <= ALLOWED_VOLUMES

    def test_the_runtime_s_seccomp_profile(self, told: PipelineJob) -> None:
        assert spec_of(told)["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}

    def test_not_as_root(self, told: PipelineJob) -> None:
        context = spec_of(told)["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] > 0

    def test_no_more_containers(self, told: PipelineJob) -> None:
        assert "ephemeralContainers" not in spec_of(told)
        assert (trainer_of(told)["name"], reporter_of(told)["name"]) == ("trainer", "reporter")

    def test_beyond_the_standard(self, told: PipelineJob) -> None:
        assert spec_of(told)["automountServiceAccountToken"] is False
        assert spec_of(told)["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


@everywhere
class TestMounts:
    def mounts(self, container: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {each["mountPath"]: each for each in container["volumeMounts"]}

    def test_every_mount_has_its_volume_and_every_volume_its_mount(self, told: PipelineJob) -> None:
        volumes = [volume["name"] for volume in spec_of(told)["volumes"]]
        mounts = {**self.mounts(trainer_of(told)), **self.mounts(reporter_of(told))}
        assert sorted(volumes) == sorted(each["name"] for each in mounts.values())
        assert len(set(volumes)) == len(volumes)

    def test_what_it_is_told_it_cannot_change(self, told: PipelineJob) -> None:
        for path in (ATTEMPT_FILES, POD_FILES):
            assert self.mounts(trainer_of(told))[path]["readOnly"] is True
        for path in (ATTEMPT_FILES, TOKEN):
            assert self.mounts(reporter_of(told))[path]["readOnly"] is True

    def test_the_token_is_for_what_reports(self, told: PipelineJob) -> None:
        assert TOKEN in self.mounts(reporter_of(told))
        assert TOKEN not in self.mounts(trainer_of(told))

    def test_its_token_is_for_the_service_alone_and_short_lived(self, told: PipelineJob) -> None:
        tokens = [
            source["serviceAccountToken"]
            for volume in spec_of(told)["volumes"]
            for source in volume.get("projected", {}).get("sources", ())
        ]
        assert tokens == [{"path": "token", "audience": "penstock-ingest", "expirationSeconds": 600}]

    def test_the_attempt_s_files_may_come_later(self, told: PipelineJob) -> None:
        (volume,) = (each for each in spec_of(told)["volumes"] if "configMap" in each)
        assert volume["configMap"] == {"name": f"{told.metadata.name}-a1", "optional": True}

    @pytest.mark.parametrize("container", [trainer_of, reporter_of])
    def test_only_the_output_can_be_written(self, container: Container, told: PipelineJob) -> None:
        roots = {path: each for path, each in self.mounts(container(told)).items() if path.startswith("/penstock/")}
        assert {path for path, each in roots.items() if not each["readOnly"]} == {"/penstock/out"}


@everywhere
class TestReporter:
    """See https://kubernetes.io/docs/concepts/workloads/pods/sidecar-containers."""

    def test_it_is_started_first_ended_last_and_started_again(self, told: PipelineJob) -> None:
        assert reporter_of(told)["restartPolicy"] == "Always"

    def test_it_asks_for_next_to_nothing_and_is_limited(self, told: PipelineJob) -> None:
        """Namespaces with a ResourceQuota let no pod in that leaves anything open."""
        assert reporter_of(told)["resources"] == {"requests": REPORTER_REQUESTS, "limits": REPORTER_LIMITS}
        assert REPORTER_REQUESTS.keys() == REPORTER_LIMITS.keys() == {"cpu", "memory"}

    def test_it_is_of_the_same_image_and_in_the_same_environment(self, told: PipelineJob) -> None:
        for name in ("image", "env"):
            assert reporter_of(told)[name] == trainer_of(told)[name]


class TestSizes:
    @pytest.mark.parametrize(("per_pod", "cpu"), [(1, "3"), (4, "12")])
    def test_on_processors(self, per_pod: int, cpu: str) -> None:
        told = job(resources={"ranks": 4, "memoryPerRank": "1Gi", "threadsPerRank": 3}, kubernetes__ranksPerPod=per_pod)
        (container,) = spec_of(told)["containers"]
        expected = {"cpu": cpu, "memory": str(per_pod * 2**30 + AGENT_BYTES)}
        assert container["resources"] == {"requests": expected, "limits": expected}

    def test_on_cuda_devices(self) -> None:
        told = job(
            resources={"ranks": 4, "device": "cuda", "memoryPerRank": "80Gi"},
            kubernetes={"ranksPerPod": 2, "acceleratorResource": "example.com/gpu"},
        )
        (container,) = spec_of(told)["containers"]
        assert container["resources"]["limits"] == {"example.com/gpu": "2"}

    @given(ranks=st.integers(1, 4096), per_pod=st.integers(1, 64))
    def test_pods_hold_all_ranks_and_none_is_empty(self, ranks: int, per_pod: int) -> None:
        pods = num_pods(job(resources={"ranks": per_pod}, kubernetes__ranksPerPod=per_pod), ranks)
        assert pods * per_pod >= ranks > (pods - 1) * per_pod


class TestJobSets:
    def ranks(self, found: dict[str, Any]) -> dict[str, Any]:
        (replicated,) = found["spec"]["replicatedJobs"]
        assert replicated["replicas"] == 1
        template = replicated["template"]["spec"]
        assert isinstance(template, dict)
        return template

    def test_nothing_is_started_a_second_time(self) -> None:
        found = jobset(job(), 3, 2, SETTINGS, GRACE)
        assert found["spec"]["failurePolicy"] == {"maxRestarts": 0}
        assert self.ranks(found)["backoffLimit"] == 0
        assert self.ranks(found)["template"]["spec"]["restartPolicy"] == "Never"

    def test_equal_pods_with_numbers(self) -> None:
        ranks = self.ranks(jobset(job(), 3, 2, SETTINGS, GRACE))
        assert (ranks["completionMode"], ranks["completions"], ranks["parallelism"]) == ("Indexed", 2, 2)
        assert ranks["template"]["spec"]["terminationGracePeriodSeconds"] == GRACE

    def test_it_is_the_job_s_and_holds_it_not_back(self) -> None:
        found = jobset(job(), 3, 2, SETTINGS, GRACE)["metadata"]
        (owner,) = found["ownerReferences"]
        assert (found["name"], owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (
            "a-a3",
            "u",
            True,
            False,
        )
        assert "finalizers" not in found

    def test_pods_bear_what_they_are_found_by(self) -> None:
        found = jobset(job(), 3, 2, SETTINGS, GRACE)
        labels = {"penstock.dev/job": "a", "penstock.dev/job-uid": "u", "penstock.dev/attempt": "3"}
        assert self.ranks(found)["template"]["metadata"]["labels"] == labels == found["metadata"]["labels"]

    @pytest.mark.parametrize("queue", ["", "team"])
    def test_a_queue_lets_it_go(self, queue: str) -> None:
        found = jobset(job(kubernetes__queueName=queue), 1, 2, SETTINGS, GRACE)
        assert found["spec"]["suspend"] is bool(queue)
        assert found["metadata"]["labels"].get("kueue.x-k8s.io/queue-name", "") == queue

    @pytest.mark.parametrize(("queue", "passed_on"), [("team", "urgent"), ("", None)])
    def test_a_job_s_priority_is_its_jobset_s(self, queue: str, passed_on: str | None) -> None:
        """Kueue knows no PipelineJobs. Without a queue it is nobody's business."""
        label = "kueue.x-k8s.io/priority-class"
        told = job(kubernetes__queueName=queue)
        told = replace(told, metadata=replace(told.metadata, labels={label: "urgent", "other": "x"}))
        found = jobset(told, 1, 2, SETTINGS, GRACE)
        assert "other" not in found["metadata"]["labels"]
        assert found["metadata"]["labels"].get(label) == passed_on

    def test_names_of_pods_are_short_enough(self) -> None:
        name = "x" * 40
        manifest = example()
        manifest["metadata"] = {"name": name, "namespace": "team", "uid": "u"}
        found = jobset(PipelineJob.from_manifest(manifest), 999, 2, SETTINGS, GRACE)
        assert len(f"{found['metadata']['name']}-ranks-0-999-abcde") <= MOST_NAME

    @given(told=valid(PipelineJob))
    def test_whatever_a_job_says_it_can_be_sent(self, told: PipelineJob) -> None:
        found = jobset(told, 1, told.spec.resources.ranks, SETTINGS, GRACE)
        assert json.loads(json.dumps(found)) == found


class TestConfigMaps:
    def test_what_a_pod_finds_from_the_start(self) -> None:
        data = config_map(job(), 1, SETTINGS)["data"]
        assert PipelineJob.from_manifest(json.loads(data[JOB_FILE])) == job()
        assert json.loads(data[ADDRESS_FILE]) == {"server": SETTINGS.service, "caFile": f"{ATTEMPT_FILES}/{CA_FILE}"}
        assert data[CA_FILE] == SETTINGS.service_ca

    def test_without_a_service(self) -> None:
        assert set(config_map(job(), 1, Settings())["data"]) == {JOB_FILE}

    def test_the_plan_once_there_is_one(self) -> None:
        assert "binaryData" not in config_map(job(), 1, SETTINGS)
        found = config_map(job(), 1, SETTINGS, sample_plan())
        assert unpacked(found["binaryData"][PLAN_FILE]) == sample_plan().to_manifest()

    def test_the_plan_is_one_that_pods_of_0_1_0_read(self) -> None:
        files = config_map(job(), 1, SETTINGS, confident_plan())["binaryData"]
        assert unknown_fields(unpacked(files[PLAN_FILE]), *OF_A_PLAN) == set()
        whole = Plan.with_confidence(unpacked(files[PLAN_FILE]), unpacked(files[CONFIDENCE_FILE]))
        assert whole == confident_plan()
        assert set(config_map(job(), 1, SETTINGS, sample_plan())["binaryData"]) == {PLAN_FILE}

    @given(st.recursive(st.integers() | st.text(), lambda inner: st.dictionaries(st.text(), inner), max_leaves=20))
    def test_packing(self, value: Any) -> None:
        assert unpacked(packed({"value": value})) == {"value": value}
        assert packed({"value": value}) == packed({"value": value})


def test_claims_are_made_as_the_template_says() -> None:
    volumes = {
        "out": {"template": {"size": "2Gi", "storageClass": "fast"}},
        "data/corpus": {"claim": "corpus"},
        "models/base": {"template": {"size": "1Gi"}, "reclaim": "Delete"},
    }
    found = {each["metadata"]["name"]: each for each in claims(job(kubernetes__volumes=volumes))}
    assert set(found) == {"a-out", "a-models-base"}
    assert found["a-out"]["spec"]["storageClassName"] == "fast"
    assert found["a-out"]["spec"]["resources"] == {"requests": {"storage": str(2 * 2**30)}}
    assert "ownerReferences" not in found["a-out"]["metadata"]
    assert found["a-models-base"]["metadata"]["ownerReferences"][0]["uid"] == "u"


def test_an_environment_s_names_are_the_job_s_and_then_its_own() -> None:
    told = job(kubernetes__env=[{"name": "HOME", "value": "/elsewhere"}])
    names = [each["name"] for each in spec_of(told)["containers"][0]["env"]]
    assert names.index("HOME") < len(names) - names[::-1].index("HOME") - 1
