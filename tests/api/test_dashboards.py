"""What can be seen of dashboards and alerts without Grafana; `test_monitoring.py` asks their queries."""

from __future__ import annotations

import re
import shutil
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.support import prometheus
from tests.support.dashboards import (
    ALERTS,
    CONFIGURATION,
    DASHBOARDS,
    FOLDER,
    GUIDE,
    alert_queries,
    alerts,
    load,
    panel_queries,
)
from tests.support.repository import ROOT

WIDTH = 24
UNITS = {"none", "short", "s", "bytes", "percentunit", "reqps", "cps"}


@pytest.fixture(params=DASHBOARDS, ids=lambda path: path.name)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(request.param)


def test_every_panel_says_what_it_shows_and_in_which_unit(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["targets"]


def test_panels_fill_their_rows_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    for one, other in combinations(places, 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    height = max(place["y"] + place["h"] for place in places)
    assert sum(place["w"] * place["h"] for place in places) == WIDTH * height


def test_several_series_have_a_legend(dashboard: dict[str, Any]) -> None:
    """A number alone needs none."""
    for panel in dashboard["panels"]:
        if panel["type"] in ("timeseries", "bargauge"):
            assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_queries_of_a_panel_are_told_apart(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)


def test_dashboards_have_names_of_their_own() -> None:
    assert len({load(path)["uid"] for path in DASHBOARDS}) == len(DASHBOARDS) == 3


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description"} <= rule["annotations"].keys()


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_waits_names_its_job_and_has_a_runbook(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"[1-9]\d*m", rule["for"])
    names = "job_name" if "penstock_job_" in rule["expr"] else "instance"
    assert f"$labels.{names}" in rule["annotations"]["summary"]
    page, _, section = rule["annotations"]["runbook_url"].partition("#")
    assert ROOT / page == GUIDE
    assert f"### {rule['alert']}\n\n" in GUIDE.read_text()
    assert section == rule["alert"].lower()


def test_no_series_bears_the_label_that_is_prometheus_own() -> None:
    """`job` is the scrape's: a series with one of its own is renamed unless labels are honored."""
    queries = [*panel_queries(dict.fromkeys(("namespace", "job", "__rate_interval"), "x")), *alert_queries()]
    for query in queries:
        assert not re.search(r"penstock_\w+\{[^}]*\bjob=", query.expression), query.place
    for path in DASHBOARDS:
        assert "{{job}}" not in path.read_text()


def test_the_guide_tells_of_every_alert() -> None:
    table = GUIDE.read_text().partition("| alert |")[2].partition("\n\n")[0]
    assert re.findall(r"`(Penstock\w+)`", table) == [rule["alert"] for rule in alerts()]


def test_promtool_finds_no_fault(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "dashboards")
    (tmp_path / "dashboards" / "token").write_text("secret\n")
    promtool = prometheus.programs() / "promtool"
    for command in (["check", "rules", "--lint-fatal", ALERTS.name], ["check", "config", CONFIGURATION.name]):
        ran = subprocess.run([promtool, *command], cwd=tmp_path / "dashboards", capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
