"""Cgroups of attempts: where they may be made, how processes come into them, and what is left of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.agent.attempt_cgroup import LEAF, PREFIX, AttemptCgroup, delegated_cgroup, limited_cgroup
from tests.support.real_cgroup import real_cgroup

SLEEPING = [sys.executable, "-c", "import signal; signal.pause()"]
FORKING = "input(); import os, signal; print(os.fork(), flush=True); signal.pause()"


# A hierarchy of plain files


@pytest.fixture
def delegated(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The folders that are delegated."""
    folders: set[Path] = set()

    def attribute(path: Path, name: str) -> bytes:
        if name == "user.delegate" and path in folders:
            return b"1"
        raise OSError(61, "No data available")

    monkeypatch.setattr(os, "getxattr", attribute)
    return folders


@pytest.fixture
def unit(tmp_path: Path, delegated: set[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A delegated cgroup that holds this process; to remove one removes its files, as in a kernel."""
    monkeypatch.setattr(Path, "rmdir", shutil.rmtree)
    unit = cgroup(tmp_path / "cgroups" / "penstock.service", procs=f"{os.getpid()}\n")
    delegated.add(unit)
    return unit


def cgroup(path: Path, *, controllers: str = "cpu memory", procs: str = "") -> Path:
    path.mkdir(parents=True)
    (path / "cgroup.controllers").write_text(controllers)
    (path / "cgroup.subtree_control").write_text("")
    (path / "cgroup.procs").write_text(procs)
    return path


def process_in(folder: Path, within: str, mounts: str) -> Path:
    """The folder in /proc of a process in that cgroup."""
    folder.mkdir()
    (folder / "cgroup").write_text(f"12:memory:/elsewhere\n0::{within}\n")
    (folder / "mountinfo").write_text(f"22 1 8:1 / / rw - ext4 /dev/sda rw\n{mounts}\n")
    return folder


def mounted(folder: Path, root: str = "/", kind: str = "cgroup2") -> str:
    return f"30 22 0:26 {root} {folder} rw,nosuid shared:4 - {kind} cgroup2 rw,nsdelegate"


def test_the_own_cgroup_is_taken_if_it_is_delegated(tmp_path: Path, unit: Path) -> None:
    process = process_in(tmp_path / "1", "/penstock.service", mounted(unit.parent))
    assert delegated_cgroup(process) == unit


def test_the_parent_is_taken_by_processes_that_were_moved(tmp_path: Path, unit: Path) -> None:
    process = process_in(tmp_path / "1", f"/penstock.service/{LEAF}", mounted(unit.parent))
    assert delegated_cgroup(process) == unit


def test_a_mount_may_begin_within_the_hierarchy(tmp_path: Path, unit: Path) -> None:
    process = process_in(tmp_path / "1", "/system.slice/penstock.service", mounted(unit.parent, "/system.slice"))
    assert delegated_cgroup(process) == unit


def test_what_is_not_delegated_is_left_alone(tmp_path: Path, unit: Path, delegated: set[Path]) -> None:
    """Also where this process may write."""
    delegated.clear()
    process = process_in(tmp_path / "1", "/penstock.service", mounted(unit.parent))
    with pytest.raises(PermissionError, match="is not delegated"):
        delegated_cgroup(process)


@pytest.mark.parametrize("within", ["/../other", "/elsewhere"])
def test_a_cgroup_that_is_not_mounted_here_is_none(tmp_path: Path, unit: Path, within: str) -> None:
    process = process_in(tmp_path / "1", within, mounted(unit.parent, "/system.slice"))
    with pytest.raises(FileNotFoundError, match="no cgroup v2"):
        delegated_cgroup(process)


def test_a_machine_with_cgroup_v1_has_none(tmp_path: Path, unit: Path) -> None:
    process = process_in(tmp_path / "1", "/penstock.service", mounted(unit.parent, kind="cgroup"))
    with pytest.raises(FileNotFoundError, match="no cgroup v2"):
        delegated_cgroup(process)


def test_a_delegated_cgroup_without_the_memory_controller_is_none(tmp_path: Path, unit: Path) -> None:
    (unit / "cgroup.controllers").write_text("hugetlb pids")
    process = process_in(tmp_path / "1", "/penstock.service", mounted(unit.parent))
    with pytest.raises(FileNotFoundError, match="no memory controller"):
        delegated_cgroup(process)


def test_an_attempt_s_cgroup_is_limited_and_holds_its_first_process(unit: Path) -> None:
    made = limited_cgroup(8 * 2**30, 4711, unit)
    assert made.path == unit / f"{PREFIX}4711"
    written = {path.name: path.read_text() for path in made.path.iterdir()}
    assert written == {
        "memory.max": str(8 * 2**30),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "cgroup.procs": "4711",
    }
    assert not made.has_killed()
    made.remove()
    assert not made.path.exists()


def test_processes_of_the_delegated_one_move_to_its_leaf_first(unit: Path) -> None:
    limited_cgroup(1, 4711, unit)
    assert (unit / LEAF / "cgroup.procs").read_text() == str(os.getpid())
    assert (unit / "cgroup.subtree_control").read_text() == "+memory"


def test_where_children_are_limited_already_nothing_moves(unit: Path) -> None:
    (unit / "cgroup.subtree_control").write_text("cpu memory")
    limited_cgroup(1, 4711, unit)
    assert not (unit / LEAF).exists()


def test_one_that_cannot_be_limited_is_removed(unit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(cgroup: AttemptCgroup, pid: int) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(AttemptCgroup, "add", refuse)
    with pytest.raises(PermissionError):
        limited_cgroup(1, 4711, unit)
    assert not list(unit.glob(f"{PREFIX}*"))


def test_what_a_killed_supervisor_left_is_removed(unit: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, alive, own = (unit / f"{PREFIX}{pid}" for pid in (ended.pid, os.getpid(), 4711))
    for path in (left, alive, own):
        path.mkdir()
    assert limited_cgroup(1, 4711, unit).path == own
    assert (left.exists(), alive.exists(), own.exists()) == (False, True, True)


def test_the_kernel_s_count_says_whether_it_ended_any(unit: Path) -> None:
    made = limited_cgroup(1, 4711, unit)
    for killed in (0, 3):
        (made.path / "memory.events").write_text(f"low 0\nmax 12\noom 3\noom_kill {killed}\n")
        assert made.has_killed() is (killed > 0)


# A real hierarchy (with ranks, and with limits: tests/agent/test_launch_memory.py)


def test_a_real_cgroup_holds_what_its_processes_start_and_ends_it_with_it() -> None:
    with real_cgroup() as unit:
        made = AttemptCgroup(unit / f"{PREFIX}1")
        with subprocess.Popen([sys.executable, "-c", FORKING], stdin=-1, stdout=-1, text=True) as process:
            made.add(process.pid)
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()
            assert len((made.path / "cgroup.procs").read_text().split()) == 2
            made.remove()
            assert process.wait() == -signal.SIGKILL
        assert not made.path.exists()


def test_a_real_cgroup_is_delegated_by_its_attribute() -> None:
    with real_cgroup() as unit, subprocess.Popen(SLEEPING) as process:
        (unit / "cgroup.procs").write_text(str(process.pid))
        with pytest.raises(PermissionError, match="is not delegated"):
            delegated_cgroup(Path(f"/proc/{process.pid}"))
        os.setxattr(unit, "trusted.delegate", b"1")
        if "memory" in (unit / "cgroup.controllers").read_text().split():
            assert delegated_cgroup(Path(f"/proc/{process.pid}")) == unit
        else:
            with pytest.raises(FileNotFoundError, match="no memory controller"):
                delegated_cgroup(Path(f"/proc/{process.pid}"))
        process.kill()
