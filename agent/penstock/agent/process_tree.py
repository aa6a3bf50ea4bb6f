"""All processes that are started during a block end with it, also orphans.

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


def _children() -> frozenset[int]:
    """Processes whose parent this one is, also those that ended and were not waited for."""
    processes = (path.name for path in Path("/proc").glob("[0-9]*"))
    return frozenset(int(name) for name in processes if _parent(name) == os.getpid())


def _parent(process: str) -> int | None:
    """From proc(5); none if the process is gone."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(fields[1])
