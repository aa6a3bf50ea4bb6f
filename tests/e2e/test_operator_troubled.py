"""Whatever becomes of the operator's writes, a job comes to the same end, and no child of it is made twice.

Pods are real and train nothing, so that a life of three attempts takes seconds. `./dev bench operator_kills` lives one
for every write.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import COLD_SECONDS
from tests.support.installed import Installed
from tests.support.story import Story
from tests.support.troubled_operator import CONFLICT, FAILURE, KILL, Trouble
from tests.support.troubles import Sieve, sieve

pytestmark = [pytest.mark.xdist_group("cluster"), pytest.mark.timeout(COLD_SECONDS)]

LEAST_WRITES = 25


@pytest.fixture(scope="module")
def there(penstock_there: Installed, first: Story, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sieve]:
    with sieve(penstock_there, first.job, tmp_path_factory.mktemp("sieve")) as found:
        yield found


@pytest.mark.long
def test_it_is_killed_after_every_write(there: Sieve) -> None:
    life = there.live("killed", Trouble(kinds=(KILL,)))
    life.verify("killed")
    assert life.killed == len(life.writes) >= LEAST_WRITES


@pytest.mark.long
def test_every_write_fails_made_or_not_and_what_is_watched_is_stale(there: Sieve) -> None:
    life = there.live("refused", Trouble(kinds=(CONFLICT, FAILURE), late_seconds=0.3, expire_after=7))
    life.verify("refused")
    assert len(life.writes) >= LEAST_WRITES
    assert life.killed == 0
