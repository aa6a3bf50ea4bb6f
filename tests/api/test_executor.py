"""The local executor against supervisors that follow scripts: every way a job can go, and a service killed anywhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from penstock.api.executor.executor import EXPIRY_LOOK_SECONDS
from penstock.api.executor.folder import AttemptFolder
from penstock.api.executor.observe import LOST, MOST_LAST_WORDS, MOST_LINE_CHARACTERS
from penstock.api.service import Service
from penstock.api.store import jobs, profiles
from penstock.api.store.plans import revisions
from penstock.core.lifecycle import STALL_LEAST_SECONDS, AttemptState, Phase
from penstock.core.profile import Profile
from penstock.core.supervision import AttemptReport
from penstock.planning.questions import Answer
from tests.support.executing import MOST_TURNS, WHOLE_LIFE, World
from tests.support.fake_supervisors import (
    FAILS,
    RUNS_ON,
    VANISHES,
    Crash,
    CrashingService,
    Script,
)
from tests.support.sample_run import sample_plan
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
    """The launch is refused by its version, so nothing started, and the next turn sees the wish."""
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
        def _moment(self) -> None:
            if waiting:
                waiting.pop()()

    values = {each.name: getattr(world.service, each.name) for each in dataclasses.fields(world.service)}
    return CrashingService(**values, crash=Once(at=0))


# Failure


def test_failing_attempts_are_counted_and_waited_after_up_to_the_limit(world: World) -> None:
    world.supervisors.scripts = [FAILS]
    uid = world.submit(backoffLimit=2)
    waits = []
    for failures in (1, 2):
        lost = world.until(uid, Phase.RECOVERING)
        assert (lost.failures, lost.phase_reason, lost.phase_message) == (failures, "AttemptFailed", FAILS.message)
        at = world.clock.now
        world.until(uid, Phase.QUEUED, seconds=0.5)
        waits.append(world.clock.now - at)
    assert waits == [1.0, 2.0]
    ended = world.until(uid, Phase.FAILED)
    assert (ended.attempt, ended.failures, ended.phase_reason) == (3, 3, "BackoffLimitExceeded")
    assert world.supervisors.started == [(uid, 1), (uid, 2), (uid, 3)]


def test_what_a_lost_attempt_said_last_is_kept_with_the_event(service: Service, clock: Clock) -> None:
    """In few and short lines, and without what PostgreSQL does not take."""
    world = World(service, clock)
    long = "x" * 2 * MOST_LINE_CHARACTERS
    said = (*(f"line {number}" for number in range(2 * MOST_LAST_WORDS)), long, "a NUL: \0")
    world.supervisors.scripts = [
        Script(end=AttemptState.FAILED, message="rank 1 was killed", last_words=said),
        Script(),
    ]
    uid = world.submit()
    world.until(uid, Phase.RECOVERING)
    words = service.read(lambda connection: jobs.last_words(jobs.history(connection, uid)))
    assert len(words) == MOST_LAST_WORDS
    assert words[-2:] == (long[:MOST_LINE_CHARACTERS], "a NUL: \ufffd")
    world.until(uid, Phase.SUCCEEDED, seconds=1)
    assert service.read(lambda connection: jobs.last_words(jobs.history(connection, uid))) == ()


def test_a_retry_goes_by_the_plan_that_is_there(world: World) -> None:
    world.supervisors.scripts = [FAILS, Script()]
    uid = world.submit()
    ended = world.until(uid, Phase.SUCCEEDED, seconds=1)
    assert (ended.attempt, ended.failures) == (2, 1)
    assert world.planner.asked == [uid]


def test_a_refused_attempt_fails_the_job_at_once(world: World) -> None:
    world.supervisors.scripts = [Script(end=AttemptState.FAILED, message="the text is empty", refused=True)]
    uid = world.submit()
    ended = world.until(uid, Phase.FAILED)
    assert (ended.attempt, ended.phase_reason, ended.phase_message) == (1, "UserError", "the text is empty")


def test_a_supervisor_that_vanishes_is_a_failure(world: World) -> None:
    world.supervisors.scripts = [VANISHES, Script()]
    uid = world.submit()
    lost = world.until(uid, Phase.RECOVERING)
    assert (lost.failures, lost.phase_message) == (1, LOST)
    assert world.until(uid, Phase.SUCCEEDED, seconds=1).attempt == 2


def test_data_that_is_gone_fails_the_job_at_once(world: World) -> None:
    uid = world.submit(source="data://gone/text")
    ended = world.until(uid, Phase.FAILED)
    assert (ended.phase_reason, world.supervisors.started) == ("UserError", [])
    assert "'data://gone/text' is not" in ended.phase_message


def test_an_attempt_that_never_came_up_is_started_until_it_does(world: World) -> None:
    world.supervisors.scripts = [Script(comes_up=False), Script(comes_up=False), Script()]
    uid = world.submit()
    assert world.until(uid, Phase.SUCCEEDED).attempt == 1
    assert world.supervisors.started == [(uid, 1)]
    assert world.supervisors.asked.count(("start", 1)) == 3


def test_an_attempt_that_never_comes_up_can_be_suspended_and_stays_so(world: World) -> None:
    world.supervisors.scripts = [Script(comes_up=False), Script()]
    uid = world.submit()
    world.until(uid, Phase.PROFILING)
    world.suspend(uid)
    world.until(uid, Phase.SUSPENDED)
    for _ in range(3):
        world.turn()
    assert world.supervisors.asked.count(("start", 1)) == 1
    assert world.folder(uid) in world.supervisors.closed
    world.suspend(uid, False)
    world.until(uid, Phase.SUCCEEDED)
    assert world.supervisors.started == [(uid, 2)]


def test_one_that_ended_before_it_was_taken_up_is_not_started_again(world: World) -> None:
    uid = world.submit()
    world.until(uid, Phase.PROFILING)
    attempt = world.supervisors.attempts[world.folder(uid)]
    attempt.alive, attempt.report = False, AttemptReport(state=AttemptState.FAILED, message="exit code 1")
    world.until(uid, Phase.RECOVERING)
    for _ in range(3):
        world.turn()
    assert world.supervisors.asked.count(("start", 1)) == 1
    assert world.until(uid, Phase.SUCCEEDED, seconds=1).attempt == 2


def test_a_deadline_ends_the_job_and_its_attempt(world: World) -> None:
    world.supervisors.scripts = [RUNS_ON]
    uid = world.submit(activeDeadlineSeconds=100)
    world.until(uid, Phase.RUNNING)
    world.clock.now += 99
    world.turn()
    assert world.job(uid).phase is Phase.RUNNING
    world.clock.now += 1
    assert world.until(uid, Phase.FAILED).phase_reason == "DeadlineExceeded"
    assert world.supervisors.living == []


def test_a_deadline_does_not_count_while_suspended(world: World) -> None:
    world.supervisors.scripts = [RUNS_ON]
    uid = world.submit(activeDeadlineSeconds=100)
    world.until(uid, Phase.RUNNING)
    world.suspend(uid)
    world.until(uid, Phase.SUSPENDED)
    world.clock.now += 1_000
    world.turn()
    assert world.job(uid).phase is Phase.SUSPENDED
    world.suspend(uid, False)
    world.until(uid, Phase.RUNNING)
    world.clock.now += 101
    assert world.until(uid, Phase.FAILED).phase_reason == "DeadlineExceeded"


# Silence


def test_an_attempt_without_a_step_for_long_is_lost(world: World) -> None:
    world.supervisors.scripts = [RUNS_ON]
    uid = world.submit()
    world.until(uid, Phase.RUNNING)
    world.report_step(uid)
    world.clock.now += STALL_LEAST_SECONDS
    assert "no step within" in world.until(uid, Phase.RECOVERING).phase_message
    assert world.supervisors.living == []


def test_nobody_is_called_silent_for_the_time_when_nobody_listened(world: World) -> None:
    world.supervisors.scripts = [RUNS_ON]
    uid = world.submit()
    world.until(uid, Phase.RUNNING)
    world.report_step(uid)
    world.clock.now += 10 * STALL_LEAST_SECONDS
    world.restart()
    world.turn()
    assert world.job(uid).phase is Phase.RUNNING
    world.clock.now += STALL_LEAST_SECONDS
    world.until(uid, Phase.RECOVERING)


def test_an_attempt_whose_records_do_not_arrive_is_not_silent(world: World) -> None:
    """The service may have moved, be busy, or refuse the token: its supervisor sees the steps."""
    world.supervisors.scripts = [RUNS_ON]
    uid = world.submit()
    world.until(uid, Phase.RUNNING)
    world.report_step(uid)
    world.clock.now += STALL_LEAST_SECONDS
    world.see_step(uid)
    world.turn()
    assert world.job(uid).phase is Phase.RUNNING
    world.clock.now += STALL_LEAST_SECONDS
    world.until(uid, Phase.RECOVERING)


def test_an_attempt_of_which_no_record_ever_came_may_be_silent(world: World) -> None:
    world.supervisors.scripts = [RUNS_ON]
    uid = world.submit()
    world.until(uid, Phase.RUNNING)
    world.see_step(uid)
    world.clock.now += STALL_LEAST_SECONDS
    world.until(uid, Phase.RECOVERING)


@pytest.mark.parametrize("backoff_limit", [0, 3], ids=["its last attempt", "one of many"])
def test_a_store_that_takes_nothing_ends_no_attempt(
    world: World, monkeypatch: pytest.MonkeyPatch, backoff_limit: int
) -> None:
    def full(self: Service, key: str, change: object) -> None:
        raise OperationalError("UPDATE", {}, Exception("database or disk is full"))

    world.supervisors.scripts = [RUNS_ON]
    uid = world.submit(backoffLimit=backoff_limit)
    world.until(uid, Phase.RUNNING)
    world.report_step(uid)
    world.clock.now += STALL_LEAST_SECONDS
    with monkeypatch.context() as patch:
        patch.setattr(Service, "write", full)
        world.turn()
    world.see_step(uid)
    world.turn()
    assert world.job(uid).phase is Phase.RUNNING
    assert [attempt.order.attempt for attempt in world.supervisors.living] == [1]


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
        world.executor.turn()
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
    world.clock.now += 1 + EXPIRY_LOOK_SECONDS
    world.turn()
    assert world.job(uid).deleted_at == world.clock.now


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


# More than one job


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


# What goes wrong with one job


@pytest.mark.parametrize("error", [PermissionError("no"), ValueError("broken"), KeyError("missing")])
@pytest.mark.parametrize("method", ["report", "start", "ask"])
def test_the_error_of_one_job_holds_up_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    bad, good = world.submit("bad", ranks=1), world.submit("good", ranks=1)
    real = getattr(world.supervisors, method)

    def broken(folder: AttemptFolder, *rest: Any) -> Any:
        if folder.root.name == bad:
            raise error
        return real(folder, *rest)

    monkeypatch.setattr(world.supervisors, method, broken)
    world.until(good, Phase.SUCCEEDED)
    assert world.job(bad).phase is Phase.PROFILING
    monkeypatch.undo()
    assert world.until(bad, Phase.SUCCEEDED).attempt == 1


def test_a_job_whose_attempt_cannot_be_looked_at_keeps_its_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.supervisors.scripts = [RUNS_ON, Script()]
    first, second = world.submit("first"), world.submit("second")
    world.until(first, Phase.RUNNING)

    def broken(folder: AttemptFolder) -> bool:
        raise PermissionError(folder)

    monkeypatch.setattr(world.supervisors, "alive", broken)
    for _ in range(3):
        world.turn()
    assert world.job(second).phase is Phase.QUEUED


def test_a_manifest_that_is_no_longer_understood_can_be_deleted(world: World) -> None:
    bad, good = world.submit("bad"), world.submit("good")

    def spoil(connection: Connection) -> None:
        jobs.add_event(connection, bad, "spoilt", {}, world.clock(), manifest={"metadata": {}}, generation=2)

    world.service.write(bad, spoil)
    world.until(good, Phase.SUCCEEDED)
    world.delete(bad)
    world.turn()
    assert world.job(bad).deleted_at is not None


def test_a_database_that_is_away_is_asked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(self: Service, question: object) -> None:
        raise OperationalError("SELECT", {}, Exception("the server is gone"))

    uid = world.submit()
    with monkeypatch.context() as patch:
        patch.setattr(Service, "read", away)
        world.executor.turn()
    world.until(uid, Phase.SUCCEEDED)
