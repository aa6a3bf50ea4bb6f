"""Processes are identified by PID and start time, and only the right one is killed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.lab import machines, processes
from tools.lab.console import LabError, run, wait_until
from tools.lab.processes import Process


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


def process_of(pid: int) -> Process:
    process = processes.process(pid)
    assert process is not None
    return process


def test_a_process_is_alive_until_it_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    process = process_of(sleeper.pid)
    assert process.alive
    process.kill()
    wait_until(lambda: not process.alive, "its end", 5)  # it is a zombie: its exit status was not read yet
    assert sleeper.wait() == -9
    process.kill()


def test_a_process_with_a_reused_pid_is_not_killed(sleeper: subprocess.Popen[bytes]) -> None:
    other = Process(pid=sleeper.pid, start_ticks=process_of(sleeper.pid).start_ticks + 1)
    assert not other.alive
    other.kill()
    assert sleeper.poll() is None


def test_there_is_no_process_with_a_pid_beyond_the_maximum() -> None:
    assert processes.process(2**30) is None
    assert processes.command(2**30) == ""


def test_descendants_include_children_of_children() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as shell:
        try:
            wait_until(lambda: len(processes.descendants(shell.pid)) == 1, "the shell's child", 5)
            [child] = processes.descendants(shell.pid)
            descendants = {descendant.pid for descendant in processes.descendants(os.getpid())}
            assert {shell.pid, child.pid} <= descendants
            assert os.getpid() not in descendants
            child.kill()
            wait_until(lambda: not processes.descendants(shell.pid), "its end", 5)
        finally:
            shell.kill()


def test_processes_are_found_by_name_and_parent(sleeper: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: processes.command(sleeper.pid) == "sleep", "its name", 5)
    assert sleeper.pid in processes.children(os.getpid())
    own_process = process_of(os.getpid())
    assert sleeper.pid in {process.pid for process in processes.find_by_name(own_process, ["sleep"])}
    assert sleeper.pid not in {process.pid for process in processes.find_by_name(own_process, ["pause"])}


def test_a_long_name_is_found_although_the_kernel_truncates_it(tmp_path: Path) -> None:
    name = tmp_path / "kube-controller-manager"
    name.symlink_to("/usr/bin/sleep")
    with subprocess.Popen([name, "60"]) as child:
        own_process = process_of(os.getpid())
        wait_until(lambda: bool(processes.find_by_name(own_process, [name.name])), "the name", 5)
        assert child.pid in {process.pid for process in processes.find_by_name(own_process, [name.name])}
        child.kill()


def test_mount_points_are_created_once_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fothers that existed before, or that have files of other programs, are not removed."""
    existing, new, used = tmp_path / "existing", tmp_path / "a" / "new", tmp_path / "used"
    existing.mkdir()
    monkeypatch.setattr(machines, "PRIVATE_FOLDERS", tuple(map(str, (existing, new, used))))
    record = tmp_path / "record"
    machines.make_mountpoints(record)
    machines.make_mountpoints(record)
    assert record.read_text().splitlines() == [str(tmp_path / "a"), str(new), str(used)]
    (used / "file").write_text("")
    machines.remove_mountpoints(record)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["existing", "used"]
    machines.remove_mountpoints(record)


def test_the_error_of_a_failed_program_has_its_command_and_output() -> None:
    with pytest.raises(LabError, match=r"command failed: sh -c 'echo no >&2; exit 3'\nno"):
        run("sh", "-c", "echo no >&2; exit 3")
    with pytest.raises(LabError, match="no-such-program is missing"):
        run("no-such-program")


def test_the_error_of_a_timeout_names_the_condition() -> None:
    with pytest.raises(LabError, match=r"the impossible: timed out after 0\.01 s"):
        wait_until(lambda: False, "the impossible", 0.01, 0.001)
