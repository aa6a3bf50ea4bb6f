"""Locks of files, against processes that hold them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.core.errors import UserError
from penstock.core.host.locks import Lock, alone, machine_lock_path

HOLD = """
import sys
from pathlib import Path
from penstock.core.host.locks import Lock

lock = Lock(Path(sys.argv[1]), "somebody else")
assert lock.take()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held_elsewhere(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process holds the lock, until it is killed at the latest at the end of the block."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_lock_is_free_once_its_holder_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with held_elsewhere(path) as process, closing(Lock(path, "this one")) as lock:
        assert (lock.take(), lock.holder) == (False, "somebody else")
        process.kill()
        process.wait()
        assert (lock.take(), lock.holder) == (True, "this one")
        assert lock.take(), "it is taken once and held on to"


def test_a_released_lock_is_free(tmp_path: Path) -> None:
    with closing(Lock(tmp_path / "lock", "first")) as lock:
        assert lock.take()
    with closing(Lock(tmp_path / "lock", "second")) as lock:
        assert lock.take()


def test_two_locks_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    with closing(Lock(tmp_path / "lock", "first")) as first, closing(Lock(tmp_path / "lock", "second")) as second:
        assert first.take()
        assert not second.take()


def test_the_error_names_the_holder(tmp_path: Path) -> None:
    with alone(tmp_path / "lock", "here", "go away"), pytest.raises(UserError) as found:  # noqa: SIM117
        with alone(tmp_path / "lock", "here", "go away"):
            pass
    assert str(found.value) == f"here: is in use by process {os.getpid()}\n  remedy: go away"


def test_machines_that_share_a_home_have_separate_locks(tmp_path: Path) -> None:
    paths = [machine_lock_path({}, tmp_path, machine) for machine in ("one", "two")]
    assert paths == [tmp_path / ".local" / "state" / "penstock" / f"executor-{name}.lock" for name in ("one", "two")]
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    assert machine_lock_path(state, tmp_path, "one") == tmp_path / "state" / "penstock" / "executor-one.lock"
