"""The operator's process on a cluster that fails: then every job is reconciled, and what vanished is dropped.

The operator is real, and so are its connections. The apiserver is scripted (`tests.support.fake_apiserver`).
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

NUM_IN_A_ROW = 3
"""A list may notice one job in time, but not the next ones."""

SAMPLE_SECONDS = 0.2
SIGNALLED_SECONDS = 15.0
"""An operator ends this soon after a signal; kopf waits for its own tasks for five seconds."""

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
    with always_healthy(operator):
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


@contextmanager
def always_healthy(operator: OperatorProcess) -> Iterator[None]:
    """No probe fails, and no scrape, during the block: neither may depend on kopf, which ends and begins again."""
    samples: list[tuple[bool, bool]] = []
    ended = threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            samples.append((operator.is_healthy(), operator.num_jobs() >= 0))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert samples
    assert samples.count((True, True)) == len(samples), f"{samples.count((True, True))} of {len(samples)} answered"


def wait_for_watch(
    fake: FakeApiserver, operator: OperatorProcess, name: str, seconds: float = RECONCILED_SECONDS
) -> None:
    """PipelineJobs are watched and not only listed, within a minute."""
    deadline, number, num_in_time = time.monotonic() + seconds, 0, 0
    while num_in_time < NUM_IN_A_ROW:
        assert time.monotonic() < deadline, operator.log.read_text()
        submit(fake, f"{name}-{number}")
        try:
            wait_for_jobset(fake, f"{name}-{number}", 5.0)
            num_in_time += 1
        except AssertionError:
            num_in_time = 0
        number += 1


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


def test_a_definition_that_comes_while_the_operator_starts(
    fake: FakeApiserver, client: ApiClient, tmp_path: Path
) -> None:
    """The first list of PipelineJobs fails, and a later one succeeds, while the first start still waits for pods."""
    fake.is_defined, began = False, time.monotonic()

    def refuse_pods(call: Any) -> None:
        if call.place[0] == "pods" and time.monotonic() - began < 8.0:
            raise RefusedError(403, "Forbidden", "as scripted")

    fake.hook = refuse_pods
    with operator_process(client, tmp_path) as operator:
        wait_for(lambda: "list of pipelinejobs failed" in operator.log.read_text(), START_SECONDS, "a list fails")
        began = time.monotonic()
        time.sleep(0.5)
        fake.is_defined = True
        submit(fake, "first")
        wait_for_jobset(fake, "first", RECONCILED_SECONDS)
        wait_for(operator.is_healthy, START_SECONDS, "the operator has started")
        wait_for_watch(fake, operator, "after")
        assert "threads can only be started once" not in operator.log.read_text()


@pytest.mark.parametrize("seed", range(6))
def test_a_signal_while_runs_of_kopf_end(fake: FakeApiserver, client: ApiClient, tmp_path: Path, seed: int) -> None:
    """The signal arrives while a run ends, which takes half a second, or soon after."""
    with operator_process(client, tmp_path) as operator:
        wait_for(operator.is_healthy, START_SECONDS, "the operator starts")
        begin(fake, "error event")
        wait_for(lambda: "multitasker has failed" in operator.log.read_text(), START_SECONDS, "a run ends")
        time.sleep(random.Random(seed).uniform(0.0, 1.0))
        began = time.monotonic()
        assert operator.end() == 0
        assert time.monotonic() - began < SIGNALLED_SECONDS


def test_a_signal_while_the_operator_starts(fake: FakeApiserver, client: ApiClient, tmp_path: Path) -> None:
    fake.is_defined = False
    with operator_process(client, tmp_path) as operator:
        wait_for(lambda: "list of pipelinejobs failed" in operator.log.read_text(), START_SECONDS, "a list fails")
        began = time.monotonic()
        assert operator.end() == 0
        assert time.monotonic() - began < SIGNALLED_SECONDS


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


def test_a_watch_that_is_silent_is_no_watch(fake: FakeApiserver, client: ApiClient, tmp_path: Path) -> None:
    """`wait_for_watch` fails, or every test here would pass without a watch: lists notice jobs as well."""
    ended = threading.Event()

    def never_begin(plural: str) -> None:
        if plural == JOBS.plural:
            ended.wait(START_SECONDS)

    fake.watch_hook = never_begin
    with operator_process(client, tmp_path) as operator:
        wait_for(operator.is_healthy, START_SECONDS, "the operator starts")
        with pytest.raises(AssertionError):
            wait_for_watch(fake, operator, "unnoticed", 5.0)
        ended.set()
