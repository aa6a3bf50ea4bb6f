"""A minute of `./dev soak fuzz` with a fixed seed: requests, ConfigMaps and files made wrong, under a memory limit."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.soak.cases import KINDS, case
from benchmarks.soak.fuzz import fuzz_rest, read

SEED = 1
NUM_REQUESTS = 1500
NUM_INPUTS = 100
FEWER_INPUTS = {"job file": 20, "service: plan ConfigMap": 30, "service: PipelineJob": 30}
"""Of those that take a tenth of a second each."""

pytestmark = pytest.mark.timeout(900)


@pytest.mark.xdist_group("service")
def test_no_request_breaks_the_service(tmp_path: Path) -> None:
    """Every route of the document and every page, over HTTP, in a process whose address space is limited."""
    found = fuzz_rest(tmp_path, SEED, count=NUM_REQUESTS)
    assert found["violations"] == []
    assert found["cases"] == NUM_REQUESTS
    assert {"200", "201", "202", "400", "401", "403", "404", "422"} <= found["statuses"].keys()


@pytest.mark.parametrize("kind", KINDS)
def test_no_input_breaks_what_reads_it(kind: str, tmp_path: Path) -> None:
    count = FEWER_INPUTS.get(kind, NUM_INPUTS)
    reading = read(kind, SEED, tmp_path, count=count)
    assert reading.violations == []
    assert reading.cases == count


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_follows_from_its_seed_and_number(kind: str) -> None:
    """So that one that broke something can be made again."""
    assert case(kind, SEED, 7) == case(kind, SEED, 7)
    assert len({case(kind, SEED, number) for number in range(20)}) > 10
