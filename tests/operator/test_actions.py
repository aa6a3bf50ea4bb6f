"""Telling the pods of a job: all at once, and the others too where one cannot be told."""

from __future__ import annotations

import threading

import pytest

from penstock.core.errors import UserError
from penstock.core.job import PipelineJob
from penstock.core.pod import PodBinding
from penstock.kube.names import BINDING_ANNOTATION, PROFILE_FILE, STOP_ANNOTATION
from penstock.kube.resources import CONFIG_MAPS, PODS
from penstock.kube.transport import KubeError
from penstock.operator.actions import MAX_PARALLEL_ANNOTATIONS
from penstock.operator.manifests import jobset
from penstock.operator.snapshots import PodSnapshot
from tests.support.fake_planner import FakePlanner
from tests.support.manifests import example
from tests.support.operating import SETTINGS, Operating
from tests.support.poison import poison
from tests.support.sample_run import sample_profile

PATIENCE_SECONDS = 30.0
POISON = poison(sample_profile().to_manifest())


def running(on: Operating, count: int) -> list[PodSnapshot]:
    """The pods of an attempt, in the order of their names."""
    manifest = example()
    manifest["metadata"] |= {"uid": "u", "namespace": "default"}
    on.kube.submit(manifest)
    job = PipelineJob.from_manifest(manifest)
    made = on.kube.start_job(on.kube.create(jobset(job, 1, count, SETTINGS, 60)))
    for number in range(count):
        on.kube.make_pod(made, number)
    on.look()
    return list(on.cache.pods("u"))


def places(pods: list[PodSnapshot]) -> list[PodBinding]:
    return [
        PodBinding(
            pod_uid=pod.uid, attempt=1, epoch=0, node_rank=k, num_nodes=len(pods), ranks_per_pod=1, master="m", port=1
        )
        for k, pod in enumerate(pods)
    ]


@pytest.fixture
def on() -> Operating:
    return Operating(FakePlanner())


def test_pods_are_told_at_once(on: Operating) -> None:
    pods = running(on, 3 * MAX_PARALLEL_ANNOTATIONS)
    together = threading.Barrier(MAX_PARALLEL_ANNOTATIONS)

    def wait_for_others(write: str) -> None:
        together.wait(PATIENCE_SECONDS)

    on.kube.hook = wait_for_others
    on.actions.bind(pods, places(pods))
    assert [pod.binding for pod in on.cache.pods("u")] == places(pods)
    on.actions.request_stop(pods, 1000.0)
    assert all(STOP_ANNOTATION in found["metadata"]["annotations"] for found in on.kube.all(PODS))


def test_one_that_cannot_be_told_is_reported_and_the_others_are_told(on: Operating) -> None:
    pods = running(on, 5)
    on.kube.remove(on.kube.objects[PODS.plural, "default", pods[1].name])
    with pytest.raises(KubeError, match=pods[1].name):
        on.actions.bind(pods, places(pods))
    assert all(BINDING_ANNOTATION in found["metadata"]["annotations"] for found in on.kube.all(PODS))
    assert len(on.kube.all(PODS)) == len(pods) - 1


def test_who_was_told_is_not_told_again(on: Operating) -> None:
    pods = running(on, 3)
    on.actions.bind(pods, places(pods))
    told, before = on.cache.pods("u"), len(on.kube.writes)
    on.actions.bind(told, places(pods))
    assert len(on.kube.writes) == before


@pytest.mark.parametrize("name", POISON)
def test_a_poisoned_measurement_is_measured_again(on: Operating, name: str) -> None:
    found = {"metadata": {"name": "measured", "namespace": "default"}, "binaryData": {PROFILE_FILE: POISON[name]}}
    on.kube.add(CONFIG_MAPS, found)
    with pytest.raises(UserError, match=r"ConfigMap measured: holds no measurement: .*\n  remedy: no action is needed"):
        on.actions.profile("default", "measured")
