"""What several services of these tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache: how fast the machine is takes half a minute to find out, and is asked once where it is not the point."""
    return tmp_path_factory.mktemp("measurements")
