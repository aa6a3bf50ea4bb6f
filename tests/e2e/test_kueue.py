"""Jobs that wait in a real Kueue's queue: for all of their quota or none, and behind those that are more important."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.core.lifecycle import Phase
from penstock.core.status import ConditionStatus, ConditionType
from penstock.kube.names import PRIORITY_LABEL
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import PINNED, ClusterJob, paced, small_training, submitted
from tests.support.installed import Installed
from tests.support.kueue import HIGH, LOW, QUEUE, kueue

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS), pytest.mark.long]

STEPS, STEPS_BEFORE = 80, 20


@pytest.fixture(scope="module")
def with_queue(penstock_there: Installed) -> Iterator[None]:
    with kueue(penstock_there.cluster, penstock_there.namespace):
        yield


@pytest.fixture
def queued(with_queue: None, on: Installed) -> Installed:
    """Where jobs are removed before the queue is."""
    return on


def submitted_to(on: Installed, queue: str, name: str, priority: str, steps: int) -> ClusterJob:
    changes: dict[str, Any] = {"parallelism": PINNED, "training": small_training(steps)}
    labels = {PRIORITY_LABEL: priority}
    return submitted(on, name, labels=labels, kubernetes={"queueName": queue}, **changes)


def waits_for_quota(job: ClusterJob) -> bool:
    """Whether none of its pods is there, and people are told why."""
    status = job.status()
    admitted = status.condition(ConditionType.ADMITTED)
    assert not job.pods()
    told = f"queue {QUEUE} has not admitted the job yet" in status.message and status.phase is Phase.QUEUED
    return told and admitted is not None and (admitted.status, admitted.reason) == (ConditionStatus.FALSE, "Waiting")


def test_jobs_wait_for_quota_are_preempted_and_come_back(queued: Installed, undisturbed: list[float]) -> None:
    with paced(queued):
        low = submitted_to(queued, QUEUE, "low", LOW, STEPS)
        low.wait_for_step(STEPS_BEFORE)
        other = submitted_to(queued, QUEUE, "other", LOW, 2)
        queued.cluster.wait(lambda: waits_for_quota(other), "it does not wait for quota")
        assert low.status().attempt == 1

        urgent = submitted_to(queued, QUEUE, "urgent", HIGH, 2)
        low.wait_for(Phase.QUEUED, attempt=2)
        attempt, step = low.checkpoints()[0]
        assert (attempt, step) == (1, max(low.losses_of(1)) + 1)
        assert step > STEPS_BEFORE
        assert urgent.wait_for(Phase.SUCCEEDED).attempt == 1
    assert other.wait_for(Phase.SUCCEEDED).attempt == 1

    ended = low.wait_for(Phase.SUCCEEDED)
    assert (ended.attempt, ended.failures) == (2, 0)
    assert min(low.losses_of(2)) == step
    assert low.losses() == undisturbed[:STEPS]
    said = [message for reason, message in low.events() if reason == "Disrupted"]
    assert len(said) == 1
    assert "was preempted" in said[0]


def test_a_queue_that_is_not_there(queued: Installed) -> None:
    job = submitted_to(queued, "nowhere", "lost", LOW, 2)
    said = job.wait_for_condition(ConditionType.ADMITTED, "queue nowhere has not admitted the job yet")
    assert "check that Kueue runs" in said
    assert not job.pods()
