"""A cgroup v2 of one attempt's processes, below the one that was delegated to penstock.

A cgroup is delegated if its folder has the extended attribute ``user.delegate`` or ``trusted.delegate`` with the value
1, which systemd sets for units with ``Delegate=`` (https://systemd.io/CGROUP_DELEGATION/). Others belong to their
manager, even where this process may write to them: root may write to all, and a user to all below the user's manager.

A cgroup whose children are limited may hold no processes itself (https://docs.kernel.org/admin-guide/cgroup-v2.html,
"No Internal Process Constraint"). So the first process that needs a limit moves all processes of the delegated cgroup
to a child of it. Example of a service with two attempts:

    penstock.service         memory in cgroup.subtree_control
      penstock               the service, its supervisors and shippers
      penstock-attempt-311   ranks; memory.max 8 GiB
      penstock-attempt-402

In a pod nothing is delegated. On machines with the memory controller of cgroup v1 there is no controller to delegate.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from penstock.agent.pod_memory import num_killed

LEAF = "penstock"
PREFIX = "penstock-attempt-"
DELEGATION = ("user.delegate", "trusted.delegate")
PROC_SELF = Path("/proc/self")
MOST_MOVES = 10
"""Largest number of rounds of moving: a process that starts during one is moved in the next."""
REMOVAL_SECONDS = 5.0
_POLL_SECONDS = 0.02


class AttemptCgroup:
    """A new cgroup at ``path``; raises `OSError` if there can be none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def limit(self, num_bytes: int) -> None:
        """Have the kernel end all processes of the cgroup when they need more memory, instead of swapping."""
        self._write("memory.max", str(num_bytes))
        with contextlib.suppress(FileNotFoundError, PermissionError):  # a kernel without swap has no such file
            self._write("memory.swap.max", "0")
        self._write("memory.oom.group", "1")

    def add(self, pid: int) -> None:
        """Move the process here. Processes that it starts from now on begin here."""
        self._write("cgroup.procs", str(pid))

    def has_killed(self) -> bool:
        """Whether the kernel has ended processes because they needed more memory."""
        return num_killed(self.path) > 0

    def remove(self) -> None:
        """End the processes that are left in it, and remove it."""
        with contextlib.suppress(OSError):  # before Linux 5.14 there is no such file
            self._write("cgroup.kill", "1")
        deadline = time.monotonic() + REMOVAL_SECONDS
        while not _removed(self.path) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _write(self, name: str, value: str) -> None:
        (self.path / name).write_text(value)


def limited_cgroup(num_bytes: int, pid: int, unit: Path | None = None) -> AttemptCgroup:
    """A cgroup for the process ``pid``, which has just been started, and all that it starts: below ``unit``, or the
    delegated cgroup of this process.

    Raises `OSError` if there can be none.
    """
    unit = unit or delegated_cgroup()
    _limit_children(unit)
    path = unit / f"{PREFIX}{pid}"
    _remove_leftovers(unit, path)
    cgroup = AttemptCgroup(path)
    try:
        cgroup.limit(num_bytes)
        cgroup.add(pid)
    except OSError:
        cgroup.remove()
        raise
    return cgroup


def delegated_cgroup(process: Path = PROC_SELF) -> Path:
    """The delegated cgroup with this process in it or in its child `LEAF`; raises `OSError` if there is none."""
    own = _own_cgroup(process)
    unit = own.parent if own.name == LEAF else own
    if not _is_delegated(unit):
        raise PermissionError(f"{unit} is not delegated to penstock")
    if "memory" not in (unit / "cgroup.controllers").read_text().split():
        raise FileNotFoundError(f"{unit} has no memory controller")
    return unit


def _own_cgroup(process: Path) -> Path:
    """By cgroups(7): the path in the line of hierarchy 0, below the folder where that hierarchy is mounted."""
    memberships = (line.split(":", 2) for line in (process / "cgroup").read_text().splitlines())
    within = next((path for number, _, path in memberships if number == "0"), "")
    for line in (process / "mountinfo").read_text().splitlines():
        mount, _, source = line.partition(" - ")
        root, folder = mount.split()[3:5]
        if source.split()[0] == "cgroup2" and Path(within).is_relative_to(root) and ".." not in within:
            return Path(folder) / Path(within).relative_to(root)
    raise FileNotFoundError("no cgroup v2 of this process is mounted")


def _is_delegated(unit: Path) -> bool:
    for attribute in DELEGATION:
        with contextlib.suppress(OSError):  # it has none, or this process may not read it
            if os.getxattr(unit, attribute) == b"1":
                return True
    return False


def _limit_children(unit: Path) -> None:
    """Have the kernel limit the memory of the cgroup's children; its own processes move to one of them, `LEAF`."""
    control = unit / "cgroup.subtree_control"
    if "memory" in control.read_text().split():
        return
    leaf = unit / LEAF
    for moves_left in reversed(range(MOST_MOVES)):
        for pid in (unit / "cgroup.procs").read_text().split():
            leaf.mkdir(exist_ok=True)
            with contextlib.suppress(ProcessLookupError):
                (leaf / "cgroup.procs").write_text(pid)
        try:
            control.write_text("+memory")
            return
        except OSError:
            if not moves_left:
                raise


def _remove_leftovers(unit: Path, own: Path) -> None:
    """Remove cgroups of attempts whose launch was killed; one that holds processes cannot be removed.

    An empty cgroup may belong to an attempt that is about to begin: it is kept if the process in its name exists. One
    with the ``own`` name was made for an earlier process with the same id.
    """
    for path in unit.glob(f"{PREFIX}*"):
        if path == own or not Path("/proc", path.name.removeprefix(PREFIX)).exists():
            _removed(path)


def _removed(path: Path) -> bool:
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
