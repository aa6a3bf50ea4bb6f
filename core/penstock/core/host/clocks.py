"""Clocks of this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from penstock.core.clocks import Reading

SLEW = 0.1
"""Seconds by which a `SlewedClock` approaches the time of day in a second."""


def read_clocks() -> Reading:
    """Read both clocks: the time of day, and the time since the boot."""
    return Reading(wall=time.time(), boot_id=boot_id(), boottime=boottime_seconds())


def boottime_seconds() -> float:
    """Seconds since the boot, which include those in which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Identifies the time since the last boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class SlewedClock:
    """The time of day, without jumps: it goes by ``boottime``, at most `SLEW` faster or slower while ``wall`` differs.

    So a duration is off by a tenth at most while a correction is made up for, and by nothing at other times.
    """

    def __init__(self, wall: Callable[[], float] = time.time, boottime: Callable[[], float] = boottime_seconds) -> None:
        self._wall, self._read_boottime = wall, boottime
        self._now, self._boottime = wall(), boottime()
        self._lock = threading.Lock()

    def __call__(self) -> float:
        """Return the seconds since the epoch."""
        with self._lock:
            boottime = self._read_boottime()
            elapsed, self._boottime = boottime - self._boottime, boottime
            most = SLEW * elapsed
            self._now += elapsed + min(max(self._wall() - self._now - elapsed, -most), most)
            return self._now
