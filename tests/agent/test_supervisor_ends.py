"""How the supervisor of an attempt ends it early: when it is asked to, at its deadline, and at a signal."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.agent.launch import Ranks
from penstock.agent.supervisor import DEADLINE
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.run.folder import RunDir
from penstock.core.run.rank_status import StatusFile, read_status, status_path
from penstock.core.serialization.files import write_json
from penstock.core.supervision import AttemptReport, SupervisorRequest
from tests.support.fake_workers import FakeRanks, FakeWorkers, Script
from tests.support.sample_run import sample_plan
from tests.support.supervised import FakeDecider
from tests.support.supervising import SILENT, Bench, silently_profiling

# Stopping


def stop_at_step(bench: Bench, step: int) -> Callable[[AttemptReport], None]:
    """The service asks once that many steps were taken."""

    def meanwhile(report: AttemptReport) -> None:
        bench.serve(report)
        if bench.run.metrics.exists() and len(bench.run.read_metrics()) >= step:
            bench.request(SupervisorRequest.STOP)

    return meanwhile


def test_a_stop_while_training_ends_after_a_checkpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.meanwhile = stop_at_step(bench, 7)
    report = bench.supervise()
    assert report.state is AttemptState.STOPPED
    assert bench.workers.ranks[-1].stop_requested
    assert not bench.workers.ranks[-1].killed
    assert report.last_checkpoint == len(bench.run.read_metrics())


def test_a_stop_before_training_is_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.meanwhile = lambda report: bench.request(SupervisorRequest.STOP)
    assert bench.supervise().state is AttemptState.STOPPED
    assert bench.workers.started == ["prepare"]


def test_a_stop_while_measuring_ends_the_measurement(tmp_path: Path) -> None:
    bench = Bench(tmp_path, silently_profiling())

    def meanwhile(report: AttemptReport) -> None:
        bench.request(SupervisorRequest.MEASURE)
        if report.profile is Step.WORKING:
            bench.request(SupervisorRequest.STOP)

    bench.meanwhile = meanwhile
    assert bench.supervise().state is AttemptState.STOPPED
    assert bench.workers.ranks[-1].killed


def test_a_stop_that_comes_with_the_binding_trains_nothing(tmp_path: Path) -> None:
    """Ranks that were started a moment ago cannot hear it, and it is told only once."""
    bench = Bench(tmp_path, decider=FakeDecider(has_profile=True))
    bench.bind()
    bench.request(SupervisorRequest.STOP)
    assert bench.supervise().state is AttemptState.STOPPED
    assert bench.workers.started == ["prepare"]


class LateRanks(FakeRanks):
    """Hear nothing before they left their status, as real ones."""

    run: RunDir

    def all_started(self) -> bool:
        return read_status(status_path(self.run.status, 0)) is not None

    def stop(self) -> None:
        if self.all_started():
            super().stop()


def test_a_stop_is_heard_by_ranks_that_still_start(tmp_path: Path) -> None:
    workers = FakeWorkers()
    bench = Bench(tmp_path, workers, decider=FakeDecider(has_profile=True))

    def train(job: PipelineJob, run: RunDir, attempt: int, num_ranks: int, metrics_port: int | None) -> Ranks:
        stopped = {"outcome": "stopped", "step": 1}
        ranks = LateRanks(Script(end=None), lambda: False, lambda outcome: write_json(run.result, stopped))
        ranks.run = run
        workers.ranks.append(ranks)
        return ranks

    def meanwhile(report: AttemptReport) -> None:
        bench.bind()
        if report.state is AttemptState.STARTING:
            bench.request(SupervisorRequest.STOP)
        if bench.pauses == 10:
            for rank in range(sample_plan().num_ranks):
                StatusFile(status_path(bench.run.status, rank), 1).start(["0F0.0"])

    workers.train = train  # type: ignore[method-assign]
    bench.meanwhile = meanwhile
    assert bench.supervise().state is AttemptState.STOPPED
    assert not workers.ranks[-1].killed


# Ending early


def test_the_deadline_ends_what_trains(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[SILENT]), deadline_at=1030.0)
    report = bench.supervise()
    assert (report.state, report.message, report.refused) == (AttemptState.FAILED, DEADLINE, False)
    assert bench.report == report
    assert bench.workers.ranks[-1].killed
    assert bench.now >= 1030.0


def test_a_deadline_by_a_clock_that_went_back_since_is_not_later_than_its_full_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[SILENT]), deadline_at=1030.0 + 3600.0)
    policy = dataclasses.replace(bench.job.spec.run_policy, active_deadline_seconds=30)
    bench.job = dataclasses.replace(bench.job, spec=dataclasses.replace(bench.job.spec, run_policy=policy))
    assert bench.supervise().message == DEADLINE
    assert 1030.0 <= bench.now < 1031.0


def test_the_deadline_ends_what_measures(tmp_path: Path) -> None:
    bench = Bench(tmp_path, silently_profiling(), deadline_at=1030.0)
    assert bench.supervise().message == DEADLINE
    assert bench.workers.ranks[-1].killed


def test_nothing_is_started_after_the_deadline(tmp_path: Path) -> None:
    bench = Bench(tmp_path, decider=FakeDecider(has_profile=True), deadline_at=1030.0)
    bench.workers.prepare_with = lambda: setattr(bench, "now", 1030.0)
    bench.bind()
    assert bench.supervise().message == DEADLINE
    assert bench.workers.started == ["prepare"]


@pytest.mark.parametrize("state", [AttemptState.READY, AttemptState.RUNNING])
def test_a_signal_ends_everything(tmp_path: Path, state: AttemptState) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[SILENT]))

    def meanwhile(report: AttemptReport) -> None:
        bench.serve(report)
        if report.state is state:
            bench.requests(signal.SIGTERM)

    bench.meanwhile = meanwhile
    report = bench.supervise()
    assert (report.state, report.message) == (
        AttemptState.FAILED,
        "the supervisor received a signal and ended the attempt",
    )
    assert not report.refused
    assert bench.report == report


def test_a_signal_ends_what_measures(tmp_path: Path) -> None:
    bench = Bench(tmp_path, silently_profiling())

    def meanwhile(report: AttemptReport) -> None:
        bench.serve(report)
        if report.profile is Step.WORKING:
            bench.requests(signal.SIGTERM)

    bench.meanwhile = meanwhile
    assert bench.supervise().message == "the supervisor received a signal and ended the attempt"
    assert bench.workers.ranks[-1].killed


def test_a_signal_cuts_preparing_short(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.workers.prepare_with = lambda: bench.requests(signal.SIGTERM)
    report = bench.supervise()
    assert (report.state, report.message) == (
        AttemptState.FAILED,
        "the supervisor received a signal and ended the attempt",
    )
    assert bench.workers.started == ["prepare"]
