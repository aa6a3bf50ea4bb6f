"""What is lost comes back: pods, nodes, cables and ranks that hang, while a job trains on two real nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from deploy.lab import lab
from penstock.core.lifecycle import Phase
from penstock.core.status import ConditionType
from tests.support.cluster import COLD_SECONDS, Cluster
from tests.support.cluster_jobs import PINNED, ClusterJob, instant, paced, small_training, submitted
from tests.support.installed import PAIR_NODES, SPARE_NODE, Installed, label_node

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

SOON_SECONDS = 10.0
"""Within which another attempt is asked for, once it can be seen that one is needed."""

WHOLE_SECOND = 1.0
"""Times of the apiserver are cut to it."""

SAVED_STEPS, BEGUN_STEPS = 40, 45
"""A checkpoint, and how far a job is at least when something happens."""

MORE_STEPS = 30
LOST = PAIR_NODES[1]


def trained(on: Installed, name: str, steps: int) -> ClusterJob:
    """A job that has saved something and goes on."""
    job = submitted(on, name, parallelism=PINNED, training=small_training(steps))
    job.wait_for_step(BEGUN_STEPS)
    return job


def goes_on(job: ClusterJob, visible_at: float, undisturbed: list[float]) -> None:
    """The second attempt was asked for soon, begins at the newest checkpoint, and has the undisturbed losses."""
    asked_after = job.jobset_made_at(2) - visible_at
    assert asked_after <= SOON_SECONDS + WHOLE_SECOND, f"attempt 2 was asked for {asked_after} s later"
    attempt, step = job.checkpoints()[0]
    assert attempt == 1
    assert step >= SAVED_STEPS
    job.wait_for_step(step + MORE_STEPS, attempt=2)
    assert min(job.losses_of(2)) == step
    losses = job.losses()
    assert losses == undisturbed[: len(losses)]


@contextmanager
def spare(on: Installed) -> Iterator[None]:
    """A third node that jobs may use, and all nodes back at the end."""
    label_node(on.cluster, SPARE_NODE, True)
    try:
        yield
    finally:
        label_node(on.cluster, SPARE_NODE, False)
        nodes = {*PAIR_NODES, SPARE_NODE}
        on.cluster.wait(lambda: nodes <= on.cluster.ready(), "a node does not come back")


def not_ready_since(cluster: Cluster, node: str) -> float:
    """When the apiserver was told that the node does not answer."""

    def lost() -> str:
        conditions = cluster.get("node", node)["status"]["conditions"]
        [ready] = [each for each in conditions if each["type"] == "Ready"]
        return "" if ready["status"] == "True" else str(ready["lastTransitionTime"])

    return instant(cluster.wait(lost, f"{node} is never missed"))


def terminating(job: ClusterJob, node: str) -> list[str]:
    """Pods of the first attempt that are deleted and yet there, because nobody on the node hears of it."""
    pods = [each["metadata"] for each in job.pods(1) if each["spec"].get("nodeName") == node]
    return [each["name"] for each in pods if "deletionTimestamp" in each]


@pytest.fixture
def slow(on: Installed) -> Iterator[Installed]:
    with paced(on):
        yield on


def test_a_pod_is_deleted(slow: Installed, undisturbed: list[float]) -> None:
    job = trained(slow, "pod-deleted", steps=400)
    name = job.pods(1)[0]["metadata"]["name"]
    slow.kubectl("delete", "pod", name, "--wait=false")
    [found] = [each["metadata"] for each in job.pods(1) if each["metadata"]["name"] == name]
    visible_at = instant(found["deletionTimestamp"]) - found["deletionGracePeriodSeconds"]
    goes_on(job, visible_at, undisturbed)
    job.wait_for(Phase.SUCCEEDED)
    assert job.losses() == undisturbed[:400]
    assert "Disrupted" in [reason for reason, _ in job.events()]
    assert job.status().failures == 0


def test_a_node_is_lost(slow: Installed, undisturbed: list[float]) -> None:
    """Its kubelet and its container runtime end, and nobody there hears of anything any more."""
    job = trained(slow, "node-lost", steps=1000)
    with spare(slow):
        lab.kill(slow.lab, LOST)
        try:
            visible_at = not_ready_since(slow.cluster, LOST)
            goes_on(job, visible_at, undisturbed)
            assert terminating(job, LOST)
        finally:
            lab.bring_back(slow.lab, LOST)


def test_a_cable_is_pulled(slow: Installed, undisturbed: list[float]) -> None:
    """What was cut off comes back later, and changes nothing."""
    job = trained(slow, "cut-off", steps=1000)
    with spare(slow):
        lab.set_link(slow.lab, LOST, "down")
        try:
            visible_at = not_ready_since(slow.cluster, LOST)
            assert job.ranks(1), "nothing is left that could come back"
            goes_on(job, visible_at, undisturbed)
            assert terminating(job, LOST)
        finally:
            lab.set_link(slow.lab, LOST, "up")
        job.wait(lambda: not job.pods(1), "the pod that was cut off stays")
        job.wait_for_step(max(job.losses_of(2)) + MORE_STEPS, attempt=2)
        job.verify_checkpoints()
        assert job.checkpoints()[0][0] == 2
        losses = job.losses()
        assert losses == undisturbed[: len(losses)]
        assert job.status().attempt == 2


def test_a_rank_hangs(slow: Installed, undisturbed: list[float]) -> None:
    """It is stopped, so that it neither ends nor answers. Nothing else shows but that no step is taken."""
    job = trained(slow, "hung", steps=400)
    job.stop_rank(1)
    status = job.wait_for(Phase.QUEUED, Phase.PLANNING, Phase.BINDING, Phase.RUNNING, attempt=2)
    assert any("no step within 60 s" in message for _, message in job.events())
    stalled = status.condition(ConditionType.STALLED)
    assert stalled is not None
    assert status.failures == 1
    assert status.failed_at is not None
    goes_on(job, status.failed_at, undisturbed)
