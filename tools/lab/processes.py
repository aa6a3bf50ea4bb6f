"""Processes by id and start time, so that a reused id is never taken for the old process."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
COMMAND_LENGTH = 15  # what the kernel keeps of a name


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of this machine: its number and when it started, in ticks of the kernel's clock since boot."""

    pid: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        found = _stat(self.pid)
        return found is not None and found[0] != "Z" and int(found[19]) == self.start_ticks

    def kill(self) -> None:
        """End it at once, if it is still there."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _stat(pid: int) -> list[str] | None:
    """What /proc/PID/stat holds after the name, which may hold blanks: the state first (`man 5 proc`)."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def process(pid: int) -> Process | None:
    """That process as it is now; none if there is none."""
    found = _stat(pid)
    return None if found is None else Process(pid=pid, start_ticks=int(found[19]))


def children(pid: int) -> list[int]:
    """The processes that it started and that are left."""
    return [each for each in pids() if (found := _stat(each)) is not None and int(found[1]) == pid]


def descendants(pid: int) -> list[Process]:
    """The children of a process, and theirs. In a process namespace those of its first process are all but that one."""
    found, waiting = [], children(pid)
    while waiting:
        pid = waiting.pop()
        found.append(process(pid))
        waiting += children(pid)
    return [each for each in found if each is not None and each.alive]


def named(inside: Process, names: Collection[str]) -> list[Process]:
    """The processes of those names in the process namespace of another, none of those in namespaces below it."""
    space = _namespace(inside.pid)
    wanted = {name[:COMMAND_LENGTH] for name in names}
    found = [process(pid) for pid in pids() if command(pid) in wanted and _namespace(pid) == space]
    return [each for each in found if each is not None and each.alive]


def command(pid: int) -> str:
    """What it runs, as the kernel names it; empty if there is none."""
    try:
        return (PROC / str(pid) / "comm").read_text().rstrip("\n")
    except OSError:
        return ""


def _namespace(pid: int) -> str | None:
    try:
        return str((PROC / str(pid) / "ns" / "pid").readlink())
    except OSError:
        return None


def pids() -> list[int]:
    return [int(path.name) for path in PROC.iterdir() if path.name.isdecimal()]
