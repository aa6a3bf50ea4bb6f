"""What people see of a run, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest

from penstock.cli.progress import People
from penstock.cli.state import PhaseChange
from penstock.core.lifecycle import Phase
from penstock.planner.candidates import Candidate, Shortage
from penstock.planner.problem import Mesh
from penstock.planner.search import Evaluation
from tests.support.fake_workers import fake_metrics
from tests.support.shown_line import Remembering

MESH = Mesh(dp=1, tp=1, pp=2, microbatch=1, num_microbatches=4)


@pytest.fixture
def shown() -> Remembering:
    return Remembering()


@pytest.fixture
def people(shown: Remembering) -> People:
    return People(10, shown)


def change(phase: Phase, at: float, reason: str = "x", message: str = "") -> PhaseChange:
    return PhaseChange(phase=phase, at=at, reason=reason, message=message)


def test_a_phase_gets_a_line_with_its_duration(people: People, screen: io.StringIO) -> None:
    people.entered(change(Phase.QUEUED, 100.0))
    people.data.progress("tokenise", 512, 2048)
    people.entered(change(Phase.PROFILING, 112.5))
    assert screen.getvalue().split() == ["prepare", "2", "KiB", "of", "text", "12.5", "s"]


def test_a_phase_that_found_everything_done_gets_none(people: People, screen: io.StringIO) -> None:
    people.entered(change(Phase.QUEUED, 100.0))
    people.entered(change(Phase.PLANNING, 100.01))
    assert screen.getvalue() == ""


def test_training_tells_step_loss_speed_and_rest(people: People, shown: Remembering) -> None:
    people.stepped(fake_metrics(3))
    assert shown.texts == ["step 4/10  loss 1.250  16,384 tokens/s  1.5 s left"]
    assert shown.shares == [0.4]
    people.stepped(fake_metrics(9))
    assert shown.texts[-1].endswith("validating")


def test_measuring_is_told_once_there_is_something(people: People, shown: Remembering) -> None:
    people.measured(0, 0)
    assert shown.texts == []
    people.measured(3, 12)
    assert shown.shares == [0.25]


def test_a_loss_and_last_words_are_shown(people: People, screen: io.StringIO) -> None:
    people.entered(change(Phase.RUNNING, 1.0))
    people.entered(change(Phase.RECOVERING, 2.0, "AttemptFailed", "rank 1 was killed in step 3 at [0F1.2]"))
    people.lost(["one", "two [bold]"])
    people.launched(2, 40)
    lines = [line.strip() for line in screen.getvalue().splitlines()]
    assert lines[1:] == ["rank 1 was killed in step 3 at [0F1.2]", "one", "two [bold]", "attempt 2, from step 40"]


def test_the_first_attempt_is_not_announced(people: People, screen: io.StringIO) -> None:
    people.launched(1, 0)
    assert screen.getvalue() == ""


def evaluation(step_ns: int) -> Evaluation:
    candidate = Candidate(mesh=MESH, stages=((0, 9), (9, 18)), slices=(1024,), schedule="1f1b")
    return Evaluation(
        candidate=candidate,
        step_ns=step_ns,
        compute_ns=0,
        bubble_ns=0,
        communication_ns=0,
        reduction_ns=0,
        optimizer_ns=0,
        peak_bytes=(1,),
        slot_bytes=(1,),
        num_actions=1,
    )


def test_planning_tells_the_best_that_fits(people: People, shown: Remembering) -> None:
    people.search.opened(MESH, 7)
    people.search.no_room(Shortage(mesh=MESH, stage=0, missing_bytes=5))
    people.search.judged(evaluation(5_000_000), fits=False)
    people.search.judged(evaluation(9_000_000), fits=True)
    people.search.judged(evaluation(7_000_000), fits=True)
    people.search.judged(evaluation(8_000_000), fits=True)
    assert "7 candidates" in shown.texts[0]
    assert "no room" in shown.texts[1]
    assert shown.texts[2] == "1 simulated"
    assert shown.texts[-1] == "4 simulated, best so far 7 ms per step"


def test_warnings_about_data_are_shown(people: People, screen: io.StringIO) -> None:
    people.data.warning("3 files are no text")
    assert "3 files are no text" in screen.getvalue()


def test_leaving_ends_what_moves(people: People, shown: Remembering) -> None:
    people.close()
    assert shown.num_closed == 1
