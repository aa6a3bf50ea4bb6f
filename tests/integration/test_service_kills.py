"""A killed service loses nothing that it acknowledged, and counts nothing twice: alone, or with another beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import postgres
from tests.support.load import Load, Target, prepare
from tests.support.load_kills import kill_under
from tests.support.load_service import lone_services

LOAD = Load(num_jobs=100, num_reports=10, period_seconds=1.0)
NUM_KILLS = 3

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    """A database that syncs its commits, with jobs."""
    if request.param == "sqlite":
        yield prepare(LOAD, tmp_path)
        return
    with postgres.server(durable=True) as server, postgres.database(server) as url:
        yield prepare(LOAD, tmp_path, url)


def test_what_was_acknowledged_is_kept_once(target: Target) -> None:
    with lone_services(target, 1 if target.database.startswith("sqlite") else 2) as services:
        survived = kill_under(LOAD, target, services, NUM_KILLS, seed=1)
    assert survived.num_kills == NUM_KILLS
    assert len(survived.sending.sent) == LOAD.num_jobs * LOAD.num_reports
    assert max(each.tries for each in survived.sending.sent) > 1, "no kill was felt"
    assert survived.kept.missing(LOAD) == []
