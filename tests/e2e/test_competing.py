"""Jobs that want the same places at once, with no queue that would give them to one after the other."""

from __future__ import annotations

import pytest

from penstock.core.lifecycle import Phase
from tests.support.cluster import COLD_SECONDS
from tests.support.cluster_jobs import small_training, submitted
from tests.support.installed import Installed

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

NUM_JOBS = 4


@pytest.mark.long
def test_all_of_them_end(on: Installed) -> None:
    """Each fits alone. The scheduler places pod by pod, so that together they may hold a place each."""
    waits = {"training": small_training(2), "runPolicy": {"suspend": True}}
    jobs = [submitted(on, f"rival-{number}", **waits) for number in range(NUM_JOBS)]
    for job in jobs:
        job.wait_for(Phase.SUSPENDED)
    for job in jobs:
        job.suspend(False)
    assert [job.wait_for(Phase.SUCCEEDED).failures for job in jobs] == [0] * NUM_JOBS
