"""A killed service loses nothing that it acknowledged, counts nothing twice, and runs its own job to its end once."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.service_kills import measure

from tests.support.load import Load

LOAD = Load(num_jobs=100, num_reports=10, period_seconds=1.0)
NUM_KILLS = 3

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]


@pytest.mark.parametrize("kind", [pytest.param("sqlite", marks=pytest.mark.long), "postgresql"])
def test_what_was_acknowledged_is_kept_once_and_a_job_is_run_once(kind: str, measurements: Path) -> None:
    """Alone on SQLite; on PostgreSQL two services, killed in turn."""
    found = measure(kind, NUM_KILLS, LOAD, num_real=1, cache=measurements)
    assert found["kills"] == NUM_KILLS
    assert found["acknowledged"] == LOAD.num_jobs * LOAD.num_reports
    assert found["sent_again"] > 0, "no kill was felt"
    assert found["wrong"] == []
    assert (found["real"], found["succeeded"], found["once"]) == (1, 1, 1)
