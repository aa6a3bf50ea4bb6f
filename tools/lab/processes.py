"""Processes identified by PID and start time, so that a reused PID is never mistaken for the old process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
COMMAND_LENGTH = 15  # the kernel truncates names to this length


@dataclass(frozen=True, kw_only=True)
class Process:
    """Process of the host: its PID, and its start time in clock ticks since boot."""

    pid: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        fields = _stat(self.pid)
        return fields is not None and fields[0] != "Z" and int(fields[19]) == self.start_ticks

    def kill(self) -> None:
        """Send SIGKILL if the process still runs."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name, which may contain spaces: the state first (`man 5 proc`)."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def process(pid: int) -> Process | None:
    """Return the process that has this PID now, if there is one."""
    fields = _stat(pid)
    return None if fields is None else Process(pid=pid, start_ticks=int(fields[19]))


def children(pid: int) -> list[int]:
    """Return the PIDs of the running child processes."""
    return [child for child in pids() if (fields := _stat(child)) is not None and int(fields[1]) == pid]


def descendants(pid: int) -> list[Process]:
    """Return the child processes, their child processes, and so on.

    The descendants of a PID namespace's init process are all other processes of that namespace.
    """
    candidates, unvisited = [], children(pid)
    while unvisited:
        pid = unvisited.pop()
        candidates.append(process(pid))
        unvisited += children(pid)
    return [candidate for candidate in candidates if candidate is not None and candidate.alive]


def find_by_name(init: Process, names: Collection[str]) -> list[Process]:
    """Return the processes with one of these names in the PID namespace of ``init``, without nested namespaces."""
    namespace = _pid_namespace(init.pid)
    kernel_names = {name[:COMMAND_LENGTH] for name in names}
    candidates = [process(pid) for pid in pids() if command(pid) in kernel_names and _pid_namespace(pid) == namespace]
    return [candidate for candidate in candidates if candidate is not None and candidate.alive]


def command(pid: int) -> str:
    """Return the kernel's name of the program that the process runs, or "" if there is no such process."""
    try:
        return (PROC / str(pid) / "comm").read_text().rstrip("\n")
    except OSError:
        return ""


def _pid_namespace(pid: int) -> str | None:
    try:
        return str((PROC / str(pid) / "ns" / "pid").readlink())
    except OSError:
        return None


def pids() -> list[int]:
    return [int(path.name) for path in PROC.iterdir() if path.name.isdecimal()]
