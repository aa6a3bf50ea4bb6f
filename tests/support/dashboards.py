"""What is in deploy/dashboards: panels, alerts, and the queries in them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.serialization import yamltext
from tests.support.repository import ROOT

FOLDER = ROOT / "deploy" / "dashboards"
ALERTS = FOLDER / "alerts.yaml"
CONFIGURATION = FOLDER / "prometheus.yml"
DASHBOARDS = sorted(FOLDER.glob("*.json"))
GUIDE = ROOT / "docs" / "guides" / "monitoring.md"

METRIC = re.compile(r"\b((?:penstock|process)_\w+|up)\b")
LABEL_VALUES = re.compile(r"label_values\((.*), (\w+)\)")
COMPARISON = re.compile(r" [<>] (?!bool)")


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and where it stands."""

    place: str
    expression: str

    @property
    def metrics(self) -> set[str]:
        """The metrics that it names."""
        return set(METRIC.findall(re.sub(r'"[^"]*"', "", self.expression)))


def load(path: Path) -> dict[str, Any]:
    """A dashboard."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def panel_queries(variables: dict[str, str]) -> list[Query]:
    """Those of every panel of every dashboard, and those that fill its variables, as Grafana would ask them."""
    found = []
    for path in DASHBOARDS:
        dashboard = load(path)
        for panel in dashboard["panels"]:
            found += [Query(f"{path.name}: {panel['title']}", target["expr"]) for target in panel["targets"]]
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                grouped = LABEL_VALUES.sub(r"group by (\2) (\1)", variable["query"])
                found.append(Query(f"{path.name}: {variable['name']}", grouped))
    return [Query(each.place, _filled(each.expression, variables)) for each in found]


def _filled(expression: str, variables: dict[str, str]) -> str:
    for name, value in variables.items():
        expression = expression.replace(f"${name}", value)
    assert "$" not in expression, expression
    return expression


def alerts() -> list[dict[str, Any]]:
    """Every alert rule."""
    return [rule for group in yamltext.load(ALERTS.read_text(), "alerts")["groups"] for rule in group["rules"]]


def alert_queries() -> list[Query]:
    """What every alert compares: its query without the threshold, and the threshold where it is a query too."""
    found = []
    for rule in alerts():
        compared = COMPARISON.split(rule["expr"])
        assert len(compared) == 2, rule
        found += [Query(rule["alert"], side) for side in compared if METRIC.search(side)]
    return found
