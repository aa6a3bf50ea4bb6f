"""The one cluster that all tests of this folder share.

Mark tests that use it ``xdist_group("cluster")``, so that one process runs them, and ``timeout(COLD_SECONDS)``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cluster import Cluster, shared


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with shared() as found:
        yield found


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A new one without restrictions."""
    with cluster.namespace() as name:
        yield name
