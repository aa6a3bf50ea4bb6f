"""The supervisor of an attempt against workers that follow scripts; the test is the service beyond the files."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.agent import mailbox as module
from penstock.agent.launch import Failure, Outcome
from penstock.agent.supervisor import STEP_GRAIN_SECONDS
from penstock.core.errors import RunError, UserError
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.run.folder import metrics_line
from penstock.core.serialization.files import write_json
from penstock.core.supervision import AttemptReport, SupervisorRequest
from tests.support.fake_workers import FakeRanks, FakeWorkers, Script, fake_metrics, killed, refused
from tests.support.sample_run import sample_plan
from tests.support.supervised import EVERY, STEPS, FakeDecider
from tests.support.supervising import SILENT, Bench, silently_profiling

PATIENCE_SECONDS = 60.0


def fail_with(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


# A life


def test_an_attempt_lives_from_preparing_to_its_success(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    report = bench.supervise()
    assert bench.states == [
        (AttemptState.READY, Step.MISSING),
        (AttemptState.READY, Step.DONE),
        (AttemptState.RUNNING, Step.DONE),
        (AttemptState.SUCCEEDED, Step.DONE),
    ]
    assert bench.workers.started == ["prepare", "profile 3", "train 3 on 2"]
    assert bench.decider.kept == 1
    assert report.ended
    assert (report.num_ranks, report.message, report.refused) == (2, "", False)
    assert report.last_checkpoint == STEPS


def test_what_is_returned_is_what_the_service_reads(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.supervise() == bench.report


def test_it_says_that_it_starts_before_it_prepares(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    found = []
    bench.workers.prepare_with = lambda: found.append(bench.report.state)
    bench.supervise()
    assert found == [AttemptState.STARTING]


def test_a_fresh_profile_is_not_measured_again(tmp_path: Path) -> None:
    """Not even if the service asks: it may have read the report of an attempt before."""
    bench = Bench(tmp_path, decider=FakeDecider(has_profile=True))
    bench.request(SupervisorRequest.MEASURE)
    assert bench.supervise().state is AttemptState.SUCCEEDED
    assert bench.workers.started == ["prepare", "train 3 on 2"]
    assert bench.decider.kept == 0


def test_nothing_is_measured_or_trained_unasked(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.meanwhile = lambda report: bench.request(SupervisorRequest.STOP) if bench.pauses == 10 else None
    bench.supervise()
    assert bench.workers.started == ["prepare"]


def test_measuring_tells_how_far_it_is(tmp_path: Path) -> None:
    bench = Bench(tmp_path, silently_profiling())

    def meanwhile(report: AttemptReport) -> None:
        bench.request(SupervisorRequest.MEASURE)
        write_json(bench.run.profile_progress, {"done": bench.pauses, "total": 9})
        if bench.pauses == 5:
            bench.request(SupervisorRequest.STOP)

    bench.meanwhile = meanwhile
    bench.supervise()
    working = [(report.done, report.total) for report in bench.seen if report.state is AttemptState.READY]
    assert working == [(0, 0), (1, 9), (2, 9), (3, 9), (4, 9)]


def test_the_newest_checkpoint_is_told_while_training(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.supervise()
    told = [report.last_checkpoint for report in bench.seen if report.state is AttemptState.RUNNING]
    assert list(dict.fromkeys(told)) == [None, 5, 10, 15, 20]


# Steps


def test_a_step_is_never_told_as_earlier_than_it_was_nor_as_much_later(tmp_path: Path) -> None:
    """Earlier, and the attempt would be taken for silent before its time."""
    bench = Bench(tmp_path)
    looked_at: list[float] = []
    late: list[float] = []

    def meanwhile(report: AttemptReport) -> None:
        bench.serve(report)
        if report.state is AttemptState.RUNNING and report.last_step_at is not None:
            late.append(report.last_step_at - looked_at[-1])
        bench.now += 7
        looked_at.append(bench.now)

    bench.meanwhile = meanwhile
    bench.supervise()
    assert len(late) == STEPS
    assert all(0 <= seconds < STEP_GRAIN_SECONDS for seconds in late)


def test_steps_that_follow_quickly_are_told_together_and_silence_is_seen(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[SILENT]), deadline_at=1030.0)
    bench.supervise()
    assert list(dict.fromkeys(report.last_step_at for report in bench.seen)) == [None, 1005.0]


def test_steps_of_attempts_before_are_none_of_this_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(until=0, end=None)]), deadline_at=1030.0)
    bench.run.metrics.write_text(metrics_line(fake_metrics(0)))
    assert bench.supervise().last_step_at is None


# Failing


def test_a_mistake_found_while_preparing_is_refused(tmp_path: Path) -> None:
    mistake = UserError(what="holds no text", where="spec.data", remedy="name other files")
    bench = Bench(tmp_path, FakeWorkers(prepare_with=fail_with(mistake)))
    report = bench.supervise()
    assert (report.state, report.message, report.refused) == (AttemptState.FAILED, str(mistake), True)
    assert bench.report == report
    assert bench.workers.started == ["prepare"]


def test_a_mistake_found_while_measuring_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(profile_ends=[refused("does not fit", "allow more")]))
    report = bench.supervise()
    assert (report.state, report.refused) == (AttemptState.FAILED, True)
    assert report.message == "does not fit\n  remedy: allow more"
    assert bench.report == report
    assert bench.decider.kept == 0


def test_a_mistake_found_while_training_is_refused(tmp_path: Path) -> None:
    script = Script(until=0, end=refused("checkpoint x is corrupt", "start again"))
    bench = Bench(tmp_path, FakeWorkers(scripts=[script]))
    report = bench.supervise()
    assert (report.state, report.refused) == (AttemptState.FAILED, True)
    assert report.message == "checkpoint x is corrupt\n  remedy: start again"
    assert bench.report == report


def test_a_measurement_that_fails_may_be_tried_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(profile_ends=[killed()]))
    report = bench.supervise()
    assert (report.state, report.profile, report.refused) == (AttemptState.FAILED, Step.FAILED, False)
    assert "rank 1 (process 4711) was killed" in report.message
    assert bench.report == report


def test_a_failing_rank_is_named_and_may_be_tried_again(tmp_path: Path) -> None:
    failure = Failure(rank=0, step=4, action="0I0.1", message="ValueError: no")
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(until=6, end=Outcome(exit_code=1, failure=failure))]))
    report = bench.supervise()
    assert (report.state, report.refused) == (AttemptState.FAILED, False)
    assert report.message == "rank 0 failed in step 4 at 0I0.1: ValueError: no"
    assert report.last_checkpoint == EVERY
    assert bench.report == report


def test_the_last_words_of_the_rank_at_fault_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "rank.log"
    log.write_text("all is well\nno, it is not\n")
    monkeypatch.setattr(FakeRanks, "log_path", lambda self, rank: log)
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(until=6, end=killed())]))
    assert bench.supervise().last_words == ("all is well", "no, it is not")


def test_ranks_that_leave_no_result_have_failed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[Script(outcome="")]))
    report = bench.supervise()
    assert (report.state, report.refused) == (AttemptState.FAILED, False)
    assert "without writing a result" in report.message


def test_an_error_that_is_nobodys_mistake_is_told_too(tmp_path: Path) -> None:
    """Else the service would know no more than that the supervisor is gone."""
    bench = Bench(tmp_path, decider=FakeDecider(error=RunError("PyTorch cannot be asked")))
    report = bench.supervise()
    assert (report.state, report.message, report.refused) == (AttemptState.FAILED, "PyTorch cannot be asked", False)
    assert bench.report == report


def test_an_error_that_nobody_expected_leaves_nothing_alive(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[SILENT]))

    def meanwhile(report: AttemptReport) -> None:
        bench.serve(report)
        if report.state is AttemptState.RUNNING:
            raise OSError("no space is left")

    bench.meanwhile = meanwhile
    with pytest.raises(OSError, match="no space is left"):
        bench.supervise()
    assert bench.workers.ranks[-1].killed


def test_a_binding_of_another_plan_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, decider=FakeDecider(has_profile=True))
    bench.bind("0123456789abcdef" * 4)
    report = bench.supervise()
    assert (report.state, report.refused) == (AttemptState.FAILED, True)
    assert (
        f"is bound to plan 0123456789ab, but the run directory has plan {sample_plan().digest[:12]}" in report.message
    )
    assert bench.workers.started == ["prepare"]


def test_a_binding_without_a_plan_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, decider=FakeDecider(has_profile=True))
    bench.bind()
    bench.run.plan.unlink()
    report = bench.supervise()
    assert (report.state, report.refused) == (AttemptState.FAILED, True)
    assert "plan.json" in report.message


# The report's file


def test_the_report_is_written_only_when_something_changed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    mark = json.dumps(AttemptReport(state=AttemptState.READY, message="as it was").to_manifest())
    found = []

    def meanwhile(report: AttemptReport) -> None:
        if bench.pauses == 3:
            bench.folder.report.write_text(mark)
        if bench.pauses == 20:
            found.append(bench.folder.report.read_text())
            bench.request(SupervisorRequest.STOP)

    bench.meanwhile = meanwhile
    bench.supervise()
    assert found == [mark]
    assert bench.report.state is AttemptState.STOPPED


def test_a_report_that_cannot_be_written_costs_no_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may be full for a while."""
    bench = Bench(tmp_path)

    def full(path: Path, manifest: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def meanwhile(report: AttemptReport) -> None:
        bench.serve(report)
        if bench.pauses == 5:
            monkeypatch.setattr(module, "write_json", full)
        if bench.pauses == 15:
            monkeypatch.undo()

    bench.meanwhile = meanwhile
    report = bench.supervise()
    assert report.state is AttemptState.SUCCEEDED
    assert bench.report == report


def test_a_report_that_vanished_is_written_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def meanwhile(report: AttemptReport) -> None:
        bench.folder.report.unlink()
        if bench.pauses == 5:
            bench.request(SupervisorRequest.STOP)

    bench.meanwhile = meanwhile
    assert bench.supervise().state is AttemptState.STOPPED
