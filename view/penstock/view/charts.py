"""Charts of a run as plotly figures, which are plain data: ``{"data": […], "layout": {…}}``.

Colours are written ``var(--name)`` with the names of `penstock.view.theme`; the page that shows a figure sets the light
or dark palette (`assets/report.js` does). Nothing here loads plotly: its JavaScript draws, its schema is for tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from penstock.core.curves import Curve, CurvePoint, RunCurves
from penstock.view.theme import SANS

Figure = dict[str, Any]
"""A plotly figure: traces in ``data``, everything else in ``layout``."""


def layout(x: str, y: str, *, height: int = 320, legend: bool = False) -> dict[str, Any]:
    """The style that all charts share, with titles of both axes."""
    axis = {"gridcolor": "var(--line)", "linecolor": "var(--line)", "zeroline": False, "automargin": True}
    title = {"font": {"size": 12}, "standoff": 8}
    return {
        "font": {"family": SANS, "size": 12, "color": "var(--muted)"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 44, "r": 14, "t": 24 if legend else 8, "b": 40},
        "height": height,
        "showlegend": legend,
        "legend": {
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "xref": "container",
            "y": 1,
            "yanchor": "top",
            "yref": "container",
        },
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": "var(--surface)",
            "bordercolor": "var(--line)",
            "font": {"family": SANS, "color": "var(--ink)"},
        },
        "xaxis": {**axis, "title": {"text": x, **title}},
        "yaxis": {**axis, "title": {"text": y, **title}},
    }


def finite(values: Iterable[float]) -> list[float | None]:
    """``values`` with None for values that are not finite, as of a diverged run: JSON has neither infinity nor NaN."""
    return [value if math.isfinite(value) else None for value in values]


def line(x: Sequence[float], y: Sequence[float], *, name: str, colour: str, **more: Any) -> dict[str, Any]:
    """A trace of straight lines between points; the fields in ``more`` replace its own."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": finite(y),
        "name": name,
        "line": {"color": f"var(--{colour})", "width": 1.6},
        **more,
    }


def envelope(curve: Curve, *, name: str, colour: str, scale: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    """The mean of every point as a line, and if points stand for several steps, the band from least to greatest."""
    steps = [point.step for point in curve.points]
    traces = [line(steps, [scale * point.mean for point in curve.points], name=name, colour=colour, **more)]
    if curve.is_bucketed:
        greatest = [scale * point.max for point in curve.points]
        least = [scale * point.min for point in curve.points]
        outline = {"color": f"var(--{colour})", "width": 0.7}
        band = {"fill": "toself", "fillcolor": f"var(--{colour})", "opacity": 0.35, "line": outline}
        silent = {"hoverinfo": "skip", "showlegend": False, "legendgroup": name}
        around = line([*steps, *steps[::-1]], [*greatest, *least[::-1]], name=name, colour=colour, **band, **silent)
        traces.insert(0, around)
    return traces


def loss(run: RunCurves, unigram_loss: float | None = None) -> Figure:
    """Nats per token over steps: training, validation where measured, and the unigram baseline."""
    training, validation = run.curves.get("loss"), run.curves.get("validation_loss")
    traces = envelope(training, name="training", colour="series-1") if training else []
    if validation:
        marker = {"color": "var(--series-2)", "size": 7}
        traces += envelope(validation, name="validation", colour="series-2", mode="lines+markers", marker=marker)
    if unigram_loss is not None and training:
        dash = {"color": "var(--faint)", "width": 1.4, "dash": "dash"}
        ends = [training.points[0].step, training.last.step]
        name = f"unigram baseline {unigram_loss:.2f}"
        traces.append(line(ends, [unigram_loss] * 2, name=name, colour="faint", line=dash))
    return {"data": traces, "layout": layout("step", "nats per token", height=340, legend=True)}


def single(curve: Curve | None, title: str, colour: str) -> Figure:
    """One number over steps."""
    traces = envelope(curve, name=title, colour=colour) if curve else []
    figure: Figure = {"data": traces, "layout": layout("step", "", height=220)}
    figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return figure


SERIES: Final = tuple(f"series-{number}" for number in range(1, 6))


def compared(runs: Mapping[str, Curve], title: str) -> Figure:
    """One number of several runs over steps, a line for each run by its name; at most as many as there are `SERIES`."""
    traces = []
    for (name, curve), colour in zip(runs.items(), SERIES, strict=False):
        traces += envelope(curve, name=name, colour=colour, showlegend=True, legendgroup=name)
    return {"data": traces, "layout": layout("step", title, height=340, legend=True)}


DASHES: Final = ("solid", "dash", "dot", "dashdot")


def by_rank(values: Mapping[int, Sequence[tuple[int, float]]], title: str) -> Figure:
    """One number over (step, value) points, a line for each rank; ranks take turns in colours, then in dashes."""
    traces = []
    for rank, points in sorted(values.items()):
        turn, place = divmod(rank, len(SERIES))
        style = {"color": f"var(--{SERIES[place]})", "width": 1.6, "dash": DASHES[turn % len(DASHES)]}
        steps, heights = [step for step, _ in points], [value for _, value in points]
        more = {"line": style, "mode": "lines+markers", "marker": {"size": 4}}
        traces.append(line(steps, heights, name=f"rank {rank}", colour=SERIES[place], **more))
    figure: Figure = {"data": traces, "layout": layout("step", title, height=270, legend=True)}
    figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return figure


def step_time(curve: Curve | None, predicted_seconds: float | None) -> Figure:
    """Milliseconds of every step next to the prediction. The slowest may lie beyond the axis; its title says so."""
    traces = envelope(curve, name="measured", colour="series-1", scale=1e3) if curve else []
    if predicted_seconds is not None and curve:
        dash = {"color": "var(--series-2)", "width": 1.8, "dash": "dash"}
        ends = [curve.points[0].step, curve.last.step]
        traces.append(line(ends, [1e3 * predicted_seconds] * 2, name="predicted", colour="series-2", line=dash))
    figure: Figure = {"data": traces, "layout": layout("step", "milliseconds", height=270, legend=True)}
    _leave_outliers_outside(figure, curve.points if curve else (), predicted_seconds or 0.0)
    return figure


def _leave_outliers_outside(figure: Figure, points: Sequence[CurvePoint], predicted_seconds: float) -> None:
    greatest = sorted(1e3 * point.max for point in points)
    if len(greatest) < 20:
        figure["layout"]["yaxis"]["rangemode"] = "tozero"
        return
    top = 1.25 * max(greatest[int(0.97 * len(greatest))], 1e3 * predicted_seconds)
    figure["layout"]["yaxis"]["range"] = [0, top]
    outside = sum(value > top for value in greatest)
    if outside:
        # a point may stand for several steps, and only its greatest value is known to lie beyond the axis
        exact = all(point.count == 1 for point in points)
        steps = f"{outside} {'step lies' if outside == 1 else 'steps lie'}" if exact else "the slowest steps lie"
        figure["layout"]["xaxis"]["title"]["text"] = f"step ({steps} above, up to {greatest[-1]:,.0f} ms)"
