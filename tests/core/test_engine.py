"""The engine: every life of the table in memory, killed at every moment, and its clocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.clocks import Reading
from penstock.core.engine import step
from penstock.core.errors import UserError
from penstock.core.lifecycle import (
    BACKOFF_BASE_SECONDS,
    STALL_LEAST_SECONDS,
    AttemptState,
    Observation,
    Phase,
    Step,
    backoff_seconds,
)
from penstock.core.processes import LOST, ProcessState, attempt_state
from penstock.core.supervision import AttemptReport
from tests.support.engine_cases import CASES, Case, End, expected
from tests.support.memory_backend import (
    Durable,
    MemoryAttempt,
    MemoryBackend,
    MemoryJob,
    StoredRecord,
    memory_outcome,
    on_every_crash,
    spec_of,
)

NOW = Reading(wall=1e9, boot_id="boot", boottime=500.0)
JUMPS = pytest.mark.parametrize("jump_seconds", [3600.0, -3600.0])


def later(seconds: float, *, jump_seconds: float = 0.0, now: Reading = NOW) -> Reading:
    """The reading after so many seconds, in which the wall clock was set by ``jump_seconds``."""
    return replace(now, wall=now.wall + seconds + jump_seconds, boottime=now.boottime + seconds)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_life_of_a_job(case: Case) -> None:
    assert memory_outcome(case) == expected(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_process_killed_at_any_moment_changes_nothing_of_it(case: Case) -> None:
    outcomes = on_every_crash(lambda crash: memory_outcome(case, crash))
    assert len(outcomes) > 10
    assert set(outcomes) == {expected(case)}


# Clocks


def recovering(failed: Reading, failures: int = 1) -> MemoryBackend:
    record = StoredRecord(
        phase=Phase.RECOVERING,
        attempt=1,
        failures=failures,
        failed_at=failed.wall,
        failed_boot_id=failed.boot_id or None,
        failed_boottime=failed.boottime if failed.boot_id else None,
    )
    return MemoryBackend(Durable((End.FAILS, End.SUCCEEDS), record, closed={1}))


def advance(backend: MemoryBackend, now: Reading, **policy: object) -> float | None:
    return step(backend, MemoryJob(spec=spec_of(**policy), record=backend.durable.record), now)


@given(
    jumps=st.lists(st.sampled_from([0.0, 3600.0, -3600.0, 1e8, -1e8]), max_size=6),
    failures=st.integers(1, 12),
    same_boot=st.booleans(),
)
def test_a_retry_is_due_after_its_pause_and_not_before(jumps: list[float], failures: int, same_boot: bool) -> None:
    """Also on another boot, if the clock has gone back since."""
    pause = backoff_seconds(failures)
    failed = NOW if same_boot else Reading(wall=NOW.wall + 10.0, boot_id="before", boottime=9999.0)
    backend, ahead = recovering(failed, failures), 0.0
    assert advance(backend, NOW) == pytest.approx(pause)
    for i, jump in enumerate(jumps):
        ahead += jump
        passed = pause * (i + 1) / (len(jumps) + 1)
        assert advance(backend, later(passed, jump_seconds=ahead)) == pytest.approx(pause - passed, abs=1e-5)
    assert advance(backend, later(pause + 1e-3, jump_seconds=ahead)) == 0.0
    assert backend.durable.record.phase is Phase.QUEUED


@JUMPS
def test_the_next_process_waits_for_the_rest_of_the_pause(jump_seconds: float) -> None:
    durable = recovering(NOW, failures=4).durable
    wait = advance(MemoryBackend(durable), later(3.0, jump_seconds=jump_seconds))
    assert wait == pytest.approx(8 * BACKOFF_BASE_SECONDS - 3.0)


def test_a_failure_of_an_earlier_version_has_only_a_wall_time() -> None:
    failed = Reading(wall=NOW.wall - 3.0)
    assert advance(recovering(failed, failures=4), NOW) == pytest.approx(5.0)


def running(num_steps: int = 5, started_at: float | None = None) -> MemoryBackend:
    report = AttemptReport(state=AttemptState.RUNNING, profile=Step.DONE)
    record = StoredRecord(phase=Phase.RUNNING, attempt=1, started_at=started_at)
    attempt = MemoryAttempt(End.FALLS_SILENT, report, num_steps=num_steps)
    return MemoryBackend(Durable((End.FALLS_SILENT, End.SUCCEEDS), record, {1: attempt}, is_planned=True))


@JUMPS
def test_silence_counts_from_the_last_change_of_the_step(jump_seconds: float) -> None:
    backend = running()
    advance(backend, NOW)
    backend.durable.attempts[1].num_steps += 1
    assert advance(backend, later(50.0)) == pytest.approx(STALL_LEAST_SECONDS)
    assert advance(backend, later(109.0, jump_seconds=jump_seconds)) == pytest.approx(1.0, abs=1e-5)
    advance(backend, later(110.1, jump_seconds=jump_seconds))
    assert backend.durable.life == [(Phase.RECOVERING, "AttemptFailed")]


def test_an_observer_that_is_restarted_listens_again_from_the_start() -> None:
    durable = running().durable
    for at in (0.0, 50.0, 100.0):
        assert advance(MemoryBackend(durable), later(at)) == pytest.approx(STALL_LEAST_SECONDS)


def test_the_first_steps_of_a_new_attempt_are_not_those_of_the_last() -> None:
    """Both may be at the same number of steps."""
    backend = running()
    advance(backend, NOW)
    backend.durable.record = replace(backend.durable.record, attempt=2)
    backend.durable.attempts[2] = backend.durable.attempts.pop(1)
    assert advance(backend, later(59.0)) == pytest.approx(STALL_LEAST_SECONDS)


def test_no_step_is_due_before_the_first() -> None:
    assert advance(running(num_steps=0), NOW) is None


def test_a_deadline_is_by_the_wall_clock() -> None:
    backend = running(num_steps=0, started_at=NOW.wall)
    assert advance(backend, later(10.0, jump_seconds=80.0), activeDeadlineSeconds=100) is None
    advance(backend, later(10.0, jump_seconds=90.0), activeDeadlineSeconds=100)
    assert backend.durable.life == [(Phase.FAILED, "DeadlineExceeded")]


@given(back=st.floats(0.0, 1e8))
def test_a_finished_job_is_due_to_expire_after_its_full_time_at_most(back: float) -> None:
    record = StoredRecord(phase=Phase.SUCCEEDED, attempt=1, finished_at=NOW.wall)
    backend = MemoryBackend(Durable((End.SUCCEEDS,), record))
    wait = advance(backend, later(0.0, jump_seconds=-back), ttlSecondsAfterFinished=100)
    assert wait == pytest.approx(100.0)
    assert advance(backend, later(100.0), ttlSecondsAfterFinished=100) is None
    assert backend.durable.expired


# The state of an attempt


@pytest.mark.parametrize("state", AttemptState)
@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("alive", [False, True])
def test_an_attempt_without_a_supervisor_has_failed_unless_it_had_ended(
    state: AttemptState, claimed: bool, alive: bool
) -> None:
    report = AttemptReport(state=state)
    process_state = ProcessState(claimed=claimed, alive=alive, report=report)
    is_lost = claimed and not alive and not report.ended
    expected_state = AttemptState.FAILED if is_lost else state
    assert attempt_state(StoredRecord(attempt=1), process_state) is expected_state


def test_a_supervisor_that_vanished_is_named() -> None:
    backend = running()
    backend.durable.attempts[1].alive = False
    advance(backend, NOW)
    assert (backend.durable.record.phase, backend.durable.record.message) == (Phase.RECOVERING, LOST)


# Observations by a cache


class CachedBackend(MemoryBackend):
    """Its cache says that the attempt is in ``cached``; ``num_fresh`` counts observations without the cache."""

    def __init__(self, durable: Durable, cached: AttemptState) -> None:
        super().__init__(durable)
        self.cached, self.num_fresh = cached, 0

    def observe(self, job: MemoryJob, now: Reading, *, fresh: bool = False) -> Observation:
        self.num_fresh += fresh
        seen = super().observe(job, now)
        return seen if fresh else replace(seen, attempt_state=self.cached, fresh=False)


@pytest.mark.parametrize("cached", [AttemptState.FAILED, AttemptState.DISRUPTED, AttemptState.SUCCEEDED])
def test_an_attempt_is_not_ended_for_what_only_a_cache_says(cached: AttemptState) -> None:
    backend = CachedBackend(running().durable, cached)
    advance(backend, NOW)
    assert (backend.durable.life, backend.num_fresh) == ([], 1)
    assert backend.durable.attempts[1].alive


def test_the_fresh_observation_counts() -> None:
    backend = CachedBackend(running().durable, AttemptState.SUCCEEDED)
    backend.durable.attempts[1].alive = False
    advance(backend, NOW)
    assert backend.durable.life == [(Phase.RECOVERING, "AttemptFailed")]


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_launch_is_final_after_an_earlier_one(attempt: int) -> None:
    record = StoredRecord(phase=Phase.QUEUED, attempt=attempt)
    backend = CachedBackend(Durable((End.SUCCEEDS,) * 2, record, closed={attempt}), AttemptState.NONE)
    advance(backend, NOW)
    assert (list(backend.durable.attempts), backend.num_fresh) == ([attempt + 1], attempt)


class RefusingBackend(MemoryBackend):
    """A place where no attempt can be started for a mistake of the user."""

    def start(self, job: MemoryJob) -> None:
        raise UserError(what="is missing", where="data", remedy="add it")


def test_a_mistake_that_a_start_finds_fails_the_job() -> None:
    backend = RefusingBackend(Durable((), StoredRecord(phase=Phase.QUEUED)))
    assert advance(backend, NOW) == 0.0
    assert [phase for phase, _ in backend.durable.life] == [Phase.PROFILING, Phase.FAILED]
    assert "add it" in backend.durable.record.message
    assert backend.durable.closed == {1}
