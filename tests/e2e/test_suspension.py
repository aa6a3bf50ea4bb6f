"""A job that is suspended again and again loses nothing, and holds nothing meanwhile."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import Phase
from penstock.core.status import ConditionStatus, ConditionType
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import PINNED, ClusterJob, paced, small_training, submitted
from tests.support.installed import Installed

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

TIMES = 3
"""`./dev bench cluster_training` does it ten times."""

STEPS, STEPS_BETWEEN = 160, 25


def suspended(job: ClusterJob) -> int:
    """The step that a job was suspended at: it has left a checkpoint there, and no pods."""
    job.suspend(True)
    status = job.wait_for(Phase.SUSPENDED)
    job.on.cluster.wait(lambda: not job.pods(), f"{job.name} is suspended and has pods")
    condition = status.condition(ConditionType.SUSPENDED)
    assert condition is not None
    assert condition.status is ConditionStatus.TRUE
    assert not job.jobsets()
    attempt, step = job.checkpoints()[0]
    assert (attempt, step) == (status.attempt, max(job.losses_of(status.attempt)) + 1)
    return step


def test_losses_are_the_undisturbed_ones(on: Installed, undisturbed: list[float]) -> None:
    with paced(on):
        job = submitted(on, "suspended", parallelism=PINNED, training=small_training(STEPS))
        begun = 0
        for attempt in range(1, TIMES + 1):
            job.wait_for_step(begun + STEPS_BETWEEN, attempt)
            assert min(job.losses_of(attempt)) == begun
            begun = suspended(job)
            job.suspend(False)
        job.wait_for_step(begun, TIMES + 1)
    status = job.wait_for(Phase.SUCCEEDED)
    assert (status.attempt, status.failures) == (TIMES + 1, 0)
    assert min(job.losses_of(TIMES + 1)) == begun
    assert job.losses() == undisturbed[:STEPS]
    assert [reason for reason, _ in job.events()].count("Suspended") == TIMES


@pytest.mark.long
def test_a_job_that_is_submitted_suspended_waits(on: Installed) -> None:
    job = submitted(on, "not-yet", training=small_training(2), runPolicy={"suspend": True})
    job.wait_for(Phase.SUSPENDED)
    assert not job.jobsets()
    job.suspend(False)
    assert job.wait_for(Phase.SUCCEEDED).attempt == 1


def test_a_job_that_is_deleted_as_it_starts_soon_holds_nothing(on: Installed) -> None:
    """What its pods run cannot listen yet, and is not waited for as long as one that saves what it has."""
    job = submitted(on, "undone", training=small_training(2))
    on.cluster.wait(job.pods, "it has no pods")
    grace = min(each["spec"]["terminationGracePeriodSeconds"] for each in job.pods())
    on.kubectl("delete", "pj", job.name)
    on.cluster.wait(lambda: not job.pods(), "its pods stay for all of their grace", 0.75 * grace)
