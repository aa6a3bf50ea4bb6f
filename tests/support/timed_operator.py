"""An operator whose clocks a test sets: a process runs this module instead of `penstock.operator`.

The file that `FILE_VARIABLE` names has two numbers of seconds: those that passed in addition to the real time, on both
clocks, and those by which the wall clock alone was set forwards.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from penstock.core.host.clocks import SlewedClock, boottime_seconds
from penstock.operator import __main__ as program
from penstock.operator.settings import Settings, settings_from

FILE_VARIABLE = "PENSTOCK_TEST_CLOCKS"
RESYNC_SECONDS = 1.0


def set_clocks(path: Path, passed_seconds: float, ahead_seconds: float) -> None:
    """Set the clocks of the operator that reads this file. Time only passes: the first number never decreases."""
    new = path.with_suffix(".new")
    new.write_text(f"{passed_seconds} {ahead_seconds}")
    new.replace(path)


def _offsets() -> tuple[float, float]:
    passed, ahead = Path(os.environ[FILE_VARIABLE]).read_text().split()
    return float(passed), float(ahead)


def _wall() -> float:
    return time.time() + sum(_offsets())


def _boottime() -> float:
    return boottime_seconds() + _offsets()[0]


class TimedClock(SlewedClock):
    """By the clocks that the test sets."""

    def __init__(self) -> None:
        super().__init__(_wall, _boottime)


def _settings(environment: Mapping[str, str]) -> Settings:
    return replace(settings_from(environment), resync_seconds=RESYNC_SECONDS)


if __name__ == "__main__":
    program.SlewedClock = TimedClock  # type: ignore[attr-defined, assignment]
    program.settings_from = _settings  # type: ignore[attr-defined]
    program.main()
