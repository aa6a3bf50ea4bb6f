"""state.json and the lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.agent.run_state import PhaseChange, RunState, read_state, state_path, write_state
from penstock.core.errors import UserError
from penstock.core.lifecycle import TRANSITIONS, IllegalTransitionError, Phase
from penstock.core.run.lock import locked

phases = st.sampled_from(Phase)
times = st.none() | st.floats(0, 2e9)
changes = st.builds(PhaseChange, phase=phases, at=st.floats(0, 2e9), reason=st.text(), message=st.text())
states = st.builds(
    RunState,
    phase=phases,
    attempt=st.integers(0, 99),
    failures=st.integers(0, 9),
    message=st.text(),
    started_at=times,
    failed_at=times,
    finished_at=times,
    history=st.lists(changes, max_size=3).map(tuple),
)


@given(states)
def test_a_state_survives_its_file(state: RunState) -> None:
    assert RunState.from_manifest(json.loads(json.dumps(state.to_manifest()))) == state


@given(states, changes)
def test_only_legal_changes_are_made(state: RunState, change: PhaseChange) -> None:
    if change.phase not in TRANSITIONS[state.phase]:
        with pytest.raises(IllegalTransitionError):
            state.entered(change)
        return
    after = state.entered(change)
    assert (after.phase, after.message, after.history) == (change.phase, change.message, (*state.history, change))
    assert after.finished_at == (change.at if change.phase.terminal else None)
    assert (after.attempt, after.failures) == (state.attempt, state.failures)


@given(states)
def test_a_new_life_keeps_the_number_of_attempts(state: RunState) -> None:
    again = state.restarted()
    assert (again.phase, again.attempt, again.failures) == (Phase.PENDING, state.attempt, 0)
    assert again.started_at is None
    assert again.history == state.history


def test_a_run_that_never_started_is_pending(tmp_path: Path) -> None:
    assert read_state(tmp_path) == RunState()


def test_attempts_are_found_without_the_file(tmp_path: Path) -> None:
    for name in ("a1", "a12", "other"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert read_state(tmp_path).attempt == 12


def test_what_was_written_is_read(tmp_path: Path) -> None:
    state = RunState(phase=Phase.RUNNING, attempt=3, failures=2, started_at=12.5)
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"], "nothing half-written stays"


@pytest.mark.parametrize("content", ["", "{", '{"phase": "Sleeping"}', '{"phases": 1}', "[]", "[" * 10**5])
def test_a_corrupt_file_is_named(tmp_path: Path, content: str) -> None:
    state_path(tmp_path).write_text(content)
    with pytest.raises(UserError) as found:
        read_state(tmp_path)
    assert found.value.where == str(state_path(tmp_path))
    assert "delete the file" in found.value.remedy


def test_the_lock_keeps_a_second_executor_out(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UserError) as found, locked(tmp_path):
        pass
    assert str(os.getpid()) in found.value.what
    with locked(tmp_path):
        pass


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib; from penstock.core.run.lock import locked\n"
        "with locked(pathlib.Path(sys.argv[1])): os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == 9
    with locked(tmp_path):
        pass


def test_a_state_is_on_the_disk_before_it_takes_the_place_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves the one or the other, whole; and the folder knows the new name on return."""
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        sync(descriptor)
        done.append("folder" if Path(f"/proc/self/fd/{descriptor}").readlink() == tmp_path else "file")

    def note_replace(self: Path, target: Path) -> Path:
        done.append("replaced")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    write_state(tmp_path, RunState(attempt=3))
    assert done == ["file", "replaced", "folder"]
    assert read_state(tmp_path).attempt == 3
