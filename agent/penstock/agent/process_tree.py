"""The processes that one started, and blocks at whose end all that were started during them end, also orphans.

Linux reparents an orphan to the nearest subreaper among its ancestors (prctl(2), PR_SET_CHILD_SUBREAPER). So this
process is the parent of all that a rank forked and left, and need not search sessions or process groups, which a
daemon leaves first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
PAGE_BYTES = 4096


@contextlib.contextmanager
def offspring_ended(spared: Callable[[], Collection[int]] = tuple) -> Iterator[None]:
    """Children that this process has before the block are left alone, and so is what they left behind before it; also
    those whose numbers ``spared`` gives at the end.
    """
    before = _children()
    _adopt_orphans(True)
    try:
        yield
    finally:
        try:
            _end_children_but(before.union(spared()))
        finally:
            _adopt_orphans(False)


def _adopt_orphans(whether: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _end_children_but(kept: frozenset[int]) -> None:
    """The children of one that ends are children of this process from then on, so in the end there are none."""
    while ending := _children() - kept:
        for pid in ending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in ending:
            with contextlib.suppress(ChildProcessError):  # its starter waited for it already
                os.waitpid(pid, 0)


def tree_of(root: int) -> frozenset[int]:
    """The process ``root`` and its descendants, without those that an ancestor has left by ending."""
    children: dict[int, list[int]] = {}
    for process, parent in _parents().items():
        children.setdefault(parent, []).append(process)
    members, pending = {root}, [root]
    while pending:
        following = children.get(pending.pop(), [])
        members.update(following)
        pending += following
    return frozenset(members)


def _children() -> frozenset[int]:
    """Processes whose parent this one is, also those that ended and were not waited for."""
    return frozenset(process for process, parent in _parents().items() if parent == os.getpid())


def _parents() -> dict[int, int]:
    """The parent of every process, from proc_pid_stat(5)."""
    with os.scandir("/proc") as entries:
        processes = [entry.name for entry in entries if entry.name.isdecimal()]
    stats = ((int(process), read_process_file(f"/proc/{process}/stat")) for process in processes)
    return {process: int(stat.rpartition(b")")[2].split(maxsplit=2)[1]) for process, stat in stats if stat}


def read_process_file(path: str | Path) -> bytes:
    """A file of a process in /proc, of a page at most; empty if the process has ended.

    It takes 10 us, half of what a file object takes. There may be thousands, several times a second.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.read(descriptor, PAGE_BYTES)
    except ProcessLookupError:
        return b""
    finally:
        os.close(descriptor)
