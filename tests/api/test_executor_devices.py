"""CUDA devices: each is one job's alone from its launch until nothing of it is left, also over a service's death."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from penstock.api.service import Service
from penstock.api.store import attempts
from penstock.core.capacity import Demand, Machine
from penstock.core.host.launches import Launches
from penstock.core.lifecycle import Phase
from tests.support.executing import World
from tests.support.fake_supervisors import FAILS, RUNS_ON, Script
from tests.support.service import Clock, new_service

TWO = Machine(cores=8, memory_bytes=2**40, devices=("0", "1"))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock = Clock()
    service = new_service(tmp_path, "", clock)
    yield World(service, clock, machine=TWO)
    service.close()


def devices(world: World, uid: str, attempt: int = 1) -> tuple[str, ...]:
    """What the supervisor of the attempt was ordered to use."""
    return world.supervisors.attempts[world.folder(uid, attempt)].order.devices


def test_jobs_side_by_side_have_devices_of_their_own(world: World) -> None:
    world.supervisors.scripts = [RUNS_ON]
    jobs = [world.submit(name, ranks=1, device="cuda") for name in ("first", "second", "third")]
    for uid in jobs[:2]:
        world.until(uid, Phase.RUNNING)
    assert [devices(world, uid) for uid in jobs[:2]] == [("0",), ("1",)]
    assert world.job(jobs[2]).phase is Phase.QUEUED
    world.delete(jobs[1])
    world.until(jobs[2], Phase.RUNNING)
    assert devices(world, jobs[2]) == ("1",)


def test_a_job_of_several_ranks_has_a_device_for_each(world: World) -> None:
    uid = world.submit(device="cuda")
    world.until(uid, Phase.SUCCEEDED)
    assert devices(world, uid) == ("0", "1")


def test_a_job_on_cpus_is_given_none(world: World) -> None:
    uid = world.submit()
    world.until(uid, Phase.SUCCEEDED)
    assert devices(world, uid) == ()


def test_a_new_service_leaves_running_jobs_what_they_have(service: Service, clock: Clock) -> None:
    """On both databases."""
    world = World(service, clock, machine=TWO)
    world.supervisors.scripts = [RUNS_ON]
    first = world.submit("first", ranks=1, device="cuda")
    world.until(first, Phase.RUNNING)
    world.restart()
    second = world.submit("second", ranks=1, device="cuda")
    world.until(second, Phase.RUNNING)
    assert (devices(world, first), devices(world, second)) == (("0",), ("1",))


def test_an_attempt_that_comes_up_late_gets_what_was_kept_for_it(world: World) -> None:
    """The service was killed after it had kept the launch, and before a supervisor took it up."""
    world.supervisors.scripts = [Script(comes_up=False), RUNS_ON]
    late, other = world.submit("late", ranks=1, device="cuda"), world.submit("other", ranks=1, device="cuda")
    world.until(late, Phase.PROFILING)
    world.restart()
    world.until(late, Phase.RUNNING)
    assert (devices(world, late), devices(world, other)) == (("0",), ("1",))


def test_devices_are_free_again_once_nothing_is_left_of_an_attempt(world: World) -> None:
    world.supervisors.scripts = [FAILS, Script()]
    uid = world.submit(device="cuda")
    assert world.until(uid, Phase.SUCCEEDED, seconds=1).attempt == 2
    assert devices(world, uid, 2) == ("0", "1")


def test_nothing_starts_while_it_is_not_known_what_is_held(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(connection: Connection, found: object) -> tuple[str, ...]:
        raise OperationalError("SELECT", {}, Exception("the server is gone"))

    uid = world.submit(device="cuda")
    with monkeypatch.context() as patch:
        patch.setattr(attempts, "devices_of", away)
        for _ in range(3):
            world.turn()
    assert (world.job(uid).phase, world.job(uid).attempt) == (Phase.QUEUED, 0)
    assert world.until(uid, Phase.SUCCEEDED).attempt == 1


# Next to other programs


def names(devices: Iterable[str]) -> tuple[str, ...]:
    return tuple(devices)


def test_a_device_that_another_program_holds_is_not_given(tmp_path: Path) -> None:
    """Its own attempts, which hold theirs too, do not keep a job from going on."""
    clock = Clock()
    launches = Launches(tmp_path / "launches", TWO, addresses=names)
    world = World(new_service(tmp_path, "", clock), clock, machine=TWO, launches=launches)
    world.supervisors.scripts = [RUNS_ON]
    first, second = (world.submit(name, ranks=1, device="cuda") for name in ("first", "second"))
    with launches.held("run directory /r", Demand(cores=1, cuda_devices=1)) as held:
        assert held == ("0",)
        world.until(first, Phase.RUNNING)
        with launches.held("job default/first", Demand(cores=1, cuda_devices=1), uid=first, devices=("1",)):
            for _ in range(3):
                world.turn()
            assert world.job(second).phase is Phase.QUEUED
    world.until(second, Phase.RUNNING)
    assert (devices(world, first), devices(world, second)) == (("1",), ("0",))
    world.service.close()
