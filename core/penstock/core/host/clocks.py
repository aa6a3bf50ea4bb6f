"""Clocks of this machine."""

from __future__ import annotations

import time
from pathlib import Path

from penstock.core.clocks import Reading


def read_clocks() -> Reading:
    """Read both clocks: the time of day, and the time since the boot."""
    return Reading(wall=time.time(), boot_id=boot_id(), boottime=boottime_seconds())


def boottime_seconds() -> float:
    """Seconds since the boot, which include those in which the machine was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Identifies the time since the last boot of this machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
