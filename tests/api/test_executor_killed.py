"""The local executor of a service that is killed, at every moment of a job's life."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.lifecycle import Phase
from tests.support.crashing import Crash, CrashError
from tests.support.executing import MOST_TURNS, WHOLE_LIFE, World
from tests.support.fake_supervisors import (
    FAILS,
    RUNS_ON,
    VANISHES,
    CrashingService,
    CrashingSupervisors,
    FakeSupervisors,
    Script,
)
from tests.support.service import Clock, new_service

RETRIED = [*WHOLE_LIFE[:-1], Phase.RECOVERING, Phase.QUEUED, *WHOLE_LIFE[2:]]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock = Clock()
    service = new_service(tmp_path, "", clock)
    yield World(service, clock)
    service.close()


@pytest.mark.parametrize(
    ("scripts", "life"),
    [([Script()], WHOLE_LIFE), ([FAILS, Script()], RETRIED), ([VANISHES, Script()], RETRIED)],
    ids=["smooth", "failing", "vanishing"],
)
def test_a_service_killed_anywhere_goes_on(world: World, scripts: list[Script], life: list[Phase]) -> None:
    attempts = len(scripts)
    for at in range(1, 200):
        crash = Crash(at)
        uid = _live_through(world, f"job{at}", list(scripts), crash)
        ended = world.job(uid)
        assert (ended.phase, ended.attempt, ended.failures) == (Phase.SUCCEEDED, attempts, attempts - 1), at
        assert world.supervisors.started == [(uid, number + 1) for number in range(attempts)], at
        assert world.phases(uid) == life, at
        assert world.supervisors.living == []
        if not crash.came:
            return
    raise AssertionError("there are more moments than were tried")


def _live_through(world: World, name: str, scripts: list[Script], crash: Crash) -> str:
    """A job's whole life, in which the service is killed once and started again; the job's uid."""
    world.supervisors = FakeSupervisors(scripts)
    values = {each.name: getattr(world.service, each.name) for each in dataclasses.fields(world.service)}
    world.restart(CrashingService(**values, crash=crash), CrashingSupervisors(world.supervisors, crash))
    uid = world.submit(name)
    for _ in range(MOST_TURNS):
        try:
            world.executor.run_once()
        except CrashError:
            world.restart()
        world.supervisors.step()
        world.clock.now += 1
        if world.job(uid).phase.terminal:
            break
    return uid


def test_a_service_killed_in_every_phase_goes_on(world: World) -> None:
    uid = world.submit()
    for phase in WHOLE_LIFE:
        world.until(uid, phase)
        world.restart()
    assert world.phases(uid) == WHOLE_LIFE
    assert world.supervisors.started == [(uid, 1)]


def test_an_attempt_that_a_killed_service_did_not_end_is_closed_before_the_next(world: World) -> None:
    """Its supervisor was only about to come up, so that no look finds it alive; and the next would meet it."""

    def killed_before_it_ends_anything() -> None:
        world.restart(supervisors=CrashingSupervisors(world.supervisors, Crash(at=1)))
        with pytest.raises(CrashError):
            world.turn()

    world.supervisors.scripts = [Script(comes_up=False), Script()]
    uid = world.submit()
    world.until(uid, Phase.PROFILING)
    world.suspend(uid)
    killed_before_it_ends_anything()
    world.suspend(uid, False)
    killed_before_it_ends_anything()
    assert (world.job(uid).phase, world.supervisors.closed) == (Phase.QUEUED, set())
    world.restart()
    world.until(uid, Phase.PROFILING)
    assert world.supervisors.closed == {world.folder(uid)}
    world.until(uid, Phase.SUCCEEDED)
    assert world.supervisors.started == [(uid, 2)]


def test_a_service_killed_while_it_stops_a_job_goes_on(world: World) -> None:
    world.supervisors.scripts = [RUNS_ON]
    uid = world.submit()
    world.until(uid, Phase.RUNNING)
    world.suspend(uid)
    for _ in range(4):
        world.restart()
        world.turn()
    assert (world.job(uid).phase, world.job(uid).failures) == (Phase.SUSPENDED, 0)
    assert world.supervisors.asked.count(("stop", 1)) == 1
