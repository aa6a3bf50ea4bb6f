"""The local executor against supervisors that follow scripts: every way a job can go, and a service killed anywhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.api.executor.executor import EXPIRY_POLL_SECONDS
from penstock.api.service import Service
from penstock.api.store import jobs, profiles
from penstock.api.store.plans import revisions
from penstock.core import engine
from penstock.core.lifecycle import AttemptState, Phase, decide
from penstock.core.plan import Plan
from penstock.core.profile import Profile
from penstock.core.run.attempt_folder import AttemptFolder
from penstock.core.supervision import AttemptReport
from penstock.planner.worker.protocol import Answer
from tests.support.crashing import Crash
from tests.support.executing import MACHINE, MOST_TURNS, WHOLE_LIFE, World
from tests.support.fake_supervisors import FAILS, RUNS_ON, CrashingService, Script
from tests.support.old_fields import OF_A_PLAN, unknown_fields
from tests.support.sample_run import confident_plan, sample_plan
from tests.support.service import Clock, new_service


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock = Clock()
    service = new_service(tmp_path, "", clock)
    yield World(service, clock)
    service.close()


# A life


def test_a_job_goes_through_all_phases_on_both_databases(service: Service, clock: Clock) -> None:
    world = World(service, clock)
    uid = world.submit()
    ended = world.until(uid, Phase.SUCCEEDED)
    assert world.phases(uid) == WHOLE_LIFE
    assert (ended.attempt, ended.failures, ended.executor, ended.finished_at) == (1, 0, "here", clock.now)
    assert world.supervisors.started == [(uid, 1)]
    assert [asked for asked, _ in world.supervisors.asked] == ["start", "measure", "bind", "end"]
    assert [made.plan for made in service.read(lambda connection: revisions(connection, uid))] == [sample_plan()]


def test_the_supervisor_finds_the_job_its_order_and_the_plan(world: World) -> None:
    uid = world.submit(activeDeadlineSeconds=100)
    world.until(uid, Phase.SUCCEEDED)
    root = world.service.settings.runs / uid
    attempt = world.supervisors.attempts[AttemptFolder(root, 1)]
    assert (attempt.order.address_file, attempt.order.deadline_at) == ("address", world.clock.now + 100)
    assert attempt.binding is not None
    assert attempt.binding.plan_digest == sample_plan().digest
    assert {path.name for path in root.iterdir()} == {"job.yaml", "plan.json", "profile.json"}


def test_an_attempt_is_given_a_plan_that_a_supervisor_of_0_1_0_reads(world: World) -> None:
    """It refused a prediction with an interval: an attempt that was measuring during an upgrade failed."""
    world.planner.answer = Answer(plan=confident_plan())
    world.restart()
    uid = world.submit()
    world.until(uid, Phase.SUCCEEDED)
    root = world.service.settings.runs / uid
    given = json.loads((root / "plan.json").read_text())
    assert unknown_fields(given, *OF_A_PLAN) == set()
    attempt = world.supervisors.attempts[AttemptFolder(root, 1)]
    assert unknown_fields(attempt.order.to_manifest(), "Order") == set()
    binding = attempt.binding
    assert binding is not None
    assert unknown_fields(binding.to_manifest(), "Binding") == set()
    assert binding.plan_digest == Plan.from_manifest(given).digest
    shown = world.service.read(lambda connection: revisions(connection, uid))
    assert [made.plan for made in shown] == [confident_plan()]


def test_a_profile_that_is_found_is_not_measured_again(world: World) -> None:
    uid = world.submit()
    root = world.service.settings.runs / uid
    world.until(uid, Phase.SUCCEEDED)
    profile = (root / "profile.json").read_text()
    world.supervisors.scripts = [Script(profiled=True)]
    second = world.submit("second")
    folder = world.service.settings.runs / second
    folder.mkdir()
    (folder / "profile.json").write_text(profile)
    world.until(second, Phase.SUCCEEDED)
    assert world.phases(second) == WHOLE_LIFE
    assert [asked for asked, _ in world.supervisors.asked].count("measure") == 1


# Suspension


def test_a_running_job_that_is_suspended_stops_and_is_resumed_by_a_new_attempt(world: World) -> None:
    world.supervisors.scripts = [RUNS_ON, Script()]
    uid = world.submit()
    world.until(uid, Phase.RUNNING)
    world.suspend(uid)
    suspended = world.until(uid, Phase.SUSPENDED)
    assert (suspended.attempt, suspended.failures) == (1, 0)
    assert world.supervisors.asked.count(("stop", 1)) == 1
    world.turn()
    assert world.job(uid).phase is Phase.SUSPENDED
    world.suspend(uid, False)
    ended = world.until(uid, Phase.SUCCEEDED)
    assert (ended.attempt, ended.failures) == (2, 0)
    assert world.supervisors.started == [(uid, 1), (uid, 2)]


@pytest.mark.parametrize("phase", [Phase.PENDING, *WHOLE_LIFE[:-2]])
def test_a_job_is_suspended_before_it_runs_and_nothing_is_left_of_it(world: World, phase: Phase) -> None:
    uid = world.submit()
    if phase is not Phase.PENDING:
        world.until(uid, phase)
    world.suspend(uid)
    world.until(uid, Phase.SUSPENDED)
    assert world.supervisors.living == []
    assert world.planner.polls == {}
    world.suspend(uid, False)
    assert world.until(uid, Phase.SUCCEEDED).failures == 0


def test_a_suspension_between_looking_and_launching_loses_nothing(world: World) -> None:
    """The launch is refused by its version, so nothing started, and the next turn sees the request."""
    uid = world.submit()
    world.turn()
    service = _interrupted(world, lambda: world.suspend(uid))
    world.restart(service=service)
    world.turn()
    assert (world.job(uid).phase, world.job(uid).attempt, world.supervisors.started) == (Phase.QUEUED, 0, [])
    world.until(uid, Phase.SUSPENDED)
    world.suspend(uid, False)
    assert world.until(uid, Phase.SUCCEEDED).attempt == 1


@pytest.mark.parametrize("phase", WHOLE_LIFE[:-1])
def test_a_suspension_between_looking_and_writing_loses_nothing(world: World, phase: Phase) -> None:
    uid = world.submit()
    world.until(uid, phase)
    world.restart(service=_interrupted(world, lambda: world.suspend(uid)))
    for _ in range(MOST_TURNS):
        world.turn()
    assert world.job(uid).phase in (Phase.SUSPENDED, Phase.SUCCEEDED)
    world.suspend(uid, False)
    ended = world.until(uid, Phase.SUCCEEDED)
    assert ended.failures == 0
    assert world.supervisors.started == [(uid, attempt + 1) for attempt in range(ended.attempt)]


def _interrupted(world: World, meanwhile: Callable[[], None]) -> Service:
    """The world's service, before whose first change something else happens once."""
    waiting = [meanwhile]

    class Once(Crash):
        def moment(self) -> None:
            if waiting:
                waiting.pop()()

    values = {each.name: getattr(world.service, each.name) for each in dataclasses.fields(world.service)}
    return CrashingService(**values, crash=Once(at=0))


# Planning


def test_a_job_without_a_plan_fails_by_what_the_planner_said(world: World) -> None:
    world.planner.answer = Answer(what="nothing fits", where="spec.resources", remedy="use more ranks")
    uid = world.submit()
    ended = world.until(uid, Phase.FAILED)
    assert (ended.phase_reason, ended.phase_message) == ("NoPlan", world.planner.answer.error)
    assert world.supervisors.living == []


def test_a_restarted_service_asks_again_and_hears_the_same(world: World) -> None:
    world.planner.answer = Answer(what="nothing fits")
    uid = world.submit()
    world.until(uid, Phase.PLANNING)
    world.turn()
    world.restart()
    assert world.until(uid, Phase.FAILED).phase_message == "nothing fits"
    assert world.planner.asked == [uid]


def test_what_was_measured_is_kept_even_if_nothing_can_be_planned(world: World) -> None:
    world.planner.answer = Answer(what="nothing fits")
    uid = world.submit()
    world.until(uid, Phase.FAILED)
    measured = Profile.from_manifest(json.loads((world.folder(uid).root / "profile.json").read_text()))
    assert [each.digest for each in world.service.read(profiles.every)] == [measured.digest]


@pytest.mark.parametrize("text", [None, "", "{", '{"foreign": 1}'])
def test_a_profile_that_cannot_be_read_fails_the_job(world: World, text: str | None) -> None:
    world.supervisors.scripts = [Script(leaves_profile=False)]
    uid = world.submit()
    world.turn()
    if text is not None:
        world.folder(uid).root.mkdir(parents=True)
        (world.folder(uid).root / "profile.json").write_text(text)
    ended = world.until(uid, Phase.FAILED)
    assert (ended.phase_reason, "profile" in ended.phase_message) == ("NoPlan", True)


def test_an_attempt_that_fails_while_there_is_no_plan_says_its_own_words(world: World) -> None:
    world.planner.answer = Answer(what="nothing fits")
    uid = world.submit()
    world.until(uid, Phase.PLANNING)
    for _ in range(2):
        world.executor.run_once()
    attempt = world.supervisors.attempts[world.folder(uid)]
    attempt.alive, attempt.report = False, AttemptReport(state=AttemptState.FAILED, message="out of memory")
    assert world.until(uid, Phase.RECOVERING).phase_message == "out of memory"


# Deletion and expiry


@pytest.mark.parametrize("phase", [*Phase])
def test_a_job_is_deleted_in_every_phase(world: World, phase: Phase) -> None:
    recovers = phase in (Phase.RECOVERING, Phase.FAILED)
    world.supervisors.scripts = [FAILS if recovers else Script()]
    uid = world.submit(backoffLimit=0 if phase is Phase.FAILED else 3)
    if phase is Phase.SUSPENDED:
        world.suspend(uid)
    if phase is not Phase.PENDING:
        world.until(uid, phase)
    world.delete(uid)
    world.turn()
    assert world.job(uid).deleted_at == world.clock.now
    assert world.supervisors.living == []
    assert world.planner.polls == {}
    world.supervisors.scripts = [Script()]
    world.until(world.submit(), Phase.SUCCEEDED)


def test_a_deleted_attempt_that_was_about_to_come_up_may_not(world: World) -> None:
    world.supervisors.scripts = [Script(comes_up=False)]
    uid = world.submit()
    world.until(uid, Phase.PROFILING)
    world.restart()
    world.delete(uid)
    world.turn()
    assert world.folder(uid) in world.supervisors.closed


def test_a_finished_job_expires(world: World) -> None:
    uid = world.submit(ttlSecondsAfterFinished=100)
    world.until(uid, Phase.SUCCEEDED)
    world.clock.now += 99
    world.turn()
    assert world.job(uid).deleted_at is None
    world.clock.now += 1 + EXPIRY_POLL_SECONDS
    world.turn()
    assert world.job(uid).deleted_at == world.clock.now


def test_a_finished_job_without_ttl_is_kept(world: World) -> None:
    uid = world.submit()
    world.until(uid, Phase.SUCCEEDED)
    world.clock.now += 10 * 365 * 86_400.0
    world.turn()
    assert world.job(uid).deleted_at is None


def test_jobs_that_have_ended_are_only_read_to_expire_or_to_be_deleted(world: World) -> None:
    ended, deleted = world.submit("ended"), world.submit("deleted")
    for uid in (ended, deleted):
        world.until(uid, Phase.SUCCEEDED)
    world.delete(deleted)
    waiting = world.submit("waiting")
    looked = world.service.read(lambda connection: jobs.unfinished(connection, "here", ended=False))
    assert [each.uid for each in looked] == [deleted, waiting]
    everything = world.service.read(lambda connection: jobs.unfinished(connection, "here"))
    assert [each.uid for each in everything] == [ended, deleted, waiting]


# A long queue


def noted(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    """The function, which also notes the arguments of each call."""

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    return call


def test_a_job_that_waits_is_read_and_decided_on_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand in a queue took most of a processor, and a new job was seen after seconds."""
    read: list[Any] = []
    decided: list[Any] = []
    monkeypatch.setattr(jobs, "_stored", noted(jobs._stored, read))
    monkeypatch.setattr(engine, "decide", noted(decide, decided))
    world.supervisors.scripts = [RUNS_ON]
    running = world.submit("running", ranks=MACHINE.cores)
    world.until(running, Phase.RUNNING)
    waiting = [world.submit(f"waits-{number}", ranks=MACHINE.cores) for number in range(20)]
    for _ in range(3):
        world.turn()
    assert {world.job(uid).phase for uid in waiting} == {Phase.QUEUED}
    read.clear()
    decided.clear()
    world.turn()
    assert (len(read), len(decided)) == (1, 1)
    world.suspend(waiting[0])
    world.delete(waiting[1])
    world.delete(running)
    for _ in range(3):
        world.turn()
    assert world.job(waiting[0]).phase is Phase.SUSPENDED
    assert world.job(waiting[1]).deleted_at is not None
    assert world.job(waiting[2]).attempt == 1
    assert {world.job(uid).attempt for uid in waiting[3:]} == {0}
