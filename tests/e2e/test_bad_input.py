"""What is wrong with a job or a cluster is told in the job's conditions, and the job goes on once it is fixed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase
from penstock.core.status import ConditionStatus, ConditionType, JobStatus
from penstock.kube.connecting import connect
from penstock.kube.resources import Resource
from penstock.kube.transport import KubeError
from penstock.operator.actions import Actions
from penstock.operator.cache import CLOCK_SLACK_SECONDS, Cache
from penstock.operator.kube import KINDS, HttpKube
from penstock.operator.settings import Settings
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import small_spec, small_training, submitted
from tests.support.installed import MISSING_IMAGE, OUT, TEXT, Installed

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

NOBODY_ELSE_S = {"ranks": 2, "memoryPerRank": "1Gi"}
"""Other resources, so that what others measured does not count."""


def volumes(claim: str) -> dict[str, Any]:
    """With that claim for the output."""
    return {"volumes": {OUT: {"claim": claim}, f"data/{TEXT}": {"claim": TEXT}}}


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A job with these changes waits, and ``says`` why, and what to do."""

    name: str
    says: tuple[str, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)


ON_CUDA = {"device": "cuda", "ranks": 2, "memoryPerRank": "2Gi"}
WAITS = (
    Wait(
        name="no-image",
        says=("Image", MISSING_IMAGE, "push the image"),
        changes={"kubernetes": {"image": MISSING_IMAGE}},
    ),
    Wait(
        name="no-node",
        says=("Unschedulable", "node affinity/selector", "add nodes"),
        changes={"kubernetes": {"nodeSelector": {"no": "such"}}},
    ),
    Wait(
        name="no-device",
        says=("Unschedulable", "Insufficient example.com/turbine", "add nodes"),
        changes={"resources": ON_CUDA, "kubernetes": {"acceleratorResource": "example.com/turbine"}},
    ),
    Wait(
        name="no-claim",
        says=("Unschedulable", 'persistentvolumeclaim "nowhere" not found', "make the claim"),
        changes={"kubernetes": volumes("nowhere")},
    ),
    Wait(
        name="no-queue",
        says=("queue nobody-s has not admitted the job yet", "Kueue"),
        changes={"kubernetes": {"queueName": "nobody-s"}},
    ),
)


def test_a_job_that_waits_says_for_what_and_what_to_do(on: Installed) -> None:
    """All of them at once."""
    jobs = [(wait, submitted(on, wait.name, **wait.changes)) for wait in WAITS]
    for wait, job in jobs:
        message = job.wait_for_condition(ConditionType.ADMITTED, wait.says[0])
        assert [word for word in wait.says if word not in message] == []
        status = job.status()
        assert (status.phase, status.attempt, status.failures) == (Phase.QUEUED, 1, 0)
        assert wait.says[0] in status.message


@contextmanager
def launching(on: Installed, name: str, clock: Callable[[], float]) -> Iterator[tuple[Cache, Callable[[], None]]]:
    """What an operator with that clock knows, and its launch of a job that nobody else has heard of."""
    metadata = {"name": name, "namespace": on.namespace, "uid": "11111111-2222-3333-4444-555555555555"}
    manifest = {"apiVersion": "penstock.dev/v1alpha1", "kind": "PipelineJob", "metadata": metadata}
    spec = small_spec(on.cluster.image, kubernetes={"nodeSelector": {"no": "such"}})
    job = PipelineJob.from_manifest({**manifest, "spec": spec})
    client, cache = connect(1), Cache(clock)
    actions = Actions(HttpKube(client), cache, Settings(image=on.cluster.image), clock)
    yield cache, lambda: actions.launch(job, JobStatus(attempt=1, ranks=2))
    client.rest_client.pool_manager.clear()


def test_a_cluster_without_job_sets(on: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has them in another version says the same."""
    monkeypatch.setenv("KUBECONFIG", str(on.cluster.kubeconfig))
    monkeypatch.setitem(KINDS, "JobSet", Resource(api_version="jobset.x-k8s.io/v0", plural="jobsets"))
    told = pytest.raises(KubeError, match=r"^JobSetMissing: .*install JobSet")
    with launching(on, "no-jobsets", time.time) as (_, launch), told:
        launch()


@pytest.mark.parametrize("ahead", [3_600.0, -3_600.0])
def test_a_clock_that_is_off_is_seen_by_what_the_cluster_dates(
    on: Installed, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    """What it makes belongs to no job that there is, so the cluster removes it."""
    monkeypatch.setenv("KUBECONFIG", str(on.cluster.kubeconfig))
    with launching(on, f"off-{'ahead' if ahead > 0 else 'behind'}", lambda: time.time() + ahead) as (cache, launch):
        launch()
        assert abs(cache.ahead_seconds - ahead) < CLOCK_SLACK_SECONDS


def test_storage_that_one_node_alone_may_write(on: Installed) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "for-one"}}
    on.cluster.create(on.namespace, {**claim, "spec": {**spec, "storageClassName": "lab-local"}})
    job = submitted(on, "not-shared", kubernetes=volumes("for-one"))
    status = on.cluster.wait(lambda: (found := job.status()).phase is Phase.FAILED and found, "it does not fail")
    failed = status.condition(ConditionType.FAILED)
    assert (failed.status, failed.reason) == (ConditionStatus.TRUE, "UserError")
    assert "offers ReadWriteOnce, but 2 pods have to write there" in failed.message
    assert "name a claim with access mode ReadWriteMany" in failed.message
    assert not job.jobsets()


def test_data_that_is_not_there(on: Installed) -> None:
    """A mistake of the user's, which no second attempt could fix."""
    data = {"source": f"data://{TEXT}/nothing", "tokenizer": {"train": "bytes"}, "sequenceLength": 128}
    job = submitted(on, "no-data", data=data)
    status = on.cluster.wait(lambda: (found := job.status()).phase is Phase.FAILED and found, "it does not fail")
    assert (status.reason, status.attempt) == ("UserError", 1)
    failed = status.condition(ConditionType.FAILED)
    assert failed is not None
    assert "nothing" in failed.message


def test_memory_that_measuring_exceeds(on: Installed) -> None:
    resources = {"ranks": 2, "memoryPerRank": "32Mi"}
    model = {"family": "llama", "layers": 2, "hidden": 2048, "heads": 16, "kvHeads": 16}
    job = submitted(on, "large", model=model, resources=resources, runPolicy={"backoffLimit": 0})
    status = on.cluster.wait(lambda: (found := job.status()).phase is Phase.FAILED and found, "it does not fail")
    assert (status.reason, status.attempt) == ("UserError", 1)
    message = status.condition(ConditionType.FAILED).message
    assert "measuring one unit of this model needs" in message
    assert "spec.resources.memoryPerRank" in message


def measures(status: JobStatus) -> bool:
    """Whether a point was measured, for which all pods have begun."""
    profiled = status.condition(ConditionType.PROFILED)
    return status.profile is not None or (profiled is not None and "has measured" in profiled.message)


@pytest.mark.long
def test_what_was_measured_needs_no_service_and_is_made_again(on: Installed) -> None:
    """The service is away while ranks measure; the attempt's ConfigMap goes, and later that of the measurement."""
    one = submitted(on, "unheard", resources=NOBODY_ELSE_S, training=small_training(2))
    one.wait_for(Phase.PROFILING)
    on.service.end(signal.SIGTERM)
    try:
        assert "unheard-a1-ranks-0-" in one.wait_for_condition(ConditionType.PROFILED, "pod ")
        on.cluster.wait(lambda: measures(one.status()), "it never measures; before that, pods need their ConfigMap")
        on.kubectl("delete", "configmap", "unheard-a1")
        one.wait_for(Phase.RUNNING, Phase.SUCCEEDED)
    finally:
        on.service.start()
    status = one.wait_for(Phase.SUCCEEDED)
    assert (status.attempt, status.failures) == (1, 0)
    assert status.profile is not None
    assert status.profile.ref == "unheard-profile-a1"

    on.kubectl("delete", "configmap", status.profile.ref)
    on.cluster.wait(one.has_left, "its pods hold their places, and others would come to other nodes")
    other = submitted(on, "unmeasured", resources=NOBODY_ELSE_S, training=small_training(2))
    assert "measures again" in other.wait_for_condition(ConditionType.PROFILED, "and with it the measurement")
    status = other.wait_for(Phase.SUCCEEDED)
    assert (status.attempt, status.failures) == (1, 0)
