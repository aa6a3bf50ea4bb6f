"""What a pod's agent serves, to callers of every kind."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.agent import endpoint as agent
from penstock.agent.endpoint import AgentFiles, serving
from penstock.agent.pod_files import PodFolders
from penstock.core.lifecycle import AttemptState, Step
from penstock.core.packing import unpack
from penstock.core.pod import AGENT_MEASUREMENT, AGENT_REPORT, MOST_AGENT_BYTES, AgentReport, CheckpointName
from penstock.core.profile import Profile
from penstock.core.run.folder import RunDir
from penstock.core.supervision import AttemptReport
from penstock.operator.fetching import AgentError, fetch
from tests.support.sample_run import sample_profile

LOOPBACK = "127.0.0.1"


class Bench:
    """A pod's files, and its agent at a port of this machine."""

    def __init__(self, root: Path) -> None:
        self.folders = PodFolders(uid="pod", attempt=3, out=root / "out", local=root / "local")
        self.run = RunDir(root / "run")
        self.run.create()
        self.files = AgentFiles(self.folders, "job", self.run)
        self.said: list[str] = []
        self.port = 0

    def get(self, name: str) -> bytes:
        return fetch(LOOPBACK, name, self.port)

    def report(self) -> AgentReport:
        return AgentReport.from_manifest(unpack(self.get(AGENT_REPORT)))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    with serving(made.folders.served, LOOPBACK, made.said.append, port=0) as place:
        assert place is not None
        made.port = place[1]
        yield made


def test_it_says_who_and_where_it_is(bench: Bench) -> None:
    bench.files.update(AttemptReport(state=AttemptState.READY, profile=Step.WORKING, done=2, total=9))
    assert bench.report() == AgentReport(
        pod_uid="pod", job_uid="job", attempt=3, state=AttemptState.READY, profile=Step.WORKING, done=2, total=9
    )


def test_what_was_measured_is_served_with_its_digest(bench: Bench) -> None:
    bench.files.measured(sample_profile())
    bench.files.update(AttemptReport(state=AttemptState.READY, profile=Step.DONE))
    assert len(bench.report().measurement) == 64
    assert Profile.from_manifest(unpack(bench.get(AGENT_MEASUREMENT))) == sample_profile()


def test_the_newest_checkpoint_is_named(bench: Bench) -> None:
    for attempt, step in ((1, 40), (2, 60), (3, 20)):
        folder = bench.run.checkpoints / f"a{attempt}" / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").touch()
    bench.files.update(AttemptReport(state=AttemptState.RUNNING, last_checkpoint=60))
    assert bench.report().checkpoint == CheckpointName(attempt=2, step=60)


@pytest.mark.parametrize("name", ["", "report.json", "../secret", f"{AGENT_REPORT}/..", "%2e%2e/secret"])
def test_nothing_else_is_served(bench: Bench, name: str) -> None:
    bench.folders.served.mkdir(parents=True)
    (bench.folders.local / "secret").write_text("secret")
    with pytest.raises(AgentError, match="404"):
        bench.get(name)


def test_before_anything_was_written_there_is_nothing(bench: Bench) -> None:
    for name in (AGENT_REPORT, AGENT_MEASUREMENT):
        with pytest.raises(AgentError, match="404"):
            bench.get(name)


def test_what_is_too_long_is_not_served(bench: Bench) -> None:
    bench.folders.served.mkdir(parents=True)
    (bench.folders.served / AGENT_MEASUREMENT).write_bytes(b"x" * (MOST_AGENT_BYTES + 1))
    with pytest.raises(AgentError, match="413"):
        bench.get(AGENT_MEASUREMENT)


def test_callers_that_say_nothing_are_cut_off_and_others_answered(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that trickle: a limit for each read would begin again."""
    monkeypatch.setattr(agent, "SECONDS", 0.5)
    bench.files.update(AttemptReport(state=AttemptState.READY))
    over = threading.Event()

    def trickle(line: socket.socket) -> None:
        try:
            while not over.wait(0.05):
                line.sendall(b"G")
        except OSError:
            pass

    with ExitStack() as stack:
        lines = [stack.enter_context(socket.create_connection((LOOPBACK, bench.port))) for _ in range(12)]
        threads = [threading.Thread(target=trickle, args=(line,)) for line in lines]
        for thread in threads:
            thread.start()
        assert fetch(LOOPBACK, AGENT_REPORT, bench.port, seconds=30.0)
        over.set()
        for thread in threads:
            thread.join()


def test_only_reading_is_answered(bench: Bench) -> None:
    with socket.create_connection((LOOPBACK, bench.port)) as line:
        line.sendall(f"POST /{AGENT_REPORT} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
        assert b" 501 " in line.recv(100)


def test_a_disk_that_is_full_ends_no_attempt(bench: Bench) -> None:
    bench.folders.served.parent.mkdir(parents=True, exist_ok=True)
    bench.folders.served.touch()
    bench.files.measured(sample_profile())
    bench.files.update(AttemptReport(state=AttemptState.READY))
    with pytest.raises(AgentError, match="404"):
        bench.get(AGENT_REPORT)


def test_without_an_address_nothing_is_served_and_a_port_in_use_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    with serving(tmp_path, "", said.append) as place:
        assert place is None
    assert said == []
    with (
        serving(tmp_path, LOOPBACK, said.append, port=0) as first,
        serving(tmp_path, LOOPBACK, said.append, port=first[1] if first else 0) as second,
    ):
        assert second is None
    [line] = said
    assert "Address already in use" in line
    assert "records still deliver them to the service" in line


def test_it_ends_soon(tmp_path: Path) -> None:
    begin = time.monotonic()
    with serving(tmp_path, LOOPBACK, lambda line: None, port=0):
        pass
    assert time.monotonic() - begin < 10.0
