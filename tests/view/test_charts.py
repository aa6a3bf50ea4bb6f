"""Charts are valid plotly figures of the run's own numbers, in colours the theme knows, of bounded size."""

from __future__ import annotations

import dataclasses
import json
import re

import plotly.graph_objects as go
import pytest

from penstock.core.curves import MAX_POINTS, RunCurves, curves_of
from penstock.view import charts
from penstock.view.charts import Figure
from penstock.view.theme import LIGHT
from tests.support.sample_run import sample_metrics

METRICS = sample_metrics(120)
RUN = curves_of(METRICS)
LONG = curves_of(sample_metrics(3 * MAX_POINTS))
SINGLE = {"throughput": "tokens_per_second", "learning rate": "learning_rate", "gradient norm": "gradient_norm"}
FIGURES = {
    "loss": charts.loss(RUN, 6.4),
    **{name: charts.single(RUN.curves[field], name, "series-4") for name, field in SINGLE.items()},
    "step time": charts.step_time(RUN.curves["step_seconds"], 0.23),
    "compared": charts.compared(
        {"a": RUN.curves["loss"], "b": curves_of(METRICS[:9]).curves["loss"]}, "nats per token"
    ),
    "by rank": charts.by_rank({rank: [(0, 1.0), (9, 2.0 + rank)] for rank in range(7)}, "milliseconds"),
    "long loss": charts.loss(LONG, 6.4),
    "long step time": charts.step_time(LONG.curves["step_seconds"], 0.23),
    "empty loss": charts.loss(RunCurves(), 6.4),
    "empty step time": charts.step_time(None, None),
    "empty": charts.single(None, "learning rate", "series-3"),
}


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


def test_the_loss_chart_leaves_out_missing_values() -> None:
    plain = curves_of(dataclasses.replace(m, validation_loss=None) for m in METRICS)
    assert list(traces(charts.loss(plain))) == ["training"]
    assert charts.loss(RunCurves(), 6.4)["data"] == []


def test_points_of_several_steps_have_a_band_from_least_to_greatest() -> None:
    """A single step's spike is as high in the chart as in the run, however long the run."""
    spike = [dataclasses.replace(METRICS[0], step=step, loss=8.17 if step == 17 else 1.0) for step in range(9_999)]
    curve = curves_of(spike).curves["loss"]
    band, mean = charts.envelope(curve, name="training", colour="series-1")
    assert max(band["y"]) == 8.17
    assert max(mean["y"]) < 3
    assert len(band["x"]) == len(band["y"]) == 2 * len(curve.points)
    assert len(charts.envelope(RUN.curves["loss"], name="training", colour="series-1")) == 1


def test_the_step_time_chart_clips_rare_outliers_and_states_it() -> None:
    slow = curves_of((dataclasses.replace(METRICS[0], step_seconds=4.0), *METRICS[1:])).curves["step_seconds"]
    layout = charts.step_time(slow, 0.23)["layout"]
    assert layout["yaxis"]["range"][1] < 400
    assert layout["xaxis"]["title"]["text"] == "step (1 step lies above, up to 4,000 ms)"


def test_step_time_counts_no_steps_where_a_point_stands_for_several() -> None:
    title = FIGURES["long step time"]["layout"]["xaxis"]["title"]["text"]
    assert re.fullmatch(r"step \(the slowest steps lie above, up to \d+ ms\)", title)


def test_step_time_of_a_short_run_shows_all_of_it() -> None:
    layout = charts.step_time(curves_of(METRICS[:5]).curves["step_seconds"], 0.23)["layout"]
    assert "range" not in layout["yaxis"]
    assert layout["xaxis"]["title"]["text"] == "step"


def test_step_time_compares_with_the_prediction_in_milliseconds() -> None:
    found = traces(FIGURES["step time"])
    assert found["predicted"]["y"] == [230.0, 230.0]
    assert found["measured"]["y"][1] == pytest.approx(1e3 * METRICS[1].step_seconds)
    assert list(traces(charts.step_time(RUN.curves["step_seconds"], None))) == ["measured"]


@pytest.mark.parametrize(("name", "field"), SINGLE.items())
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
    first, second = (charts.single(RUN.curves["loss"], "loss", "series-1") for _ in range(2))
    first["layout"]["xaxis"]["title"]["text"] = "changed"
    assert second["layout"]["xaxis"]["title"]["text"] == "step"
    assert first["layout"]["yaxis"]["title"]["text"] == ""
