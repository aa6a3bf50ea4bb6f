"""What goes on next to answering."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from penstock.api.start import background
from penstock.api.store import series
from penstock.api.store.retention import DAY_SECONDS
from penstock.api.store.schema import points
from penstock.api.store.series import ALL_RANKS, Point
from tests.support.service import NOW, Clock, add_job, new_service
from tests.support.serving import wait_until


def test_a_service_that_is_often_started_anew_forgets_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the first time it does not wait as long as between two."""
    monkeypatch.setattr(background, "FIRST_FORGET_SECONDS", 0.0)
    clock = Clock()
    service = new_service(tmp_path, clock=clock)
    uid = add_job(service).uid
    told = [Point("loss", ALL_RANKS, step, 5.0) for step in range(2)]
    service.write(uid, lambda c: series.add_points(c, {(uid, 1): told}, NOW))
    clock.now += 8 * DAY_SECONDS
    with background.enforcing_retention(service):  # an attempt's first point stays
        wait_until(lambda: len(service.read(lambda c: c.execute(select(points)).all())) == 1)
    service.close()


def test_a_request_is_looked_at_before_the_next_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "POLL_SECONDS", 3600.0)
    turns, wake = threading.Semaphore(0), threading.Event()
    with background.polling("tried", turns.release, wake=wake):
        for _ in range(3):
            wake.set()
            assert turns.acquire(timeout=30)
        assert not turns.acquire(timeout=0.1)


def test_many_requests_leave_it_idle_for_half_of_the_time() -> None:
    """A busy machine makes pauses longer, and never shorter than the turn before."""
    wake, starts, ends = threading.Event(), [], []

    def turn() -> None:
        starts.append(time.monotonic())
        wake.set()
        time.sleep(0.05)
        ends.append(time.monotonic())

    with background.polling("tried", turn, wake=wake):
        wake.set()
        wait_until(lambda: len(ends) >= 5)
    for began, ended, following in zip(starts, ends, starts[1:], strict=False):
        assert following - ended >= ended - began


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            OperationalError("SELECT", {}, Exception("it is gone\nsince")),
            "tried: the database does not answer: it is gone; ",
        ),
        (ZeroDivisionError("it is gone"), "tried: unexpected failure; retrying in 0.5 s"),
    ],
)
def test_it_goes_on_after_any_error(error: Exception, says: str, caplog: pytest.LogCaptureFixture) -> None:
    wake, turns = threading.Event(), threading.Semaphore(0)

    def turn() -> None:
        turns.release()
        raise error

    with background.polling("tried", turn, wake=wake):
        for _ in range(3):
            wake.set()
            assert turns.acquire(timeout=30)
    assert says in caplog.text
    assert "it is gone" in caplog.text


def test_it_ends_while_requests_come() -> None:
    wake, turns, closed = threading.Event(), threading.Semaphore(0), []

    def turn() -> None:
        wake.set()
        turns.release()

    with background.polling("tried", turn, lambda: closed.append(True), wake=wake):
        wake.set()
        for _ in range(3):
            assert turns.acquire(timeout=30)
    assert closed == [True]
