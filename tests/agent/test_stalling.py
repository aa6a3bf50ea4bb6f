"""Silence is measured from the last step, by the rule of the life cycle."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.agent.stalling import RankSteps, stop_seconds
from penstock.core.lifecycle import stall_seconds
from penstock.core.run.rank_status import BETWEEN_STEPS, StatusFile, status_path


class Scene:
    """A rank on simulated time, which takes a step or stays in one when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.now, self.num_steps = 1000.0, 0
        self.status = StatusFile(status_path(folder, 0), 1)
        self.status.start(["0F0.0", "WAIT_RECV"])
        self.steps = RankSteps(folder, lambda: self.now)

    def step(self) -> None:
        self.num_steps += 1
        self.status.cursor[0] = self.num_steps
        self.status.cursor[1] = 1
        assert self.steps.has_advanced()


@pytest.mark.parametrize("predicted", [None, 0.2, 60.0])
def test_a_stall_is_what_the_life_cycle_says(tmp_path: Path, predicted: float | None) -> None:
    scene = Scene(tmp_path)
    scene.now += 10_000
    assert scene.steps.stall_message(predicted) == "", "before the first step ranks restore and warm up"
    scene.step()
    silent = stall_seconds(predicted)
    scene.now += silent - 0.1
    assert scene.steps.stall_message(predicted) == ""
    scene.now += 0.1
    assert scene.steps.stall_message(predicted) == f"no step within {silent:.0f} s"
    scene.step()
    assert scene.steps.stall_message(predicted) == ""


@pytest.mark.parametrize("predicted", [None, 0.2, 60.0])
def test_a_step_at_hand_has_to_hurry_once_a_stop_is_asked_for(tmp_path: Path, predicted: float | None) -> None:
    scene = Scene(tmp_path)
    scene.steps.record_stop_request()
    scene.now += 10_000
    assert scene.steps.stall_message(predicted) == "", "before the first step ranks restore and warm up"
    scene.step()
    scene.now += 1.0
    scene.steps.record_stop_request()
    hurried = stop_seconds(predicted)
    assert hurried < stall_seconds(predicted) / 3
    scene.now += hurried - 0.1
    assert scene.steps.stall_message(predicted) == ""
    scene.now += 0.1
    assert scene.steps.stall_message(predicted) == f"no step within {hurried:.0f} s of the stop request"
    scene.status.cursor[1] = BETWEEN_STEPS
    assert scene.steps.stall_message(predicted) == "", "a checkpoint takes its time"
    scene.step()
    assert scene.steps.stall_message(predicted) == ""


def test_steps_are_seen_in_what_ranks_say_of_themselves(tmp_path: Path) -> None:
    old = StatusFile(status_path(tmp_path, 0), 1)
    old.cursor[0] = 7
    steps = RankSteps(tmp_path)
    assert not steps.has_advanced(), "what was there before is no step"
    first, second = (StatusFile(status_path(tmp_path, rank), 1) for rank in (0, 1))
    assert not steps.has_advanced(), "a rank that starts takes none"
    first.cursor[0] = 20
    assert steps.has_advanced()
    assert not steps.has_advanced()
    second.cursor[0] = 20
    assert steps.has_advanced()
    second.fail("no", 1)
    assert not steps.has_advanced()
