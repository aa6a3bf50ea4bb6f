"""The load of `benchmarks/service_load.py` for ten seconds: nothing is lost, nothing doubled; how fast is not asked."""

from __future__ import annotations

import pytest
from benchmarks.service_load import measure

from tests.support.load import Load

LOAD = Load(num_reports=2)

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def test_what_was_acknowledged_is_kept_once(kind: str) -> None:
    """Two hundred requests a second, while job streams and list streams hear of them."""
    found = measure(kind, LOAD)
    assert (LOAD.seconds, found["requests"]) == (10, 2000)
    assert found["wrong"] == []
    assert found["job_delivery_seconds"]["num"] > 0
    assert found["list_delivery_seconds"]["num"] > 0
