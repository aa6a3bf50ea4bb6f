"""What is wrong with a job or a cluster is told in the job's conditions, and the job goes on once it is mended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.core.lifecycle import Phase
from penstock.core.status import ConditionStatus, ConditionType
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import small_training, submitted
from tests.support.installed import OUT, TEXT, Installed
from tests.support.repository import ROOT

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

NOBODY_ELSE_S = {"ranks": 2, "memoryPerRank": "1Gi"}
"""Other resources, so that what others measured does not count."""


def volumes(claim: str) -> dict[str, Any]:
    """With that claim for the output."""
    return {"volumes": {OUT: {"claim": claim}, f"data/{TEXT}": {"claim": TEXT}}}


GUIDE = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()


def explained(words: str) -> bool:
    """Whether the guide's table says what to do about it."""
    rows = [line for line in GUIDE.splitlines() if line.startswith("|") and line.count("|") == 4]
    return any(words in row.split("|")[1] for row in rows)


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A job with these changes waits, and ``says`` why; the guide has a row with the words of ``row``."""

    name: str
    says: tuple[str, ...]
    row: str
    changes: Mapping[str, Any] = field(default_factory=dict)


WAITS = (
    Wait(
        name="no-image",
        says=("Image", "lab.penstock.dev/nothing:1"),
        row="ErrImagePull",
        changes={"image": "lab.penstock.dev/nothing:1"},
    ),
    Wait(
        name="no-node",
        says=("Unschedulable", "node affinity/selector"),
        row="Unschedulable",
        changes={"nodeSelector": {"no": "such"}},
    ),
    Wait(
        name="no-claim",
        says=("Unschedulable", 'persistentvolumeclaim "nowhere" not found'),
        row='persistentvolumeclaim "x" not found',
        changes=volumes("nowhere"),
    ),
    Wait(
        name="no-queue",
        says=("queue nobody-s has not admitted it yet", "Kueue"),
        row="queue x has not admitted it yet",
        changes={"queueName": "nobody-s"},
    ),
)


@pytest.mark.parametrize("wait", WAITS, ids=lambda wait: wait.name)
def test_a_job_that_waits_says_for_what(on: Installed, wait: Wait) -> None:
    job = submitted(on, wait.name, kubernetes=wait.changes)
    message = job.wait_for_condition(ConditionType.ADMITTED, wait.says[0])
    assert explained(wait.row)
    assert all(word in message for word in wait.says)
    status = job.status()
    assert (status.phase, status.attempt, status.failures) == (Phase.QUEUED, 1, 0)
    assert wait.says[0] in status.message


def test_a_device_that_no_node_has(on: Installed) -> None:
    resources = {"device": "cuda", "ranks": 2, "memoryPerRank": "2Gi"}
    job = submitted(on, "no-device", resources=resources, kubernetes={"acceleratorResource": "example.com/turbine"})
    message = job.wait_for_condition(ConditionType.ADMITTED, "Insufficient example.com/turbine")
    assert "Unschedulable" in message
    assert explained("Insufficient nvidia.com/gpu")


def test_storage_that_one_node_alone_may_write(on: Installed) -> None:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "for-one"}}
    on.cluster.create(on.namespace, {**claim, "spec": {**spec, "storageClassName": "lab-local"}})
    job = submitted(on, "not-shared", kubernetes=volumes("for-one"))
    status = on.cluster.wait(lambda: (found := job.status()).phase is Phase.FAILED and found, "it does not fail")
    failed = status.condition(ConditionType.FAILED)
    assert (failed.status, failed.reason) == (ConditionStatus.TRUE, "UserError")
    assert "offers ReadWriteOnce, and 2 pods have to write there" in failed.message
    assert "name a claim with access mode ReadWriteMany" in failed.message
    assert not job.jobsets()
    assert explained("`spec.kubernetes.volumes.out`")


def test_data_that_is_not_there(on: Installed) -> None:
    """A mistake of the user's, which no second attempt could mend."""
    data = {"source": f"data://{TEXT}/nothing", "tokenizer": {"train": "bytes"}, "sequenceLength": 128}
    job = submitted(on, "no-data", data=data)
    status = on.cluster.wait(lambda: (found := job.status()).phase is Phase.FAILED and found, "it does not fail")
    assert (status.reason, status.attempt) == ("UserError", 1)
    assert "nothing" in status.condition(ConditionType.FAILED).message


def test_memory_that_measuring_exceeds(on: Installed) -> None:
    resources = {"ranks": 2, "memoryPerRank": "32Mi"}
    job = submitted(on, "small", resources=resources, runPolicy={"backoffLimit": 0})
    status = on.cluster.wait(lambda: (found := job.status()).phase is Phase.FAILED and found, "it does not fail")
    assert status.reason == "BackoffLimitExceeded"
    message = status.condition(ConditionType.FAILED).message
    assert "resources.memoryPerRank" in message or "killed" in message or "exit code -9" in message
    assert explained("while measuring")


def test_what_was_measured_waits_for_the_service_and_is_made_again(on: Installed) -> None:
    """The service is away while ranks measure; later the attempt's ConfigMap, and that of the measurement, go."""
    one = submitted(on, "unheard", resources=NOBODY_ELSE_S, training=small_training(2))
    one.wait_for(Phase.PROFILING)
    on.service.kill()
    try:
        message = one.wait_for_condition(ConditionType.PROFILED, "service")
        profiled = one.status().condition(ConditionType.PROFILED)
        assert profiled is not None
        assert (profiled.status, profiled.reason) == (ConditionStatus.FALSE, "ServiceUnavailable")
        assert "start it, or wait" in message
        assert explained("ServiceUnavailable")
        on.kubectl("delete", "configmap", "unheard-a1")
    finally:
        on.service.start()
    status = one.wait_for(Phase.SUCCEEDED)
    assert (status.attempt, status.failures) == (1, 0)
    assert status.profile is not None

    on.kubectl("delete", "configmap", status.profile.ref)
    other = submitted(on, "unmeasured", resources=NOBODY_ELSE_S, training=small_training(2))
    ended = other.wait_for(Phase.SUCCEEDED)
    assert any("with what was measured is gone" in message for _, message in other.events())
    assert (ended.attempt, ended.failures) == (2, 1)
    assert explained("with what was measured is gone")
