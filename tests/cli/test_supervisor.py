"""The supervisor of an attempt against workers that follow scripts; the test is the service beyond the files."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.api.executor.folder import AttemptFolder
from penstock.api.executor.supervisors import is_alive
from penstock.cli import supervisor
from penstock.cli.state import locked
from penstock.cli.stopping import StopRequests
from penstock.cli.supervisor import DEADLINE, ClaimedError, Supervisor, claim, shipping, supervise, this_process
from penstock.cli.workers import Ranks
from penstock.core.errors import RunError, UserError
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.plan import Plan
from penstock.core.records import LogLine, RecordKind
from penstock.core.supervision import AttemptReport, Binding, Claim, Order, Wish
from penstock.planner import yamltext
from penstock.planner.search import Reporter
from penstock.trainer.launch import Failure, Outcome
from penstock.trainer.outbox import Outbox
from penstock.trainer.rundir import RunDir, write_json
from penstock.trainer.status import StatusFile, read_status, status_path
from tests.support.fake_workers import FakeRanks, FakeWorkers, Script, killed, refused
from tests.support.ingest_server import IngestServer, Request
from tests.support.manifests import example
from tests.support.sample_run import sample_plan

STEPS = 20
EVERY = 5
PATIENCE_SECONDS = 60.0
SILENT = Script(until=6, end=None)


class FakeDecider:
    """A profile is found or not, or asking for one goes wrong."""

    def __init__(self, *, has_profile: bool = False, error: Exception | None = None) -> None:
        self.has_profile, self.error = has_profile, error
        self.kept = 0

    def find_profile(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.has_profile

    def keep_profile(self) -> None:
        self.kept += 1

    def find_plan(self) -> Plan | None:
        raise AssertionError("the service plans")

    def plan(self, reporter: Reporter) -> Plan:
        raise AssertionError("the service plans")


class Bench:
    """A supervisor on simulated time; at every pause the service reads the report and then does ``meanwhile``."""

    def __init__(
        self,
        root: Path,
        workers: FakeWorkers | None = None,
        *,
        decider: FakeDecider | None = None,
        deadline_at: float | None = None,
    ) -> None:
        self.run = RunDir(root)
        self.run.create()
        self.job = sample_job()
        self.folder = AttemptFolder(root, 3)
        self.folder.path.mkdir(parents=True)
        self.order = Order(uid="u-1", attempt=3, deadline_at=deadline_at)
        self.workers, self.decider = workers or FakeWorkers(), decider or FakeDecider()
        self.requests = StopRequests()
        self.now = 1000.0
        self.pauses = 0
        self.seen: list[AttemptReport] = []
        self.meanwhile: Callable[[AttemptReport], None] = self.serve

    def supervise(self) -> AttemptReport:
        supervisor = Supervisor(
            self.job,
            self.run,
            self.order,
            workers=self.workers,
            decider=self.decider,
            requests=self.requests,
            clock=lambda: self.now,
            pause=self.pause,
        )
        try:
            return supervisor.run()
        finally:
            assert not self.workers.alive

    def pause(self, seconds: float) -> None:
        self.pauses += 1
        assert self.pauses < 1000, "the attempt does not end"
        self.now += seconds
        report = self.report
        if report not in self.seen[-1:]:
            self.seen.append(report)
        self.meanwhile(report)

    @property
    def report(self) -> AttemptReport:
        return AttemptReport.from_manifest(json.loads(self.folder.report.read_text()))

    @property
    def states(self) -> list[tuple[AttemptState, Step]]:
        """What the service saw, each once."""
        return list(dict.fromkeys((report.state, report.profile) for report in self.seen))

    def wish(self, wish: Wish) -> None:
        self.folder.wish(wish).touch()

    def bind(self, digest: str | None = None) -> None:
        write_json(self.run.plan, sample_plan().to_manifest())
        write_json(self.folder.binding, Binding(plan_digest=digest or sample_plan().digest).to_manifest())

    def serve(self, report: AttemptReport) -> None:
        """What a service does that wants the job done."""
        if report.state is AttemptState.READY and report.profile is Step.MISSING:
            self.wish(Wish.MEASURE)
        if report.state is AttemptState.READY and report.profile is Step.DONE:
            self.bind()


def sample_job() -> PipelineJob:
    return PipelineJob.from_manifest(example(training__steps=STEPS, checkpoint={"everySteps": EVERY}))


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
    bench.wish(Wish.MEASURE)
    assert bench.supervise().state is AttemptState.SUCCEEDED
    assert bench.workers.started == ["prepare", "train 3 on 2"]
    assert bench.decider.kept == 0


def test_nothing_is_measured_or_trained_unasked(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.meanwhile = lambda report: bench.wish(Wish.STOP) if bench.pauses == 10 else None
    bench.supervise()
    assert bench.workers.started == ["prepare"]


def test_measuring_tells_how_far_it_is(tmp_path: Path) -> None:
    bench = Bench(tmp_path, silently_profiling())

    def meanwhile(report: AttemptReport) -> None:
        bench.wish(Wish.MEASURE)
        write_json(bench.run.profile_progress, {"done": bench.pauses, "total": 9})
        if bench.pauses == 5:
            bench.wish(Wish.STOP)

    bench.meanwhile = meanwhile
    bench.supervise()
    working = [(report.done, report.total) for report in bench.seen if report.state is AttemptState.READY]
    assert working == [(0, 0), (1, 9), (2, 9), (3, 9), (4, 9)]


def silently_profiling() -> FakeWorkers:
    """Workers whose measurement does not end by itself."""
    workers = FakeWorkers()
    workers.profile = lambda job, run, attempt: workers._add(  # type: ignore[method-assign]
        Script(end=None), lambda: False, lambda _: None
    )
    return workers


def test_the_newest_checkpoint_is_told_while_training(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.supervise()
    told = [report.last_checkpoint for report in bench.seen if report.state is AttemptState.RUNNING]
    assert list(dict.fromkeys(told)) == [None, 5, 10, 15, 20]


# Stopping


def stop_at_step(bench: Bench, step: int) -> Callable[[AttemptReport], None]:
    """The service asks once that many steps were taken."""

    def meanwhile(report: AttemptReport) -> None:
        bench.serve(report)
        if bench.run.metrics.exists() and len(bench.run.read_metrics()) >= step:
            bench.wish(Wish.STOP)

    return meanwhile


def test_a_stop_while_training_ends_after_a_checkpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.meanwhile = stop_at_step(bench, 7)
    report = bench.supervise()
    assert report.state is AttemptState.STOPPED
    assert bench.workers.ranks[-1].asked_to_stop
    assert not bench.workers.ranks[-1].killed
    assert report.last_checkpoint == len(bench.run.read_metrics())


def test_a_stop_before_training_is_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.meanwhile = lambda report: bench.wish(Wish.STOP)
    assert bench.supervise().state is AttemptState.STOPPED
    assert bench.workers.started == ["prepare"]


def test_a_stop_while_measuring_ends_the_measurement(tmp_path: Path) -> None:
    bench = Bench(tmp_path, silently_profiling())

    def meanwhile(report: AttemptReport) -> None:
        bench.wish(Wish.MEASURE)
        if report.profile is Step.WORKING:
            bench.wish(Wish.STOP)

    bench.meanwhile = meanwhile
    assert bench.supervise().state is AttemptState.STOPPED
    assert bench.workers.ranks[-1].killed


def test_a_stop_that_comes_with_the_binding_trains_nothing(tmp_path: Path) -> None:
    """Ranks that were started a moment ago cannot hear it, and it is told only once."""
    bench = Bench(tmp_path, decider=FakeDecider(has_profile=True))
    bench.bind()
    bench.wish(Wish.STOP)
    assert bench.supervise().state is AttemptState.STOPPED
    assert bench.workers.started == ["prepare"]


class LateRanks(FakeRanks):
    """Hear nothing before they left their status, as real ones."""

    run: RunDir

    def stop(self) -> None:
        if read_status(status_path(self.run.status, 0)) is not None:
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
            bench.wish(Wish.STOP)
        if bench.pauses == 10:
            for rank in range(sample_plan().num_ranks):
                StatusFile(status_path(bench.run.status, rank), 1).start(["0F0.0"])

    workers.train = train  # type: ignore[method-assign]
    bench.meanwhile = meanwhile
    assert bench.supervise().state is AttemptState.STOPPED
    assert not workers.ranks[-1].killed


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
    script = Script(until=0, end=refused("checkpoint x is corrupt", "start anew"))
    bench = Bench(tmp_path, FakeWorkers(scripts=[script]))
    report = bench.supervise()
    assert (report.state, report.refused) == (AttemptState.FAILED, True)
    assert report.message == "checkpoint x is corrupt\n  remedy: start anew"
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
    assert "left no result" in report.message


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
    assert f"is of plan 0123456789ab, the run directory holds {sample_plan().digest[:12]}" in report.message
    assert bench.workers.started == ["prepare"]


def test_a_binding_without_a_plan_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path, decider=FakeDecider(has_profile=True))
    bench.bind()
    bench.run.plan.unlink()
    report = bench.supervise()
    assert (report.state, report.refused) == (AttemptState.FAILED, True)
    assert "plan.json" in report.message


# Ending early


def test_the_deadline_ends_what_trains(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FakeWorkers(scripts=[SILENT]), deadline_at=1030.0)
    report = bench.supervise()
    assert (report.state, report.message, report.refused) == (AttemptState.FAILED, DEADLINE, False)
    assert bench.report == report
    assert bench.workers.ranks[-1].killed
    assert bench.now >= 1030.0


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
    assert (report.state, report.message) == (AttemptState.FAILED, "was ended from outside")
    assert not report.refused
    assert bench.report == report


def test_a_signal_ends_what_measures(tmp_path: Path) -> None:
    bench = Bench(tmp_path, silently_profiling())

    def meanwhile(report: AttemptReport) -> None:
        bench.serve(report)
        if report.profile is Step.WORKING:
            bench.requests(signal.SIGTERM)

    bench.meanwhile = meanwhile
    assert bench.supervise().message == "was ended from outside"
    assert bench.workers.ranks[-1].killed


def test_a_signal_cuts_preparing_short(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.workers.prepare_with = lambda: bench.requests(signal.SIGTERM)
    report = bench.supervise()
    assert (report.state, report.message) == (AttemptState.FAILED, "was ended from outside")
    assert bench.workers.started == ["prepare"]


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
            bench.wish(Wish.STOP)

    bench.meanwhile = meanwhile
    bench.supervise()
    assert found == [mark]
    assert bench.report.state is AttemptState.STOPPED


def test_a_report_that_vanished_is_written_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def meanwhile(report: AttemptReport) -> None:
        bench.folder.report.unlink()
        if bench.pauses == 5:
            bench.wish(Wish.STOP)

    bench.meanwhile = meanwhile
    assert bench.supervise().state is AttemptState.STOPPED


# Claiming


@pytest.fixture
def folder(tmp_path: Path) -> AttemptFolder:
    folder = AttemptFolder(tmp_path, 3)
    folder.path.mkdir(parents=True)
    return folder


def claim_in(folder: AttemptFolder) -> Claim:
    return Claim.from_manifest(json.loads(folder.claim.read_text()))


def test_a_claim_names_this_very_process(folder: AttemptFolder) -> None:
    claim(folder)
    found = claim_in(folder)
    assert found == this_process()
    assert found.pid == os.getpid()
    assert found.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert is_alive(found)
    assert not is_alive(dataclasses.replace(found, started_ticks=found.started_ticks - 1))


def test_the_start_is_since_the_machine_s(folder: AttemptFolder) -> None:
    uptime_ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    assert 0 < this_process().started_ticks <= uptime_ticks


def test_a_second_claim_changes_nothing(folder: AttemptFolder) -> None:
    first = Claim(pid=1, started_ticks=2, boot_id="another time")
    write_json(folder.claim, first.to_manifest())
    with pytest.raises(ClaimedError, match="attempt 3"):
        claim(folder)
    assert claim_in(folder) == first
    assert list(folder.path.iterdir()) == [folder.claim]


def test_attempts_are_claimed_one_by_one(folder: AttemptFolder) -> None:
    claim(folder)
    other = AttemptFolder(folder.root, 4)
    other.path.mkdir()
    claim(other)
    with pytest.raises(ClaimedError):
        claim(folder)


# The whole process


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "POLL_SECONDS", 0.0)


def ordered(root: Path, **changes: Any) -> AttemptFolder:
    """What the service leaves for a supervisor: the job, the order, and here already plan and binding."""
    run, folder = RunDir(root), AttemptFolder(root, 3)
    folder.path.mkdir(parents=True)
    run.job.write_text(yamltext.dump(sample_job().to_manifest()))
    write_json(folder.order, Order(uid="u-1", attempt=3, **changes).to_manifest())
    write_json(run.plan, sample_plan().to_manifest())
    write_json(folder.binding, Binding(plan_digest=sample_plan().digest).to_manifest())
    return folder


def state_in(folder: AttemptFolder) -> AttemptState:
    return AttemptReport.from_manifest(json.loads(folder.report.read_text())).state


def deciding(job: PipelineJob, run: RunDir) -> FakeDecider:
    return FakeDecider(has_profile=True)


@pytest.mark.usefixtures("at_once")
def test_a_process_claims_and_supervises(tmp_path: Path) -> None:
    folder, workers = ordered(tmp_path), FakeWorkers()
    assert supervise(tmp_path, 3, workers=workers, decider=deciding) == 0
    assert claim_in(folder) == this_process()
    assert state_in(folder) is AttemptState.SUCCEEDED
    assert workers.started == ["prepare", "train 3 on 2"]


@pytest.mark.usefixtures("at_once")
def test_a_failure_is_an_exit_code(tmp_path: Path) -> None:
    folder = ordered(tmp_path)
    workers = FakeWorkers(scripts=[Script(until=3, end=killed())])
    assert supervise(tmp_path, 3, workers=workers, decider=deciding) == 1
    assert state_in(folder) is AttemptState.FAILED


@pytest.mark.usefixtures("at_once")
def test_a_real_signal_ends_the_supervisor_in_order(tmp_path: Path) -> None:
    folder = ordered(tmp_path)
    script = Script(end=None, before=lambda: os.kill(os.getpid(), signal.SIGTERM))
    workers = FakeWorkers(scripts=[script])
    handler = signal.getsignal(signal.SIGTERM)
    assert supervise(tmp_path, 3, workers=workers, decider=deciding) == 1
    assert state_in(folder) is AttemptState.FAILED
    assert not workers.alive
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_second_supervisor_of_an_attempt_touches_nothing(tmp_path: Path) -> None:
    folder, workers = ordered(tmp_path), FakeWorkers()
    write_json(folder.claim, Claim(pid=1, started_ticks=2, boot_id="another time").to_manifest())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ClaimedError):
        supervise(tmp_path, 3, workers=workers, decider=deciding)
    assert sorted(tmp_path.rglob("*")) == before
    assert workers.started == []


def test_the_run_directory_has_one_supervisor_at_a_time(tmp_path: Path) -> None:
    ordered(tmp_path)
    workers = FakeWorkers()
    with locked(tmp_path), pytest.raises(UserError, match="is in use"):
        supervise(tmp_path, 3, workers=workers, decider=deciding)
    assert workers.started == []


# Shipping beside it


class FakeProcess:
    """Notes what was started, and whether it was asked to end."""

    def __init__(self, command: list[str], *, start_new_session: bool) -> None:
        self.command, self.start_new_session, self.asked = command, start_new_session, False

    def terminate(self) -> None:
        self.asked = True


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    started: list[FakeProcess] = []

    def start(command: list[str], **options: Any) -> FakeProcess:
        started.append(FakeProcess(command, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def test_without_a_server_nothing_is_shipped(tmp_path: Path, processes: list[FakeProcess]) -> None:
    with shipping(tmp_path, Order(uid="u-1", attempt=3)):
        pass
    assert processes == []


def test_a_shipper_is_asked_to_end_when_the_attempt_has(tmp_path: Path, processes: list[FakeProcess]) -> None:
    order = Order(uid="u-1", attempt=3, server="http://127.0.0.1:9", token_file="/t")
    with shipping(tmp_path, order):
        assert not processes[0].asked
    assert processes[0].asked
    assert processes[0].start_new_session
    command = [sys.executable, "-m", "penstock.cli", "ship", str(tmp_path), "--server", order.server]
    assert processes[0].command == [*command, "--token-file", "/t"]


def test_a_shipper_is_asked_to_end_whatever_happened(tmp_path: Path, processes: list[FakeProcess]) -> None:
    order = Order(uid="u-1", attempt=3, server="http://127.0.0.1:9", token_file="/t")
    with pytest.raises(ZeroDivisionError), shipping(tmp_path, order):
        1 / 0  # noqa: B018
    assert processes[0].asked


@pytest.fixture
def real_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """What was started in the test, which ends with it."""
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen

    def note(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(start(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", note)
    yield started
    for process in started:
        process.kill()
        process.wait()


def test_a_shipper_outlives_the_block_until_all_is_acknowledged(
    tmp_path: Path, real_processes: list[subprocess.Popen[bytes]]
) -> None:
    run = RunDir(tmp_path)
    run.create()
    box = Outbox(run.outbox, uid="u-1", attempt=3, source="rank-0", clock=lambda: 1.0)
    box.put(RecordKind.LOG, log=LogLine(rank=0, level="info", message="hello"))
    box.close()
    (tmp_path / "token").write_text("secret\n")
    came, block_is_over = threading.Event(), threading.Event()

    def answer(request: Request) -> tuple[int, bytes]:
        came.set()
        return (200, b'{"sequence": 0}') if block_is_over.is_set() else (503, b"")

    with IngestServer(answer) as server:
        with shipping(tmp_path, Order(uid="u-1", attempt=3, server=server.url, token_file=str(tmp_path / "token"))):
            assert came.wait(PATIENCE_SECONDS)
        block_is_over.set()
        assert real_processes[0].wait(PATIENCE_SECONDS) == 0
        assert len(server.requests) > 1
