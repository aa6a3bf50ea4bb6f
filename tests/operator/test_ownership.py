"""Which pods are a job's ranks: those of its attempt's JobSet, whatever labels others bear."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from penstock.core.lifecycle import AttemptState, Phase
from penstock.core.pod import PodBinding
from penstock.kube.names import BINDING_ANNOTATION, STOP_ANNOTATION, UID_LABEL
from penstock.kube.resources import BATCH_JOBS, JOBSETS, PODS
from penstock.kube.transport import KubeError
from tests.support.fake_planner import FakePlanner
from tests.support.one_job import NODES, example, running, word
from tests.support.operating import Operating
from tests.support.sample_run import sample_profile


@pytest.fixture
def operating() -> Operating:
    return Operating(FakePlanner())


def copied(operating: Operating, **metadata: Any) -> dict[str, Any]:
    """A running pod with the labels of the first rank, as `kubectl debug --copy-to --keep-labels` makes it."""
    found = copy.deepcopy(next(iter(operating.kube.all(PODS))))
    kept = {name: found["metadata"][name] for name in ("name", "namespace", "labels")}
    found["metadata"] = {**kept, **metadata}
    found["status"] = {**found["status"], "podIP": "198.19.68.29"}
    return found


def ranks_of(operating: Operating) -> list[dict[str, Any]]:
    """The pods that the Job controller made."""
    return [pod for pod in operating.kube.all(PODS) if pod["metadata"]["name"].startswith("stdlib-llama-a")]


def stray(operating: Operating, kind: str) -> str:
    """A pod of that kind comes; its name."""
    kube = operating.kube
    match kind:
        case "another namespace":
            made = copied(operating, name="stray", namespace="evil")
        case "a copy to debug":
            made = copied(operating, name="stray")
        case "another Job":
            job = copy.deepcopy(kube.all(BATCH_JOBS)[0])
            job["metadata"] = {"name": "other", "namespace": "default", "labels": job["metadata"]["labels"]}
            kube.add(BATCH_JOBS, job)
            made = copied(operating, name="stray", ownerReferences=[owner("batch/v1", "Job", job)])
        case "another JobSet":
            made = copied(operating, name="stray", ownerReferences=[owner("batch/v1", "Job", forged_chain(operating))])
        case "another namespace, the right Job":
            references = [owner("batch/v1", "Job", kube.all(BATCH_JOBS)[0])]
            made = copied(operating, name="stray", namespace="evil", ownerReferences=references)
        case _:
            reference = {**owner("batch/v1", "Job", kube.all(BATCH_JOBS)[0]), "controller": False}
            made = copied(operating, name="stray", ownerReferences=[reference])
    kube.add(PODS, made)
    return "stray"


def owner(api_version: str, kind: str, found: dict[str, Any]) -> dict[str, Any]:
    named = {"name": found["metadata"]["name"], "uid": found["metadata"]["uid"]}
    return {"apiVersion": api_version, "kind": kind, **named, "controller": True}


def forged_chain(operating: Operating) -> dict[str, Any]:
    """A JobSet that somebody made by hand with the attempt's labels, and its Job."""
    kube = operating.kube
    jobset = copy.deepcopy(kube.all(JOBSETS)[0])
    jobset["metadata"] = {"name": "other", "namespace": "default", "labels": jobset["metadata"]["labels"]}
    kube.add(JOBSETS, jobset)
    return kube.start_job(jobset)


KINDS = (
    "another namespace",
    "a copy to debug",
    "another Job",
    "another JobSet",
    "another namespace, the right Job",
    "an owner that does not control it",
)


@pytest.mark.parametrize("kind", KINDS)
class TestStrays:
    def test_one_is_never_bound_nor_counted(self, operating: Operating, kind: str) -> None:
        for node in NODES:
            operating.kube.add_node(node)
        uid = operating.kube.submit(example())
        operating.turn()
        operating.kube.start_pods(*NODES)
        name = stray(operating, kind)
        operating.turn()
        operating.measured(uid, sample_profile())
        operating.turn(12)
        assert operating.phase(uid) is Phase.RUNNING, operating.status(uid)
        found = {pod["metadata"]["name"]: pod["metadata"].get("annotations", {}) for pod in operating.kube.all(PODS)}
        assert found[name] == {}
        told = [json.loads(found[pod["metadata"]["name"]][BINDING_ANNOTATION]) for pod in ranks_of(operating)]
        assert {PodBinding.from_manifest(each).master for each in told} == {"10.0.0.1"}

    def test_its_end_is_not_the_job_s(self, operating: Operating, kind: str) -> None:
        uid = running(operating)
        name = stray(operating, kind)
        operating.turn()
        found = next(pod for pod in operating.kube.all(PODS) if pod["metadata"]["name"] == name)
        found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        found["status"]["phase"] = "Failed"
        found["status"]["containerStatuses"][0]["state"] = {"terminated": {"exitCode": 1}}
        operating.kube.touch(found)
        operating.turn()
        operating.kube.remove(found)
        operating.turn()
        assert (operating.phase(uid), operating.status(uid).attempt) == (Phase.RUNNING, 1)

    def test_it_holds_no_next_attempt_up_and_is_not_asked_to_stop(self, operating: Operating, kind: str) -> None:
        uid = running(operating)
        name = stray(operating, kind)
        operating.kube.change_spec(uid, runPolicy={"suspend": True})
        operating.turn()
        for pod in operating.kube.all(PODS):
            assert (STOP_ANNOTATION in pod["metadata"].get("annotations", {})) == (pod["metadata"]["name"] != name)
        for index, pod in enumerate(operating.kube.all(PODS)):
            if pod["metadata"]["name"] != name:
                operating.kube.end_pod(index, code=0, word=word(AttemptState.STOPPED))
        operating.turn(8)
        assert operating.phase(uid) is Phase.SUSPENDED
        operating.kube.change_spec(uid, runPolicy={"suspend": False})
        operating.turn(8)
        assert operating.status(uid).attempt == 2


def test_the_same_holds_after_the_operator_s_restart(operating: Operating) -> None:
    uid = running(operating)
    stray(operating, "another namespace")
    operating.restart()
    operating.turn()
    assert (operating.phase(uid), operating.status(uid).attempt) == (Phase.RUNNING, 1)


def test_one_pod_counts_for_each_index(operating: Operating) -> None:
    """A Job may have two for a moment; the one that was there first is the rank."""
    for node in NODES:
        operating.kube.add_node(node)
    uid = operating.kube.submit(example())
    operating.turn()
    operating.kube.start_pods(*NODES)
    operating.turn()
    second = operating.kube.make_pod(operating.kube.all(BATCH_JOBS)[0], 0, suffix="-second")
    operating.turn()
    operating.measured(uid, sample_profile())
    operating.turn(12)
    assert operating.phase(uid) is Phase.RUNNING
    assert "annotations" not in second["metadata"]


@pytest.mark.parametrize("restarts", [False, True])
def test_pods_that_outlive_their_jobset_hold_the_next_attempt_up(operating: Operating, restarts: bool) -> None:
    """They may still write: also where the operator never knew their owners."""
    uid = running(operating)
    jobset, left = operating.kube.all(JOBSETS)[0], copy.deepcopy(operating.kube.all(PODS))
    operating.kube.remove(jobset)
    for pod in left:
        operating.kube.add(PODS, pod)
    if restarts:
        operating.restart()
    operating.turn(8)
    assert (operating.phase(uid), operating.status(uid).attempt) == (Phase.RECOVERING, 1)
    for pod in operating.kube.all(PODS):
        operating.kube.remove(pod)
    operating.turn(8)
    assert operating.status(uid).attempt == 2


def test_a_jobset_of_somebody_else_s_is_not_taken_for_the_attempt_s(operating: Operating) -> None:
    for node in NODES:
        operating.kube.add_node(node)
    uid = operating.kube.submit(example())
    labels = {"penstock.dev/job": "stdlib-llama", UID_LABEL: uid, "penstock.dev/attempt": "1"}
    metadata = {"name": "stdlib-llama-a1", "namespace": "default", "labels": labels}
    operating.kube.add(JOBSETS, {"metadata": metadata, "spec": {"replicatedJobs": []}})
    with pytest.raises(KubeError, match="belongs to something else"):
        operating.turn()
    assert "belongs to something else" in operating.status(uid).message
