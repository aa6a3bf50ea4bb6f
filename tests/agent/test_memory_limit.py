"""The limit on what ranks use of the host's memory: what counts, how often it is read, and what is said."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.agent import memory_limit
from penstock.agent.attempt_cgroup import AttemptCgroup
from penstock.agent.memory_limit import (
    MOST_SHARE,
    OOM_SCORE_ADJ,
    PERIOD_SECONDS,
    PROC,
    UNLIMITED,
    KernelLimit,
    MemoryLimit,
    MemoryWatch,
    counted_bytes,
    enforced,
    proportional_bytes,
    raise_oom_score,
)
from penstock.agent.process_tree import tree_of
from penstock.core.capacity import demand_of
from penstock.core.errors import UserError
from penstock.core.job import Device, ResourcesSpec
from penstock.core.units import MEBIBYTE
from penstock.operator.podspec import AGENT_BYTES
from penstock.operator.podspec import resources as pod_resources
from tests.support.local_run import local_job

GIBIBYTE = 2**30
LIMIT = MemoryLimit(num_bytes=8 * GIBIBYTE, num_ranks=2)


# The limit


def test_the_limit_is_the_job_s_and_the_ranks_share_it() -> None:
    resources = ResourcesSpec(ranks=4, memory_per_rank=3 * GIBIBYTE)
    assert MemoryLimit.of(resources, 4) == MemoryLimit(num_bytes=12 * GIBIBYTE, num_ranks=4)
    assert MemoryLimit.of(resources, 2) == MemoryLimit(num_bytes=6 * GIBIBYTE, num_ranks=2), "a plan on fewer"


def test_no_field_limits_the_host_s_memory_on_cuda() -> None:
    assert MemoryLimit.of(ResourcesSpec(device=Device.CUDA, memory_per_rank=1), 2) is None
    assert enforced(None, os.getpid()) is UNLIMITED


def test_a_mistake_names_use_limit_and_origin_and_what_to_do() -> None:
    mistake = LIMIT.exceeded(round(9.1 * GIBIBYTE))
    assert mistake.where == "spec.resources.memoryPerRank"
    assert mistake.what == "the attempt's ranks use 9.1 GiB, limit 8 GiB (memoryPerRank 4 GiB x 2 ranks)"
    assert "write more than 4660Mi" in mistake.remedy
    assert "another attempt would use as much" in mistake.remedy


def test_a_mistake_of_few_bytes_gives_bytes() -> None:
    mistake = MemoryLimit(num_bytes=GIBIBYTE, num_ranks=1).exceeded(GIBIBYTE + 1)
    expected = "the attempt's ranks use 1,073,741,825 bytes, limit 1,073,741,824 bytes (memoryPerRank 1 GiB x 1 rank)"
    assert mistake.what == expected
    assert "more than 1025Mi" in mistake.remedy


def test_a_mistake_that_the_kernel_noticed_names_the_limit() -> None:
    mistake = LIMIT.ended_by_kernel()
    assert "the kernel ended the attempt's ranks" in mistake.what
    assert "8 GiB (memoryPerRank 4 GiB x 2 ranks)" in mistake.what
    assert mistake.where == "spec.resources.memoryPerRank"
    assert mistake.remedy


def test_admission_and_pods_count_the_memory_that_is_enforced() -> None:
    """A service admits by it, and the kubelet enforces it, together with what a pod's agent takes."""
    job = local_job(resources={"ranks": 4, "memoryPerRank": "3Gi"}, kubernetes={"ranksPerPod": 2})
    limits = {n: MemoryLimit.of(job.spec.resources, n) for n in (2, 4)}
    assert limits == {n: MemoryLimit(num_bytes=n * 3 * GIBIBYTE, num_ranks=n) for n in (2, 4)}
    assert demand_of(job.spec).memory_bytes == 12 * GIBIBYTE
    assert int(pod_resources(job)["memory"]) - AGENT_BYTES == 6 * GIBIBYTE


# The watch


@dataclass
class FakeMachine:
    """Processes with counted and proportional bytes; readings of the latter take time."""

    processes: dict[str, tuple[int, int]] = field(default_factory=dict)
    now: float = 0.0
    spent: float = 0.0
    counted_cost: float = 0.0
    proportional_cost: float = 0.0
    readings: list[str] = field(default_factory=list)

    def watch(self, limit: MemoryLimit = LIMIT) -> MemoryWatch:
        return MemoryWatch(
            limit,
            lambda: map(Path, self.processes),
            counted=self._reader(0, "counted"),
            proportional=self._reader(1, "proportional"),
            clock=lambda: self.now,
            spent=lambda: self.spent,
        )

    def _reader(self, index: int, name: str) -> Callable[[Path], int]:
        def read(process: Path) -> int:
            self.readings.append(name)
            self.spent += self.proportional_cost if index else self.counted_cost
            return self.processes[str(process)][index]

        return read

    def due(self, watch: MemoryWatch) -> float:
        """Seconds until the watch reads again."""
        before, begin = len(self.readings), self.now
        while len(self.readings) == before:
            self.now += 0.25
            watch.mistake()
        return self.now - begin


def test_use_is_read_every_half_second() -> None:
    machine = FakeMachine({"1": (GIBIBYTE, GIBIBYTE)})
    watch = machine.watch()
    assert watch.mistake() is None
    assert machine.readings == ["counted"]
    assert [machine.due(watch) for _ in range(3)] == [PERIOD_SECONDS] * 3


def test_what_ranks_share_counts_once() -> None:
    """Counters of both have it, which makes 10 GiB, and both together use 8 GiB."""
    machine = FakeMachine({"1": (5 * GIBIBYTE, 4 * GIBIBYTE), "2": (5 * GIBIBYTE, 4 * GIBIBYTE)})
    watch = machine.watch()
    assert watch.mistake() is None
    assert machine.readings == ["counted"] * 2 + ["proportional"] * 2
    machine.processes["2"] = (5 * GIBIBYTE, 4 * GIBIBYTE + MEBIBYTE)
    machine.now += PERIOD_SECONDS
    mistake = watch.mistake()
    assert mistake is not None
    assert "use 8,590,983,168 bytes, limit 8,589,934,592 bytes" in mistake.what


def near_the_limit() -> FakeMachine:
    """16 ranks that use 7.75 GiB of 8; counters have 0.5 GiB more. A walk takes 80 ms."""
    rank = (8 * GIBIBYTE + GIBIBYTE // 4) // 16, (8 * GIBIBYTE - GIBIBYTE // 4) // 16
    return FakeMachine({str(number): rank for number in range(16)}, proportional_cost=0.005)


def test_page_tables_are_walked_seldom_and_counters_read_often() -> None:
    machine = near_the_limit()
    watch = machine.watch()
    begin = machine.now
    while machine.now < begin + 80:
        assert watch.mistake() is None
        machine.now += 0.25
    assert machine.readings.count("counted") == 16 * 80 / PERIOD_SECONDS
    walks = machine.readings.count("proportional") / 16
    assert 80 / 9 <= walks <= 80 / 8, "a walk takes 80 ms, and so the pause 8 s"


def test_what_ranks_take_near_the_limit_is_noticed_in_half_a_second() -> None:
    machine = near_the_limit()
    watch = machine.watch()
    assert watch.mistake() is None
    counted, own = machine.processes["3"]
    machine.processes["3"] = counted + GIBIBYTE // 2, own + GIBIBYTE // 2
    machine.now += PERIOD_SECONDS
    mistake = watch.mistake()
    assert mistake is not None
    assert "use 8.25 GiB, limit 8 GiB" in mistake.what


def test_a_shared_page_that_becomes_a_process_s_own_is_noticed_later() -> None:
    """The counters stay, and the page tables show it when they are due."""
    machine = near_the_limit()
    watch = machine.watch()
    assert watch.mistake() is None
    machine.processes = {number: (counted, counted) for number, (counted, _) in machine.processes.items()}
    machine.now += PERIOD_SECONDS
    assert watch.mistake() is None
    machine.now += 16 * 0.005 / MOST_SHARE
    assert watch.mistake() is not None


def test_counters_that_take_long_are_read_less_often() -> None:
    """As with thousands of processes."""
    machine = FakeMachine({str(number): (1, 1) for number in range(16)}, counted_cost=0.001)
    watch = machine.watch()
    watch.mistake()
    assert machine.due(watch) == 1.75, "the first look after 1.6 s"


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=8),
    st.integers(1, 4 * 10**6),
)
def test_a_mistake_is_made_exactly_if_the_proportional_sum_exceeds_the_limit(
    processes: list[tuple[int, int]], limit: int
) -> None:
    """Counters are no less than the proportional size."""
    machine = FakeMachine({str(n): (own + shared, own) for n, (own, shared) in enumerate(processes)})
    mistake = machine.watch(MemoryLimit(num_bytes=limit, num_ranks=1)).mistake()
    used = sum(own for own, _ in processes)
    assert (mistake is not None) == (used > limit)


def test_processes_that_may_not_be_read_are_not_limited_and_that_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(process: Path) -> int:
        raise PermissionError(13, "Permission denied", str(process))

    memory_limit._note.cache_clear()
    times = iter(range(100))
    watches = [MemoryWatch(LIMIT, lambda: [Path("7")], counted=refuse, clock=lambda: next(times)) for _ in range(2)]
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert [watch.mistake() for watch in watches] == [None, None]
    assert [record.message for record in caplog.records] == [
        "the memory of ranks is not limited: [Errno 13] Permission denied: '7'"
    ]


# What the kernel says


STATUS = "Name:\tpython\nVmRSS:\t 900 kB\nRssAnon:\t 100 kB\nRssFile:\t 700 kB\nRssShmem:\t 20 kB\nVmSwap:\t 3 kB\n"
ROLLUP = """\
55dd05366000-7fff79c11000 ---p 00000000 00:00 0                          [rollup]
Rss:                1772 kB
Pss:                 700 kB
Pss_Anon:            116 kB
Pss_File:            554 kB
Pss_Shmem:            30 kB
Anonymous:           116 kB
Swap:                  9 kB
SwapPss:               4 kB
"""


def test_anonymous_shared_and_swapped_memory_count(tmp_path: Path) -> None:
    (tmp_path / "status").write_text(STATUS)
    (tmp_path / "smaps_rollup").write_text(ROLLUP)
    assert counted_bytes(tmp_path) == 123 * 1024
    assert proportional_bytes(tmp_path) == 150 * 1024


def test_a_process_that_has_ended_uses_nothing(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nState:\tZ (zombie)\n")
    assert (counted_bytes(tmp_path), proportional_bytes(tmp_path)) == (0, 0)


SHARING = """
import os, signal, sys
held = bytearray(b"x") * (64 * 2**20)
for _ in range(2):
    if os.fork() == 0:
        signal.pause()
print("held", flush=True)
signal.pause()
"""
MAPPING = """
import mmap, signal, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
sum(mapped[::mmap.PAGESIZE])
print("held", flush=True)
signal.pause()
"""
HELD_BYTES = 64 * MEBIBYTE


@contextlib.contextmanager
def running(script: str, *arguments: str) -> Iterator[list[Path]]:
    """A process and its children, once it holds what it is to hold; their folders in /proc."""
    command = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"held\n"
            yield [PROC / str(pid) for pid in tree_of(process.pid)]
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_pages_that_forked_processes_share_count_once() -> None:
    with running(SHARING) as processes:
        assert len(processes) == 3
        used = sum(map(proportional_bytes, processes))
        assert HELD_BYTES <= used < 1.5 * HELD_BYTES
        assert sum(map(counted_bytes, processes)) >= 3 * HELD_BYTES


def test_pages_of_files_do_not_count(tmp_path: Path) -> None:
    """The kernel drops them when it needs memory."""
    (tmp_path / "tokens").write_bytes(bytes(HELD_BYTES))
    with running(MAPPING, str(tmp_path / "tokens")) as (process,):
        assert max(counted_bytes(process), proportional_bytes(process)) < HELD_BYTES


# Before the service


def oom_score_adj(pid: int) -> int:
    return int((PROC / str(pid) / "oom_score_adj").read_text())


def test_the_kernel_ends_ranks_before_what_started_them() -> None:
    own = oom_score_adj(os.getpid())
    with running(SHARING) as processes:
        pid = int(processes[0].name)
        raise_oom_score(pid)
        assert oom_score_adj(pid) == max(own, OOM_SCORE_ADJ)
    assert oom_score_adj(os.getpid()) == own


def test_a_higher_score_stays() -> None:
    with running(SHARING) as processes:
        pid = int(processes[0].name)
        (processes[0] / "oom_score_adj").write_text("900")
        raise_oom_score(pid)
        assert oom_score_adj(pid) == 900


def test_a_process_that_has_ended_has_no_score() -> None:
    with running(SHARING) as processes:
        pass
    raise_oom_score(int(processes[0].name))


# By which means


def test_without_a_cgroup_memory_is_watched_and_that_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(num_bytes: int, pid: int) -> AttemptCgroup:
        raise PermissionError("/sys/fs/cgroup is not delegated to penstock")

    monkeypatch.setattr(memory_limit, "limited_cgroup", refuse)
    memory_limit._note.cache_clear()
    with caplog.at_level(logging.INFO):
        assert all(isinstance(enforced(LIMIT, os.getpid()), MemoryWatch) for _ in range(2))
    assert [record.message for record in caplog.records] == [
        "ranks have no cgroup (/sys/fs/cgroup is not delegated to penstock); their memory is read every 0.5 s instead"
    ]


def test_with_a_cgroup_the_kernel_limits_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cgroup = AttemptCgroup(tmp_path / "attempt")
    monkeypatch.setattr(memory_limit, "limited_cgroup", lambda num_bytes, pid: cgroup)
    limited = enforced(LIMIT, os.getpid())
    assert isinstance(limited, KernelLimit)
    assert limited.mistake() is None
    (cgroup.path / "memory.events").write_text("oom 1\noom_kill 1\noom_group_kill 1\n")
    assert isinstance(limited.mistake(), UserError)
    (cgroup.path / "memory.events").unlink()
    monkeypatch.setattr("penstock.agent.attempt_cgroup.REMOVAL_SECONDS", 0.0)
    limited.close()
    assert limited.mistake() is None
