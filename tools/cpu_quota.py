"""A limit on the processor time of some processes, by the kernel's CFS bandwidth control in cgroup v1 or v2.

Processes of a group may run for ``share`` of every period, over all their threads, and are stopped for the rest of it.
With a short period a process of one thread is like one on a core of ``share`` of the speed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.lab.cgroups import ROOT

PERIOD_MICROSECONDS = 2_000
"""Period of the limit: much shorter than an action of a rank, and twice the kernel's minimum."""


class QuotaError(Exception):
    """The limit cannot be set here."""


class CpuQuota:
    """A control group whose processes have ``share`` of a core; the context manager `cpu_quota` makes one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, share: float) -> None:
        """Limit to this share of one core."""
        quota = round(share * PERIOD_MICROSECONDS)
        if (self._folder / "cpu.max").exists():
            (self._folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
            return
        (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        (self._folder / "cpu.cfs_quota_us").write_text(str(quota))

    def add(self, pid: int) -> None:
        """Limit a process with all its threads; what it starts later is limited, too."""
        (self._folder / "cgroup.procs").write_text(str(pid))


@contextlib.contextmanager
def cpu_quota(name: str, share: float) -> Iterator[CpuQuota]:
    """A group of that name below the root, which is removed at the end; its processes have to be gone by then.

    Raises `QuotaError` without the right or the controller.
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
    """The hierarchy of the cpu controller. Version 2 has to delegate it to groups below the root."""
    if (ROOT / "cpu" / "tasks").exists():
        return ROOT / "cpu"
    if not (ROOT / "cgroup.controllers").exists():
        raise QuotaError("there is no cpu controller of cgroups here")
    with contextlib.suppress(OSError):  # it may be delegated already
        (ROOT / "cgroup.subtree_control").write_text("+cpu")
    return ROOT


_LOOP = """
import sys, time
pause = float(sys.argv[1])
sys.stdin.readline()
end, count = time.monotonic() + pause, 0
while time.monotonic() < end:
    for _ in range(1_000):
        pass
    count += 1
print(count)
"""


def effective_shares(quota: CpuQuota, shares: Sequence[float], seconds: float = 1.0) -> list[float]:
    """The speed that a process really has under each of ``shares``, as a share of what it has with a whole core."""
    counts = []
    for share in (1.0, *shares):
        quota.set(share)
        counts.append(max(_count(quota, seconds) for _ in range(3)))
    return [count / counts[0] for count in counts[1:]]


def _count(quota: CpuQuota, seconds: float) -> int:
    command = [sys.executable, "-c", _LOOP, str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        quota.add(process.pid)
        time.sleep(0.05)
        output, _ = process.communicate("\n")
    return int(output)
