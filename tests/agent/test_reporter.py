"""What runs next to a pod's ranks, against a service on loopback; the test is the kubelet, which asks it to end."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.agent import reporter
from penstock.agent.pod_files import PodFolders
from penstock.agent.shipping import num_unsent
from penstock.cli.main import main
from penstock.core.errors import RunError
from penstock.core.host.stopping import StopRequests
from penstock.core.pod import ADDRESS_FILE, JOB_FILE, POD_UID_VARIABLE
from penstock.core.run.folder import RunDir
from tests.support.ingest_server import IngestServer, Request
from tests.support.outboxes import fill
from tests.support.pods import Attempt, identified
from tests.support.supervised import sample_job

NOWHERE = "http://127.0.0.1:9"
SOON_SECONDS, PATIENCE_SECONDS = 0.2, 60.0


class Sidecar:
    """A pod of an attempt, and its reporting container."""

    def __init__(self, root: Path) -> None:
        self.job = identified(sample_job())
        self.attempt = Attempt(root, self.job, number=3)
        self.pod = self.attempt.pods[0]

    @property
    def folders(self) -> PodFolders:
        return self.pod.folders(3, self.attempt.out)

    @property
    def run(self) -> RunDir:
        return self.folders.run(self.job)

    def report(self) -> bool:
        return reporter.report(self.folders, self.pod.attempt_files, self.pod.token, lambda line: None)


@pytest.fixture
def sidecar(tmp_path: Path) -> Sidecar:
    return Sidecar(tmp_path)


def ask_to_end() -> None:
    """Not before it listens, or the test would end."""
    while not isinstance(signal.getsignal(signal.SIGTERM), StopRequests):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def later(act: Callable[[], None]) -> Iterator[None]:
    """While the block lasts, in a moment."""
    timer = threading.Timer(SOON_SECONDS, act)
    timer.start()
    yield
    timer.join()


def acknowledge(request: Request) -> tuple[int, bytes]:
    return 200, json.dumps({"sequence": sequences(request)[-1]}).encode()


def sequences(request: Request) -> list[int]:
    return [each["sequence"] for each in json.loads(gzip.decompress(request.body))["records"]]


def test_what_ranks_record_is_brought_also_what_comes_as_they_end(sidecar: Sidecar) -> None:
    sidecar.run.create()
    fill(sidecar.run.outbox, 2)

    def answer(request: Request) -> tuple[int, bytes]:
        if len(server.requests) == 1:
            fill(sidecar.run.outbox, 3)
            ask_to_end()
        return acknowledge(request)

    with IngestServer(answer) as server:
        sidecar.attempt.serve_at(server.url)
        assert sidecar.report()
    assert [sequences(request) for request in server.requests] == [[0, 1], [2, 3, 4]]
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer secret"}


def test_it_waits_until_the_ranks_have_laid_out_their_run(sidecar: Sidecar) -> None:
    def lay_out() -> None:
        sidecar.run.create()
        fill(sidecar.run.outbox, 1)

    def answer(request: Request) -> tuple[int, bytes]:
        ask_to_end()
        return acknowledge(request)

    with IngestServer(answer) as server:
        sidecar.attempt.serve_at(server.url)
        with later(lay_out):
            assert sidecar.report()
    assert [sequences(request) for request in server.requests] == [[0]]


@pytest.mark.parametrize("is_laid_out", [False, True])
def test_with_nothing_to_bring_it_ends_when_it_is_asked_and_not_before(sidecar: Sidecar, is_laid_out: bool) -> None:
    """Ranks may fail before they record anything, and there may be no service."""
    if is_laid_out:
        sidecar.run.create()
        fill(sidecar.run.outbox, 1)
    begin = time.monotonic()
    with later(ask_to_end):
        assert sidecar.report()
    assert time.monotonic() - begin >= SOON_SECONDS


def test_a_service_that_is_away_holds_no_pod_up(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "DRAIN_SECONDS", 0.5)
    sidecar.run.create()
    fill(sidecar.run.outbox, 1)
    sidecar.attempt.serve_at(NOWHERE)
    begin = time.monotonic()
    with later(ask_to_end):
        assert not sidecar.report()
    assert time.monotonic() - begin < PATIENCE_SECONDS / 2
    assert list(sidecar.run.outbox.glob("*.jsonl"))


def test_what_a_pod_could_not_bring_is_said_and_brought_by_the_next_attempt(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a later attempt nothing is taken: its own pods bring that."""
    monkeypatch.setattr(reporter, "DRAIN_SECONDS", 0.0)
    sidecar.run.create()
    fill(sidecar.run.outbox, 3)
    sidecar.attempt.serve_at(NOWHERE)
    said: list[str] = []
    with later(ask_to_end):
        assert not reporter.report(sidecar.folders, sidecar.pod.attempt_files, sidecar.pod.token, said.append)
    assert [
        line for line in said if line.startswith("3 records were not delivered") and str(sidecar.run.outbox) in line
    ]

    following = dataclasses.replace(sidecar.folders, attempt=4, uid="another-pod")
    run = following.run(sidecar.job)
    run.create()
    future = dataclasses.replace(following, attempt=5).run(sidecar.job)
    future.create()
    fill(future.outbox, 1, source="rank-7")

    def answer(request: Request) -> tuple[int, bytes]:
        ask_to_end()
        return acknowledge(request)

    with IngestServer(answer) as server:
        sidecar.attempt.serve_at(server.url)
        assert reporter.report(following, sidecar.pod.attempt_files, sidecar.pod.token, said.append)
    assert [sequences(request) for request in server.requests] == [[0, 1, 2]]
    assert not num_unsent(sidecar.run.outbox)
    assert num_unsent(future.outbox)


def test_one_whose_files_are_gone_says_so(sidecar: Sidecar) -> None:
    (sidecar.pod.attempt_files / JOB_FILE).unlink()
    with pytest.raises(RunError, match="ConfigMap was deleted"):
        sidecar.report()


def test_the_command(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not (sidecar.pod.attempt_files / ADDRESS_FILE).exists()
    folders = {"out": sidecar.attempt.out, "local": sidecar.pod.local}
    files = {"attempt-files": sidecar.pod.attempt_files, "token-file": sidecar.pod.token}
    options = [f"--{name}={path}" for name, path in {**folders, **files}.items()]
    monkeypatch.setenv(POD_UID_VARIABLE, sidecar.pod.uid)
    with later(ask_to_end):
        assert main(["report-pod", "--attempt", "3", *options]) == 0


def test_the_command_wants_the_pod_s_uid(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(POD_UID_VARIABLE, raising=False)
    folders = ["--out", str(sidecar.attempt.out), "--local", str(sidecar.pod.local)]
    assert main(["report-pod", "--attempt", "3", *folders]) == 2
    assert f"{POD_UID_VARIABLE}: is not set" in capsys.readouterr().err
