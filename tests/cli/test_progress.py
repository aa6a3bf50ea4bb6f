"""What the display shows of a run, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from penstock.agent.run_state import PhaseChange
from penstock.cli.local.progress import RunDisplay
from penstock.core.lifecycle import Phase
from penstock.planner.worker.protocol import Progress
from tests.support.fake_workers import fake_metrics
from tests.support.sample_run import sample_plan
from tests.support.shown_line import Remembering


@pytest.fixture
def shown() -> Remembering:
    return Remembering()


@pytest.fixture
def display(shown: Remembering) -> RunDisplay:
    return RunDisplay(10, shown)


def change(phase: Phase, at: float, reason: str = "x", message: str = "") -> PhaseChange:
    return PhaseChange(phase=phase, at=at, reason=reason, message=message)


def test_a_phase_gets_a_line_with_its_duration(display: RunDisplay, screen: io.StringIO) -> None:
    display.entered(change(Phase.QUEUED, 100.0))
    display.progress("tokenise", 512, 2048)
    display.entered(change(Phase.PROFILING, 112.5))
    assert screen.getvalue().split() == ["prepare", "2", "KiB", "of", "text", "12.5", "s"]


def test_a_phase_that_found_everything_done_gets_none(display: RunDisplay, screen: io.StringIO) -> None:
    display.entered(change(Phase.QUEUED, 100.0))
    display.entered(change(Phase.PLANNING, 100.01))
    assert screen.getvalue() == ""


def test_training_tells_step_loss_speed_and_rest(display: RunDisplay, shown: Remembering) -> None:
    display.stepped(fake_metrics(3))
    assert shown.texts == ["step 4/10  loss 1.250  16,384 tokens/s  1.5 s left"]
    assert shown.shares == [0.4]
    display.stepped(fake_metrics(9))
    assert shown.texts[-1].endswith("validating")


def test_measuring_is_told_once_there_is_something(display: RunDisplay, shown: Remembering) -> None:
    display.measured(0, 0)
    assert shown.texts == []
    display.measured(3, 12)
    assert shown.shares == [0.25]


def test_a_loss_and_last_words_are_shown(display: RunDisplay, screen: io.StringIO) -> None:
    display.entered(change(Phase.RUNNING, 1.0))
    display.entered(change(Phase.RECOVERING, 2.0, "AttemptFailed", "rank 1 was killed in step 3 at [0F1.2]"))
    display.lost(["one", "two [bold]"])
    display.launched(2, 40)
    lines = [line.strip() for line in screen.getvalue().splitlines()]
    assert lines[1:] == ["rank 1 was killed in step 3 at [0F1.2]", "one", "two [bold]", "attempt 2, from step 40"]


def test_the_first_attempt_is_not_announced(display: RunDisplay, screen: io.StringIO) -> None:
    display.launched(1, 0)
    assert screen.getvalue() == ""


def test_planning_tells_the_best_so_far(display: RunDisplay, shown: Remembering) -> None:
    display.searching(Progress(candidates=1))
    display.searching(Progress(candidates=4, best="zb", best_step_seconds=0.007))
    assert shown.texts == ["1 simulated", "4 simulated, best so far 7 ms per step"]


def test_planning_leaves_the_plan_s_own_step(display: RunDisplay, screen: io.StringIO) -> None:
    """Not that of the best candidate, which was improved afterwards."""
    display.entered(change(Phase.PLANNING, 100.0))
    display.searching(Progress(candidates=4, best="zb", best_step_seconds=0.3))
    display.planned(sample_plan())
    display.entered(change(Phase.BINDING, 102.0))
    told = "plan predicted step 231 ms, 8,881 tokens/s per device 2 s"
    assert screen.getvalue().split() == told.split()


def test_warnings_about_data_are_shown(display: RunDisplay, screen: io.StringIO) -> None:
    display.warning("3 files are no text")
    assert "3 files are no text" in screen.getvalue()


def test_leaving_ends_what_moves(display: RunDisplay, shown: Remembering) -> None:
    display.close()
    assert shown.num_closed == 1
