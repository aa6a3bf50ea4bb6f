"""Launched ranks that take more of the host's memory than they may: how they are ended, and what is said of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from penstock.agent import memory_limit
from penstock.agent.attempt_cgroup import LEAF, PREFIX, AttemptCgroup, limited_cgroup
from penstock.agent.launch import LaunchSpec, Outcome, Ranks, launch
from penstock.agent.memory_limit import OOM_SCORE_ADJ, MemoryLimit
from penstock.agent.process_tree import tree_of
from penstock.core.units import MEBIBYTE
from tests.support.leaving import runs
from tests.support.real_cgroup import real_cgroup
from tests.support.repository import ROOT

PATIENCE_SECONDS = 120.0
NUM_RANKS = 2
LIMIT = MemoryLimit(num_bytes=NUM_RANKS * 512 * MEBIBYTE, num_ranks=NUM_RANKS)
"""PyTorch, which torchrun loads, takes some 150 MiB."""
TOO_MUCH, LITTLE = 600, 100
CHECKED_SECONDS = 3.0
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no cgroup, also on a machine that delegates one."""

    def refuse(num_bytes: int, pid: int) -> AttemptCgroup:
        raise PermissionError("nothing is delegated")

    monkeypatch.setattr(memory_limit, "limited_cgroup", refuse)


def hungry(folder: Path, mebibytes: int, behaviour: str = "itself") -> Ranks:
    """Ranks that take so much each; the first rank alone would be within the limit."""
    return launch(
        LaunchSpec(
            module="tests.support.hungry_rank",
            arguments=(str(folder), str(mebibytes), behaviour),
            num_ranks=NUM_RANKS,
            threads_per_rank=1,
            log_folder=folder / "logs",
            status_folder=folder,
            environment={"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            memory=LIMIT,
            expendable=True,
        )
    )


def ended(ranks: Ranks) -> Outcome:
    outcome = ranks.wait(PATIENCE_SECONDS)
    assert outcome is not None
    return outcome


def wait_until_taken(folder: Path, ranks: Ranks) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all((folder / f"taken-{rank}").exists() for rank in range(NUM_RANKS)):
        assert ranks.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("behaviour", ["itself", "child"])
def test_ranks_that_use_too_much_are_ended_and_the_message_says_how_much(tmp_path: Path, behaviour: str) -> None:
    ranks = hungry(tmp_path, TOO_MUCH, behaviour)
    outcome = ended(ranks)
    assert outcome.exit_code
    failure = outcome.failure
    assert failure is not None
    assert (failure.rank, failure.refused) == (None, True)
    place, _, what = failure.message.partition(": ")
    assert place == "spec.resources.memoryPerRank"
    assert what.startswith("the attempt's ranks use 1")
    assert "limit 1 GiB (memoryPerRank 512 MiB x 2 ranks)" in what
    assert "remedy: " in what
    statuses = [status for status in ranks.statuses() if status]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while any(runs(status.pid) for status in statuses):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(("mebibytes", "behaviour"), [(LITTLE, "itself"), (TOO_MUCH, "file")])
def test_ranks_within_the_limit_go_on(tmp_path: Path, mebibytes: int, behaviour: str) -> None:
    """Pages of a mapped file are the page cache's. Meanwhile the kernel would end ranks before their launcher."""
    ranks = hungry(tmp_path, mebibytes, behaviour)
    try:
        wait_until_taken(tmp_path, ranks)
        begin = time.monotonic()
        while time.monotonic() < begin + CHECKED_SECONDS:
            assert ranks.poll() is None
            time.sleep(0.05)
        scores = {int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in tree_of(ranks.pid)}
        assert min(scores) >= OOM_SCORE_ADJ
    finally:
        ranks.kill()
        ranks.wait(PATIENCE_SECONDS)


def test_the_kernel_ends_ranks_in_a_cgroup_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with real_cgroup(limited=True) as unit:
        monkeypatch.setattr(memory_limit, "limited_cgroup", lambda num_bytes, pid: limited_cgroup(num_bytes, pid, unit))
        ranks = hungry(tmp_path, TOO_MUCH, "child")
        assert (unit / f"{PREFIX}{ranks.pid}" / "memory.max").read_text().strip() == str(LIMIT.num_bytes)
        failure = ended(ranks).failure
        assert failure is not None
        assert failure.refused
        assert "the kernel ended the attempt's ranks" in failure.message
        assert not list(unit.glob(f"{PREFIX}*"))
        assert not (unit / LEAF).exists(), "nothing was in the delegated cgroup itself"


def test_ranks_that_end_well_leave_no_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with real_cgroup(limited=True) as unit:
        monkeypatch.setattr(memory_limit, "limited_cgroup", lambda num_bytes, pid: limited_cgroup(num_bytes, pid, unit))
        ranks = hungry(tmp_path, LITTLE)
        wait_until_taken(tmp_path, ranks)
        ranks.kill()
        failure = ended(ranks).failure
        assert failure is not None
        assert "was killed" in failure.message
        assert not list(unit.glob(f"{PREFIX}*"))
