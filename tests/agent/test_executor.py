"""The local executor against workers that follow scripts: every way a run can go, with no process left behind."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.agent.launch import Failure, Outcome
from penstock.agent.progress_files import newest_checkpoint_step
from penstock.agent.run_state import read_state
from penstock.core.errors import UserError
from penstock.core.lifecycle import BACKOFF_BASE_SECONDS, STALL_LEAST_SECONDS, Phase
from tests.support.fake_workers import FINE, FakeWorkers, Script, killed, refused
from tests.support.running_locally import STEPS, Bench, FakeDecider

WHOLE_LIFE = [Phase.QUEUED, Phase.PROFILING, Phase.PLANNING, Phase.BINDING, Phase.RUNNING, Phase.SUCCEEDED]


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run to which nothing happened."""
    bench = Bench(tmp_path_factory.mktemp("undisturbed"), FakeWorkers())
    bench.execute()
    return bench.losses


def test_a_run_goes_through_its_phases(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers())
    state = bench.execute()
    assert bench.phases == WHOLE_LIFE
    assert (state.phase, state.attempt, state.failures) == (Phase.SUCCEEDED, 1, 0)
    assert bench.workers.started == ["prepare", "profile 1", "train 1 on 2"]
    assert bench.decider.kept == 1
    assert [entry.step for entry in bench.show.steps] == list(range(STEPS))


def test_what_is_remembered_is_what_is_returned(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers())
    state = bench.execute()
    assert read_state(tmp_path) == state
    assert [change.phase for change in state.history] == WHOLE_LIFE
    assert state.finished_at == state.history[-1].at


def test_a_fresh_profile_is_not_measured_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(), decider=FakeDecider(has_profile=True))
    bench.execute()
    assert Phase.PROFILING not in bench.phases
    assert bench.workers.started == ["prepare", "train 1 on 2"]
    assert bench.decider.kept == 0


def test_a_lost_attempt_is_tried_again_from_the_checkpoint(tmp_path: Path, undisturbed: list[float]) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(until=13, end=killed(step=13)), Script()]))
    state = bench.execute()
    assert state.phase is Phase.SUCCEEDED
    assert (state.attempt, state.failures) == (2, 1)
    assert bench.show.launches == [(1, 0), (2, 10)]
    assert bench.decider.planned == 1, "the plan stays, so that losses do"
    assert bench.losses == undisturbed
    recovering = next(change for change in bench.show.phases if change.phase is Phase.RECOVERING)
    assert "rank 1" in recovering.message
    assert "1F0.0" in recovering.message


def test_a_retry_waits_for_its_backoff(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(until=3, end=killed()), Script()]))
    bench.execute()
    times = {change.phase: change.at for change in bench.show.phases if change.reason in ("AttemptFailed", "Retrying")}
    assert times[Phase.QUEUED] - times[Phase.RECOVERING] >= BACKOFF_BASE_SECONDS


def test_without_retries_a_loss_is_the_end(tmp_path: Path) -> None:
    script = Script(until=7, end=killed(step=7))
    bench = Bench(tmp_path, FakeWorkers(scripts=[script]), runPolicy__backoffLimit=0)
    state = bench.execute()
    assert (state.phase, state.attempt, state.failures) == (Phase.FAILED, 1, 1)
    assert "rank 1" in state.message
    assert "step 7" in state.message


def test_resuming_goes_on_as_a_new_attempt(tmp_path: Path, undisturbed: list[float]) -> None:
    first = Bench(tmp_path, FakeWorkers(scripts=[Script(until=7, end=killed())]), runPolicy__backoffLimit=0)
    first.execute()
    second = Bench(tmp_path, FakeWorkers(), runPolicy__backoffLimit=0)
    state = second.execute(read_state(tmp_path).restarted())
    assert (state.phase, state.attempt, state.failures) == (Phase.SUCCEEDED, 2, 0)
    assert second.show.launches == [(2, 5)]
    assert second.losses == undisturbed
    assert len(state.history) == len(first.show.phases) + len(second.show.phases)


def test_retries_are_used_up(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(until=3, end=killed())]), runPolicy__backoffLimit=2)
    state = bench.execute()
    assert (state.phase, state.attempt, state.failures) == (Phase.FAILED, 3, 3)
    assert state.history[-1].reason == "BackoffLimitExceeded"


def test_a_rank_that_was_asked_to_stop_by_others_is_no_failure(tmp_path: Path, undisturbed: list[float]) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(until=8, outcome="stopped"), Script()]))
    state = bench.execute()
    assert (state.phase, state.attempt, state.failures) == (Phase.SUCCEEDED, 2, 0)
    assert bench.show.launches == [(1, 0), (2, 8)]
    assert bench.losses == undisturbed


def request_at(bench: Bench, step: int, *, times: int = 1) -> Callable[[], None]:
    """Signals, once ``step`` steps were seen."""

    def meanwhile() -> None:
        if len(bench.show.steps) >= step and len(bench.requests.received) < times:
            bench.requests(signal.SIGINT)

    return meanwhile


def test_a_request_stops_after_a_checkpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers())
    bench.meanwhile = request_at(bench, 6)
    state = bench.execute()
    assert state.phase is Phase.SUSPENDED
    assert bench.workers.ranks[-1].stop_requested
    assert not bench.workers.ranks[-1].killed
    assert newest_checkpoint_step(bench.run) == len(bench.losses)


def test_a_second_request_ends_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(deaf=True, end=None)]))
    bench.meanwhile = request_at(bench, 6, times=2)
    state = bench.execute()
    assert state.phase is Phase.SUSPENDED
    assert bench.workers.ranks[-1].killed
    assert state.failures == 0


def test_a_suspended_run_goes_on(tmp_path: Path, undisturbed: list[float]) -> None:
    first = Bench(tmp_path, FakeWorkers())
    first.meanwhile = request_at(first, 6)
    first.execute()
    second = Bench(tmp_path, FakeWorkers())
    state = second.execute(read_state(tmp_path).restarted())
    assert (state.phase, state.attempt) == (Phase.SUCCEEDED, 2)
    assert second.losses == undisturbed


def test_a_request_while_preparing_launches_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(prepare_with=lambda: bench.requests(signal.SIGTERM)))
    state = bench.execute()
    assert (state.phase, state.attempt) == (Phase.SUSPENDED, 0)
    assert bench.workers.started == ["prepare"]


def test_a_request_while_measuring_ends_the_measurement(tmp_path: Path) -> None:
    workers = FakeWorkers(profile_ends=[FINE])
    bench = Bench(tmp_path, workers)
    bench.workers.profile_ends = [dataclasses.replace(FINE)]
    silent = Script(end=None)
    workers.profile = lambda job, run, attempt: workers._add(silent, lambda: False, lambda _: None)  # type: ignore[method-assign]
    bench.meanwhile = lambda: bench.requests(signal.SIGINT) if bench.pauses == 3 else None
    state = bench.execute()
    assert state.phase is Phase.SUSPENDED
    assert workers.ranks[-1].killed


def test_a_job_that_says_suspend_does_not_start(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(), runPolicy__suspend=True)
    assert bench.execute().phase is Phase.SUSPENDED
    assert bench.workers.started == []


def test_a_mistake_found_by_a_rank_is_not_tried_again(tmp_path: Path) -> None:
    bench = Bench(
        tmp_path, FakeWorkers(scripts=[Script(until=0, end=refused("checkpoint x is corrupt", "start again"))])
    )
    with pytest.raises(UserError) as found:
        bench.execute()
    assert found.value.what == "checkpoint x is corrupt"
    assert found.value.remedy == "start again"
    assert read_state(tmp_path).phase is Phase.FAILED
    assert bench.workers.started.count("train 1 on 2") == 1


def test_nothing_that_fits_is_a_mistake(tmp_path: Path) -> None:
    mistake = UserError(what="nothing fits", where="spec.resources.memoryPerRank", remedy="allow more")
    bench = Bench(tmp_path, FakeWorkers(), decider=FakeDecider(mistake=mistake))
    with pytest.raises(UserError, match="nothing fits"):
        bench.execute()
    assert read_state(tmp_path).phase is Phase.FAILED


def test_data_that_does_not_suit_is_a_mistake(tmp_path: Path) -> None:
    def prepare() -> None:
        raise UserError(what="holds no text")

    bench = Bench(tmp_path, FakeWorkers(prepare_with=prepare))
    with pytest.raises(UserError, match="holds no text"):
        bench.execute()
    assert bench.workers.started == ["prepare"]


def test_measuring_may_fail_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(profile_ends=[killed(), FINE]))
    state = bench.execute()
    assert (state.phase, state.attempt, state.failures) == (Phase.SUCCEEDED, 2, 1)
    assert bench.workers.started == ["prepare", "profile 1", "profile 2", "train 2 on 2"]


def test_a_silent_attempt_is_lost(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(until=6, end=None), Script()]))
    state = bench.execute()
    assert (state.phase, state.attempt, state.failures) == (Phase.SUCCEEDED, 2, 1)
    lost = next(change for change in state.history if change.phase is Phase.RECOVERING)
    assert f"no step within {STALL_LEAST_SECONDS:.0f} s" in lost.message


@pytest.mark.parametrize("jump_seconds", [3600.0, -3600.0])
def test_a_jump_of_the_wall_clock_is_no_silence(tmp_path: Path, jump_seconds: float) -> None:
    bench = Bench(tmp_path, FakeWorkers(), runPolicy__backoffLimit=0)

    def meanwhile() -> None:
        if len(bench.show.steps) == 6:
            bench.ahead_seconds = jump_seconds

    bench.meanwhile = meanwhile
    assert bench.execute().phase is Phase.SUCCEEDED
    assert bench.ahead_seconds == jump_seconds


@pytest.mark.parametrize("jump_seconds", [3600.0, -3600.0])
def test_a_jump_of_the_wall_clock_does_not_move_a_retry(tmp_path: Path, jump_seconds: float) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(until=3, end=killed()), Script()]))
    lost_at: list[float] = []

    def meanwhile() -> None:
        if bench.show.phases[-1].phase is Phase.RECOVERING and not lost_at:
            lost_at.append(bench.now)
            bench.ahead_seconds = jump_seconds

    bench.meanwhile = meanwhile
    bench.execute()
    retried = next(change for change in bench.show.phases if change.reason == "Retrying")
    waited = retried.at - jump_seconds - lost_at[0]
    assert waited == pytest.approx(BACKOFF_BASE_SECONDS, abs=0.2)


def test_a_jump_of_the_wall_clock_hides_no_silence(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(until=6, end=None)]), runPolicy__backoffLimit=0)

    def meanwhile() -> None:
        bench.ahead_seconds -= 0.05  # a wall clock that stands still

    bench.meanwhile = meanwhile
    assert "no step within" in bench.execute().message
    assert bench.now < 1000.0 + 2 * STALL_LEAST_SECONDS


def test_a_deadline_ends_the_run(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(until=6, end=None)]), runPolicy__activeDeadlineSeconds=30)
    state = bench.execute()
    assert (state.phase, state.history[-1].reason) == (Phase.FAILED, "DeadlineExceeded")


def test_an_attempt_without_a_result_has_failed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(outcome="")]), runPolicy__backoffLimit=0)
    state = bench.execute()
    assert state.phase is Phase.FAILED
    assert "without writing a result" in state.message


def test_an_old_result_does_not_count(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(until=3, end=killed())]), runPolicy__backoffLimit=0)
    bench.run.result.write_text(json.dumps({"outcome": "succeeded"}))
    assert bench.execute().phase is Phase.FAILED


def test_steps_that_came_with_the_end_are_shown(tmp_path: Path) -> None:
    """Ranks take steps while the executor looks elsewhere."""
    bench = Bench(tmp_path, FakeWorkers())

    def meanwhile() -> None:
        for _ in range(9):
            bench.workers.ranks[-1].poll()

    bench.meanwhile = meanwhile
    bench.execute()
    assert [entry.step for entry in bench.show.steps] == list(range(STEPS))


def test_an_error_nobody_expected_leaves_no_process(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(end=None)]))

    def meanwhile() -> None:
        if len(bench.show.steps) > 3:
            raise RuntimeError("the terminal is gone")

    bench.meanwhile = meanwhile
    with pytest.raises(RuntimeError, match="the terminal is gone"):
        bench.execute()
    assert bench.workers.ranks[-1].killed


def test_what_ranks_warn_of_is_shown_once(tmp_path: Path) -> None:
    def warn() -> None:
        with bench.run.warnings.open("a") as file:
            file.write("checkpoint a1/step-5 is corrupt\n")

    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(until=7, end=killed()), Script(before=warn)]))
    bench.execute()
    assert bench.show.notes == ["checkpoint a1/step-5 is corrupt"]
    again = Bench(tmp_path, FakeWorkers())
    again.execute()
    assert again.show.notes == []


def test_a_failure_without_its_place_is_given_one(tmp_path: Path) -> None:
    failure = Failure(rank=0, step=4, action="0I0.1", message="ValueError: no")
    script = Script(until=4, end=Outcome(exit_code=1, failure=failure))
    bench = Bench(tmp_path, FakeWorkers(scripts=[script]), runPolicy__backoffLimit=0)
    assert bench.execute().message == "rank 0 failed in step 4 at 0I0.1: ValueError: no"
