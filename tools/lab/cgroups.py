"""Control groups: a root group for each kubelet, because kubelets that share one would kill each other's pods."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tools.lab.console import LabError

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
"""Controllers that a kubelet requires."""
REMOVAL_SECONDS = 10.0


def hierarchies(mounts: str) -> list[Path]:
    """Return the mount points of control groups; ``mounts`` is the content of /proc/mounts.

    Version 2 has a single hierarchy. Version 1 has several, and possibly one of version 2 without controllers.
    """
    fields = [line.split() for line in mounts.splitlines()]
    return [Path(field[1]) for field in fields if field[2] in ("cgroup", "cgroup2")]


def _mounted_hierarchies() -> list[Path]:
    return hierarchies(Path("/proc/mounts").read_text())


def make(group: str) -> None:
    """Create a group in every hierarchy."""
    for hierarchy in _mounted_hierarchies():
        _delegate(hierarchy)
        folder = hierarchy / group
        folder.mkdir(exist_ok=True)
        _inherit(hierarchy, folder)


def _delegate(hierarchy: Path) -> None:
    """Enable the controllers for groups below the root, which version 2 requires."""
    controllers = hierarchy / "cgroup.controllers"
    if controllers.exists() and set(CONTROLLERS) <= set(controllers.read_text().split()):
        (hierarchy / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in CONTROLLERS))


def _inherit(hierarchy: Path, folder: Path) -> None:
    """Copy the cpuset of the root, since a new group of version 1 has an empty one, in which no process can run."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (folder / name).exists() and not (folder / name).read_text().strip():
            (folder / name).write_text((hierarchy / name).read_text())


def remove(group: str) -> None:
    """Remove a group and its descendants in every hierarchy; wait until their processes have ended."""
    end = time.monotonic() + REMOVAL_SECONDS
    while remaining := [hierarchy for hierarchy in _mounted_hierarchies() if not _try_remove(hierarchy / group)]:
        if time.monotonic() > end:
            raise LabError(
                f"the control group {remaining[0] / group} still has processes after {REMOVAL_SECONDS:g} s: "
                f"end them, then run ./dev cluster down again"
            )
        time.sleep(0.1)


def _try_remove(folder: Path) -> bool:
    """Try to remove a group, its descendants first; return whether it no longer exists."""
    if not folder.is_dir():
        return True
    groups = [Path(path) for path, _, _ in os.walk(folder, topdown=False)]
    try:
        for group in groups:
            group.rmdir()
    except OSError:  # a killed process of the group has not ended yet
        return False
    return True
