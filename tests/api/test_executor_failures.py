"""The local executor when attempts fail, vanish or are silent, and when one job's trouble must not be another's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from penstock.api.executor import executor as module
from penstock.api.executor.executor import MOST_LAST_LINES, MOST_LINE_CHARACTERS
from penstock.api.service import Service
from penstock.api.store import jobs
from penstock.core import limits
from penstock.core.lifecycle import STALL_LEAST_SECONDS, AttemptState, Phase
from penstock.core.processes import LOST
from penstock.core.run.attempt_folder import AttemptFolder
from penstock.core.supervision import AttemptReport
from tests.support.executing import WHOLE_LIFE, World
from tests.support.fake_supervisors import FAILS, RUNS_ON, VANISHES, Script
from tests.support.service import Clock, new_service


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    clock = Clock()
    service = new_service(tmp_path, "", clock)
    yield World(service, clock)
    service.close()


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
    said = (*(f"line {number}" for number in range(2 * MOST_LAST_LINES)), long, "a NUL: \0")
    world.supervisors.scripts = [
        Script(end=AttemptState.FAILED, message="rank 1 was killed", last_words=said),
        Script(),
    ]
    uid = world.submit()
    world.until(uid, Phase.RECOVERING)
    lines = service.read(lambda connection: jobs.last_lines(jobs.history(connection, uid)))
    assert len(lines) == MOST_LAST_LINES
    assert lines[-2:] == (long[:MOST_LINE_CHARACTERS], "a NUL: \ufffd")
    world.until(uid, Phase.SUCCEEDED, seconds=1)
    assert service.read(lambda connection: jobs.last_lines(jobs.history(connection, uid))) == ()


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
    world.turn()
    world.clock.now += STALL_LEAST_SECONDS
    assert "no step within" in world.until(uid, Phase.RECOVERING).phase_message
    assert world.supervisors.living == []


def test_nobody_is_called_silent_for_the_time_when_nobody_listened(world: World) -> None:
    world.supervisors.scripts = [RUNS_ON]
    uid = world.submit()
    world.until(uid, Phase.RUNNING)
    world.report_step(uid)
    world.turn()
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
    world.turn()
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
    world.turn()
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
    world.turn()
    world.clock.now += STALL_LEAST_SECONDS
    with monkeypatch.context() as patch:
        patch.setattr(Service, "write", full)
        world.turn()
    world.see_step(uid)
    world.turn()
    assert world.job(uid).phase is Phase.RUNNING
    assert [attempt.order.attempt for attempt in world.supervisors.living] == [1]


# Clocks


@pytest.fixture
def jumping(tmp_path: Path) -> Iterator[World]:
    """A service whose wall clock is set while its machine runs on."""
    clock = Clock()
    service = new_service(tmp_path, "", clock)
    yield World(service, clock, boottime=Clock(50.0))
    service.close()


JUMPS = pytest.mark.parametrize("jump_seconds", [3600.0, -3600.0])


@JUMPS
def test_a_jump_of_the_wall_clock_is_no_silence(jumping: World, jump_seconds: float) -> None:
    jumping.supervisors.scripts = [RUNS_ON]
    uid = jumping.submit(backoffLimit=0)
    jumping.until(uid, Phase.RUNNING)
    jumping.see_step(uid)
    jumping.turn()
    jumping.clock.now += jump_seconds
    jumping.pass_time(STALL_LEAST_SECONDS - 1)
    jumping.turn()
    assert jumping.job(uid).phase is Phase.RUNNING
    jumping.pass_time(1)
    assert "no step within" in jumping.until(uid, Phase.FAILED).phase_message


@JUMPS
@pytest.mark.parametrize("restarts", [False, True], ids=["same service", "next service"])
def test_a_jump_of_the_wall_clock_does_not_move_a_retry(jumping: World, jump_seconds: float, restarts: bool) -> None:
    jumping.supervisors.scripts = [FAILS, RUNS_ON]
    uid = jumping.submit()
    jumping.until(uid, Phase.RECOVERING)
    jumping.clock.now += jump_seconds
    if restarts:
        jumping.restart()
    jumping.pass_time(0.5)
    jumping.turn()
    assert jumping.job(uid).phase is Phase.RECOVERING
    jumping.pass_time(0.5)
    jumping.turn()
    assert jumping.job(uid).phase is Phase.QUEUED


def test_after_a_reboot_with_a_clock_that_went_back_a_retry_waits_its_pause_at_most(
    jumping: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    jumping.supervisors.scripts = [FAILS, RUNS_ON]
    uid = jumping.submit()
    jumping.until(uid, Phase.RECOVERING)
    assert jumping.boottime is not None
    jumping.clock.now, jumping.boottime.now = jumping.clock.now - 3600.0, 3.0
    monkeypatch.setattr(module, "boot_id", lambda: "another boot")
    jumping.restart()
    jumping.turn()
    assert jumping.job(uid).phase is Phase.RECOVERING
    jumping.pass_time(1.0)
    jumping.turn()
    assert jumping.job(uid).phase is Phase.QUEUED


# What goes wrong with one job


@pytest.mark.parametrize("error", [PermissionError("no"), ValueError("broken"), KeyError("missing")])
@pytest.mark.parametrize("method", ["report", "start", "request"])
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
    refused = world.job(bad)
    assert (refused.phase, refused.phase_reason) == (Phase.FAILED, "InvalidSpec")
    assert refused.phase_message.startswith("apiVersion: None is not")
    world.delete(bad)
    world.turn()
    assert world.job(bad).deleted_at is not None


def exceed_a_limit(world: World, uid: str) -> None:
    """The stored manifest has a number that this version takes from nobody, as one of an older version may have."""
    stored = world.job(uid)
    spec = {**stored.manifest["spec"], "checkpoint": {"keep": limits.EXACT + 1}}
    changed: dict[str, Any] = {"manifest": {**stored.manifest, "spec": spec}, "generation": stored.generation + 1}
    world.service.write(uid, lambda connection: jobs.add_event(connection, uid, "spoilt", {}, world.clock(), **changed))


@pytest.mark.parametrize("phase", [Phase.PROFILING, Phase.PLANNING, Phase.BINDING, Phase.RUNNING])
def test_a_live_attempt_goes_on_though_its_manifest_exceeds_a_newer_limit(world: World, phase: Phase) -> None:
    uid = world.submit()
    world.until(uid, phase)
    world.turn()  # it has a supervisor by now
    exceed_a_limit(world, uid)
    world.restart()
    assert world.until(uid, Phase.SUCCEEDED).attempt == 1
    assert world.phases(uid) == WHOLE_LIFE
    assert world.supervisors.asked.count(("end", 1)) == 1, "it was ended before it had ended"


def test_a_live_attempt_beyond_a_newer_limit_can_be_suspended(world: World) -> None:
    world.supervisors.scripts = [RUNS_ON, Script()]
    uid = world.submit()
    world.until(uid, Phase.RUNNING)
    exceed_a_limit(world, uid)
    world.suspend(uid)
    assert world.until(uid, Phase.SUSPENDED).failures == 0


@pytest.mark.parametrize("phase", [Phase.QUEUED, Phase.RECOVERING])
def test_no_attempt_is_launched_by_a_manifest_beyond_a_limit(world: World, phase: Phase) -> None:
    world.supervisors.scripts = [FAILS]
    uid = world.submit()
    if phase is Phase.RECOVERING:
        world.until(uid, Phase.RUNNING)
    exceed_a_limit(world, uid)
    refused = world.until(uid, Phase.FAILED)
    assert (refused.phase_reason, refused.attempt) == ("InvalidSpec", int(phase is Phase.RECOVERING))
    assert "spec.checkpoint.keep" in refused.phase_message


def test_a_database_that_is_away_is_asked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(self: Service, question: object) -> None:
        raise OperationalError("SELECT", {}, Exception("the server is gone"))

    uid = world.submit()
    with monkeypatch.context() as patch:
        patch.setattr(Service, "read", away)
        with pytest.raises(OperationalError):
            world.executor.run_once()
    world.until(uid, Phase.SUCCEEDED)
