"""Dashboards and alerts against a real Prometheus that scrapes a real service: every query finds something.

It runs by the configuration that users are given, with other addresses and shorter intervals.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.api.auth.identity import Role
from penstock.api.service import Service
from penstock.api.settings import Limits
from penstock.core.lifecycle import Phase
from penstock.core.records import StepMetrics
from penstock.trainer.exporter import Exporter
from tests.support import prometheus
from tests.support.dashboards import (
    ALERTS,
    CONFIGURATION,
    DASHBOARDS,
    FOLDER,
    alert_queries,
    alerts,
    load,
    panel_queries,
)
from tests.support.filled_job import enter, running_job
from tests.support.listening import answering, bearer
from tests.support.prometheus import Prometheus
from tests.support.repository import ROOT
from tests.support.service import Clock, new_service, step_records

pytestmark = pytest.mark.xdist_group("prometheus")

VARIABLES = {"namespace": "default", "job": "tiny", "__rate_interval": "1m"}
GUIDE = ROOT / "docs" / "guides" / "monitoring.md"
FEWEST_SCRAPES = 4
PATIENCE_SECONDS = 60.0
WIDTH = 24
UNITS = {"none", "short", "s", "bytes", "percentunit", "reqps", "cps"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a few times: a job that runs, one that recovers, one that ended well, one not."""
    folder = tmp_path_factory.mktemp("prometheus")
    service = new_service(folder, clock=Clock(time.time()), limits=Limits(streams=0))
    fill(service)
    with answering(service) as url:
        configuration = configured(folder, service, url, serve_ranks())
        with prometheus.server(folder, configuration) as found:
            scrape_a_few_times(found, service, url)
            yield found
    service.close()


def fill(service: Service) -> None:
    running_job(service, "tiny")
    for name, phase in (("tries", Phase.RECOVERING), ("done", Phase.SUCCEEDED), ("broke", Phase.FAILED)):
        enter(service, running_job(service, name).uid, phase)


def serve_ranks() -> int:
    """The port of a job's ranks; their endpoint ends with the process."""
    exporter, port = Exporter("tiny"), prometheus.free_port()
    exporter.predict(0.2)
    step: dict[str, Any] = {"learning_rate": 1e-3, "gradient_norm": 1.0, "peak_bytes": 10**9}
    exporter.update(StepMetrics(step=0, loss=5.0, step_seconds=0.25, tokens_per_second=1000.0, **step))
    exporter.serve("127.0.0.1", port)
    return port


def configured(folder: Path, service: Service, url: str, ranks_port: int) -> Path:
    shutil.copy(ALERTS, folder)
    (folder / "token").write_text(bearer(service)["Authorization"].removeprefix("Bearer ") + "\n")
    text = CONFIGURATION.read_text().replace("15s", "1s").replace("127.0.0.1:8470", url.removeprefix("http://"))
    path = folder / CONFIGURATION.name
    path.write_text(text.replace("127.0.0.1:9400", f"127.0.0.1:{ranks_port}"))
    return path


def scrape_a_few_times(found: Prometheus, service: Service, url: str) -> None:
    """While there is traffic: reports, pages, and streams that are refused because too many are open."""
    uid = running_job(service, "reports").uid
    reporter, viewer = bearer(service, Role.INGEST), bearer(service)
    end = time.monotonic() + PATIENCE_SECONDS
    with httpx.Client(base_url=url, trust_env=False) as client:
        for i in range(10**6):
            records = step_records(uid, range(i, i + 1), attempt=0, first=2 * i, source="rank-1")
            body = {"records": [each.to_manifest() for each in records]}
            assert client.post("/v1/ingest", json=body, headers=reporter).status_code == 200
            assert client.get("/v1/jobs", headers=viewer).status_code == 200
            assert client.get("/v1/events", headers=viewer).status_code == 503
            scrapes = found.query('count_over_time(penstock_http_request_seconds_count{operation="ingest"}[5m])')
            if scrapes and float(scrapes[0]["value"][1]) >= FEWEST_SCRAPES:
                return
            assert time.monotonic() < end, found.get("targets")
            time.sleep(0.2)


def test_both_endpoints_are_scraped(measured: Prometheus) -> None:
    targets = measured.get("targets")["activeTargets"]
    assert {each["labels"]["job"]: each["health"] for each in targets} == {"penstock": "up", "penstock-ranks": "up"}


def test_a_series_bears_its_training_job_s_name(measured: Prometheus) -> None:
    for name in ("penstock_job_loss", "penstock_loss"):
        (found,) = measured.query(f'{name}{{job="tiny"}}')
        assert "exported_job" not in found["metric"]


def test_what_has_ended_has_no_series_of_its_own(measured: Prometheus) -> None:
    jobs = {each["metric"]["job"] for each in measured.query("penstock_job_attempt")}
    assert jobs == {"tiny", "tries", "reports"}
    counted = {each["metric"]["phase"]: each["value"][1] for each in measured.query("penstock_jobs > 0")}
    assert counted == {"Running": "2", "Recovering": "1", "Succeeded": "1", "Failed": "1"}


@pytest.mark.parametrize("query", panel_queries(VARIABLES), ids=lambda query: query.place)
def test_every_panel_shows_something(measured: Prometheus, query: Any) -> None:
    assert measured.query(query.expression)


@pytest.mark.parametrize("query", alert_queries(), ids=lambda query: query.place)
def test_every_alert_looks_at_something(measured: Prometheus, query: Any) -> None:
    assert measured.query(query.expression)


def test_every_metric_that_is_named_exists(measured: Prometheus) -> None:
    named = {name for query in (*panel_queries(VARIABLES), *alert_queries()) for name in query.metrics}
    assert "penstock_job_step_seconds" in named
    assert sorted(named - set(measured.get("label/__name__/values"))) == []


def test_alerts_are_taken_by_prometheus(measured: Prometheus) -> None:
    loaded = [rule for group in measured.get("rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in loaded] == [rule["alert"] for rule in alerts()]
    assert [rule["name"] for rule in loaded if rule.get("lastError")] == []


def test_a_job_that_failed_raises_its_alert(measured: Prometheus) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not (firing := [each for each in measured.get("alerts")["alerts"] if each["state"] == "firing"]):
        assert time.monotonic() < end
        time.sleep(0.2)
    assert [each["labels"]["alertname"] for each in firing] == ["PenstockJobFailed"]


def test_promtool_finds_no_fault(measured: Prometheus, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "dashboards")
    (tmp_path / "dashboards" / "token").write_text("secret\n")
    promtool = prometheus.programs() / "promtool"
    for command in (["check", "rules", ALERTS.name], ["check", "config", CONFIGURATION.name]):
        ran = subprocess.run([promtool, *command], cwd=tmp_path / "dashboards", capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr


class TestGuide:
    """What users read, against what is there."""

    def test_its_metrics_are_those_that_are_scraped(self, measured: Prometheus) -> None:
        there = {name for name in measured.get("label/__name__/values") if name.startswith("penstock_")}
        there -= {each["metric"]["__name__"] for each in measured.query('{job="tiny", instance!="", namespace=""}')}
        there = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in there}
        table = GUIDE.read_text().partition("| metric |")[2].partition("\n\n")[0]
        assert set(re.findall(r"`(penstock_\w+)", table)) == there - {"penstock_ingested_records"}

    def test_its_alerts_are_those_that_are_ruled(self) -> None:
        table = GUIDE.read_text().partition("| alert |")[2].partition("\n\n")[0]
        assert re.findall(r"`(Penstock\w+)`", table) == [rule["alert"] for rule in alerts()]


class TestLooks:
    """What can be seen of a dashboard without Grafana."""

    @pytest.fixture(params=DASHBOARDS, ids=lambda path: path.name)
    def dashboard(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        return load(request.param)

    def test_every_panel_says_what_it_shows_and_in_which_unit(self, dashboard: dict[str, Any]) -> None:
        for panel in dashboard["panels"]:
            assert panel["title"]
            assert panel["description"].endswith(".")
            assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
            assert panel["targets"]

    def test_panels_fill_their_rows_and_do_not_overlap(self, dashboard: dict[str, Any]) -> None:
        places = [panel["gridPos"] for panel in dashboard["panels"]]
        for one, other in combinations(places, 2):
            beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            assert beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        height = max(place["y"] + place["h"] for place in places)
        assert sum(place["w"] * place["h"] for place in places) == WIDTH * height

    def test_several_series_have_a_legend(self, dashboard: dict[str, Any]) -> None:
        """A number alone needs none."""
        for panel in dashboard["panels"]:
            if panel["type"] in ("timeseries", "bargauge"):
                assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]

    def test_queries_of_a_panel_are_told_apart(self, dashboard: dict[str, Any]) -> None:
        for panel in dashboard["panels"]:
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references)


def test_dashboards_have_names_of_their_own() -> None:
    assert len({load(path)["uid"] for path in DASHBOARDS}) == len(DASHBOARDS) == 3


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description"} <= rule["annotations"].keys()
