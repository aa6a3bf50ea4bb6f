"""How ranks are started here, waited for, and how their mistakes come back."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.agent import workers
from penstock.agent.attempt import MOST_LAST_LINES, Attempt
from penstock.agent.launch import Failure, LaunchSpec, Outcome
from penstock.agent.memory_limit import MemoryLimit
from penstock.agent.workers import LocalWorkers, end, finish, refusal
from penstock.core.errors import RunError, UserError
from penstock.core.host import members
from penstock.core.host.stopping import StopRequestedError, StopRequests
from penstock.core.job import Device
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.preparing import Reporter
from penstock.core.run.folder import RunDir
from penstock.core.run.rank_status import StatusFile, status_path
from penstock.core.serialization.files import write_json
from tests.support.fake_workers import FINE, FakeRanks, FakeWorkers, Script, killed, refused
from tests.support.local_run import local_job
from tests.support.supervised import FakeDecider
from tests.support.supervising import silently_profiling


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.create()
    return run


def ranks(script: Script, *, steps: int = 0) -> FakeRanks:
    """Ranks that take ``steps`` before they end."""
    left = iter(range(steps))
    return FakeRanks(script, lambda: next(left, None) is not None, lambda outcome: None)


# Starting


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    """What would have been launched."""
    specs: list[LaunchSpec] = []

    def launch(spec: LaunchSpec) -> FakeRanks:
        specs.append(spec)
        return ranks(Script())

    monkeypatch.setattr(workers, "launch", launch)
    return specs


def test_every_entry_point_is_told_its_run(run: RunDir, launched: list[LaunchSpec]) -> None:
    job = local_job(resources__threadsPerRank=3)
    local = LocalWorkers()
    local.profile(job, run, 4)
    local.train(job, run, 5, 7, None)
    local.train(job, run, 6, 7, 9100)
    local.rehearse(job, run, 16)
    directory = ("--run-dir", str(run.root))
    assert [spec.arguments for spec in launched] == [
        ("profile", *directory),
        ("train", *directory, "--attempt", "5"),
        ("train", *directory, "--attempt", "6", "--metrics-port", "9100"),
        ("rehearse", *directory),
    ]
    assert [spec.num_ranks for spec in launched] == [2, 7, 7, 16]
    assert {spec.threads_per_rank for spec in launched} == {3}
    assert {spec.status_folder for spec in launched} == {run.status}
    assert len({spec.log_folder for spec in launched}) == 4
    assert {spec.devices for spec in launched} == {()}


def test_every_entry_point_sees_the_devices_that_the_job_holds(run: RunDir, launched: list[LaunchSpec]) -> None:
    job, local = local_job(), LocalWorkers(("1", "3"))
    local.profile(job, run, 1)
    local.train(job, run, 1, 2, None)
    assert [spec.devices for spec in launched] == [("1", "3")] * 2


@pytest.mark.parametrize("device", Device)
def test_every_entry_point_starts_for_the_job_s_device(run: RunDir, launched: list[LaunchSpec], device: Device) -> None:
    job, local = local_job(resources__device=device.value), LocalWorkers()
    local.profile(job, run, 1)
    local.train(job, run, 1, 2, None)
    local.rehearse(job, run, 2)
    assert [spec.device for spec in launched] == [device] * 3


@pytest.mark.parametrize("package", ["torch", "tokenizers"])
def test_a_machine_that_cannot_train_says_what_to_install(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setattr(members, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(UserError, match=rf"needs the package {package}(.|\n)*remedy: .*penstock\.txt penstock-trainer"):
        LocalWorkers().prepare(local_job(), run, Reporter())


def test_ranks_that_measure_or_train_are_held_to_the_job_s_memory(run: RunDir, launched: list[LaunchSpec]) -> None:
    """A plan on fewer ranks has theirs. All are ended before the service where the machine lacks memory."""
    job, local = local_job(resources={"ranks": 4, "memoryPerRank": "3Gi"}), LocalWorkers()
    local.profile(job, run, 1)
    local.train(job, run, 1, 2, None)
    local.rehearse(job, run, 16)
    assert [spec.memory for spec in launched] == [
        MemoryLimit(num_bytes=12 * 2**30, num_ranks=4),
        MemoryLimit(num_bytes=6 * 2**30, num_ranks=2),
        None,
    ]
    assert all(spec.expendable for spec in launched)


def test_on_cuda_the_memory_of_ranks_is_the_device_s(run: RunDir, launched: list[LaunchSpec]) -> None:
    job = local_job(resources__device="cuda")
    LocalWorkers().train(job, run, 1, 2, None)
    assert launched[0].memory is None


# Waiting


def test_ranks_that_end_well_are_waited_for() -> None:
    watched = []
    finish(ranks(Script(), steps=3), StopRequests(), lambda: watched.append(True))
    assert len(watched) == 3


def test_a_failure_is_an_error_that_names_it() -> None:
    with pytest.raises(RunError, match="rank 1"):
        finish(ranks(Script(end=killed())), StopRequests())


def test_a_refusal_is_the_users_error() -> None:
    with pytest.raises(UserError) as found:
        finish(ranks(Script(end=refused("is corrupt", "begin again"))), StopRequests())
    assert (found.value.what, found.value.remedy) == ("is corrupt", "begin again")


def test_a_request_ends_the_waiting_and_the_ranks() -> None:
    waited, requests = ranks(Script(end=None)), StopRequests()
    requests(signal.SIGINT)
    with pytest.raises(StopRequestedError):
        finish(waited, requests)
    assert waited.killed


def test_ranks_that_ended_are_left_alone() -> None:
    ended = ranks(Script())
    end(ended)
    assert not ended.killed


@pytest.mark.parametrize(
    ("what", "where", "remedy"),
    [("is corrupt", "checkpoint a", "begin again"), ("is corrupt", "", ""), ("two\nlines", "x", "a remedy: of sorts")],
)
def test_a_refusal_says_what_the_rank_said(what: str, where: str, remedy: str) -> None:
    mistake = UserError(what=what, where=where, remedy=remedy)
    failure = Failure(rank=0, step=-1, action="", message=str(mistake), refused=True)
    assert str(refusal(failure)) == str(mistake)
    assert refusal(failure).remedy == remedy


# An attempt


def attempt(run: RunDir, fake: FakeWorkers, **changes: Any) -> Attempt:
    return Attempt(local_job(**changes), run, 1, fake, FakeDecider())


def test_an_attempt_is_ready_until_it_trains(run: RunDir) -> None:
    decider = FakeDecider()
    tried = Attempt(local_job(), run, 1, FakeWorkers(), decider)
    report = tried.report()
    assert (report.state, report.profile, decider.kept) == (AttemptState.READY, Step.MISSING, 0)
    tried.measure()
    for _ in range(2):
        report = tried.report()
        assert (report.state, report.profile, decider.kept) == (AttemptState.READY, Step.DONE, 1)


def test_a_measurement_is_reported_as_it_goes_on(run: RunDir) -> None:
    tried = attempt(run, silently_profiling())
    write_json(run.profile_progress, {"done": 3, "total": 8})
    report = tried.report()
    assert (report.profile, report.done, report.total) == (Step.MISSING, 0, 0)
    tried.measure()
    report = tried.report()
    assert (report.profile, report.done, report.total) == (Step.WORKING, 3, 8)


def test_an_attempt_runs_when_all_its_ranks_do(run: RunDir) -> None:
    fake = FakeWorkers(scripts=[Script(end=None, until=0)])
    tried = attempt(run, fake)
    tried.train(2, None)
    waiting = StatusFile(status_path(run.status, 1), 1)
    assert tried.report().state is AttemptState.STARTING
    waiting.start(["1F0.0"])
    assert tried.report().state is AttemptState.RUNNING
    tried.kill()
    assert not fake.alive


@pytest.mark.parametrize(
    ("script", "state"),
    [
        (Script(until=0), AttemptState.SUCCEEDED),
        (Script(until=0, outcome="stopped"), AttemptState.STOPPED),
        (Script(until=0, outcome="nonsense"), AttemptState.FAILED),
        (Script(until=0, end=killed()), AttemptState.FAILED),
    ],
)
def test_an_attempt_ends_as_its_ranks_say(run: RunDir, script: Script, state: AttemptState) -> None:
    tried = attempt(run, FakeWorkers(scripts=[script]))
    tried.train(2, None)
    assert tried.report().state is state
    assert bool(tried.message) == (state is AttemptState.FAILED)


def test_last_words_come_from_the_rank_at_fault(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    log = run.root / "stderr.log"
    log.write_text("\n".join(f"line {n}" for n in range(50)))
    monkeypatch.setattr(FakeRanks, "log_path", lambda self, rank: log if rank == 1 else None)
    tried = attempt(run, FakeWorkers(scripts=[Script(until=0, end=killed(rank=1))]))
    tried.train(2, None)
    report = tried.report()
    assert report.last_words == tuple(f"line {n}" for n in range(50 - MOST_LAST_LINES, 50))


def test_a_measurement_that_failed_says_why(run: RunDir) -> None:
    failure = Failure(rank=None, step=-1, action="", message="the ranks did not start")
    tried = attempt(run, FakeWorkers(profile_ends=[Outcome(exit_code=1, failure=failure)]))
    tried.measure()
    report = tried.report()
    assert (report.state, report.profile) == (AttemptState.FAILED, Step.FAILED)
    assert report.message == "the ranks did not start"


def test_stopping_asks_the_ranks(run: RunDir) -> None:
    fake = FakeWorkers(scripts=[Script(end=FINE)])
    tried = attempt(run, fake)
    tried.stop()
    tried.train(2, None)
    tried.stop()
    assert fake.ranks[-1].stop_requested
    assert tried.stop_requested
