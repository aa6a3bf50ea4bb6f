"""A limit on the processor time of some processes, by the kernel's CFS bandwidth control in cgroup v1 or v2.

Processes of a group may run for ``share`` of every period, summed over all their threads, and are stopped for the rest.
With a short period, a process of one thread behaves as on a core with ``share`` of the speed.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.lab.cgroups import ROOT

PERIOD_MICROSECONDS = 4_000
"""Period of the limit: much shorter than an action of a rank, and as long as a tick of the kernel. With 2 ms a limit of
0.6 of a core gave 0.49 on a kernel of 250 ticks a second, with 4 ms 0.60.
"""
LEAST_QUOTA_MICROSECONDS = 1_000
"""Shortest time per period that the kernel accepts."""


class QuotaError(Exception):
    """The limit cannot be set here."""


class CpuQuota:
    """A control group whose processes have ``share`` of a core; the context manager `cpu_quota` makes one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, share: float) -> None:
        """Limit the processes to this share of one core; 1 or more removes the limit."""
        period = max(PERIOD_MICROSECONDS, math.ceil(LEAST_QUOTA_MICROSECONDS / share))
        quota = round(share * period)
        if (self._folder / "cpu.max").exists():
            (self._folder / "cpu.max").write_text(f"{quota if share < 1 else 'max'} {period}")
            return
        (self._folder / "cpu.cfs_quota_us").write_text("-1")
        (self._folder / "cpu.cfs_period_us").write_text(str(period))
        if share < 1:
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota))

    def add(self, pid: int) -> None:
        """Limit a process with all its threads, and all processes that it starts later."""
        (self._folder / "cgroup.procs").write_text(str(pid))


@contextlib.contextmanager
def cpu_quota(name: str, share: float) -> Iterator[CpuQuota]:
    """A group of that name below the root. It is removed at the end, when its processes have to have ended.

    Raises `QuotaError` if the caller has no permission, or if there is no cpu controller.
    """
    folder = _hierarchy() / f"{name}-{os.getpid()}"
    try:
        folder.mkdir()
        quota = CpuQuota(folder)
        quota.set(share)
    except OSError as error:
        raise QuotaError(f"the cpu controller cannot be used here: {error}") from None
    try:
        yield quota
    finally:
        folder.rmdir()


def _hierarchy() -> Path:
    """The hierarchy of the cpu controller. In cgroup v2, the root has to delegate the controller to groups below it."""
    if (ROOT / "cpu" / "tasks").exists():
        return ROOT / "cpu"
    if not (ROOT / "cgroup.controllers").exists():
        raise QuotaError("there is no cpu controller of cgroups here")
    with contextlib.suppress(OSError):  # it may be delegated already
        (ROOT / "cgroup.subtree_control").write_text("+cpu")
    return ROOT


_LOOP = """
import sys, time
sys.stdin.readline()
begin, used = time.monotonic(), time.process_time()
while time.monotonic() < begin + float(sys.argv[1]):
    pass
print((time.process_time() - used) / (time.monotonic() - begin))
"""


def effective_shares(quota: CpuQuota, shares: Sequence[float], seconds: float = 1.0) -> list[float]:
    """Shares of a core that a process which never waits gets under each limit in ``shares``, by its processor time.

    Processor time is used because the amount of work varies far more, on a virtual machine whose cores have other
    guests.
    """
    used = []
    for share in shares:
        quota.set(share)
        used.append(statistics.median(_used_share(quota, seconds) for _ in range(3)))
    return used


def _used_share(quota: CpuQuota, seconds: float) -> float:
    command = [sys.executable, "-c", _LOOP, str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        quota.add(process.pid)
        output, _ = process.communicate("\n")
    return float(output)
