"""A small job that trains on two real nodes, what becomes of nodes, and when the cluster can see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from penstock.kube.resources import NODES
from tests.support.cluster import Cluster
from tests.support.cluster_jobs import PINNED, ClusterJob, instant, small_training, submitted
from tests.support.installed import PAIR_NODES, SPARE_NODE, Installed, JobSpace, label_node

SAVED_STEPS, BEGUN_STEPS = 40, 45
"""A checkpoint, and how far a job is at least when something happens."""

SIBLING, LOST = PAIR_NODES


def trained(on: Installed, name: str, steps: int) -> ClusterJob:
    """A job that has saved something and goes on."""
    job = submitted(on, name, parallelism=PINNED, training=small_training(steps))
    job.wait_for_step(BEGUN_STEPS)
    return job


@contextmanager
def spare(on: JobSpace) -> Iterator[None]:
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


def delete_a_pod(on: Installed, job: ClusterJob) -> float:
    """Of its first attempt; when the apiserver was asked to."""
    name = job.pods(1)[0]["metadata"]["name"]
    on.kubectl("delete", "pod", name, "--wait=false")
    [found] = [each["metadata"] for each in job.pods(1) if each["metadata"]["name"] == name]
    return instant(found["deletionTimestamp"]) - float(found["deletionGracePeriodSeconds"])


def not_ready_since(cluster: Cluster, node: str) -> float:
    """When the apiserver was told that the node does not answer."""

    def lost() -> str:
        conditions = cluster.get(NODES, node)["status"]["conditions"]
        [ready] = [each for each in conditions if each["type"] == "Ready"]
        return "" if ready["status"] == "True" else str(ready["lastTransitionTime"])

    return instant(cluster.wait(lost, f"{node} is never missed"))
