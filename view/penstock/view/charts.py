"""Charts of a run as plotly figures, which are plain data: ``{"data": […], "layout": {…}}``.

Colours are written ``var(--name)`` with the names of `penstock.view.theme`; whoever shows a figure puts in the palette
of light or dark (`assets/report.js` does). Nothing here loads plotly: its JavaScript draws, its schema is for tests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from penstock.core.records import StepMetrics
from penstock.view.theme import SANS

Figure = dict[str, Any]
"""A plotly figure: traces in ``data``, everything else in ``layout``."""

MAX_POINTS: Final = 2_000
"""Longer runs are drawn with every n-th step, so that a chart's size does not follow the run's length."""


def newest(metrics: Iterable[StepMetrics]) -> tuple[StepMetrics, ...]:
    """One entry per step in order of steps: the latest attempt's, and of equals the one that came last."""
    found: dict[int, StepMetrics] = {}
    for entry in metrics:
        if entry.step not in found or entry.attempt >= found[entry.step].attempt:
            found[entry.step] = entry
    return tuple(found[step] for step in sorted(found))


def thin(metrics: Sequence[StepMetrics]) -> Sequence[StepMetrics]:
    """At most `MAX_POINTS` + 1 evenly spaced entries, the last among them."""
    every = -(-len(metrics) // MAX_POINTS)
    return metrics if every <= 1 else (*metrics[:-1:every], metrics[-1])


def layout(x: str, y: str, *, height: int = 320, legend: bool = False) -> dict[str, Any]:
    """The look that all charts share, with titles of both axes."""
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
    """``values`` with gaps where a run diverged: JSON knows neither infinity nor NaN."""
    return [value if math.isfinite(value) else None for value in values]


def line(x: Sequence[float], y: Sequence[float], *, name: str, colour: str, **more: Any) -> dict[str, Any]:
    """A trace of straight lines between points; ``more`` is put over it."""
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": finite(y),
        "name": name,
        "line": {"color": f"var(--{colour})", "width": 1.6},
        **more,
    }


def loss(metrics: Sequence[StepMetrics], unigram_loss: float | None = None) -> Figure:
    """Nats per token over steps: training, validation where measured, and the unigram baseline."""
    entries = newest(metrics)
    shown = thin(entries)
    traces = [line([m.step for m in shown], [m.loss for m in shown], name="training", colour="series-1")]
    validated = [(m.step, m.validation_loss) for m in entries if m.validation_loss is not None]
    if validated:
        steps, losses = zip(*validated, strict=True)
        marker = {"color": "var(--series-2)", "size": 7}
        traces.append(line(steps, losses, name="validation", colour="series-2", mode="lines+markers", marker=marker))
    if unigram_loss is not None and entries:
        dash = {"color": "var(--faint)", "width": 1.4, "dash": "dash"}
        ends = [entries[0].step, entries[-1].step]
        name = f"unigram baseline {unigram_loss:.2f}"
        traces.append(line(ends, [unigram_loss] * 2, name=name, colour="faint", line=dash))
    return {"data": traces, "layout": layout("step", "nats per token", height=340, legend=True)}


def throughput(metrics: Sequence[StepMetrics]) -> Figure:
    """Tokens per second over steps."""
    return _single(metrics, "tokens_per_second", "tokens per second", "series-4")


def learning_rate(metrics: Sequence[StepMetrics]) -> Figure:
    """The learning rate over steps."""
    return _single(metrics, "learning_rate", "learning rate", "series-3")


def gradient_norm(metrics: Sequence[StepMetrics]) -> Figure:
    """The norm of all gradients, before clipping, over steps."""
    return _single(metrics, "gradient_norm", "gradient norm", "series-5")


def _single(metrics: Sequence[StepMetrics], field: str, title: str, colour: str) -> Figure:
    shown = thin(newest(metrics))
    values = [getattr(m, field) for m in shown]
    figure: Figure = {
        "data": [line([m.step for m in shown], values, name=title, colour=colour)],
        "layout": layout("step", "", height=220),
    }
    figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return figure


SERIES: Final = tuple(f"series-{number}" for number in range(1, 6))


def compared(runs: Mapping[str, Sequence[StepMetrics]], field: str, title: str) -> Figure:
    """One number of several runs over steps, a line for each run by its name; at most as many as there are `SERIES`."""
    traces = []
    for (name, metrics), colour in zip(runs.items(), SERIES, strict=False):
        shown = thin(newest(metrics))
        values = [getattr(m, field) for m in shown]
        traces.append(line([m.step for m in shown], values, name=name, colour=colour, showlegend=True))
    return {"data": traces, "layout": layout("step", title, height=340, legend=True)}


DASHES: Final = ("solid", "dash", "dot", "dashdot")


def by_rank(values: Mapping[int, Sequence[tuple[int, float]]], title: str) -> Figure:
    """One number over (step, value) points, a line for each rank; ranks take turns in colours, then in dashes."""
    traces = []
    for rank, points in sorted(values.items()):
        turn, place = divmod(rank, len(SERIES))
        look = {"color": f"var(--{SERIES[place]})", "width": 1.6, "dash": DASHES[turn % len(DASHES)]}
        steps, heights = [step for step, _ in points], [value for _, value in points]
        more = {"line": look, "mode": "lines+markers", "marker": {"size": 4}}
        traces.append(line(steps, heights, name=f"rank {rank}", colour=SERIES[place], **more))
    figure: Figure = {"data": traces, "layout": layout("step", title, height=270, legend=True)}
    figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return figure


def step_time(metrics: Sequence[StepMetrics], predicted_seconds: float | None) -> Figure:
    """Seconds of every step against the prediction. Rare outliers may lie outside the axis, which says how many do."""
    entries = newest(metrics)
    shown = thin(entries)
    steps = [m.step for m in shown]
    milliseconds = [1e3 * m.step_seconds for m in shown]
    traces = [line(steps, milliseconds, name="measured", colour="series-1")]
    if predicted_seconds is not None and steps:
        dash = {"color": "var(--series-2)", "width": 1.8, "dash": "dash"}
        ends = [steps[0], steps[-1]]
        traces.append(line(ends, [1e3 * predicted_seconds] * 2, name="predicted", colour="series-2", line=dash))
    figure: Figure = {"data": traces, "layout": layout("step", "milliseconds", height=270, legend=True)}
    _leave_outliers_outside(figure, milliseconds, 1e3 * (predicted_seconds or 0))
    return figure


def _leave_outliers_outside(figure: Figure, values: Sequence[float], predicted: float) -> None:
    ordered = sorted(values)
    if len(ordered) < 20:
        figure["layout"]["yaxis"]["rangemode"] = "tozero"
        return
    top = 1.25 * max(ordered[int(0.97 * len(ordered))], predicted)
    outside = sum(value > top for value in ordered)
    figure["layout"]["yaxis"]["range"] = [0, top]
    if outside:
        steps = "1 step lies" if outside == 1 else f"{outside} steps lie"
        figure["layout"]["xaxis"]["title"]["text"] = f"step ({steps} above, up to {ordered[-1]:,.0f} ms)"
