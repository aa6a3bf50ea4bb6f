"""The limit on what an attempt's ranks use of the host's memory together, and how it is enforced.

``memoryPerRank`` is what a plan may take. Ranks that take more than that make the machine swap, or the kernel's
out-of-memory killer end processes of its choice, such as the service or another job. So `penstock.agent.launch` ends
the ranks first, with an error that says how much they use. In a pod the kernel enforces the container's limit, and this
module is not used.

The kernel enforces the limit where it can: in a cgroup of the attempt's own (`penstock.agent.attempt_cgroup`), which
needs one that was delegated to penstock. Elsewhere a watch reads what the processes use, at most every half second.

**What counts.** The proportional set size (PSS, proc_pid_smaps(5)): a page that n processes map counts 1/n in each.
Forked ranks share what was imported before the fork, so sums of resident sizes would count it once per rank. Of the PSS
the parts of anonymous, shared and swapped memory count. Pages of files do not: a token file of 100 GB that ranks map is
in the page cache, from which the kernel drops pages when the machine or a cgroup needs memory.

**What it costs.** ``smaps_rollup`` walks the page tables. ``status`` has counters of the same parts, which take 20 us
per process and are no less than the PSS, so while their sum is within the limit nothing else is read. Beyond it the
page tables are walked, and show how much the counters have in excess. They are walked again once the counters minus
this excess exceed the limit, and also from time to time: the excess falls when a process writes to a shared page.
Pauses grow with the processor time of a reading: counters take at most 1 % of a core, and so do page tables. Measured
with 16 ranks of 0.5 GiB and 0.15 GiB in common, among 130 processes: counters and the tree of processes take 2 ms,
which is 0.4 % of a core, and page tables 0.15 s, so near the limit they are walked every 15 s.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from penstock.agent.attempt_cgroup import AttemptCgroup, limited_cgroup
from penstock.agent.process_tree import read_process_file, tree_of
from penstock.core.errors import UserError
from penstock.core.job import ResourcesSpec
from penstock.core.units import MEBIBYTE, bytes_apart, format_bytes, format_count

log = logging.getLogger(__name__)

PROC = Path("/proc")
PERIOD_SECONDS = 0.5
MOST_SHARE = 0.01
"""Largest share of one core that reading counters takes, and that walking page tables takes."""
OOM_SCORE_ADJ = 500
"""The value of ranks (proc_pid_oom_score_adj(5)): as if they used half of the machine's memory more than they do, so
that the kernel ends them before the service, its supervisors and other programs of the user.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """``num_bytes`` of the host's memory for ``num_ranks`` ranks together."""

    num_bytes: int
    num_ranks: int

    @classmethod
    def of(cls, resources: ResourcesSpec, num_ranks: int) -> MemoryLimit | None:
        """The limit of ``num_ranks`` ranks of a job; None if the job has none."""
        num_bytes = resources.host_memory_bytes(num_ranks)
        return None if num_bytes is None else cls(num_bytes=num_bytes, num_ranks=num_ranks)

    @property
    def _origin(self) -> str:
        per_rank = format_bytes(self.num_bytes // self.num_ranks)
        return f"(memoryPerRank {per_rank} x {format_count(self.num_ranks, 'rank')})"

    def exceeded(self, used_bytes: int) -> UserError:
        """The error for ranks that use ``used_bytes``."""
        used, limit = bytes_apart(used_bytes, self.num_bytes)
        mebibytes = -(-used_bytes // self.num_ranks // MEBIBYTE)
        return self._mistake(
            f"the attempt's ranks use {used}, limit {limit} {self._origin}",
            f"write more than {mebibytes}Mi, as far as the machine has it",
        )

    def ended_by_kernel(self) -> UserError:
        """The error for ranks that the kernel ended at the limit of their cgroup."""
        return self._mistake(
            f"the kernel ended the attempt's ranks, which needed more memory than their limit of "
            f"{format_bytes(self.num_bytes)} {self._origin}",
            "write more, as far as the machine has it",
        )

    @staticmethod
    def _mistake(what: str, more: str) -> UserError:
        smaller = "make the model, the sequence or the micro-batch smaller"
        remedy = f"{more}, or {smaller}; another attempt would use as much"
        return UserError(what=what, where="spec.resources.memoryPerRank", remedy=remedy)


class Enforcement:
    """Holds the processes of one launch to their limit. The base class has no limit."""

    def mistake(self) -> UserError | None:
        """The error if the processes use, or have used, more than their limit. Call it often to notice that soon."""
        return None

    def close(self) -> None:
        """Called after the launch; processes that are left of it may be ended."""


UNLIMITED = Enforcement()


class KernelLimit(Enforcement):
    """A cgroup whose memory the kernel limits."""

    def __init__(self, limit: MemoryLimit, cgroup: AttemptCgroup) -> None:
        self._limit, self._cgroup = limit, cgroup

    def mistake(self) -> UserError | None:
        """None until the kernel has ended a process."""
        return self._limit.ended_by_kernel() if self._cgroup.has_killed() else None

    def close(self) -> None:
        """End the processes that are left in the cgroup, and remove it."""
        self._cgroup.remove()


def counted_bytes(process: Path) -> int:
    """Anonymous, shared and swapped memory of the process with this folder in /proc; 0 if it has ended. A shared page
    counts in full.
    """
    return _sum_of(process / "status", (b"RssAnon", b"RssShmem", b"VmSwap"))


def proportional_bytes(process: Path) -> int:
    """The process's share of this memory: a page that n processes map counts 1/n. 0 if it has ended."""
    return _sum_of(process / "smaps_rollup", (b"Pss_Anon", b"Pss_Shmem", b"SwapPss"))


def _sum_of(path: Path, names: tuple[bytes, ...]) -> int:
    """Sum of fields in KiB. A process that has ended has no file, or one without these fields."""
    fields = (line.partition(b":") for line in read_process_file(path).splitlines())
    return 1024 * sum(int(value.split()[0]) for name, _, value in fields if name in names)


class MemoryWatch(Enforcement):
    """Sums what the processes of a launch use, at most every `PERIOD_SECONDS`.

    ``processes`` gives their folders in /proc. ``clock`` and ``spent``, the processor time of this thread, are seconds.
    """

    def __init__(
        self,
        limit: MemoryLimit,
        processes: Callable[[], Iterable[Path]],
        *,
        counted: Callable[[Path], int] = counted_bytes,
        proportional: Callable[[Path], int] = proportional_bytes,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._limit, self._processes = limit, processes
        self._counted, self._proportional = counted, proportional
        self._clock, self._spent = clock, spent
        self._due_at = self._walk_due_at = -math.inf
        self._excess_bytes = 0
        """Bytes by which the counters exceeded the page tables when these were walked last."""

    def mistake(self) -> UserError | None:
        """None between two readings."""
        if self._clock() < self._due_at:
            return None
        try:
            used_bytes = self._used_bytes()
        except PermissionError as error:  # of another user, or hidden by a security module
            _note(f"the memory of ranks is not limited: {error}")
            self._due_at = math.inf
            return None
        return self._limit.exceeded(used_bytes) if used_bytes > self._limit.num_bytes else None

    def _used_bytes(self) -> int:
        """Bytes that the processes use: exact if above the limit, otherwise an estimate of at most the limit."""
        now, began = self._clock(), self._spent()
        processes = list(self._processes())
        counted_sum = sum(map(self._counted, processes))
        self._due_at = now + max(PERIOD_SECONDS, (self._spent() - began) / MOST_SHARE)
        if counted_sum <= self._limit.num_bytes:
            return counted_sum
        if now >= self._walk_due_at or counted_sum - self._excess_bytes > self._limit.num_bytes:
            began = self._spent()
            self._excess_bytes = counted_sum - sum(map(self._proportional, processes))
            self._walk_due_at = now + (self._spent() - began) / MOST_SHARE
        return counted_sum - self._excess_bytes


def enforced(limit: MemoryLimit | None, pid: int) -> Enforcement:
    """Enforce the limit on the process ``pid``, which has just been started, and on all that it starts."""
    if limit is None:
        return UNLIMITED
    try:
        return KernelLimit(limit, limited_cgroup(limit.num_bytes, pid))
    except OSError as error:
        _note(f"ranks have no cgroup ({error}); their memory is read every {PERIOD_SECONDS} s instead")
        return MemoryWatch(limit, lambda: [PROC / str(member) for member in tree_of(pid)])


@functools.cache
def _note(line: str) -> None:
    """Log the line once in this process."""
    log.info(line)


def raise_oom_score(pid: int) -> None:
    """Have the kernel, when it lacks memory, end this process and what it starts before others."""
    path = PROC / str(pid) / "oom_score_adj"
    try:
        if int(path.read_text()) < OOM_SCORE_ADJ:
            path.write_text(str(OOM_SCORE_ADJ))
    except OSError as error:
        _note(f"the kernel may end other processes before ranks ({error})")
