"""A step as a picture: one row per rank, time to the right, as one SVG document.

Solid bars are compute, coloured by kind and shaded by micro-batch, and grey bars are reductions and the optimizer.
Where many short events share a bar, its height is divided by their shares of the time. A thin line at half height is
waiting, an empty track idle time of unknown cause. The two slim strips below a row are transfers of activations and of
gradients. Several timelines share one time scale. Tooltips are ``<title>`` elements and need no script.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from penstock.core.comparison import prediction_error
from penstock.core.timeline import Source, Timeline
from penstock.view.axis import round_ticks, signed, time_unit
from penstock.view.legend import legend, wrapped
from penstock.view.markup import Markup, element
from penstock.view.rows import Frame, choose_labels, draw_row, kind_styles
from penstock.view.spans import Lanes, end_ns, lanes
from penstock.view.theme import css_variables

MAX_SPANS: Final = 12_000
"""Limit of shapes. A longer step has more of its events gathered, so that a picture stays below about 1.5 MB."""

_STYLE: Final = """
.gantt{background:var(--surface);font-family:var(--sans);font-size:12px;font-variant-numeric:tabular-nums}
.gantt text{fill:var(--muted)}.gantt .strong{fill:var(--ink);font-weight:600;font-size:13px}
.gantt .end{text-anchor:end}.gantt .middle{text-anchor:middle}
.gantt .on{fill:var(--on-bar);text-anchor:middle;font-size:11px;pointer-events:none}
.gantt .track{fill:var(--track)}.gantt .grid{stroke:var(--line)}.gantt .mark{stroke:var(--ink);stroke-dasharray:2 3}
.gantt .wait{fill:var(--faint);fill-opacity:.55}.gantt .bar{stroke:var(--track);stroke-width:.5}
.gantt .reduce{fill:var(--other);fill-opacity:.7}.gantt .step{fill:var(--other)}.gantt .other{fill:var(--other)}
.gantt .send-f{fill:var(--forward)}.gantt .send-b{fill:var(--input-gradient)}
.gantt.dense .bar{stroke:none}.gantt .bar:hover{stroke:var(--ink);stroke-width:1.5}
"""


def gantt(
    timelines: Sequence[Timeline], *, width: int = 1120, title: str = "", most_spans: int = MAX_SPANS, tp: int = 1
) -> str:
    """One or more timelines of a step, from the top down on a common scale, as an SVG document.

    ``width`` is in pixels, without margins; from 600 on there is space for names and busy shares. With two timelines,
    their steps are compared in a sentence. A row of a step that was not measured stands for ``tp`` ranks. Raises
    `ValueError` without a timeline.
    """
    if not timelines:
        raise ValueError("nothing to draw: no timeline")
    frame = _frame(timelines, width, tp)
    all_lanes = _fit(timelines, frame, most_spans)
    frame = dataclasses.replace(frame, labels=choose_labels(all_lanes, frame))
    parts, first_top = _heading(timelines, frame, title)
    top = first_top
    panels = []
    for timeline, rows in zip(timelines, all_lanes, strict=True):
        panels.append(_panel(timeline, rows, timelines[0], frame, top))
        top += _header(frame) + timeline.num_ranks * frame.pitch + 16
    parts = [*parts, _grid(frame, first_top + _header(frame), top - 10), *panels]
    num_bars = sum(len(row.bars) for rows in all_lanes for row in rows)
    is_dense = num_bars * _OUTLINED > frame.plot * sum(map(len, all_lanes))
    class_ = "gantt dense" if is_dense else "gantt"
    return _document(parts, frame, top + 10, class_=class_, aria_label=_summary(timelines))


_OUTLINED: Final = 5.0
"""Bars that are on average narrower than this many pixels have no outline, which would hide them."""


def _document(parts: Sequence[Markup], frame: Frame, height: float, **attributes: str) -> str:
    width, height = frame.width + 2 * _MARGIN, height + 2 * _MARGIN
    return element(
        "svg",
        element("style", Markup(css_variables() + _STYLE + kind_styles())),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"{-_MARGIN:g} {-_MARGIN:g} {width:g} {height:g}",
        width=width,
        height=height,
        role="img",
        **attributes,
    )


_MARGIN: Final = 10.0


def _header(frame: Frame) -> float:
    """Height above the rows: a line, or two where name and facts would meet."""
    return 26.0 if frame.is_wide else 42.0


def _frame(timelines: Sequence[Timeline], width: int, tp: int) -> Frame:
    num_rows = sum(timeline.num_ranks for timeline in timelines)
    pitch = 38.0 if num_rows <= 8 else 26.0 if num_rows <= 34 else 18.0 if num_rows <= 64 else max(6.0, 1100 / num_rows)
    left, right = (60.0 if tp == 1 else 84.0, 140.0) if width >= 600 else (26.0, 60.0)
    longest = max(1, *(end_ns(timeline) for timeline in timelines))
    plot = width - left - right
    scale, unit = plot / longest, time_unit(longest)
    return Frame(width=width, left=left, plot=plot, pitch=pitch, scale=scale, unit=unit, tp=tp)


def _fit(timelines: Sequence[Timeline], frame: Frame, most_spans: int) -> list[tuple[Lanes, ...]]:
    """The lanes of all timelines. Events below one pixel are gathered, or longer ones if there are too many shapes."""
    pixels = 1.0
    while True:
        rows_by_timeline = [lanes(timeline, pixels / frame.scale) for timeline in timelines]
        if sum(row.num_spans for rows in rows_by_timeline for row in rows) <= most_spans or pixels > frame.plot:
            return rows_by_timeline
        pixels *= 1.5


def _heading(timelines: Sequence[Timeline], frame: Frame, title: str) -> tuple[list[Markup], float]:
    parts: list[Markup] = []
    top = 8.0
    if title:
        parts.append(element("text", title, x=0, y=top + 10, class_="strong"))
        top += 22
    if len(timelines) > 1:
        for text in wrapped(difference(timelines[0], timelines[1]), frame.width):
            parts.append(element("text", text, x=0, y=top + 8))
            top += 16
        top += 4
    legend_markup, height = legend(timelines, frame.width, top)
    return [*parts, legend_markup], top + height + 6


def difference(first: Timeline, second: Timeline) -> str:
    """One sentence with both steps and the error of the first, which is the prediction of the second."""
    unit = time_unit(max(first.step_ns, second.step_ns))
    texts = [f"{SOURCE_NAMES[t.source].lower()} {unit.text(t.step_ns)}" for t in (second, first)]
    if not second.step_ns:
        return f"{texts[0]}, {texts[1]}.".capitalize()
    error = prediction_error(first.step_ns, second.step_ns)
    return f"{texts[0]}, {texts[1]}: error {signed(error)}.".capitalize()


SOURCE_NAMES: Final = {Source.SIMULATED: "Predicted", Source.MEASURED: "Measured", Source.REHEARSED: "Rehearsed"}


def _summary(timelines: Sequence[Timeline]) -> str:
    return " ".join(
        f"{SOURCE_NAMES[t.source]} step on {t.num_ranks} rank{'' if t.num_ranks == 1 else 's'}: "
        f"{time_unit(t.step_ns).text(t.step_ns)}, bubble {t.bubble.text}."
        for t in timelines
    )


def _panel(timeline: Timeline, rows: Sequence[Lanes], first: Timeline, frame: Frame, top: float) -> Markup:
    step = "" if timeline.step is None else f", step {timeline.step}"
    heading = f"{SOURCE_NAMES[timeline.source]}{step}"
    facts = f"{frame.unit.text(timeline.step_ns)} · bubble {timeline.bubble.short}"
    below = top + _header(frame) - 12
    facts_place: dict[str, float | str] = {"x": 0, "y": below}
    if frame.is_wide:
        facts_place = {"x": frame.left + frame.plot, "y": below, "class_": "end"}
    parts = [
        element("text", heading, x=0, y=top + 14, class_="strong"),
        element("text", facts, **facts_place),
    ]
    if timeline.peak_bytes:
        parts.append(element("text", "peak memory" if frame.is_wide else "peak", x=frame.width, y=below, class_="end"))
    parts.extend(draw_row(timeline, rank, row, frame, top + _header(frame)) for rank, row in enumerate(rows))
    if timeline is not first:
        parts.append(_end_of(first, frame, top + _header(frame), timeline.num_ranks * frame.pitch))
    return element("g", *parts)


def _end_of(first: Timeline, frame: Frame, top: float, height: float) -> Markup:
    """Mark of the end of the first timeline's step in another timeline's rows."""
    x = frame.left + first.step_ns * frame.scale
    tooltip = element("title", f"{SOURCE_NAMES[first.source].lower()} end of the step")
    return element("line", tooltip, x1=x, x2=x, y1=top - 4, y2=top + height, class_="mark")


def _grid(frame: Frame, top: float, bottom: float) -> Markup:
    marks = []
    ticks = round_ticks(frame.plot / frame.scale / frame.unit.nanoseconds, max(2, int(frame.plot / 80)))
    for tick in ticks:
        x = frame.left + tick * frame.unit.nanoseconds * frame.scale
        marks.append(element("line", x1=x, x2=x, y1=top - 4, y2=bottom, class_="grid"))
        marks.append(element("text", f"{tick:.6g}", x=x, y=bottom + 14, class_="middle"))
    marks.append(element("text", frame.unit.name, x=frame.left + frame.plot + 10, y=bottom + 14))
    return element("g", *marks)
