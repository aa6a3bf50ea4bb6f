"""What this machine cannot run is listed at the end of a run, in red, or is a failure where it is required."""

from __future__ import annotations

import pytest

from tests.support.not_run import missing
from tests.support.repository import ROOT

pytest_plugins = ["pytester"]

TESTS = """
import pytest
from tests.support.not_run import missing

@pytest.fixture(scope="session")
def server():
    missing("server", "Server is missing: apt install server")

@pytest.mark.parametrize("number", range(3))
def test_that_needs_the_server(server, number):
    pass

@pytest.mark.skipif(True, reason="NOT RUN: kernels need a device")
def test_that_needs_a_device():
    pass

def test_that_has_a_reason_of_its_own():
    pytest.skip("not on a Sunday")

def test_that_passes():
    pass
"""
RED, RESET = "\x1b[31m", "\x1b[0m"
CLOSING = ["3 tests: Server is missing: apt install server", "1 test: kernels need a device"]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project whose conftest.py is this one's."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("PENSTOCK_REQUIRE", "PENSTOCK_WHOLE_RUN"):
        monkeypatch.delenv(name, raising=False)
    pytester.makeconftest((ROOT / "tests" / "conftest.py").read_text())
    return pytester


@pytest.mark.parametrize("workers", ["0", "2"])
def test_the_run_closes_with_a_red_list(project: pytest.Pytester, workers: str) -> None:
    project.makepyfile(TESTS)
    ran = project.runpytest_subprocess("-ra", "--color=yes", "-n", workers)
    assert ran.outlines[-3:-1] == [f"{RED}{line}{RESET}" for line in CLOSING]
    assert "= NOT RUN =" in ran.outlines[-4]
    assert ran.ret == pytest.ExitCode.OK


@pytest.mark.parametrize("workers", ["0", "2"])
def test_long_tests_are_left_out_unless_their_file_is_asked_for(
    project: pytest.Pytester, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makepyprojecttoml('[tool.pytest.ini_options]\ntestpaths = ["."]\nmarkers = ["long"]\n')
    path = project.makepyfile("import pytest\n\n@pytest.mark.long\ndef test_it():\n    pass\n")
    for folders in ([], [path.parent]):
        whole = project.runpytest_subprocess("-n", workers, *folders)
        whole.assert_outcomes(skipped=1)
        assert "1 test: takes minutes" in whole.outlines[-2]
    for file in (path, f"{path}::test_it"):
        project.runpytest_subprocess("-n", workers, file).assert_outcomes(passed=1)
    monkeypatch.setenv("PENSTOCK_REQUIRE", "long")
    project.runpytest_subprocess("-n", workers).assert_outcomes(passed=1)


def test_a_run_that_lacked_nothing_has_no_list(project: pytest.Pytester) -> None:
    project.makepyfile("import pytest\n\ndef test_it():\n    pytest.skip('not on a Sunday')\n")
    assert "NOT RUN" not in project.runpytest_subprocess().stdout.str()


def test_what_is_required_fails_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REQUIRE", "client,server")
    with pytest.raises(pytest.fail.Exception, match="NOT RUN: Server is missing"):
        missing("server", "Server is missing")
    with pytest.raises(pytest.skip.Exception, match="NOT RUN: Another is missing"):
        missing("another", "Another is missing")
