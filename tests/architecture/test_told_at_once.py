"""What failed or took long stands in a run's output before the run has ended."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.support.repository import ROOT
from tests.support.told_at_once import LONG_SECONDS, failure_text

pytest_plugins = ["pytester"]

TESTS = """
import os
import time
from pathlib import Path

def test_that_fails():
    assert 1 + 1 == 3

def test_that_ends_the_run():
    end = time.monotonic() + 30
    while "PYTEST_XDIST_WORKER" in os.environ and "FAILED" not in Path("stdout").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid(), 9)
"""


def report(outcome: Literal["passed", "failed", "skipped"], seconds: float, said: str = "") -> pytest.TestReport:
    return pytest.TestReport(
        "tests/test_it.py::test_it", ("tests/test_it.py", 1, "test_it"), {}, outcome, said, "call", duration=seconds
    )


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_run_that_was_ended_has_told(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # the process that ends is not one of this run
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    pytester.makepyfile(TESTS)
    ran = pytester.runpytest_subprocess("-n", workers)
    ran.stdout.fnmatch_lines("FAILED *::test_that_fails (call, * s): assert (1 + 1) == 3")
    assert "short test summary" not in ran.stdout.str()


def test_a_line_says_what_where_and_how_long() -> None:
    assert failure_text(report("failed", 3.2, "no\nmore\n")) == "FAILED tests/test_it.py::test_it (call, 3 s): no\nmore"
    assert failure_text(report("passed", LONG_SECONDS)) == "took long: tests/test_it.py::test_it (call, 60 s)"
    assert failure_text(report("passed", LONG_SECONDS - 1)) is None
    assert failure_text(report("skipped", 0.0)) is None
