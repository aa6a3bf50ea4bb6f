"""Charts are valid plotly figures of the run's own numbers, in colours the theme knows, of bounded size."""

from __future__ import annotations

import dataclasses
import json
import re

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.records import StepMetrics
from penstock.view import charts
from penstock.view.charts import MAX_POINTS, Figure, newest, thin
from penstock.view.theme import LIGHT
from tests.support.sample_run import sample_metrics

METRICS = sample_metrics(120)
FIGURES = {
    "loss": charts.loss(METRICS, 6.4),
    "throughput": charts.throughput(METRICS),
    "learning rate": charts.learning_rate(METRICS),
    "gradient norm": charts.gradient_norm(METRICS),
    "step time": charts.step_time(METRICS, 0.23),
    "compared": charts.compared({"a": METRICS, "b": METRICS[:9]}, "loss", "nats per token"),
    "by rank": charts.by_rank({rank: [(0, 1.0), (9, 2.0 + rank)] for rank in range(7)}, "milliseconds"),
    "empty loss": charts.loss((), 6.4),
    "empty step time": charts.step_time((), None),
}


def entry(step: int, attempt: int = 0, loss: float = 1.0) -> StepMetrics:
    return dataclasses.replace(METRICS[0], step=step, attempt=attempt, loss=loss)


@pytest.mark.parametrize("name", FIGURES)
def test_figures_follow_plotly_s_schema(name: str) -> None:
    figure = FIGURES[name]
    assert set(figure) == {"data", "layout"}
    go.Figure(figure)
    json.dumps(figure, allow_nan=False)


@pytest.mark.parametrize("name", FIGURES)
def test_colours_are_the_theme_s(name: str) -> None:
    text = json.dumps(FIGURES[name])
    assert set(re.findall(r"var\(--([\w-]+)\)", text)) <= set(LIGHT)
    assert not re.search(r'"#[0-9a-f]{3,8}"', text)


def traces(figure: Figure) -> dict[str, dict[str, list[float]]]:
    return {trace["name"]: trace for trace in figure["data"]}


def test_every_rank_has_its_line_and_its_look() -> None:
    found = traces(FIGURES["by rank"])
    assert found["rank 3"]["x"] == [0, 9]
    assert found["rank 3"]["y"] == [1.0, 5.0]
    assert len({json.dumps(trace["line"]) for trace in found.values()}) == 7


def test_loss_shows_training_validation_and_baseline() -> None:
    found = traces(FIGURES["loss"])
    assert found["training"]["y"] == [m.loss for m in METRICS]
    assert found["validation"]["x"] == [m.step for m in METRICS if m.validation_loss is not None]
    assert found["unigram baseline 6.40"]["y"] == [6.4, 6.4]
    assert found["unigram baseline 6.40"]["x"] == [1, 120]


def test_loss_leaves_out_what_was_not_measured() -> None:
    plain = [dataclasses.replace(m, validation_loss=None) for m in METRICS]
    assert list(traces(charts.loss(plain))) == ["training"]
    assert list(traces(charts.loss((), 6.4))) == ["training"]


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3)), max_size=60))
def test_the_newest_attempt_s_last_entry_counts(keys: list[tuple[int, int]]) -> None:
    metrics = [entry(step, attempt, loss=float(i)) for i, (step, attempt) in enumerate(keys)]
    found = newest(metrics)
    assert [m.step for m in found] == sorted({step for step, _ in keys})
    for m in found:
        rivals = [r for r in metrics if r.step == m.step]
        assert (m.attempt, m.loss) == max((r.attempt, r.loss) for r in rivals)


@given(st.integers(0, 5 * MAX_POINTS))
def test_long_runs_are_thinned_evenly_and_end_with_the_last_step(count: int) -> None:
    metrics = [METRICS[0]] * max(0, count - 1) + [METRICS[-1]] * min(1, count)
    found = thin(metrics)
    assert len(found) <= MAX_POINTS + 1
    assert not count or found[-1] is METRICS[-1]
    assert count > MAX_POINTS or len(found) == count


def test_step_time_leaves_rare_outliers_outside_and_says_so() -> None:
    slow = (dataclasses.replace(METRICS[0], step_seconds=4.0), *METRICS[1:])
    layout = charts.step_time(slow, 0.23)["layout"]
    assert layout["yaxis"]["range"][1] < 400
    assert layout["xaxis"]["title"]["text"] == "step (1 step lies above, up to 4,000 ms)"


def test_step_time_of_a_short_run_shows_all_of_it() -> None:
    short = METRICS[:5]
    layout = charts.step_time(short, 0.23)["layout"]
    assert "range" not in layout["yaxis"]
    assert layout["xaxis"]["title"]["text"] == "step"


def test_step_time_compares_with_the_prediction_in_milliseconds() -> None:
    found = traces(FIGURES["step time"])
    assert found["predicted"]["y"] == [230.0, 230.0]
    assert found["measured"]["y"][1] == pytest.approx(1e3 * METRICS[1].step_seconds)
    assert list(traces(charts.step_time(METRICS, None))) == ["measured"]


@pytest.mark.parametrize(
    ("name", "field"),
    [("throughput", "tokens_per_second"), ("learning rate", "learning_rate"), ("gradient norm", "gradient_norm")],
)
def test_single_charts_show_their_field(name: str, field: str) -> None:
    (trace,) = FIGURES[name]["data"]
    assert trace["y"] == [getattr(m, field) for m in METRICS]


def test_runs_are_compared_by_name_each_in_its_colour() -> None:
    first, second = FIGURES["compared"]["data"]
    assert (first["name"], second["name"]) == ("a", "b")
    assert first["line"]["color"] != second["line"]["color"]
    assert second["x"] == [m.step for m in METRICS[:9]]
    assert second["y"] == [m.loss for m in METRICS[:9]]


def test_figures_share_no_mutable_parts() -> None:
    first, second = charts.throughput(METRICS), charts.throughput(METRICS)
    first["layout"]["xaxis"]["title"]["text"] = "changed"
    assert second["layout"]["xaxis"]["title"]["text"] == "step"
    assert first["layout"]["yaxis"]["title"]["text"] == ""
