"""Ten thousand queued jobs: response time of ``/healthz``, and delay until a new job is observed.

The service is `penstock serve` with its executor, whose machine is busy with one job that trains all the time. The
operator is a separate process on an API server of this process (`tests.support.fake_apiserver`), where every job has a
JobSet that no queue admits. A separate process requests ``/healthz`` of both.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.operator_cluster import SERVICE_NAMESPACE, SPEC
from benchmarks.operator_process import LISTS
from benchmarks.soak.kills import TRACEBACK, quiet
from kubernetes.client import ApiClient
from sqlalchemy import update

from penstock.api.store import jobs as stored_jobs
from penstock.api.store.engine import make_engine, parse_url
from penstock.api.store.schema import jobs
from penstock.core.host.ports import free_port
from penstock.core.instants import format_instant
from penstock.core.job import PipelineJob
from penstock.core.lifecycle import Phase
from penstock.kube.names import API_VERSION, ATTEMPT_LABEL, JOB_KIND, UID_LABEL
from tests.support.away import Shared, away
from tests.support.fake_apiserver import FakeApiserver, Found, kubeconfig_of
from tests.support.fake_apiserver import served as serving
from tests.support.polling import milliseconds, poll
from tests.support.serving import Served, served, served_job, wait_until

HEALTH_MILLISECONDS = 100.0
SEEN_SECONDS = 1.0
HEALTH_PAUSE_SECONDS = 0.02
NEW_JOB_PAUSE_SECONDS = 1.0
WARM_UP_SECONDS = 5.0
PATIENCE_SECONDS = 300.0
ENDLESS = {"globalBatch": 2, "steps": 10**9, "optimizer": {"learningRate": 1e-6}}

SETTLE_SECONDS = 3.0
WAITING = {
    "phase": Phase.QUEUED.value,
    "reason": "Launched",
    "observedGeneration": 1,
    "attempt": 1,
    "launched": 1,
    "ranks": 1,
}
"""Status of a job whose JobSet was just created."""

Report = Callable[[str], None]


def queue(folder: Path, count: int, seconds: float, report: Report = quiet) -> dict[str, Any]:
    """Measure both figures of both programs, each over ``seconds``."""
    results = {"service": _service(folder / "service", count, seconds, report)}
    results["operator"] = _operator(folder / "operator", count, seconds, report)
    violations = [f"{name}: {violation}" for name, part in results.items() for violation in part.pop("violations")]
    return {"jobs": count, **results, "violations": violations}


def _judged(health: dict[str, float], seen: dict[str, float], errors: list[str], log: Path) -> list[str]:
    wrong = list(errors)
    if health["p99"] >= HEALTH_MILLISECONDS:
        wrong.append(
            f"/healthz took {health['p99']:.0f} ms at the 99th percentile, not under {HEALTH_MILLISECONDS:.0f}"
        )
    if seen["max"] >= 1000 * SEEN_SECONDS:
        wrong.append(f"a new job was seen after {seen['max'] / 1000:.2f} s, not within {SEEN_SECONDS:.0f} s")
    text = log.read_text(errors="replace")
    if TRACEBACK in text:
        wrong.append(f"it printed a traceback: {text[text.index(TRACEBACK) :][:2000]}")
    return wrong


def _measured(
    url: str, seconds: float, first: int, new_job: Callable[[int], float]
) -> tuple[dict[str, float], dict[str, float], list[str], int]:
    """Request ``/healthz`` while submitting new jobs. Returns figures of both, errors and the number of jobs."""
    shared = Shared()
    with away(poll, shared, url, HEALTH_PAUSE_SECONDS) as polling:
        time.sleep(WARM_UP_SECONDS)
        seen, end = [], time.monotonic() + seconds
        for number in itertools.count(first):
            began = time.monotonic()
            seen.append(new_job(number))
            time.sleep(max(NEW_JOB_PAUSE_SECONDS - (time.monotonic() - began), 0.0))
            if time.monotonic() >= end:
                break
        shared["end"] = time.monotonic()
        took, errors = polling.result()
    return milliseconds(took), milliseconds(seen), errors, len(seen)


# The service


def _service(folder: Path, count: int, seconds: float, report: Report) -> dict[str, Any]:
    with served(folder, log=folder.parent / "service.log") as service:
        service.submit("endless", training=ENDLESS)
        service.wait_for("endless", Phase.RUNNING.value)
        report(f"service: one job trains; queueing {count} more")
        began = time.monotonic()
        _fill(service, count)
        wait_until(lambda: _counted(service) >= count)
        report(f"service: {count} jobs queued after {time.monotonic() - began:.0f} s")
        url = f"http://127.0.0.1:{service.port}/healthz"
        health, seen, errors, new = _measured(url, seconds, count, lambda number: _seen_by_executor(service, number))
        assert service.log is not None
        report(f"service: /healthz p99 {health['p99']:.1f} ms, a new job seen after {seen['max']:.0f} ms at most")
        violations = _judged(health, seen, errors, service.log)
        if _counted(service) != count + new:
            violations.append(f"{_counted(service)} jobs are queued, not {count + new}")
    return {"healthMilliseconds": health, "newJobMilliseconds": seen, "violations": violations}


def _fill(service: Served, count: int) -> None:
    """Write queued jobs to the database. Requests would take minutes."""
    engine = make_engine(parse_url(f"sqlite:///{service.folder / 'data' / 'penstock.db'}"))
    with engine.connect().execution_options(writes=True) as connection, connection.begin():
        for number in range(count):
            job = PipelineJob.from_manifest(served_job(f"queued-{number}"))
            stored_jobs.create(connection, job, f"{number:08d}-0000-0000-0000-000000000000", "soak", time.time())
        connection.execute(update(jobs).where(jobs.c.created_by == "soak").values(phase=Phase.QUEUED.value))
    engine.dispose()


def _counted(service: Served) -> int:
    """Number of queued jobs in the Prometheus metrics."""
    text = service.client.get("/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("penstock_jobs{") and '"Queued"' in line]
    return round(sum(float(line.rpartition(" ")[2]) for line in lines))


def _seen_by_executor(service: Served, number: int) -> float:
    """Submit another job. Returns the seconds until the executor has queued it."""
    name = f"new-{number}"
    began = time.monotonic()
    service.submit(name)
    while service.status(name)["phase"] == Phase.PENDING.value:
        if time.monotonic() > began + PATIENCE_SECONDS:
            return PATIENCE_SECONDS
        time.sleep(0.01)
    return time.monotonic() - began


# The operator


def _operator(folder: Path, count: int, seconds: float, report: Report) -> dict[str, Any]:
    folder.mkdir(parents=True)
    fake = FakeApiserver()
    with serving(fake) as client:
        status = _settled(fake, folder, client)
        for number in range(1, count):
            _queued(fake, f"queued-{number}", status)
        report(f"operator: {count} jobs with suspended JobSets are on the apiserver")
        return _under_load(fake, folder, client, count, seconds, report)


def _settled(fake: FakeApiserver, folder: Path, client: ApiClient) -> Found:
    """Final status of a job that waits for its queue: the operator no longer changes it."""
    _queued(fake, "queued-0", WAITING)
    with _running(folder, client):
        wait_until(lambda: bool(fake.job("queued-0")["status"].get("conditions")), PATIENCE_SECONDS)
        time.sleep(SETTLE_SECONDS)
    return dict(fake.job("queued-0")["status"])


def _under_load(
    fake: FakeApiserver, folder: Path, client: ApiClient, count: int, seconds: float, report: Report
) -> dict[str, Any]:
    with _running(folder, client) as (port, log):
        url = f"http://127.0.0.1:{port}/healthz"
        _wait_for_launch(fake, "first", PATIENCE_SECONDS)
        report("operator: it has listed all of them")
        health, seen, errors, _ = _measured(
            url, seconds, count, lambda number: _wait_for_launch(fake, f"new-{number}", PATIENCE_SECONDS)
        )
        report(f"operator: /healthz p99 {health['p99']:.1f} ms, a new job seen after {seen['max']:.0f} ms at most")
        violations = _judged(health, seen, errors, log)
        launched = [key[2] for key in fake.objects if key[0] == "jobsets"]
        again = [name for name in launched if not name.endswith("-a1")]
        if again:
            violations.append(f"queued jobs were launched again: {again[:5]}")
    return {"healthMilliseconds": health, "newJobMilliseconds": seen, "violations": violations}


def _manifest(name: str) -> Found:
    metadata = {"name": name, "creationTimestamp": format_instant(time.time())}
    return {"apiVersion": API_VERSION, "kind": JOB_KIND, "metadata": metadata, "spec": SPEC}


def _queued(fake: FakeApiserver, name: str, status: Mapping[str, Any]) -> None:
    """Create a job whose first attempt was launched and waits for admission to a queue."""
    now = format_instant(time.time())
    status = {**status, "phaseEnteredAt": now, "startedAt": now}
    job = fake.add_job(_manifest(name), **status)["metadata"]
    owner = {"apiVersion": API_VERSION, "kind": JOB_KIND, "name": name, "uid": job["uid"], "controller": True}
    labels = {UID_LABEL: job["uid"], ATTEMPT_LABEL: "1"}
    own: Found = {"name": f"{name}-a1", "namespace": "default", "labels": labels, "ownerReferences": [owner]}
    own["creationTimestamp"] = now
    fake.add("jobsets", {"metadata": own, "spec": {"suspend": True}})


def _wait_for_launch(fake: FakeApiserver, name: str, patience: float) -> float:
    """Apply another job. Returns the seconds until its JobSet exists."""
    began = time.monotonic()
    fake.add_job(_manifest(name))
    with fake.news:
        fake.news.wait_for(lambda: ("jobsets", "default", f"{name}-a1") in fake.objects, patience)
    return time.monotonic() - began


@contextmanager
def _running(folder: Path, client: ApiClient) -> Iterator[tuple[int, Path]]:
    """Run the operator's process on the API server. Yields its probe port and its log."""
    port, log, policy = free_port(), folder / "operator.log", folder / "policy.json"
    policy.write_text(json.dumps({"everywhere": {name: ["*"] for name in LISTS}}))
    environ = {
        **os.environ,
        "KUBECONFIG": str(kubeconfig_of(client, folder)),
        "PENSTOCK_POLICY_FILE": str(policy),
        "PENSTOCK_METRICS_PORT": "0",
        "PENSTOCK_LIVENESS_PORT": str(port),
        "PENSTOCK_OWN_NAMESPACE": SERVICE_NAMESPACE,
    }
    command = [sys.executable, "-m", "penstock.operator"]
    with log.open("a") as out, subprocess.Popen(command, env=environ, stdout=out, stderr=out) as process:
        try:
            yield port, log
            assert process.poll() is None, f"the operator ended with exit code {process.returncode}"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
