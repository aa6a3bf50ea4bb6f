"""Processes are known by number and start, and only the right one is ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.lab import processes, rooms
from tools.lab.console import LabError, run, wait_until
from tools.lab.processes import Process


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as started:
        yield started
        started.kill()


def process_of(pid: int) -> Process:
    seen = processes.process(pid)
    assert seen is not None
    return seen


def test_a_process_lives_until_it_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    seen = process_of(sleeper.pid)
    assert seen.alive
    seen.kill()
    wait_until(lambda: not seen.alive, "its end", 5)  # nobody has waited for it yet
    assert sleeper.wait() == -9
    seen.kill()


def test_another_process_with_its_number_is_spared(sleeper: subprocess.Popen[bytes]) -> None:
    stranger = Process(pid=sleeper.pid, start_ticks=process_of(sleeper.pid).start_ticks + 1)
    assert not stranger.alive
    stranger.kill()
    assert sleeper.poll() is None


def test_no_process_has_a_number_that_is_too_large() -> None:
    assert processes.process(2**30) is None
    assert processes.command(2**30) == ""


def test_descendants_are_children_and_theirs() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & wait"]) as shell:
        try:
            wait_until(lambda: len(processes.descendants(shell.pid)) == 1, "the shell's child", 5)
            [child] = processes.descendants(shell.pid)
            known = {each.pid for each in processes.descendants(os.getpid())}
            assert {shell.pid, child.pid} <= known
            assert os.getpid() not in known
            child.kill()
            wait_until(lambda: not processes.descendants(shell.pid), "its end", 5)
        finally:
            shell.kill()


def test_processes_are_found_by_name_and_parent(sleeper: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: processes.command(sleeper.pid) == "sleep", "its name", 5)
    assert sleeper.pid in processes.children(os.getpid())
    here = process_of(os.getpid())
    assert sleeper.pid in {each.pid for each in processes.named(here, ["sleep"])}
    assert sleeper.pid not in {each.pid for each in processes.named(here, ["pause"])}


def test_a_long_name_is_found_though_the_kernel_cuts_it(tmp_path: Path) -> None:
    name = tmp_path / "kube-controller-manager"
    name.symlink_to("/usr/bin/sleep")
    with subprocess.Popen([name, "60"]) as started:
        here = process_of(os.getpid())
        wait_until(lambda: bool(processes.named(here, [name.name])), "the name", 5)
        assert started.pid in {each.pid for each in processes.named(here, [name.name])}
        started.kill()


def test_folders_for_rooms_are_made_once_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before stays, and so does what somebody else has put things into."""
    there, new, used = tmp_path / "there", tmp_path / "a" / "new", tmp_path / "used"
    there.mkdir()
    monkeypatch.setattr(rooms, "OWN_FOLDERS", tuple(map(str, (there, new, used))))
    note = tmp_path / "note"
    rooms.make_mountpoints(note)
    rooms.make_mountpoints(note)
    assert note.read_text().splitlines() == [str(tmp_path / "a"), str(new), str(used)]
    (used / "file").write_text("")
    rooms.remove_mountpoints(note)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there", "used"]
    rooms.remove_mountpoints(note)


def test_a_program_that_fails_is_named_with_its_last_words() -> None:
    with pytest.raises(LabError, match=r"this failed: sh -c 'echo no >&2; exit 3'\nno"):
        run("sh", "-c", "echo no >&2; exit 3")
    with pytest.raises(LabError, match="no-such-program is missing"):
        run("no-such-program")


def test_waiting_ends_with_what_was_waited_for() -> None:
    with pytest.raises(LabError, match="the impossible: not within 0 s"):
        wait_until(lambda: False, "the impossible", 0.01, 0.001)
