"""A real Prometheus scrapes a service with a job, an operator, and ranks of a run: every query of ours finds something.

It runs by the configuration that users are given, with other addresses and shorter intervals.
"""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.api.http.routes.plans import MOST_WAITING
from penstock.core.host.ports import free_port
from penstock.core.run.folder import RunDir
from penstock.kube.names import SERVICE_LEASE
from penstock.kube.resources import LEASES
from penstock.operator.controller import Controller
from penstock.operator.metrics import serve
from penstock.operator.settings import Settings
from tests.support import prometheus
from tests.support.command import ended, give_way, laid_out, tiny_job, wait_for_step
from tests.support.dashboards import ALERTS, CONFIGURATION, GUIDE, alert_queries, alerts, panel_queries
from tests.support.fake_planner import FakePlanner
from tests.support.manifests import example
from tests.support.prometheus import Prometheus
from tests.support.serving import Served, served, wait_until
from tests.support.watchable import Watchable
from tests.support.whatif import asked_for

VARIABLES = {"namespace": "default", "job": "tiny", "__rate_interval": "1m"}
FEWEST_SCRAPES = 4
ENDLESS: dict[str, Any] = {
    "training": {"globalBatch": 2, "steps": 10**6, "optimizer": {"learningRate": 1e-3}},
    "checkpoint": {"everySteps": 10**4},
}
LAST_SERIES = (
    'penstock_operator_reconcile_seconds_count{result="done"}',
    "penstock_operator_attempts_ended_total",
    "penstock_operator_service_lease_held",
    'penstock_http_request_seconds_count{status="5xx"}',
    'penstock_http_request_seconds_count{operation="ingest"}',
    'penstock_job_loss{job_name="tiny"}',
    'penstock_loss{job_name="tiny"}',
)
"""Once these are there, all are."""
CANNOT_BE_PLANNED = {"pp": 2, "slices": 4, "stages": [2, 0], "schedule": "zbv"}

pytestmark = [pytest.mark.xdist_group("service"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, measurements: Path) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a few times: a job that trains, one that failed, and a run without the service."""
    with served(tmp_path_factory.mktemp("monitored"), cache=measurements) as service, an_operator() as operator_port:
        service.submit("broke", parallelism=CANNOT_BE_PLANNED)
        trains = service.submit("tiny", **ENDLESS)
        service.wait_for_step("tiny", 1)
        give_way(RunDir(service.run_dir(trains)))
        with ranks_of_its_own(service) as port:
            ask_for_too_many_plans(service)
            with prometheus.server(service.folder, configured(service, port, operator_port)) as found:
                wait_until(lambda: is_scraped(found, service))
                yield found


@contextmanager
def ranks_of_its_own(service: Served) -> Iterator[int]:
    """The port at which `penstock run` answers, which trains a job of the same name."""
    port = free_port()
    run = laid_out(service.folder / "own")
    job = tiny_job(service.folder, **ENDLESS)
    command = replace(service.command, environment={"XDG_STATE_HOME": str(run.root / "state")})  # two jobs on two cores
    process = command.start("run", job, "--run-dir", run.root, "--metrics-port", str(port))
    try:
        wait_for_step(run, 1, attempt=1)
        give_way(run)
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        ended(process, 128 + signal.SIGINT)


@contextmanager
def an_operator() -> Iterator[int]:
    """The port of an operator of a cluster in memory: a job waits for nodes, one fails, and a service has its Lease."""
    kube, settings = Watchable(), Settings(image="trainer:1", service="https://service:8470", resync_seconds=0.5)
    kube.submit(example(kubernetes={"volumes": {"out": {"claim": "shared"}}}))
    kube.submit({**example(), "metadata": {"name": "without-a-claim"}})
    lease = {"name": SERVICE_LEASE, "namespace": settings.own_namespace}
    port, ending, started = free_port(), threading.Event(), threading.Event()

    def renew() -> None:
        kube.add(LEASES, {"metadata": dict(lease), "spec": {"renewTime": str(time.time())}})

    async def operate() -> None:
        found = Controller(kube, FakePlanner(), settings, time.time)
        close = serve(found.registry, port)
        await found.start(asyncio.get_running_loop())
        started.set()
        while not ending.is_set():
            renew()
            await asyncio.sleep(0.5)
        await found.close()
        close()

    renew()
    thread = threading.Thread(target=asyncio.run, args=(operate(),))
    thread.start()
    try:
        assert started.wait(60.0)
        yield port
    finally:
        ending.set()
        thread.join()


def configured(service: Served, ranks_port: int, operator_port: int) -> Path:
    (service.folder / ALERTS.name).write_text(ALERTS.read_text().replace("for: 1m", "for: 1s"))
    create = ("token", "create", "prometheus", "--role", "viewer", "--folder", service.folder / "data")
    (service.folder / "token").write_text(service.command(*create)[0])
    text = CONFIGURATION.read_text().replace("15s", "1s").replace("127.0.0.1:8470", f"127.0.0.1:{service.port}")
    path = service.folder / CONFIGURATION.name
    target = f'{{job_name: penstock-operator, static_configs: [{{targets: ["127.0.0.1:{operator_port}"]}}]}}'
    path.write_text(text.replace("127.0.0.1:9400", f"127.0.0.1:{ranks_port}") + f"  - {target}\n")
    return path


def is_scraped(found: Prometheus, service: Served) -> bool:
    """Whether all there is was seen a few times; somebody looks at the jobs meanwhile."""
    service.client.get("/v1/jobs").raise_for_status()
    counts = [found.query(f"count_over_time({series}[5m])") for series in LAST_SERIES]
    return all(samples and float(samples[0]["value"][1]) >= FEWEST_SCRAPES for samples in counts)


def ask_for_too_many_plans(service: Served) -> None:
    """Until the service answers 503, which takes many tokens in many namespaces; none of them is made."""
    asked: list[str] = []
    status = 202
    for number in range(MOST_WAITING):
        wanted = {"name": f"asks-{number}", "role": "editor", "namespace": f"n{number}"}
        bearer = {"Authorization": f"Bearer {service.client.post('/v1/tokens', json=wanted).json()['token']}"}
        body = asked_for()
        body["job"]["metadata"]["namespace"] = f"n{number}"
        while (answer := service.client.post("/v1/plans", json=body, headers=bearer)).status_code == 202:
            asked.append(answer.json()["id"])
        status = answer.status_code
        if status == 503:
            break
    assert status == 503
    for each in asked:
        service.client.delete(f"/v1/plans/{each}")


def test_all_endpoints_are_scraped(measured: Prometheus) -> None:
    for job in ("penstock", "penstock-ranks", "penstock-operator"):
        measured.samples(f'up{{job="{job}"}} == 1')


def test_a_series_bears_its_training_job_s_name(measured: Prometheus) -> None:
    for name in ("penstock_job_loss", "penstock_loss"):
        (found,) = measured.samples(f'{name}{{job_name="tiny"}}')
        assert found["metric"]["job"] in ("penstock", "penstock-ranks")


def test_what_has_ended_has_no_series_of_its_own(measured: Prometheus) -> None:
    assert {each["metric"]["job_name"] for each in measured.samples("penstock_job_attempt")} == {"tiny"}
    counted = {each["metric"]["phase"]: each["value"][1] for each in measured.samples("penstock_jobs > 0")}
    assert counted == {"Running": "1", "Failed": "1"}


OF_KNOWN_PEAKS = {"penstock_job_model_flops_utilization"}
"""The job that is measured here runs on a CPU, whose peak nobody states."""


@pytest.mark.parametrize(
    "query",
    [query for query in panel_queries(VARIABLES) if not set(query.metrics) <= OF_KNOWN_PEAKS],
    ids=lambda query: query.place,
)
def test_every_panel_shows_something(measured: Prometheus, query: Any) -> None:
    measured.samples(query.expression)


@pytest.mark.parametrize("query", alert_queries(), ids=lambda query: query.place)
def test_every_alert_looks_at_something(measured: Prometheus, query: Any) -> None:
    measured.samples(query.expression)


def test_every_metric_that_is_named_exists(measured: Prometheus) -> None:
    named = {name for query in (*panel_queries(VARIABLES), *alert_queries()) for name in query.metrics}
    assert "penstock_job_step_seconds" in named
    assert named >= OF_KNOWN_PEAKS
    assert sorted(named - OF_KNOWN_PEAKS - set(measured.get("label/__name__/values"))) == []


def test_alerts_are_taken_by_prometheus(measured: Prometheus) -> None:
    loaded = [rule for group in measured.get("rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in loaded] == [rule["alert"] for rule in alerts()]
    assert [rule["name"] for rule in loaded if rule.get("lastError")] == []


def test_a_job_that_failed_raises_its_alert(measured: Prometheus) -> None:
    wait_until(lambda: firing(measured) == ["PenstockJobFailed"])


def firing(measured: Prometheus) -> list[str]:
    return [each["labels"]["alertname"] for each in measured.get("alerts")["alerts"] if each["state"] == "firing"]


def test_the_guide_tells_of_every_metric_of_service_and_operator(measured: Prometheus) -> None:
    there = {name for name in measured.get("label/__name__/values") if name.startswith("penstock_")}
    there -= {each["metric"]["__name__"] for each in measured.samples('{job_name="tiny", instance!="", namespace=""}')}
    there = {re.sub(r"_(bucket|sum|count)$", "", name) for name in there if not name.endswith("_created")}
    text = GUIDE.read_text()
    tables = [text.partition(head)[2].partition("\n\n")[0] for head in ("| metric |", "| metric of the operator |")]
    named = {name for table in tables for name in re.findall(r"`(penstock_\w+)", table)}
    assert named == there | OF_KNOWN_PEAKS
