"""Tests that this machine cannot run: said where they are skipped, and once more at the end, in red."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import NoReturn

import pytest

BEGINNING = "NOT RUN: "
_WHOLE_RUN = "PENSTOCK_WHOLE_RUN"


def required(name: str) -> bool:
    """Whether PENSTOCK_REQUIRE names it, so that its absence is a failure."""
    return name in os.environ.get("PENSTOCK_REQUIRE", "").split(",")


def missing(name: str, message: str) -> NoReturn:
    """Fail the test if what it needs is required, else skip it, loudly."""
    if required(name):
        pytest.fail(BEGINNING + message)
    pytest.skip(BEGINNING + message)


def note_whole_run(config: pytest.Config) -> None:
    """Remember, for the workers of pytest-xdist too, that no file was asked for by its path, only folders or all."""
    if not any(argument.partition("::")[0].endswith(".py") for argument in config.args):
        os.environ[_WHOLE_RUN] = "yes"


def leave_out_if_long(item: pytest.Item) -> None:
    """Skip a test marked ``long``, loudly, where whole folders are run and long tests are not required."""
    if item.get_closest_marker("long") and _WHOLE_RUN in os.environ and not required("long"):
        pytest.skip(f"{BEGINNING}takes minutes: PENSTOCK_REQUIRE=long ./dev test, or the path of its file, runs it")


def close(reporter: pytest.TerminalReporter) -> None:
    """Write what was not run, if anything."""
    found = lines(reporter.stats.get("skipped", ()))
    if found:
        reporter.write_sep("=", "NOT RUN", red=True, bold=True)
    for line in found:
        reporter.write_line(line, red=True)


def lines(skipped: Iterable[pytest.TestReport | pytest.CollectReport]) -> list[str]:
    """How many tests were not run for which reason, the most frequent first."""
    counted = Counter(reason for report in skipped if (reason := _reason(report)) is not None)
    return [f"{number} test{'s' * (number > 1)}: {reason}" for reason, number in counted.most_common()]


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    assert isinstance(report.longrepr, tuple)  # path, line and reason: so it is of what was skipped
    said = report.longrepr[2].removeprefix("Skipped: ")
    return said.removeprefix(BEGINNING) if said.startswith(BEGINNING) else None
