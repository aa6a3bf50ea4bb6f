"""The operator is killed at random while a job trains, service and apiserver once: the end is the same."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from penstock.client import Place
from penstock.core.lifecycle import Phase
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import PINNED, ClusterJob, paced, small_training, submitted
from tests.support.installed import Installed
from tools.lab import lab

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

SEED, KILLS = 5, 3
MOST_SECONDS = 8.0
"""Between two kills; the job's life before its first step is some such times long."""

STEPS, BEGUN_STEPS = 300, 30


@pytest.fixture
def repaired(on: Installed) -> Iterator[Installed]:
    """Whatever fails, tests that follow have a service and an operator."""
    yield on
    for program in (on.service, on.operator):
        if program.process is None:
            program.start()


def children(job: ClusterJob) -> tuple[list[str], list[str]]:
    """Names of JobSets and of attempts' ConfigMaps."""
    return [each["metadata"]["name"] for each in job.jobsets()], job.config_maps()


def test_the_end_is_the_same(repaired: Installed, undisturbed: list[float]) -> None:
    on, dice = repaired, random.Random(SEED)
    with paced(on):
        job = submitted(on, "orphan", parallelism=PINNED, training=small_training(STEPS))
        for number in range(KILLS):
            time.sleep(dice.uniform(0.0, MOST_SECONDS))
            on.operator.kill()
            if number == KILLS // 2:
                on.service.kill()
                on.service.start()
            on.operator.start()
            assert len(job.jobsets()) <= 1
        job.wait_for_step(BEGUN_STEPS)
        lab.restart_apiserver(on.lab)
    status = job.wait_for(Phase.SUCCEEDED)
    assert (status.attempt, status.failures) == (1, 0)
    assert children(job) == (["orphan-a1"], ["orphan-a1"])
    assert job.losses() == undisturbed[:STEPS]
    with on.client as client:
        place = Place(name=job.name, namespace=on.namespace)
        on.cluster.wait(lambda: client.get(place).status.phase is Phase.SUCCEEDED, "the service did not catch up")
        loss = next(each for each in client.metrics(place) if each.name == "loss")
        assert [point.last for point in loss.points] == undisturbed[:STEPS]


@pytest.mark.long
def test_an_attempt_is_followed_by_one_other(repaired: Installed, undisturbed: list[float]) -> None:
    """The operator is dead while a pod is deleted, and killed again as it sees to that, and the service is away."""
    on = repaired
    with paced(on):
        job = submitted(on, "unseen", parallelism=PINNED, training=small_training(STEPS))
        job.wait_for_step(BEGUN_STEPS)
        on.service.kill()
        on.operator.kill()
        on.kubectl("delete", "pod", job.pods(1)[0]["metadata"]["name"], "--wait=false")
        on.operator.start()
        job.wait_for(Phase.RECOVERING, Phase.QUEUED, Phase.PLANNING, Phase.BINDING, attempt=1)
        on.operator.kill()
        on.operator.start()
        job.wait_for(Phase.RUNNING, attempt=2)
    on.service.start()
    assert job.wait_for(Phase.SUCCEEDED).attempt == 2
    assert children(job) == (["unseen-a2"], ["unseen-a2"])
    assert job.losses() == undisturbed[:STEPS]
