"""Runs of kopf follow each other until a signal comes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from random import Random

import pytest

from penstock.operator import kopf_runs
from penstock.operator.kopf_runs import KopfRuns, background_loop

SOON = 5.0


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Signals have the handlers that they had before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The backoffs, none of which is waited for."""
    waits: list[float] = []
    monkeypatch.setattr(KopfRuns, "_pause", lambda self, seconds: waits.append(seconds))
    return waits


class Failing:
    """Fails that many times, then ends as after a signal."""

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.num_runs = list(failures), 0
        self.loops: set[asyncio.AbstractEventLoop] = set()

    async def __call__(self, stop_flag: asyncio.Event) -> None:
        self.num_runs += 1
        self.loops.add(asyncio.get_running_loop())
        if self.failures:
            raise self.failures.pop(0)


def test_a_signal_ends_the_last_run(waits: list[float]) -> None:
    operate = Failing()
    KopfRuns(operate).run()
    assert (operate.num_runs, waits) == (1, [])


def test_failures_are_followed_by_longer_and_longer_backoffs(waits: list[float]) -> None:
    operate = Failing(*[RuntimeError("404")] * 7)
    KopfRuns(operate).run()
    assert waits == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0]
    assert len(operate.loops) == operate.num_runs == 8


def test_the_backoff_begins_again_after_a_long_run(waits: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kopf_runs, "STEADY_SECONDS", 0.0)
    KopfRuns(Failing(*[RuntimeError("410")] * 3)).run()
    assert waits == [0.5, 0.5, 0.5]


def test_a_failure_is_logged_with_its_first_cause(waits: list[float], caplog: pytest.LogCaptureFixture) -> None:
    error = RuntimeError("kopf's own")
    error.__cause__ = ValueError("truncated")
    with caplog.at_level(logging.WARNING):
        KopfRuns(Failing(error, KeyError())).run()
    first, second = [record.getMessage() for record in caplog.records if record.name == kopf_runs.__name__]
    assert first == "kopf ended: ValueError: truncated; starting it again in 0.5 s"
    assert second == "kopf ended: KeyError; starting it again in 1.0 s"


def test_a_restart_is_no_failure(waits: list[float]) -> None:
    num_runs = 0

    async def operate(stop_flag: asyncio.Event) -> None:
        nonlocal num_runs
        num_runs += 1
        if num_runs < 3:
            threading.Thread(target=runs.restart).start()
            await asyncio.wait_for(stop_flag.wait(), SOON)

    runs = KopfRuns(operate)
    runs.restart()  # there is no run yet
    runs.run()
    assert (num_runs, waits) == (3, [])


def test_a_handler_that_sets_the_flag_at_the_end_restarts_nothing(waits: list[float]) -> None:
    num_runs = 0

    async def operate(stop_flag: asyncio.Event) -> None:
        nonlocal num_runs
        num_runs += 1
        stop_flag.set()

    KopfRuns(operate).run()
    assert num_runs == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_two_runs_ends_the_process(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    monkeypatch.setattr(kopf_runs, "FIRST_WAIT_SECONDS", SOON)
    operate, began = Failing(RuntimeError("cut")), time.monotonic()
    timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
    timer.start()
    KopfRuns(operate).run()
    timer.join()
    assert operate.num_runs == 1
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("seed", range(20))
def test_a_signal_at_any_time_ends_all_runs(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Runs end by themselves every few milliseconds: the signal comes in a run, between two, or while a loop closes.

    Each run has handlers of its own for signals, as kopf has.
    """
    monkeypatch.setattr(kopf_runs, "FIRST_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(kopf_runs, "LONGEST_WAIT_SECONDS", 0.002)
    monkeypatch.setattr(kopf_runs, "POLL_SECONDS", 0.001)
    random, num_runs, own = Random(seed), 0, list[int]()

    async def operate(stop_flag: asyncio.Event) -> None:
        nonlocal num_runs
        num_runs += 1
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, own.append, number)
        await asyncio.sleep(random.uniform(0.0, 0.004))
        raise RuntimeError("cut")

    timer = threading.Timer(0.1 + random.uniform(0.0, 0.05), os.kill, (os.getpid(), signal.SIGTERM))
    began = time.monotonic()
    timer.start()
    KopfRuns(operate).run()
    timer.join()
    assert time.monotonic() - began < SOON
    assert num_runs > 1
    assert not own


def test_a_signal_in_a_run_sets_its_stop_flag() -> None:
    async def operate(stop_flag: asyncio.Event) -> None:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        await asyncio.wait_for(stop_flag.wait(), SOON)

    began = time.monotonic()
    KopfRuns(operate).run()
    assert time.monotonic() - began < SOON


def test_an_error_after_a_signal_is_followed_by_no_run(waits: list[float], caplog: pytest.LogCaptureFixture) -> None:
    async def operate(stop_flag: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop_flag.wait(), SOON)
        raise RuntimeError("cut")

    with caplog.at_level(logging.WARNING):
        KopfRuns(operate).run()
    assert not waits
    assert "kopf ended after a signal: RuntimeError: cut" in caplog.text


def test_a_task_on_the_background_loop_outlives_the_loop_that_began_it() -> None:
    ended: list[int] = []

    async def begin() -> asyncio.Task[None]:
        async def later() -> None:
            await asyncio.sleep(0.1)
            ended.append(1)

        return asyncio.get_running_loop().create_task(later())

    async def run_of_kopf() -> asyncio.Task[None]:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(begin(), background))

    with background_loop() as background:
        task = asyncio.run(run_of_kopf())
        assert not ended
        asyncio.run_coroutine_threadsafe(asyncio.wait_for(task, SOON), background).result()
    assert ended == [1]
    assert background.is_closed()
