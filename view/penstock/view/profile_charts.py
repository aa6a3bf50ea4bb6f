"""Charts of measurements next to predictions: memory of the ranks, the fit of the cost model, the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from penstock.core.comparison import FitPoint, RankMemory
from penstock.core.model import UnitKind
from penstock.core.profile import LinkRecord, UnitRecord
from penstock.core.schedule import Kind
from penstock.core.units import format_bytes, format_seconds
from penstock.view.charts import Figure, finite, layout, line
from penstock.view.theme import UNIT_NAMES

_PARTS: Final = (
    ("process", "constant_bytes", "faint"),
    ("parameters, gradients, optimizer", "state_bytes", "series-1"),
    ("slots", "slot_bytes", "series-4"),
    ("transient", "transient_bytes", "series-5"),
)


def memory(ranks: Sequence[RankMemory], limit_bytes: int | None = None) -> Figure:
    """Predicted memory of every rank, stacked by cause, with the measured peak as a mark and the limit as a line."""
    largest = max((max(r.predicted_bytes, r.measured_bytes or 0) for r in ranks), default=1)
    size, unit = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    pitch = 46 if len(ranks) <= 4 else max(12, min(30, 900 // len(ranks)))
    names = [f"rank {i}" for i in range(len(ranks))]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "y": names,
            "x": [getattr(rank, field) / size for rank in ranks],
            "name": title,
            "marker": {"color": f"var(--{colour})"},
            "hovertemplate": f"{title}: %{{x:.4g}} {unit}<extra>%{{y}}, predicted</extra>",
        }
        for title, field, colour in _PARTS
    ]
    if any(rank.measured_bytes is not None for rank in ranks):
        traces.append(_measured(ranks, size, unit, 0.5 * pitch))
    figure: Figure = {
        "data": traces,
        "layout": layout(f"{unit} per rank", "", height=76 + pitch * len(ranks), legend=True),
    }
    figure["layout"] |= {
        "barmode": "stack",
        "bargap": 0.45,
        "legend": figure["layout"]["legend"] | {"traceorder": "normal"},
    }
    figure["layout"]["yaxis"] |= {"range": [len(ranks) - 0.5, -0.5], "showgrid": False}
    if limit_bytes is not None:
        _draw_limit(figure, limit_bytes, largest, size)
    return figure


def _measured(ranks: Sequence[RankMemory], size: int, unit: str, height: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "y": [f"rank {i}" for i in range(len(ranks))],
        "x": [None if rank.measured_bytes is None else rank.measured_bytes / size for rank in ranks],
        "name": "measured peak",
        "marker": {
            "symbol": "line-ns",
            "size": height,
            "line": {"width": 3, "color": "var(--ink)"},
        },
        "hovertemplate": f"measured peak: %{{x:.4g}} {unit}<extra>%{{y}}</extra>",
    }


def _draw_limit(figure: Figure, limit_bytes: int, largest: int, size: int) -> None:
    """A line at the limit, or words below the axis if the line would squeeze the bars."""
    name = f"limit {format_bytes(limit_bytes)}"
    if limit_bytes > 2.5 * largest:
        figure["layout"]["xaxis"]["title"]["text"] += f", {name} beyond the axis"
        return
    x = limit_bytes / size
    dash = {"color": "var(--bad)", "width": 1.8, "dash": "dash"}
    ends = {"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}
    figure["layout"]["shapes"] = [{"type": "line", "name": name, "showlegend": True, "line": dash, **ends}]


_UNIT_COLOURS: Final = {
    UnitKind.EMBEDDING: "series-4",
    UnitKind.ATTENTION: "series-1",
    UnitKind.MLP: "series-5",
    UnitKind.HEAD: "series-3",
}
_KIND_SYMBOLS: Final = {Kind.F: "circle", Kind.I: "diamond", Kind.W: "square", Kind.B: "cross", Kind.R: "x"}


def fit(points: Sequence[FitPoint]) -> Figure:
    """Predicted against measured seconds of every cost record, equal on the diagonal. Held-out records are hollow."""
    traces = [
        trace
        for unit in UnitKind
        for kind in _KIND_SYMBOLS
        for trace in _fit_traces([p for p in points if p.record.unit is unit and p.record.kind is kind], unit, kind)
    ]
    measured = [point.record.together_seconds for point in points if point.record.together_seconds > 0]
    if measured:
        ends = [min(measured) / 1.5, max(measured) * 1.5]
        dash = {"color": "var(--faint)", "width": 1, "dash": "dot"}
        traces.insert(0, line(ends, ends, name="equal", colour="faint", line=dash, hoverinfo="skip", showlegend=False))
    figure: Figure = {"data": traces, "layout": layout("measured", "predicted", height=430, legend=True)}
    for axis in ("xaxis", "yaxis"):
        figure["layout"][axis] |= {
            "type": "log",
            "exponentformat": "SI",
            "minexponent": 1,
            "ticksuffix": "s",
            "dtick": 1,
        }
    return figure


def _fit_traces(points: Sequence[FitPoint], unit: UnitKind, kind: Kind) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for held_out in (False, True):
        chosen = [point for point in points if point.record.held_out is held_out]
        if chosen:
            traces.append(_fit_trace(chosen, unit, kind, held_out) | {"showlegend": not traces})
    return traces


def _fit_trace(points: Sequence[FitPoint], unit: UnitKind, kind: Kind, held_out: bool) -> dict[str, Any]:
    colour = f"var(--{_UNIT_COLOURS[unit]})"
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [point.record.together_seconds for point in points],
        "y": finite(point.predicted_seconds for point in points),
        "text": [_describe(point) for point in points],
        "name": f"{UNIT_NAMES[unit]} {kind.value}",
        "legendgroup": f"{unit.value} {kind.value}",
        "marker": {
            "symbol": _KIND_SYMBOLS[kind] + ("-open" if held_out else ""),
            "color": colour,
            "size": 8,
            "opacity": 0.85,
            "line": {"width": 1.6 if held_out else 0, "color": colour},
        },
        "hovertemplate": "%{text}<extra></extra>",
    }


def _describe(point: FitPoint) -> str:
    record = point.record
    divided = f" in {record.head_parts} parts" if record.head_parts > 1 else ""
    return (
        f"{UNIT_NAMES[record.unit]}{divided} {record.kind.value}"
        f"{f' of {record.tp} shards' if record.tp > 1 else ''}, "
        f"{record.batch} × {record.length} tokens after {record.prefix}<br>"
        f"measured {format_seconds(record.together_seconds)}, predicted {format_seconds(point.predicted_seconds)} "
        f"({point.error:+.1%}){', held out' if record.held_out else ''}"
    )


def curves(records: Sequence[UnitRecord], kind: Kind) -> Figure:
    """Milliseconds of one pass over a slice, by its tokens, a line for each unit.

    The slice has no prefix, the micro-batch is the smallest and the degree of tensor parallelism the lowest that was
    measured, and the head is in one part.
    """
    least_tp = min((record.tp for record in records), default=1)
    selection = (kind, 0, least_tp, 1)
    selected = [record for record in records if (record.kind, record.prefix, record.tp, record.head_parts) == selection]
    smallest = min((record.batch for record in selected), default=1)
    traces = []
    for unit in UnitKind:
        points = sorted(
            (r.length, 1e3 * r.together_seconds) for r in selected if r.unit is unit and r.batch == smallest
        )
        if points:
            lengths, milliseconds = zip(*points, strict=True)
            options = {"mode": "lines+markers", "showlegend": True}
            traces.append(line(lengths, milliseconds, name=UNIT_NAMES[unit], colour=_UNIT_COLOURS[unit], **options))
    figure: Figure = {"data": traces, "layout": layout("tokens of the slice", "milliseconds", height=300, legend=True)}
    figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return figure


@dataclass(frozen=True, kw_only=True, slots=True)
class FitError:
    """Mean absolute relative errors of one unit's kind: on records of the fit, and on those held out."""

    unit: UnitKind
    kind: Kind
    fitted: float | None
    held_out: float | None
    num_records: int


def fit_errors(points: Sequence[FitPoint]) -> tuple[FitError, ...]:
    """The errors of every (unit, kind) there is a record of, in the units' order."""
    errors = []
    for unit in UnitKind:
        for kind in _KIND_SYMBOLS:
            chosen = [p for p in points if p.record.unit is unit and p.record.kind is kind]
            if chosen:
                fitted, held_out = (_mean_error([p for p in chosen if p.record.held_out is h]) for h in (False, True))
                errors.append(FitError(unit=unit, kind=kind, fitted=fitted, held_out=held_out, num_records=len(chosen)))
    return tuple(errors)


def _mean_error(points: Sequence[FitPoint]) -> float | None:
    return sum(abs(point.error) for point in points) / len(points) if points else None


def links(records: Sequence[LinkRecord]) -> Figure:
    """Bandwidth of every directed link as a matrix, source down and target right; latency in the tooltip."""
    size = 1 + max((max(record.source, record.target) for record in records), default=0)
    speed: list[list[float | None]] = [[None] * size for _ in range(size)]
    latency: list[list[str]] = [[""] * size for _ in range(size)]
    for record in records:
        speed[record.source][record.target] = record.bytes_per_second / 1e9
        latency[record.source][record.target] = format_seconds(record.latency_seconds)
    names = [f"{rank}" for rank in range(size)]
    heatmap = {
        "type": "heatmap",
        "x": names,
        "y": names,
        "z": speed,
        "customdata": latency,
        "zmin": 0,
        "zmax": max((record.bytes_per_second / 1e9 for record in records), default=1),
        "colorscale": [[0, "var(--track)"], [1, "var(--series-1)"]],
        "colorbar": {"title": {"text": "GB/s", "font": {"size": 12}}, "thickness": 10, "outlinewidth": 0},
        "xgap": 2,
        "ygap": 2,
        "hoverongaps": False,
        "texttemplate": "%{z:.2f}" if size <= 10 else "",
        "hovertemplate": "rank %{y} to %{x}: %{z:.3g} GB/s, %{customdata}<extra></extra>",
    }
    figure: Figure = {
        "data": [heatmap],
        "layout": layout("to rank", "from rank", height=max(230, min(440, 120 + 24 * size))),
    }
    category = {"type": "category", "showgrid": False, "constrain": "domain"}
    figure["layout"]["xaxis"] |= category
    figure["layout"]["yaxis"] |= category | {"autorange": "reversed", "scaleanchor": "x"}
    return figure
