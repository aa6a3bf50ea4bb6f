"""Detection of processes of this container that the kernel killed because of the memory limit.

cgroup v2 has `memory.events` (https://docs.kernel.org/admin-guide/cgroup-v2.html), cgroup v1 `memory.oom_control`
(https://docs.kernel.org/admin-guide/cgroup-v1/memory.html). Most kubelets set `memory.oom.group`: the kernel
then kills all processes of the container, and the kubelet reports the cause. Otherwise it kills one process, and
only these files show the cause.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.core.lifecycle import AttemptState
from penstock.core.supervision import AttemptReport

CGROUPS = Path("/sys/fs/cgroup")
_FILES = ("memory.events", "memory/memory.oom_control")
REMEDY = "ranks were killed because the pod exceeded its memory limit; raise resources.memoryPerRank"


def num_killed(cgroups: Path) -> int:
    """Number of processes that were killed for memory so far; 0 without such a file."""
    for name in _FILES:
        try:
            counts = dict(line.split() for line in (cgroups / name).read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return 0


def explained(report: AttemptReport, cgroups: Path) -> AttemptReport:
    """Return the report; add a remedy if the attempt failed after the kernel killed a process for memory."""
    if report.state is not AttemptState.FAILED or report.refused or not num_killed(cgroups):
        return report
    return replace(report, message=f"{report.message}; {REMEDY}")
