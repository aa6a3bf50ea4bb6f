"""The supervisor as a process: claiming, signals, the shipper next to it."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.agent import supervisor
from penstock.agent.launch import LaunchSpec
from penstock.agent.local_launch import local_launches
from penstock.agent.shipper import ShipperProcess, shipping
from penstock.agent.shipping import POLL_SECONDS, is_acknowledged
from penstock.agent.supervisor import DEADLINE, ClaimedError, claim, read_order, supervise
from penstock.cli.main import main
from penstock.core.capacity import Demand
from penstock.core.errors import RunError, UserError
from penstock.core.host.launches import Holding
from penstock.core.host.machine_capacity import this_machine
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import AttemptState
from penstock.core.records import LogLine, RecordKind
from penstock.core.run.attempt_folder import AttemptFolder, shipping_lock
from penstock.core.run.claims import is_alive, is_locked, this_process
from penstock.core.run.folder import RunDir
from penstock.core.run.lock import locked
from penstock.core.run.outbox import Outbox
from penstock.core.run.rank_status import read_status, status_path
from penstock.core.serialization import yamltext
from penstock.core.serialization.files import write_json
from penstock.core.supervision import AttemptReport, Binding, Claim, Order
from tests.support.fake_workers import FakeRanks, FakeWorkers, Script, killed
from tests.support.ingest_server import IngestServer, Request
from tests.support.leaving import ended_after, leave_behind, runs
from tests.support.outboxes import address_file
from tests.support.sample_run import sample_plan
from tests.support.serving import wait_until
from tests.support.supervised import FakeDecider, sample_job

PATIENCE_SECONDS = 60.0

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


def test_a_claim_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the attempt would run a second time, and number its records as the first time."""
    attempt, synced, sync = AttemptFolder(tmp_path / "run", 1), [], os.fsync

    def noted(descriptor: int) -> None:
        sync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path, attempt.claim.exists()))

    monkeypatch.setattr(os, "fsync", noted)
    claim(attempt)
    assert (attempt.path, True) in synced, "the claim's own name"
    assert {path for path, _ in synced} >= {tmp_path, attempt.root, attempt.path.parent}, "the folders' names"


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


def report_in(folder: AttemptFolder) -> AttemptReport:
    return AttemptReport.from_manifest(json.loads(folder.report.read_text()))


def state_in(folder: AttemptFolder) -> AttemptState:
    return report_in(folder).state


def deciding(job: PipelineJob, run: RunDir) -> FakeDecider:
    return FakeDecider(has_profile=True)


@pytest.mark.usefixtures("at_once")
def test_a_process_claims_and_supervises(tmp_path: Path) -> None:
    folder, workers = ordered(tmp_path), FakeWorkers()
    assert supervise(tmp_path, read_order(tmp_path, 3), workers=workers, decider=deciding) == 0
    assert claim_in(folder) == this_process()
    assert state_in(folder) is AttemptState.SUCCEEDED
    assert workers.started == ["prepare", "train 3 on 2"]


@pytest.mark.usefixtures("at_once")
def test_a_failure_is_an_exit_code(tmp_path: Path) -> None:
    folder = ordered(tmp_path)
    workers = FakeWorkers(scripts=[Script(until=3, end=killed())])
    assert supervise(tmp_path, read_order(tmp_path, 3), workers=workers, decider=deciding) == 1
    assert state_in(folder) is AttemptState.FAILED


@pytest.mark.usefixtures("at_once")
def test_a_real_signal_ends_the_supervisor_in_order(tmp_path: Path) -> None:
    folder = ordered(tmp_path)
    script = Script(end=None, before=lambda: os.kill(os.getpid(), signal.SIGTERM))
    workers = FakeWorkers(scripts=[script])
    handler = signal.getsignal(signal.SIGTERM)
    assert supervise(tmp_path, read_order(tmp_path, 3), workers=workers, decider=deciding) == 1
    assert state_in(folder) is AttemptState.FAILED
    assert not workers.alive
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_second_supervisor_of_an_attempt_touches_nothing(tmp_path: Path) -> None:
    folder, workers = ordered(tmp_path), FakeWorkers()
    write_json(folder.claim, Claim(pid=1, started_ticks=2, boot_id="another time").to_manifest())
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ClaimedError):
        supervise(tmp_path, read_order(tmp_path, 3), workers=workers, decider=deciding)
    assert sorted(tmp_path.rglob("*")) == before
    assert workers.started == []


def test_the_run_directory_has_one_supervisor_at_a_time(tmp_path: Path) -> None:
    ordered(tmp_path)
    workers = FakeWorkers()
    with locked(tmp_path), pytest.raises(UserError, match="is in use"):
        supervise(tmp_path, read_order(tmp_path, 3), workers=workers, decider=deciding)
    assert workers.started == []


@pytest.mark.usefixtures("at_once")
def test_an_attempt_holds_its_part_of_the_machine(tmp_path: Path) -> None:
    ordered(tmp_path)
    held: list[Holding] = []
    workers = FakeWorkers(prepare_with=lambda: held.extend(local_launches().holdings()))
    assert supervise(tmp_path, read_order(tmp_path, 3), workers=workers, decider=deciding) == 0
    assert [(holding.what, holding.uid, holding.cores) for holding in held] == [
        ("job default/stdlib-llama of a service", "u-1", 2)
    ]
    assert local_launches().holdings() == []


def test_what_another_program_holds_fails_the_attempt_and_a_later_one_may_succeed(tmp_path: Path) -> None:
    folder, workers = ordered(tmp_path), FakeWorkers()
    whole = Demand(cores=this_machine(os.environ).cores)
    with (
        local_launches().held("run directory /elsewhere", whole),
        pytest.raises(RunError, match=r"process \d+ \(run directory /elsewhere\) holds"),
    ):
        supervise(tmp_path, read_order(tmp_path, 3), workers=workers, decider=deciding)
    report = report_in(folder)
    assert (report.state, report.refused) == (AttemptState.FAILED, False)
    assert "run directory /elsewhere" in report.message
    assert workers.started == []


def test_what_goes_wrong_before_supervising_is_reported(tmp_path: Path) -> None:
    folder = ordered(tmp_path)
    RunDir(tmp_path).job.write_text("kind: Sandwich")
    with pytest.raises(UserError):
        supervise(tmp_path, read_order(tmp_path, 3), workers=FakeWorkers(), decider=deciding)
    report = report_in(folder)
    assert (report.state, report.refused) == (AttemptState.FAILED, True)
    assert "apiVersion" in report.message


@pytest.mark.usefixtures("at_once")
def test_what_was_left_behind_ends_with_the_attempt(tmp_path: Path) -> None:
    """Its deadline has passed; what it started has left its session and lost its parent by then."""
    left: list[int] = []
    folder = ordered(tmp_path, deadline_at=1.0)
    workers = FakeWorkers(prepare_with=lambda: left.append(leave_behind(tmp_path)))
    with ended_after(left):
        assert supervise(tmp_path, read_order(tmp_path, 3), workers=workers, decider=deciding) == 1
        assert report_in(folder).message == DEADLINE
        assert not [pid for pid in left if runs(pid)]
    assert len(left) == 1


def test_ranks_are_given_the_devices_of_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[LaunchSpec] = []

    def launch(spec: LaunchSpec) -> FakeRanks:
        launched.append(spec)
        return FakeRanks(Script(), lambda: False, lambda outcome: None)

    monkeypatch.setattr("penstock.agent.workers.launch", launch)
    monkeypatch.setattr("penstock.agent.workers.LocalWorkers.prepare", lambda *given: None)
    ordered(tmp_path, devices=("1",))
    assert main(["supervise", str(tmp_path), "3"]) == 1
    assert [(spec.arguments[0], spec.devices) for spec in launched] == [("train", ("1",))]


# Shipping next to it


class FakeProcess:
    """Notes what was started, and whether the other end of its stdin was closed."""

    def __init__(self, command: list[str], *, stdin: int, start_new_session: bool) -> None:
        assert stdin == subprocess.PIPE
        self.command, self.start_new_session, self.stdin = command, start_new_session, io.BytesIO()

        self.pid, self.died = 2**22 + 1, False

    @property
    def stop_requested(self) -> bool:
        return self.stdin.closed

    def poll(self) -> int | None:
        return -signal.SIGKILL if self.died else None


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[FakeProcess]:
    started: list[FakeProcess] = []

    def start(command: list[str], **options: Any) -> FakeProcess:
        started.append(FakeProcess(command, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


def test_without_an_address_nothing_is_shipped(tmp_path: Path, processes: list[FakeProcess]) -> None:
    with shipping(tmp_path, Order(uid="u-1", attempt=3)):
        pass
    assert processes == []


def test_a_shipper_is_asked_to_end_when_the_attempt_has(tmp_path: Path, processes: list[FakeProcess]) -> None:
    order = Order(uid="u-1", attempt=3, address_file="/a", token_file="/t")
    with shipping(tmp_path, order):
        assert not processes[0].stop_requested
    assert processes[0].stop_requested
    assert processes[0].start_new_session
    command = [sys.executable, "-m", "penstock.agent", "ship", str(tmp_path)]
    assert processes[0].command == [*command, "--address-file", "/a", "--token-file", "/t"]


def test_a_shipper_is_asked_to_end_whatever_happened(tmp_path: Path, processes: list[FakeProcess]) -> None:
    order = Order(uid="u-1", attempt=3, address_file="/a", token_file="/t")

    def fail() -> None:
        with shipping(tmp_path, order):
            raise OSError("no space is left")

    with pytest.raises(OSError, match="no space is left"):
        fail()
    assert processes[0].stop_requested


ORDER = Order(uid="u-1", attempt=3, address_file="/a", token_file="/t")


def test_a_shipper_that_died_is_followed_by_another_after_longer_and_longer_pauses(
    tmp_path: Path, processes: list[FakeProcess]
) -> None:
    now = 0.0
    with contextlib.closing(ShipperProcess(tmp_path, ORDER, seconds=lambda: now)) as shipper:

        def pause_after(life: float) -> int:
            """How long nothing ships after one that lived for so many seconds."""
            nonlocal now
            now += life
            shipper.ensure_running()
            dead, processes[-1].died = processes[-1], True
            shipper.ensure_running()
            died_at = now
            while processes[-1] is dead:
                now += 1
                shipper.ensure_running()
            assert shipper.pids == {processes[-1].pid}
            return int(now - died_at)

        assert [pause_after(0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
        assert [pause_after(60), pause_after(59), pause_after(59)] == [1, 2, 4]
        assert [process.stop_requested for process in processes] == [True] * 11 + [False]


def test_a_shipper_that_died_just_before_the_end_is_followed_by_a_last_one(
    tmp_path: Path, processes: list[FakeProcess]
) -> None:
    with shipping(tmp_path, ORDER):
        processes[0].died = True
    assert [process.stop_requested for process in processes] == [True, True]


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


def reporting_to(server: IngestServer, folder: Path) -> Order:
    address = address_file(folder / "address.json", server.url)
    return Order(uid="u-1", attempt=3, address_file=str(address), token_file=str(folder / "token"))


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
        with shipping(tmp_path, reporting_to(server, tmp_path)):
            assert came.wait(PATIENCE_SECONDS)
        block_is_over.set()
        assert real_processes[0].wait(PATIENCE_SECONDS) == 0
        assert len(server.requests) > 1


def test_a_shipper_that_is_killed_while_the_supervisor_works_is_replaced_and_goes_on_after_it(
    tmp_path: Path, real_processes: list[subprocess.Popen[bytes]]
) -> None:
    """Killed once before any record is acknowledged; the last one outlives the supervisor's other children."""
    folder = ordered(tmp_path)
    (tmp_path / "token").write_text("secret\n")
    bodies: list[bytes] = []

    def answer(request: Request) -> tuple[int, bytes]:
        body = gzip.decompress(request.body)
        bodies.append(body)
        return 200, json.dumps({"sequence": json.loads(body)["records"][-1]["sequence"]}).encode()

    def prepare() -> None:
        real_processes[0].kill()
        real_processes[0].wait()
        box = Outbox(RunDir(tmp_path).outbox, uid="u-1", attempt=3, source="rank-0", clock=lambda: 1.0)
        box.put(RecordKind.LOG, log=LogLine(rank=0, level="info", message="hello"))
        box.close()

    with IngestServer(answer) as server:
        order = dataclasses.replace(reporting_to(server, tmp_path), attempt=3)
        workers = FakeWorkers(prepare_with=prepare)
        assert supervise(tmp_path, order, workers=workers, decider=deciding) == 0
        assert len(real_processes) == 2
        assert real_processes[1].wait(PATIENCE_SECONDS) == 0
    assert b"hello" in b"".join(bodies)
    assert state_in(folder) is AttemptState.SUCCEEDED
    assert is_acknowledged(folder, is_newest=True)


RANK = """
import os, sys, time
from pathlib import Path
from penstock.core.records import LogLine, RecordKind
from penstock.agent.launch import LaunchSpec
from penstock.agent.local_launch import local_launches
from penstock.core.run.outbox import Outbox
from penstock.core.run.folder import RunDir
from penstock.core.run.rank_status import StatusFile, status_path

run = RunDir(Path(sys.argv[1]))
StatusFile(status_path(run.status, 0), os.getpid())
while not (run.root / "go").exists():
    time.sleep(0.01)
box = Outbox(run.outbox, uid="u-1", attempt=3, source="rank-0", clock=lambda: 1.0)
box.put(RecordKind.LOG, log=LogLine(rank=0, level="info", message="the last word"))
box.close()
"""


def test_a_shipper_waits_for_ranks_that_outlive_their_supervisor(
    tmp_path: Path, real_processes: list[subprocess.Popen[bytes]]
) -> None:
    """They save what they have, and what they say then is said by nobody else."""
    run = RunDir(tmp_path)
    run.create()
    (tmp_path / "token").write_text("secret\n")
    bodies: list[bytes] = []

    def answer(request: Request) -> tuple[int, bytes]:
        bodies.append(gzip.decompress(request.body))
        return 200, b'{"sequence": 0}'

    subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)])
    wait_until(lambda: read_status(status_path(run.status, 0)) is not None)
    with IngestServer(answer) as server:
        with shipping(tmp_path, reporting_to(server, tmp_path)):
            wait_until(lambda: is_locked(shipping_lock(tmp_path)))
        time.sleep(2 * POLL_SECONDS)
        assert is_locked(shipping_lock(tmp_path))
        (tmp_path / "go").touch()
        assert real_processes[1].wait(PATIENCE_SECONDS) == 0
    assert b"the last word" in b"".join(bodies)
