"""What is started during a block ends with it, anyone who left it behind; what was there before stays."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.agent.process_tree import offspring_ended
from tests.support.leaving import ended_after, leave_behind, runs

SLEEPING = [sys.executable, "-c", "import signal; signal.pause()"]


def test_what_was_forked_twice_ends_with_the_block(tmp_path: Path) -> None:
    left: list[int] = []
    with ended_after(left):
        with offspring_ended():
            left += [leave_behind(tmp_path), leave_behind(tmp_path)]
            assert all(map(runs, left))
        assert not any(map(runs, left))


def test_children_end_with_the_block() -> None:
    with offspring_ended():
        child = subprocess.Popen(SLEEPING)
    assert not runs(child.pid)
    child.wait()


def test_what_was_there_before_stays() -> None:
    with subprocess.Popen(SLEEPING) as before:
        with offspring_ended():
            pass
        assert before.poll() is None
        before.kill()


def test_it_ends_whatever_happened_in_the_block(tmp_path: Path) -> None:
    left: list[int] = []

    def fail() -> None:
        with offspring_ended():
            left.append(leave_behind(tmp_path))
            raise OSError("no space is left")

    with ended_after(left):
        with pytest.raises(OSError, match="no space"):
            fail()
        assert not any(map(runs, left))


def test_afterwards_orphans_are_somebody_else_s(tmp_path: Path) -> None:
    left: list[int] = []
    with ended_after(left):
        with offspring_ended():
            pass
        left.append(leave_behind(tmp_path))
        with offspring_ended():
            pass
        assert all(map(runs, left))
