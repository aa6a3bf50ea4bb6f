"""Control groups: a root for each kubelet, because two kubelets on one root would end each other's pods."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tools.lab.console import LabError

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
"""What a kubelet insists on."""
PATIENCE_SECONDS = 10.0


def hierarchies(mounts: str) -> list[Path]:
    """Where control groups are mounted, by the text of /proc/mounts.

    With version 2 that is one place; with version 1 several, and possibly one of version 2 without controllers.
    """
    fields = [line.split() for line in mounts.splitlines()]
    return [Path(field[1]) for field in fields if field[2] in ("cgroup", "cgroup2")]


def _here() -> list[Path]:
    return hierarchies(Path("/proc/mounts").read_text())


def make(group: str) -> None:
    """Make a group in every hierarchy."""
    for hierarchy in _here():
        _delegate(hierarchy)
        folder = hierarchy / group
        folder.mkdir(exist_ok=True)
        _inherit(hierarchy, folder)


def _delegate(hierarchy: Path) -> None:
    """Version 2: let groups below the root be limited."""
    controllers = hierarchy / "cgroup.controllers"
    if controllers.exists() and set(CONTROLLERS) <= set(controllers.read_text().split()):
        (hierarchy / "cgroup.subtree_control").write_text(" ".join(f"+{each}" for each in CONTROLLERS))


def _inherit(hierarchy: Path, folder: Path) -> None:
    """Version 1: a new cpuset is empty, and nothing runs in an empty one."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (folder / name).exists() and not (folder / name).read_text().strip():
            (folder / name).write_text((hierarchy / name).read_text())


def remove(group: str) -> None:
    """Remove a group and those below it in every hierarchy, once their processes have ended."""
    end = time.monotonic() + PATIENCE_SECONDS
    while left := [hierarchy for hierarchy in _here() if not _removed(hierarchy / group)]:
        if time.monotonic() > end:
            raise LabError(f"processes are left in the control group {group} of {left[0]}")
        time.sleep(0.1)


def _removed(folder: Path) -> bool:
    """Whether the group is gone, after an attempt to remove it from below upwards."""
    if not folder.is_dir():
        return True
    below = [Path(path) for path, _, _ in os.walk(folder, topdown=False)]
    try:
        for path in below:
            path.rmdir()
    except OSError:  # the kernel is not done with a process that was killed
        return False
    return True
