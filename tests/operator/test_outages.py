"""The operator's process on a cluster that fails: then every job is reconciled, and what vanished is dropped.

The operator is real, and so are its connections. The apiserver is scripted (`tests.support.fake_apiserver`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import ApiClient, Configuration

from penstock.kube.names import OPERATOR_MANAGER
from penstock.kube.resources import JOBS
from tests.support.cutting_proxy import cutting_proxy
from tests.support.fake_apiserver import Call, FakeApiserver, RefusedError, served
from tests.support.manifests import example
from tests.support.operator_process import OperatorProcess, operator_process, wait_for

START_SECONDS = 30.0
RECONCILED_SECONDS = 60.0
WATCHED_SECONDS = 10.0
"""A job is noticed this soon only if it is watched: lists are a minute apart."""

NUM_PACKETS = 60
"""A start has fewer packets; later cuts hit a watch or a write."""


@pytest.fixture
def fake() -> FakeApiserver:
    return FakeApiserver()


@pytest.fixture
def client(fake: FakeApiserver) -> Iterator[ApiClient]:
    with served(fake) as client:
        yield client


@pytest.fixture
def operator(client: ApiClient, tmp_path: Path) -> Iterator[OperatorProcess]:
    with operator_process(client, tmp_path) as operator:
        wait_for(operator.is_healthy, START_SECONDS, "the operator starts")
        yield operator
        assert operator.process.poll() is None, "one process outlives the fault"
        assert operator.end() == 0


def submit(fake: FakeApiserver, name: str) -> dict[str, Any]:
    job = example(kubernetes__volumes={"out": {"claim": "shared"}})
    job["metadata"] = {"name": name}
    return fake.add_job(job)


def has_jobset(fake: FakeApiserver, name: str) -> bool:
    return ("jobsets", "default", f"{name}-a1") in list(fake.objects)


def wait_for_jobset(fake: FakeApiserver, name: str, seconds: float) -> float:
    return wait_for(lambda: has_jobset(fake, name), seconds, f"{name} has a JobSet")


def refusing(status: int, reason: str) -> Callable[[Any], None]:
    def refuse(_: Any) -> None:
        raise RefusedError(status, reason, "as scripted")

    return refuse


def no_fault(_: Any) -> None:
    """Answer as usual."""


def begin(fake: FakeApiserver, fault: str) -> None:
    """Every call fails in this way, and so do watches, all of which begin again."""
    if fault == "error event":
        fake.watch_hook = lambda plural: {"code": 500, "reason": "InternalError", "message": "etcd has no leader"}
    else:
        status, _, reason = fault.partition(" ")
        fake.hook = fake.watch_hook = refusing(int(status), reason)
    fake.forget_history()


def end(fake: FakeApiserver) -> None:
    fake.hook = fake.watch_hook = no_fault


def survive(fake: FakeApiserver, operator: OperatorProcess, fault: str, seconds: float) -> float:
    """Job ``lost`` vanishes and job ``during`` comes to be during the fault; returns seconds until all is right."""
    lost = submit(fake, "lost")
    wait_for_jobset(fake, "lost", WATCHED_SECONDS)
    begin(fake, fault)
    time.sleep(seconds / 2)
    fake.remove(lost)
    submit(fake, "during")
    time.sleep(seconds / 2)
    end(fake)
    began = time.monotonic()
    wait_for_jobset(fake, "during", RECONCILED_SECONDS)
    wait_for(lambda: operator.num_jobs() == 1, RECONCILED_SECONDS, "the lost job is dropped")
    took = time.monotonic() - began
    wait_for_watch(fake, operator, "after")
    return took


def wait_for_watch(fake: FakeApiserver, operator: OperatorProcess, name: str) -> None:
    """PipelineJobs are watched and not only listed, within a minute."""
    deadline = time.monotonic() + RECONCILED_SECONDS
    for number in range(20):
        submit(fake, f"{name}-{number}")
        try:
            wait_for_jobset(fake, f"{name}-{number}", 5.0)
            return
        except AssertionError:
            assert time.monotonic() < deadline, operator.log.read_text()


FAULTS = [
    "500 InternalError",
    "503 ServiceUnavailable",
    "401 Unauthorized",
    "403 Forbidden",
    "429 TooManyRequests",
    "error event",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_seconds(fake: FakeApiserver, operator: OperatorProcess, fault: str) -> None:
    assert survive(fake, operator, fault, 5.0) < RECONCILED_SECONDS


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_minute(fake: FakeApiserver, operator: OperatorProcess, fault: str) -> None:
    assert survive(fake, operator, fault, 60.0) < RECONCILED_SECONDS


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_a_definition_is_deleted_and_made_again(fake: FakeApiserver, operator: OperatorProcess, seconds: float) -> None:
    submit(fake, "old")
    wait_for_jobset(fake, "old", WATCHED_SECONDS)
    fake.undefine()
    time.sleep(seconds)
    fake.is_defined = True
    submit(fake, "new")
    wait_for_jobset(fake, "new", RECONCILED_SECONDS)
    wait_for(lambda: operator.num_jobs() == 1, RECONCILED_SECONDS, "the old job is dropped")
    wait_for_watch(fake, operator, "after")


def test_a_definition_that_comes_later(fake: FakeApiserver, client: ApiClient, tmp_path: Path) -> None:
    """The probe is answered meanwhile."""
    fake.is_defined = False
    with operator_process(client, tmp_path) as operator:
        wait_for(operator.is_healthy, 2 * RECONCILED_SECONDS, "the probe is answered without a definition")
        fake.is_defined = True
        submit(fake, "first")
        wait_for_jobset(fake, "first", RECONCILED_SECONDS)
        wait_for_watch(fake, operator, "after")


def test_an_object_that_was_handled_is_equal_byte_by_byte(fake: FakeApiserver, operator: OperatorProcess) -> None:
    """No finalizer, no annotation, nothing: only the operator's own status is written, by its own client."""
    job = submit(fake, "one")
    job["metadata"]["annotations"] = {"team": "blue"}
    before = json.dumps({**job, "metadata": {**job["metadata"], "resourceVersion": ""}})
    wait_for_jobset(fake, "one", WATCHED_SECONDS)
    for step in range(20):
        fake.touch(job, progress={"attempt": 1, "step": step, "reportedAt": "2026-01-01T00:00:00Z"})
    submit(fake, "two")
    wait_for_jobset(fake, "two", WATCHED_SECONDS)
    current = {name: value for name, value in fake.job("one").items() if name != "status"}
    assert json.dumps({**current, "metadata": {**current["metadata"], "resourceVersion": ""}}) == before
    writes = [call for call in fake.calls if call.method != "GET" and call.place[0] == JOBS.plural]
    assert writes
    for call in writes:
        assert (call.method, call.place[3]) == ("PATCH", "status")
        assert call.query["fieldManager"] == OPERATOR_MANAGER
    settled = json.dumps(fake.job("two"))
    fake.forget_history()  # kopf lists and handles everything once more
    submit(fake, "three")
    wait_for_jobset(fake, "three", RECONCILED_SECONDS)
    assert json.dumps(fake.job("two")) == settled


def start_cut(fake: FakeApiserver, client: ApiClient, folder: Path, cut_at: int) -> None:
    """Start an operator behind a proxy that cuts this packet; a job has its JobSet in time, and others are watched."""
    folder.mkdir()
    submit(fake, f"cut-{cut_at}")
    with cutting_proxy(int(client.configuration.host.rpartition(":")[2]), cut_at) as proxy:
        cut = Configuration()
        cut.host = f"http://127.0.0.1:{proxy.port}"
        with operator_process(ApiClient(cut), folder) as operator:
            wait_for_jobset(fake, f"cut-{cut_at}", RECONCILED_SECONDS)
            wait_for_watch(fake, operator, f"after-{cut_at}")
            assert operator.process.poll() is None
            assert proxy.num_packets >= cut_at


@pytest.mark.parametrize("cut_at", [1, 3, 5, 8, 12, 16, 22, 30])
def test_a_start_that_is_cut(fake: FakeApiserver, client: ApiClient, tmp_path: Path, cut_at: int) -> None:
    start_cut(fake, client, tmp_path / "cut", cut_at)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_start_that_is_cut_at_any_packet(client: ApiClient, fake: FakeApiserver, tmp_path: Path) -> None:
    for cut_at in range(1, NUM_PACKETS + 1):
        start_cut(fake, client, tmp_path / str(cut_at), cut_at)


def test_it_is_killed_again_and_again(fake: FakeApiserver, client: ApiClient, tmp_path: Path) -> None:
    """Jobs come meanwhile. In the end each has one JobSet, which was created once."""
    names = [f"job-{number}" for number in range(40)]
    for kill, seconds in enumerate((0.3, 0.6, 0.9, 1.2, 1.5)):
        for name in names[8 * kill : 8 * kill + 8]:
            submit(fake, name)
        with operator_process(client, tmp_path) as operator:
            wait_for(operator.is_healthy, START_SECONDS, "the operator starts")
            submit(fake, f"late-{kill}")
            names.append(f"late-{kill}")
            time.sleep(seconds / 10)
            operator.process.kill()
            operator.process.wait()
    with operator_process(client, tmp_path) as operator:
        wait_for(lambda: all(has_jobset(fake, name) for name in names), RECONCILED_SECONDS, "all JobSets")
        wait_for(lambda: operator.num_jobs() == len(names), RECONCILED_SECONDS, "all jobs are cached")
    assert len(fake.of("jobsets")) == len(names)
    attempts = {item["metadata"]["name"]: item["status"]["attempt"] for item in fake.of(JOBS.plural)}
    assert attempts == dict.fromkeys(names, 1)


def test_calls_are_counted(fake: FakeApiserver) -> None:
    """The hook of the scripted apiserver refuses calls, or every test here would pass."""
    fake.hook = refusing(500, "InternalError")
    with pytest.raises(RefusedError):
        fake.answer(Call(method="GET", place=("pods", "", "", ""), query={}, body=None, content_type=""))
