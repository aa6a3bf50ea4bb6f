"""Runs that are disturbed, in real processes: killed ranks, requests to stop, a killed executor. Losses stay equal."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from penstock.agent.run_state import read_state
from penstock.core.lifecycle import Phase
from penstock.core.run.folder import RunDir
from penstock.trainer.checkpoint import Checkpoint, find_checkpoints, verify
from tests.support.command import (
    EVERY,
    STEPS,
    Command,
    ended,
    kill_in_step,
    laid_out,
    losses,
    no_orphans,
    rank_status,
    tiny_job,
    wait_for_step,
    wait_until_gone,
)

NOTICED_SECONDS = 10.0


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command(tmp_path_factory.mktemp("recovery"))


@pytest.fixture(scope="module")
def undisturbed(command: Command) -> list[float]:
    """The losses of a run to which nothing happened."""
    run = laid_out(command.folder / "undisturbed")
    command("run", tiny_job(command.folder), "--run-dir", run.root)
    assert len(losses(run)) == STEPS
    return losses(run)


@pytest.mark.xdist_group("cli-recovery")
def test_a_run_goes_on_by_itself(command: Command, undisturbed: list[float]) -> None:
    """One rank is asked to stop in the first attempt, the other killed in the second."""
    run = laid_out(command.folder / "by-itself")
    with no_orphans(run):
        process = command.start("run", tiny_job(command.folder), "--run-dir", run.root)
        wait_for_step(run, 20, attempt=1)
        os.kill(rank_status(run, 0).pid, signal.SIGTERM)
        wait_for_step(run, 60, attempt=2)
        stopped = find_checkpoints(run.checkpoints)[-1]
        assert (stopped.attempt, verify(stopped.folder).step) == (1, stopped.step)
        os.kill(rank_status(run, 1).pid, signal.SIGKILL)
        _, told = ended(process, 0)
    assert "rank 1" in told
    state = read_state(run.root)
    assert (state.phase, state.attempt, state.failures) == (Phase.SUCCEEDED, 3, 1)
    assert losses(run) == undisturbed


@pytest.mark.xdist_group("cli-recovery")
@pytest.mark.long
def test_a_run_without_retries_is_resumed_by_hand(command: Command, undisturbed: list[float]) -> None:
    """Killed, tried with corrupt checkpoints, resumed from the older one, interrupted, and resumed to its end."""
    run = laid_out(command.folder / "by-hand")
    job = tiny_job(command.folder, runPolicy={"backoffLimit": 0}, checkpoint={"everySteps": EVERY // 2, "keep": 3})
    with no_orphans(run):
        process = command.start("run", job, "--run-dir", run.root)
        wait_for_step(run, EVERY + 5, attempt=1)
        kill_in_step(run, 1)
        _, told = ended(process, 1, seconds=NOTICED_SECONDS)
        assert "rank 1" in told
        assert "in step" in told
        assert f"penstock resume {run.root}" in told

        _refuses_to_go_on_without_a_whole_checkpoint(command, run.root, undisturbed)
        newest, older, *_ = find_checkpoints(run.checkpoints)
        damaged = _spoil(newest)

        process = command.start("resume", run.root)
        wait_for_step(run, EVERY + 20, attempt=2)
        process.send_signal(signal.SIGINT)
        _, told = ended(process, 128 + signal.SIGINT)
        assert f"checkpoint a1/step-{newest.step} is corrupt: {damaged} is not what was written" in told
        assert f"goes on from step {older.step}" in told
        assert f"penstock resume {run.root}" in told
        assert find_checkpoints(run.checkpoints)[0].attempt == 2

        command("resume", run.root)
    assert read_state(run.root).attempt == 3
    assert losses(run) == undisturbed
    attempts = [entry.attempt for entry in run.read_metrics()]
    assert attempts == sorted(attempts)
    assert (attempts.index(2), set(attempts)) == (older.step, {1, 2, 3})


def _refuses_to_go_on_without_a_whole_checkpoint(command: Command, root: Path, undisturbed: list[float]) -> None:
    """Until its remedy is followed."""
    run = RunDir(shutil.copytree(root, root.with_name("all-corrupt")))
    damaged = {found.step: _spoil(found) for found in find_checkpoints(run.checkpoints)}
    _, told = command("resume", run.root, code=2)
    assert all(f"a1/step-{step} is corrupt: {name}" in told for step, name in damaged.items())
    assert f"remove {run.checkpoints}" in told
    assert "Traceback" not in told
    shutil.rmtree(run.checkpoints)
    command("resume", run.root)
    assert losses(run) == undisturbed


def _spoil(checkpoint: Checkpoint) -> str:
    """Damage one of its files, and name it."""
    path = min(checkpoint.folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    return path.name


@pytest.mark.xdist_group("cli-recovery")
def test_ranks_do_not_outlive_a_killed_executor(command: Command) -> None:
    run = laid_out(command.folder / "killed")
    process = command.start("run", tiny_job(command.folder), "--run-dir", run.root)
    wait_for_step(run, 5, attempt=1)
    process.kill()
    process.communicate()
    wait_until_gone(run)
    assert len(losses(run)) < STEPS
    assert json.loads((run.root / "state.json").read_text())["phase"] == "Running"
