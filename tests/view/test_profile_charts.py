"""Charts of memory, of the cost model's fit and of links."""

from __future__ import annotations

import dataclasses
import json
import re

import plotly.graph_objects as go
import pytest

from penstock.core.comparison import FitPoint, RankMemory
from penstock.core.model import UnitKind
from penstock.core.profile import LinkRecord, UnitRecord
from penstock.core.schedule import Kind
from penstock.view import profile_charts
from penstock.view.theme import LIGHT
from tests.support.sample_run import sample_fit, sample_links, sample_memory, sample_plan, sample_profile

GIB = 2**30
RANKS = sample_memory(sample_plan())
POINTS = sample_fit(sample_profile())
LINKS = sample_links(8)
FIGURES = {
    "memory": profile_charts.memory(RANKS, 4 * GIB),
    "memory near its limit": profile_charts.memory(RANKS, 600 * 2**20),
    "memory without a limit": profile_charts.memory(RANKS),
    "memory of many": profile_charts.memory(RANKS * 48, 4 * GIB),
    "no memory": profile_charts.memory(()),
    "fit": profile_charts.fit(POINTS),
    "no fit": profile_charts.fit(()),
    "links": profile_charts.links(LINKS),
    "many links": profile_charts.links(sample_links(24)),
    "no links": profile_charts.links(()),
    "curves": profile_charts.curves(sample_profile().units, Kind.F),
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_follow_plotly_s_schema_in_the_theme_s_colours(name: str) -> None:
    go.Figure(FIGURES[name])
    text = json.dumps(FIGURES[name], allow_nan=False)
    assert set(re.findall(r"var\(--([\w-]+)\)", text)) <= set(LIGHT)


def test_memory_stacks_the_parts_of_every_rank() -> None:
    bars = [trace for trace in FIGURES["memory"]["data"] if trace["type"] == "bar"]
    assert [bar["name"] for bar in bars] == ["process", "parameters, gradients, optimizer", "slots", "transient"]
    for rank, memory in enumerate(RANKS):
        assert sum(bar["x"][rank] for bar in bars) == pytest.approx(memory.predicted_bytes / 2**20)
    (measured,) = [trace for trace in FIGURES["memory"]["data"] if trace["type"] == "scatter"]
    assert measured["x"] == [(memory.measured_bytes or 0) / 2**20 for memory in RANKS]


def test_memory_without_measurement_shows_only_the_prediction() -> None:
    ranks = [dataclasses.replace(rank, measured_bytes=None) for rank in RANKS]
    assert {trace["type"] for trace in profile_charts.memory(ranks)["data"]} == {"bar"}
    half = profile_charts.memory([RANKS[0], ranks[1]])["data"][-1]
    assert half["x"][1] is None


def test_large_memory_is_in_gibibytes() -> None:
    rank = RankMemory(constant_bytes=GIB, state_bytes=GIB, slot_bytes=0, transient_bytes=0)
    figure = profile_charts.memory([rank])
    assert figure["data"][0]["x"] == [1.0]
    assert figure["layout"]["xaxis"]["title"]["text"] == "GiB per rank"


def test_the_limit_is_a_line_where_it_is_near_and_words_where_it_is_far() -> None:
    (line,) = FIGURES["memory near its limit"]["layout"]["shapes"]
    assert line["x0"] == line["x1"] == 600
    assert line["name"] == "limit 600 MiB"
    far = FIGURES["memory"]["layout"]
    assert "shapes" not in far
    assert far["xaxis"]["title"]["text"] == "MiB per rank, limit 4 GiB beyond the axis"
    assert "limit" not in json.dumps(FIGURES["memory without a limit"]["layout"])


def test_fit_shows_every_record_once_held_out_ones_hollow() -> None:
    data = FIGURES["fit"]["data"]
    marks = [trace for trace in data if trace["mode"] == "markers"]
    assert sum(len(trace["x"]) for trace in marks) == len(POINTS)
    hollow = [trace for trace in marks if trace["marker"]["symbol"].endswith("-open")]
    assert sum(len(trace["x"]) for trace in hollow) == sum(p.record.held_out for p in POINTS)
    shown = [trace["name"] for trace in marks if trace["showlegend"]]
    assert len(shown) == len(set(shown)) == len({(p.record.unit, p.record.kind) for p in POINTS})
    assert data[0]["x"] == data[0]["y"]


def test_curves_show_slices_without_a_prefix_by_unit() -> None:
    profile = sample_profile()
    figure = profile_charts.curves(profile.units, Kind.F)
    shown = [r for r in profile.units if r.kind is Kind.F and r.prefix == 0]
    smallest = min(r.batch for r in shown)
    expected = {(r.length, 1e3 * r.together_seconds) for r in shown if r.batch == smallest}
    assert {point for trace in figure["data"] for point in zip(trace["x"], trace["y"], strict=True)} == expected
    assert all(list(trace["x"]) == sorted(trace["x"]) for trace in figure["data"])
    assert profile_charts.curves((), Kind.W)["data"] == []


def record(predicted: float, measured: float, held_out: bool) -> FitPoint:
    return FitPoint(
        record=UnitRecord(
            unit=UnitKind.MLP,
            kind=Kind.F,
            batch=1,
            length=64,
            prefix=0,
            alone_seconds=measured,
            together_seconds=measured,
            spread=0.0,
            samples=3,
            held_out=held_out,
        ),
        predicted_seconds=predicted,
    )


def test_fit_errors_are_means_of_absolute_errors() -> None:
    points = [record(1.1, 1.0, False), record(0.8, 1.0, False), record(3.0, 2.0, True)]
    (found,) = profile_charts.fit_errors(points)
    assert (found.unit, found.kind, found.num_records) == (UnitKind.MLP, Kind.F, 3)
    assert found.fitted == pytest.approx(0.15)
    assert found.held_out == pytest.approx(0.5)
    (alone,) = profile_charts.fit_errors(points[:1])
    assert alone.held_out is None


def test_a_record_of_no_time_has_no_error() -> None:
    assert record(1.0, 0.0, False).error == 0.0


def test_fit_errors_name_every_unit_and_kind_in_the_model_s_order() -> None:
    found = [(error.unit, error.kind) for error in profile_charts.fit_errors(POINTS)]
    assert found[0] == (UnitKind.EMBEDDING, Kind.F)
    assert found[-1] == (UnitKind.HEAD, Kind.W)
    assert len(found) == len(set(found)) == 10
    assert sum(error.num_records for error in profile_charts.fit_errors(POINTS)) == len(POINTS)


def test_links_are_a_matrix_with_an_empty_diagonal() -> None:
    (heatmap,) = FIGURES["links"]["data"]
    assert all(heatmap["z"][rank][rank] is None for rank in range(8))
    for link in LINKS:
        assert heatmap["z"][link.source][link.target] == link.bytes_per_second / 1e9
    assert heatmap["customdata"][0][1] == "70 us"
    assert heatmap["zmax"] == max(link.bytes_per_second for link in LINKS) / 1e9


def test_numbers_are_written_into_small_matrices_only() -> None:
    assert FIGURES["links"]["data"][0]["texttemplate"]
    assert not FIGURES["many links"]["data"][0]["texttemplate"]


def test_links_that_were_not_measured_stay_blank() -> None:
    only = LinkRecord(source=2, target=0, latency_seconds=1e-4, bytes_per_second=2e9, error=0.0)
    (heatmap,) = profile_charts.links([only])["data"]
    assert heatmap["z"] == [[None, None, None], [None, None, None], [2.0, None, None]]
