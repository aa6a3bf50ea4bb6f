"""What failed or took long is written when it happens: a run that is ended early has told what it knew."""

from __future__ import annotations

import pytest

LONG_SECONDS = 60.0
MOST_CHARACTERS = 1000


class TellsAtOnce:
    """A plugin for the process that writes to the terminal."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a line below the dots, which pytest-xdist does not let end."""
        line = failure_text(report)
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if line is not None and reporter is not None:
            reporter.write_line("\n" + line, red=report.failed)


def failure_text(report: pytest.TestReport) -> str | None:
    """The line about it, unless it passed in good time."""
    where = f"{report.nodeid} ({report.when}, {report.duration:.0f} s)"
    if report.failed:
        return f"FAILED {where}: {_why(report)}"
    return f"took long: {where}" if report.duration >= LONG_SECONDS else None


def _why(report: pytest.TestReport) -> str:
    """The beginning of what the exception says; the whole report follows at the run's end."""
    crash = getattr(report.longrepr, "reprcrash", None)
    said = report.longreprtext if crash is None else crash.message
    return said.strip()[:MOST_CHARACTERS]
