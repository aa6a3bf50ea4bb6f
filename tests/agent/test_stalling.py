"""Silence is measured from the last step, by the rule of the life cycle."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.agent.stalling import RankSteps, StallWatch, stop_seconds
from penstock.core.lifecycle import stall_seconds
from penstock.core.run.rank_status import BETWEEN_STEPS, StatusFile, status_path


@pytest.mark.parametrize("predicted", [None, 0.2, 60.0])
def test_a_stall_is_what_the_life_cycle_says(predicted: float | None) -> None:
    now = [1000.0]
    watch = StallWatch(lambda: now[0])
    now[0] += 10_000
    assert watch.stall_message(predicted) == "", "before the first step ranks restore and warm up"
    watch.record_step()
    silent = stall_seconds(predicted)
    now[0] += silent - 0.1
    assert watch.stall_message(predicted) == ""
    now[0] += 0.1
    assert watch.stall_message(predicted) == f"no step within {silent:.0f} s"
    watch.record_step()
    assert watch.stall_message(predicted) == ""


@pytest.mark.parametrize("predicted", [None, 0.2, 60.0])
def test_a_step_at_hand_has_to_hurry_once_a_stop_is_asked_for(predicted: float | None) -> None:
    now = [1000.0]
    watch = StallWatch(lambda: now[0])
    watch.record_stop_request()
    now[0] += 10_000
    assert watch.stall_message(predicted, inside_step=True) == "", "before the first step ranks restore and warm up"
    watch.record_step()
    now[0] += 1.0
    watch.record_stop_request()
    hurried = stop_seconds(predicted)
    assert hurried < stall_seconds(predicted) / 3
    now[0] += hurried - 0.1
    assert watch.stall_message(predicted, inside_step=True) == ""
    now[0] += 0.1
    assert watch.stall_message(predicted, inside_step=True) == f"no step within {hurried:.0f} s of the stop request"
    assert watch.stall_message(predicted, inside_step=False) == "", "a checkpoint takes its time"
    watch.record_step()
    assert watch.stall_message(predicted, inside_step=True) == ""


def test_ranks_are_inside_a_step_while_one_is_at_an_action(tmp_path: Path) -> None:
    status = StatusFile(status_path(tmp_path, 0), 1)
    status.start(["0F0.0", "WAIT_RECV"])
    steps = RankSteps(tmp_path)
    assert not steps.is_inside_step()
    status.cursor[1] = 1
    assert steps.is_inside_step()
    status.cursor[1] = BETWEEN_STEPS
    assert not steps.is_inside_step()


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
