"""What is started during a block ends with it, anyone who left it behind; what was there before stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.agent.process_tree import offspring_ended, tree_of
from tests.support.leaving import ended_after, leave_behind, runs

SLEEPING = [sys.executable, "-c", "import signal; signal.pause()"]
PATIENCE_SECONDS = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


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


FAMILY = """
import os, signal
if os.fork() == 0:
    if os.fork() == 0:
        signal.pause()
    os.setsid()
    signal.pause()
if os.fork() == 0:
    print("forked", flush=True)
    signal.pause()
signal.pause()
"""


def test_a_tree_is_a_process_with_its_descendants_whatever_their_session() -> None:
    with offspring_ended():
        child = subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE)
        other = subprocess.Popen(SLEEPING)
        assert child.stdout is not None
        child.stdout.readline()
        wait_until(lambda: len(tree_of(child.pid)) == 4)
        assert child.pid in tree_of(child.pid)
        assert other.pid not in tree_of(child.pid)
        assert tree_of(child.pid) | {other.pid} <= tree_of(os.getpid())
    child.wait()
    other.wait()
    child.stdout.close()


def test_a_process_that_has_ended_is_a_tree_of_its_own() -> None:
    """So that its folder in /proc may be looked for, and not found."""
    child = subprocess.Popen(["true"])
    child.wait()
    assert tree_of(child.pid) == {child.pid}
