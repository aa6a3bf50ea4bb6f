"""Two executors on one database: a job belongs to the one that launched it, as its files do."""

from __future__ import annotations

import pytest

from penstock.api.service import Service
from penstock.core.lifecycle import Phase
from tests.support.executing import MOST_TURNS, World
from tests.support.fake_supervisors import RUNS_ON
from tests.support.service import Clock


@pytest.fixture
def here(service: Service, clock: Clock) -> World:
    return World(service, clock)


@pytest.fixture
def there(service: Service, clock: Clock) -> World:
    return World(service, clock, name="there")


def test_every_job_is_run_by_one(here: World, there: World) -> None:
    uids = [here.submit(f"job-{number}") for number in range(4)]
    for _ in range(2 * MOST_TURNS):
        here.turn()
        there.turn()
    jobs = [here.job(uid) for uid in uids]
    assert [(job.phase, job.attempt, job.failures) for job in jobs] == [(Phase.SUCCEEDED, 1, 0)] * 4
    for world, name in ((here, "here"), (there, "there")):
        assert world.supervisors.started == [(job.uid, 1) for job in jobs if job.executor == name]
        assert world.supervisors.started


def test_a_job_waits_for_its_own(here: World, there: World) -> None:
    """Suspended, resumed and deleted while the other executor alone looks."""
    here.supervisors.scripts = [RUNS_ON]
    uid = here.submit()
    here.until(uid, Phase.RUNNING)
    here.suspend(uid)
    there.turn()
    assert here.job(uid).phase is Phase.RUNNING
    here.until(uid, Phase.SUSPENDED)
    here.suspend(uid, suspend=False)
    there.turn()
    assert here.job(uid).phase is Phase.SUSPENDED
    here.delete(uid)
    there.turn()
    assert here.job(uid).deleted_at is None
    here.turn()
    assert here.job(uid).deleted_at is not None
    assert there.supervisors.started == []
