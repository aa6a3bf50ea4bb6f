"""What is lost comes back: pods, nodes, cables and ranks that hang, while a job trains on two real nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from deploy.lab import lab
from penstock.api.client import Place
from penstock.core.lifecycle import Phase
from penstock.core.status import ConditionType
from penstock.kube.quantities import amount
from tests.support.cluster import COLD_SECONDS, Cluster
from tests.support.cluster_jobs import PINNED, ClusterJob, instant, paced, small_training, submitted
from tests.support.installed import PAIR_NODES, SPARE_NODE, Installed, label_node, operated_by
from tests.support.story import Story

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

SOON_SECONDS = 10.0
"""Within which another attempt is asked for, once it can be seen that one is needed."""

WHOLE_SECOND = 1.0
"""Times of the apiserver are cut to it."""

SAVED_STEPS, BEGUN_STEPS = 40, 45
"""A checkpoint, and how far a job is at least when something happens."""

MORE_STEPS = 30
DELETED_STEPS = 200
ENDLESS = 100_000
LONELY: dict[str, Any] = {
    "parallelism": {"pp": 1, "microBatch": 1, "slices": 1, "schedule": "1f1b"},
    "resources": {"ranks": 1, "memoryPerRank": "2Gi"},
    "checkpoint": {"everySteps": 40, "keep": 3},
}
"""Nothing slows down one rank alone."""

BESIDE, LOST = PAIR_NODES


def trained(on: Installed, name: str, steps: int) -> ClusterJob:
    """A job that has saved something and goes on."""
    job = submitted(on, name, parallelism=PINNED, training=small_training(steps))
    job.wait_for_step(BEGUN_STEPS)
    return job


def asked_for_soon(job: ClusterJob, visible_at: float) -> None:
    asked_after = job.jobset_made_at(2) - visible_at
    assert asked_after <= SOON_SECONDS + WHOLE_SECOND, f"attempt 2 was asked for {asked_after} s later"


def goes_on(job: ClusterJob, visible_at: float, undisturbed: list[float]) -> None:
    """The second attempt was asked for soon, begins at the newest checkpoint, and has the undisturbed losses."""
    asked_for_soon(job, visible_at)
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


@contextmanager
def only(on: Installed, node: str) -> Iterator[None]:
    """Jobs that begin in the block are put on that one of the pair."""
    others = [each for each in PAIR_NODES if each != node]
    for other in others:
        label_node(on.cluster, other, False)
    try:
        yield
    finally:
        for other in others:
            label_node(on.cluster, other, True)


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


@pytest.fixture(scope="module")
def measured_beside(penstock_there: Installed, first: Story) -> None:
    """The pair that is left when a node is lost is known, or each such test would measure it by slow cards."""
    with only(penstock_there, BESIDE), spare(penstock_there):
        job = submitted(penstock_there, "beside", parallelism=PINNED, training=small_training(2))
        job.wait_for(Phase.SUCCEEDED)
        job.wait(job.has_left, "its pods hold their places")


@pytest.fixture
def slow(on: Installed) -> Iterator[Installed]:
    with paced(on):
        yield on


def test_a_pod_is_deleted(slow: Installed, undisturbed: list[float]) -> None:
    job = trained(slow, "pod-deleted", steps=DELETED_STEPS)
    name = job.pods(1)[0]["metadata"]["name"]
    slow.kubectl("delete", "pod", name, "--wait=false")
    [found] = [each["metadata"] for each in job.pods(1) if each["metadata"]["name"] == name]
    visible_at = instant(found["deletionTimestamp"]) - found["deletionGracePeriodSeconds"]
    goes_on(job, visible_at, undisturbed)
    job.wait_for(Phase.SUCCEEDED)
    assert job.losses() == undisturbed[:DELETED_STEPS]
    assert "Disrupted" in [reason for reason, _ in job.events()]
    assert job.status().failures == 0


def test_a_node_is_lost(measured_beside: None, slow: Installed, undisturbed: list[float]) -> None:
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


def test_a_cable_is_pulled(measured_beside: None, slow: Installed, undisturbed: list[float]) -> None:
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


def test_what_is_cut_off_and_writes_on_harms_nothing(on: Installed) -> None:
    """A rank that needs nobody does not notice. For a while it is there twice, and both do the same."""
    with only(on, LOST):
        job = submitted(on, "twice", training=small_training(ENDLESS), **LONELY)
        job.wait_for_step(BEGUN_STEPS)
    lab.set_link(on.lab, LOST, "down")
    try:
        asked_for_soon(job, not_ready_since(on.cluster, LOST))
        job.wait(lambda: job.losses_of(2), "attempt 2 takes no step")
        written, begun = max(job.losses_of(1)), min(job.losses_of(2))
        job.wait(lambda: max(job.losses_of(1)) > written + MORE_STEPS, "what is cut off does not write on")
        job.wait_for_step(begun + MORE_STEPS, attempt=2)
        job.wait(
            lambda: any(attempt == 1 and step > begun for attempt, step in job.checkpoints()),
            "what is cut off leaves no checkpoint beside those that follow it",
        )
    finally:
        lab.set_link(on.lab, LOST, "up")
    job.wait(lambda: not job.pods(1), "the pod that was cut off stays")
    job.suspend(True)
    status = job.wait_for(Phase.SUSPENDED)
    assert (status.attempt, status.failures) == (2, 0)
    assert status.progress is not None
    assert status.progress.attempt == 2
    job.verify_checkpoints()
    first, second = job.losses_of(1), job.losses_of(2)
    assert sorted(second) == list(range(begun, begun + len(second)))
    both = sorted(first.keys() & second.keys())
    assert len(both) > MORE_STEPS
    assert [first[step] for step in both] == [second[step] for step in both]
    with on.client as client:
        series = client.metrics(Place(name=job.name, namespace=on.namespace))
    loss = next(each for each in series if each.name == "loss")
    assert {point.attempt for point in loss.points if point.step >= begun} == {2}


def most_of_a_node(cluster: Cluster) -> str:
    """So much memory that no node has room for two."""
    allocatable = cluster.get("node", LOST)["status"]["allocatable"]["memory"]
    return f"{int(amount(allocatable)) * 6 // 10 // 2**20}Mi"


def test_an_elastic_job_goes_on_with_the_nodes_left_and_grows_back(slow: Installed, undisturbed: list[float]) -> None:
    """By an operator whose minutes are seconds."""
    resources = {"ranks": 2, "minRanks": 1, "memoryPerRank": most_of_a_node(slow.cluster)}
    with operated_by(slow, "tests.support.hurried_operator"):
        job = submitted(slow, "elastic", resources=resources, training=small_training(ENDLESS))
        job.wait_for_step(BEGUN_STEPS)
        lab.kill(slow.lab, LOST)
        try:
            shrunken = job.wait_for(Phase.RUNNING, attempt=3)
            assert (shrunken.ranks, shrunken.failures) == (1, 0)
            job.wait(lambda: job.losses_of(3), "attempt 3 takes no step")
            begun = min(job.losses_of(3))
            assert begun == max(step for attempt, step in job.checkpoints() if attempt < 3) >= SAVED_STEPS
            job.wait_for_step(begun + MORE_STEPS, attempt=3)
            again = [job.losses_of(3)[step] for step in range(begun, begun + MORE_STEPS)]
            assert again == pytest.approx(undisturbed[begun : begun + MORE_STEPS], rel=1e-3)
        finally:
            lab.bring_back(slow.lab, LOST)
        grown = job.wait_for(Phase.RUNNING, attempt=4)
        assert (grown.ranks, grown.failures) == (2, 0)
        stopped = max(job.losses_of(3)) + 1
        job.wait_for_step(stopped + MORE_STEPS, attempt=4)
        assert min(job.losses_of(4)) == stopped
        assert [reason for reason, _ in job.events()].count("Shrink") == 1
