"""The local executor and more than one job: who runs first, who waits, who can never run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.core.capacity import Demand
from penstock.core.host.launches import Launches
from penstock.core.lifecycle import Phase
from tests.support.executing import MACHINE, MOST_TURNS, World
from tests.support.fake_supervisors import FAILS, RUNS_ON, Script
from tests.support.service import Clock, new_service


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock = Clock()
    service = new_service(tmp_path, "", clock)
    yield World(service, clock)
    service.close()


def test_a_job_waits_for_room(world: World) -> None:
    world.supervisors.scripts = [RUNS_ON, Script()]
    first, second = world.submit("first"), world.submit("second")
    world.until(first, Phase.RUNNING)
    world.turn()
    assert world.job(second).phase is Phase.QUEUED
    world.delete(first)
    world.until(second, Phase.SUCCEEDED)


def test_the_higher_priority_goes_first(world: World) -> None:
    low, high, huge = world.submit("low"), world.submit("high", priority=5), world.submit("huge", ranks=4, priority=9)
    world.until(high, Phase.SUCCEEDED)
    assert world.job(low).attempt == 0
    world.until(low, Phase.SUCCEEDED)
    assert world.job(huge).phase is Phase.FAILED


def test_an_attempt_that_ended_makes_room_only_when_nothing_is_left_of_it(world: World) -> None:
    world.supervisors.scripts = [FAILS, Script()]
    first, second = world.submit("first", priority=1), world.submit("second")
    world.until(first, Phase.RECOVERING)
    world.turn()
    assert world.job(second).attempt == 1
    assert [attempt.order.uid for attempt in world.supervisors.living] == [second]
    world.until(first, Phase.SUCCEEDED, seconds=1)
    assert world.job(second).phase is Phase.SUCCEEDED


def test_nothing_is_launched_on_a_machine_that_another_has(world: World) -> None:
    """What was launched before is seen to its end, and who waits may still be deleted."""
    before, unwanted, late = (world.submit(name) for name in ("before", "unwanted", "late"))
    world.until(before, Phase.RUNNING)
    world.may_launch = False
    world.delete(unwanted)
    world.until(before, Phase.SUCCEEDED)
    for _ in range(MOST_TURNS):
        world.turn()
    assert (world.job(late).phase, world.job(late).attempt) == (Phase.QUEUED, 0)
    assert world.job(unwanted).deleted_at is not None
    world.may_launch = True
    world.until(late, Phase.SUCCEEDED)


def test_a_job_that_the_machine_can_never_hold_fails_and_says_what_is_lacking(world: World) -> None:
    large, small = world.submit("large", ranks=4), world.submit("small")
    failed = world.until(large, Phase.FAILED)
    assert failed.phase_reason == "UserError"
    assert "4 cores of 2" in failed.phase_message
    assert "remedy" in failed.phase_message
    world.until(small, Phase.SUCCEEDED)
    assert world.supervisors.started == [(small, 1)]


def test_a_job_waits_for_another_program_and_the_log_names_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Cores that its own attempt holds, as the supervisor says, are not counted twice."""
    clock = Clock()
    launches = Launches(tmp_path / "launches", MACHINE, cpus=(0, 1))
    world = World(new_service(tmp_path, "", clock), clock, launches=launches)
    first, second = world.submit("first"), world.submit("second")
    with launches.held("run directory /r", Demand(cores=1)):
        for _ in range(3):
            world.turn()
        assert world.job(first).phase is Phase.QUEUED
    (line,) = [record.getMessage() for record in caplog.records if "run directory /r" in record.getMessage()]
    assert "holds 1 core" in line
    with launches.held("job default/first", Demand(cores=2), uid=first):
        world.until(first, Phase.SUCCEEDED)
    world.until(second, Phase.SUCCEEDED)
    world.service.close()
