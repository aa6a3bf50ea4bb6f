"""A rank's place in its Program, as another process reads it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

from penstock.core.run.rank_status import BETWEEN_STEPS, State, StatusFile, read_status, status_path

ACTIONS = ("0F0.0", "0SEND_F0.0", "0STEP")


def test_life_of_a_rank(tmp_path: Path) -> None:
    path = status_path(tmp_path, 3)
    assert read_status(path) is None
    status = StatusFile(path, pid=42)
    seen = read_status(path)
    assert seen is not None
    assert (seen.pid, seen.state, seen.step, seen.action) == (42, State.STARTING, BETWEEN_STEPS, "")
    status.start(ACTIONS)
    status.cursor[0] = 7
    status.cursor[1] = 1
    seen = read_status(path)
    assert seen is not None
    assert (seen.state, seen.step, seen.action, seen.error) == (State.RUNNING, 7, "0SEND_F0.0", "")
    status.cursor[1] = BETWEEN_STEPS
    status.finish(now_ns=123)
    seen = read_status(path)
    assert seen is not None
    assert (seen.state, seen.step, seen.action, seen.ended_ns) == (State.DONE, 7, "", 123)


def test_a_failure_says_why_and_a_new_life_forgets_it(tmp_path: Path) -> None:
    path = status_path(tmp_path, 0)
    StatusFile(path, pid=1).fail("it rained", now_ns=5)
    seen = read_status(path)
    assert seen is not None
    assert (seen.state, seen.error, seen.ended_ns) == (State.FAILED, "it rained", 5)
    StatusFile(path, pid=2).fail("no umbrella", now_ns=6, refused=True)
    seen = read_status(path)
    assert seen is not None
    assert (seen.state, seen.error) == (State.REFUSED, "no umbrella")
    StatusFile(path, pid=3)
    seen = read_status(path)
    assert seen is not None
    assert (seen.pid, seen.state, seen.error) == (3, State.STARTING, "")


def test_a_truncated_file_is_not_a_status(tmp_path: Path) -> None:
    path = status_path(tmp_path, 0)
    path.write_bytes(b"half")
    assert read_status(path) is None


def _die_at_the_second_action(path: Path) -> None:
    status = StatusFile(path, os.getpid())
    status.start(ACTIONS)
    status.cursor[0] = 11
    status.cursor[1] = 1
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_status_outlives_a_killed_rank(tmp_path: Path) -> None:
    path = status_path(tmp_path, 0)
    process = multiprocessing.get_context("spawn").Process(target=_die_at_the_second_action, args=(path,))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    seen = read_status(path)
    assert seen is not None
    assert (seen.pid, seen.state, seen.step, seen.action) == (process.pid, State.RUNNING, 11, "0SEND_F0.0")


def test_the_actions_of_another_plan_replace_those_before(tmp_path: Path) -> None:
    path = status_path(tmp_path, 0)
    status = StatusFile(path, pid=42)
    for actions in (ACTIONS, ("0W12.3", "0B1.1"), (*ACTIONS, "0WAIT_SEND_F10.10")):
        status.start(actions)
        between = read_status(path)
        assert between is not None
        assert (between.state, between.action) == (State.RUNNING, "")
        for index, action in enumerate(actions):
            status.cursor[1] = index
            seen = read_status(path)
            assert seen is not None
            assert seen.action == action
