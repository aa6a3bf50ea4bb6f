"""Supervisors as processes: started, found again by another service, asked, ended, and never mistaken for others."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.api.executor import supervisors as module
from penstock.api.executor.supervisors import ProcessSupervisors
from penstock.core.errors import UserError
from penstock.core.host.clocks import boot_id
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.processes import ProcessState
from penstock.core.run.attempt_folder import AttemptFolder, shipping_lock
from penstock.core.run.claims import is_alive, this_process
from penstock.core.serialization.manifest_files import read, write
from penstock.core.supervision import AttemptReport, Binding, Claim, Order, SupervisorRequest

STUB = """
import os, signal, sys, time
from pathlib import Path
from penstock.core.run.attempt_folder import AttemptFolder, shipping_lock
from penstock.agent.supervisor import claim

does, folder = sys.argv[1], AttemptFolder(Path(sys.argv[2]), int(sys.argv[3]))
if does == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if does == "refuses":
    print("no such thing\\n", file=sys.stderr)
    sys.exit(7)
while does == "waits" and not (folder.path / "go").exists():
    time.sleep(0.01)
claim(folder)
if does == "breaks":
    sys.exit("the run directory is locked")
while does != "ends":
    time.sleep(0.01)
"""
PATIENCE_SECONDS = 60.0


class Stubs:
    """Services whose supervisors are stubs, all of which are ended after the test."""

    def __init__(self, folder: Path) -> None:
        self._script = folder / "stub.py"
        self._script.write_text(STUB)
        self._services: list[ProcessSupervisors] = []

    def service(self, does: str = "sleeps") -> ProcessSupervisors:
        """A service as it is after its start: it remembers nothing."""
        self._services.append(ProcessSupervisors((sys.executable, str(self._script), does)))
        return self._services[-1]

    def processes(self) -> list[subprocess.Popen[bytes]]:
        """All that were ever started."""
        return [process for service in self._services for process in service._started.values()]

    def close(self) -> None:
        for process in self.processes():
            process.kill()
            process.wait()


@pytest.fixture
def stubs(tmp_path: Path) -> Iterator[Stubs]:
    made = Stubs(tmp_path)
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> AttemptFolder:
    return AttemptFolder(tmp_path / "run", 1)


def order(attempt: int = 1) -> Order:
    return Order(uid="a-uid", attempt=attempt, deadline_at=12.5, address_file="address", token_file="token")


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def started(service: ProcessSupervisors, folder: AttemptFolder) -> Claim:
    """Start a supervisor and wait until it has the attempt."""
    service.start(folder, order(folder.attempt))
    wait_until(lambda: service.claimed(folder))
    found = read(folder.claim, Claim)
    assert found is not None
    return found


def test_nothing_is_there_before_the_start(stubs: Stubs, folder: AttemptFolder) -> None:
    service = stubs.service()
    assert (service.claimed(folder), service.alive(folder), service.report(folder)) == (False, False, None)
    assert service.observe(folder) == ProcessState()


def test_a_start_leaves_the_order_and_a_process_that_is_known_by_its_claim(stubs: Stubs, folder: AttemptFolder) -> None:
    service = stubs.service()
    service.start(folder, order())
    assert read(folder.order, Order) == order()
    assert service.alive(folder)
    claim = started(service, folder)
    assert [process.pid for process in stubs.processes()] == [claim.pid]
    assert is_alive(claim)
    assert os.getsid(claim.pid) == claim.pid


def test_an_attempt_is_started_once(stubs: Stubs, folder: AttemptFolder) -> None:
    service = stubs.service()
    service.start(folder, order())
    service.start(folder, order())
    started(service, folder)
    service.start(folder, order())
    stubs.service().start(folder, order())
    assert len(stubs.processes()) == 1


def test_two_attempts_are_two_processes(stubs: Stubs, folder: AttemptFolder) -> None:
    service, second = stubs.service(), AttemptFolder(folder.root, 2)
    assert started(service, folder).pid != started(service, second).pid
    service.end(folder)
    assert (service.alive(folder), service.alive(second)) == (False, True)


def test_a_new_service_finds_the_supervisor_of_the_last(stubs: Stubs, folder: AttemptFolder) -> None:
    started(stubs.service(), folder)
    service = stubs.service()
    assert service.claimed(folder)
    assert service.alive(folder)
    service.end(folder)
    assert not service.alive(folder)
    assert stubs.processes()[0].wait() == -signal.SIGTERM


def test_a_supervisor_that_was_killed_is_seen_gone(stubs: Stubs, folder: AttemptFolder) -> None:
    claim = started(stubs.service(), folder)
    os.kill(claim.pid, signal.SIGKILL)
    service = stubs.service()
    wait_until(lambda: not service.alive(folder))
    assert service.claimed(folder)
    service.start(folder, order())
    assert len(stubs.processes()) == 1


def test_a_shipper_is_waited_for_but_not_for_ever(
    stubs: Stubs, folder: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next attempt would begin before this one's last records came, and they would be refused."""
    service = stubs.service("ends")
    started(service, folder)
    stubs.processes()[0].wait()
    assert not service.alive(folder)
    shipping_lock(folder.root).parent.mkdir()
    with shipping_lock(folder.root).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert service.alive(folder)
        service.end(folder)
        monkeypatch.setattr(module, "MOST_SHIPPING_SECONDS", 0.0)
        assert not service.alive(folder)
        monkeypatch.undo()
        assert service.alive(folder)
    assert not service.alive(folder)


@pytest.mark.parametrize(
    "change", [{"started_ticks": 1}, {"boot_id": "another"}, {"pid": 2**22 + 1}], ids=["start", "boot", "pid"]
)
def test_another_process_is_never_taken_for_a_supervisor(
    stubs: Stubs, folder: AttemptFolder, change: dict[str, int | str]
) -> None:
    """It may have the number of one that is long gone: it is neither alive as that, nor signalled."""
    mine = this_process()
    assert is_alive(mine)
    folder.path.mkdir(parents=True)
    write(folder.claim, dataclasses.replace(mine, **change))  # type: ignore[arg-type]
    service = stubs.service()
    assert not service.alive(folder)
    service.end(folder)


def test_this_boot_has_a_name() -> None:
    assert boot_id() == boot_id() != ""


def test_one_that_does_not_hear_is_killed(stubs: Stubs, folder: AttemptFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 0.1)
    service = stubs.service("deaf")
    started(service, folder)
    service.end(folder)
    assert stubs.processes()[0].wait() == -signal.SIGKILL
    assert not service.alive(folder)


def test_one_that_outlives_everything_is_told_and_not_forgotten(
    stubs: Stubs, folder: AttemptFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("END_SECONDS", "KILL_SECONDS"):
        monkeypatch.setattr(module, name, 0.0)
    service = stubs.service()
    started(service, folder)
    sent: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: sent.append(number))
        with pytest.raises(TimeoutError, match="did not end after SIGKILL"):
            service.end(folder)
    assert sent == [signal.SIGTERM, signal.SIGKILL]
    assert service.alive(folder)


def test_an_attempt_that_was_ended_cannot_be_taken_up_any_more(stubs: Stubs, folder: AttemptFolder) -> None:
    """A service that was killed between the start and the claim knows nothing of the process that is starting up."""
    stubs.service("waits").start(folder, order())
    service = stubs.service()
    service.end(folder)
    (folder.path / "go").touch()
    (process,) = stubs.processes()
    assert process.wait() == 1
    assert "ClaimedError" in folder.log.read_text()
    assert (service.claimed(folder), service.alive(folder), service.report(folder)) == (True, False, None)
    service.start(folder, order())
    assert len(stubs.processes()) == 1


def test_an_attempt_that_was_never_started_can_be_ended(stubs: Stubs, folder: AttemptFolder) -> None:
    service = stubs.service()
    service.end(folder)
    service.end(folder)
    assert not service.alive(folder)
    assert [path.name for path in folder.path.iterdir()] == ["claim.json"]


def test_both_of_two_that_start_up_are_ended(stubs: Stubs, folder: AttemptFolder) -> None:
    """One was started by a service that was killed, the other by the next, and the first has just the claim."""
    service = stubs.service("waits")
    service.start(folder, order())
    started(stubs.service(), AttemptFolder(folder.root, 2))
    os.link(AttemptFolder(folder.root, 2).claim, folder.claim)
    service.end(folder)
    assert [process.wait() for process in stubs.processes()] == [-signal.SIGTERM, -signal.SIGTERM]


def test_one_that_ends_before_it_claims_leaves_its_last_words(stubs: Stubs, folder: AttemptFolder) -> None:
    service = stubs.service("refuses")
    service.start(folder, order())
    wait_until(lambda: not service.alive(folder))
    message = "the supervisor did not start (exit code 7): no such thing"
    assert service.report(folder) == AttemptReport(state=AttemptState.FAILED, message=message)
    assert not service.claimed(folder)
    service.end(folder)
    assert service.report(folder) == AttemptReport(state=AttemptState.FAILED, message=message)


def test_one_that_ends_before_it_reports_leaves_its_last_words(stubs: Stubs, folder: AttemptFolder) -> None:
    service = stubs.service("breaks")
    started(service, folder)
    wait_until(lambda: not service.alive(folder))
    message = "the supervisor did not start (exit code 1): the run directory is locked"
    assert service.report(folder) == AttemptReport(state=AttemptState.FAILED, message=message)


def test_one_that_says_nothing_is_told_so(stubs: Stubs, folder: AttemptFolder) -> None:
    service = stubs.service("ends")
    service.start(folder, order())
    wait_until(lambda: not service.alive(folder))
    found = service.report(folder)
    assert found is not None
    assert found.message.startswith("the supervisor did not start (exit code 0): ")
    assert found.message.endswith("supervisor.log is empty")


def test_a_report_outlives_its_supervisor(stubs: Stubs, folder: AttemptFolder) -> None:
    service = stubs.service()
    started(service, folder)
    told = AttemptReport(state=AttemptState.SUCCEEDED, profile=Step.DONE, num_ranks=2, last_checkpoint=50)
    write(folder.report, told)
    service.end(folder)
    assert service.report(folder) == told == stubs.service().report(folder)


def test_wishes_stay_and_a_binding_is_made_once(stubs: Stubs, folder: AttemptFolder) -> None:
    service = stubs.service()
    started(service, folder)
    for _ in range(2):
        service.request(folder, SupervisorRequest.MEASURE)
    assert (folder.request(SupervisorRequest.MEASURE).exists(), service.observe(folder).stop_requested) == (True, False)
    service.request(folder, SupervisorRequest.STOP)
    assert service.observe(folder).stop_requested
    service.bind(folder, Binding(plan_digest="one"))
    service.bind(folder, Binding(plan_digest="two"))
    assert read(folder.binding, Binding) == Binding(plan_digest="one")


@pytest.mark.parametrize("text", ["", "{", '{"state": "runn', '{"state": "running"'])
def test_what_is_half_written_is_not_there_yet(tmp_path: Path, text: str) -> None:
    path = tmp_path / "report.json"
    assert read(path, AttemptReport) is None
    path.write_text(text)
    assert read(path, AttemptReport) is None


def test_a_claim_of_another_version_is_not_taken_for_none(stubs: Stubs, folder: AttemptFolder) -> None:
    """Its supervisor may be alive, so the attempt must neither count as lost nor as ended."""
    claim = started(stubs.service(), folder)
    folder.claim.write_text(json.dumps({**claim.to_manifest(), "host": "east"}))
    service = stubs.service()
    for act in (service.observe, service.end):
        with pytest.raises(UserError) as error:
            act(folder)
        assert error.value.where.startswith(f"{folder.claim}: ")
        assert "version" in error.value.remedy


def test_what_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.mkdir()
    with pytest.raises(OSError, match=r"report\.json"):
        read(path, AttemptReport)


def test_what_is_written_is_there_whole_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    for state in (AttemptState.READY, AttemptState.RUNNING):
        write(path, AttemptReport(state=state))
        assert read(path, AttemptReport) == AttemptReport(state=state)
    assert json.loads(path.read_text()) == {"state": "running"}
    assert list(tmp_path.iterdir()) == [path]
