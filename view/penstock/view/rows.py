"""The rows of a Gantt picture: bars, waits and transfers of one rank, their tooltips and their labels."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from penstock.core.schedule import Action
from penstock.core.timeline import Activity, Event, Source, Timeline
from penstock.core.units import format_bytes
from penstock.view.axis import TimeUnit
from penstock.view.markup import Markup, element, join
from penstock.view.spans import Lanes, Span, action_of, compute_kind
from penstock.view.theme import KIND_NAMES, NUM_SHADES, kind_variable


class Labels(enum.Enum):
    """Labels of bars, the same all over a picture: micro-batch and slice, the slice alone, or nothing."""

    FULL = enum.auto()
    SLICE = enum.auto()
    NONE = enum.auto()

    def text(self, action: Action) -> str:
        """The words on the bar of ``action``."""
        if self is Labels.NONE or action.slice is None:
            return ""
        return f"{action.slice}" if self is Labels.SLICE else f"{action.microbatch}.{action.slice}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """Geometry of a chart, in pixels. ``scale`` is in pixels per nanosecond, ``pitch`` is the distance of two rows.

    A row is one rank. In a step that was not measured, it stands for the ``tp`` shards of a pipeline rank.
    """

    width: float
    left: float
    plot: float
    pitch: float
    scale: float
    unit: TimeUnit
    labels: Labels = Labels.NONE
    tp: int = 1

    @property
    def bar(self) -> float:
        """The height of a bar."""
        return self.pitch * 0.64

    @property
    def is_wide(self) -> bool:
        """Whether there is space for more than the bars."""
        return self.width >= 600


def draw_row(timeline: Timeline, rank: int, row: Lanes, frame: Frame, top: float) -> Markup:
    """The bars, waits, transfers and labels of one rank; row 0 begins at ``top``."""
    y = top + rank * frame.pitch
    strip = frame.pitch * 0.1
    parts = [element("rect", x=0, y=0, width=timeline.step_ns * frame.scale, height=frame.bar, class_="track")]
    parts.extend(_rect(s, frame, frame.bar * 0.44, frame.bar * 0.12, "wait") for s in row.waits)
    for span in row.bars:
        parts.append(_bar(span, frame))
        parts.extend(_label(span, frame))
    parts.extend(_rect(s, frame, frame.bar + 1.5, strip, "send-f") for s in row.activations)
    parts.extend(_rect(s, frame, frame.bar + 1.5 + strip, strip, "send-b") for s in row.gradients)
    spans = element("g", *parts, transform=f"translate({frame.left:g} {y:g})")
    return Markup(spans + join(_margins(timeline, rank, frame, y)))


def _margins(timeline: Timeline, rank: int, frame: Frame, y: float) -> list[Markup]:
    """The rank's name on the left; its busy share and peak memory on the right. Slim rows skip most ranks."""
    every = max(1, round(13 / frame.pitch + 0.49))
    if rank % every:
        return []
    baseline = y + frame.bar / 2 + 4
    name = rank_name(timeline, rank, frame.tp)
    narrow = name.split()[-1].partition("–")[0]  # the number of the first rank alone
    margin = [element("text", name if frame.is_wide else narrow, x=0, y=baseline)]
    edge = frame.left + frame.plot
    if frame.is_wide and timeline.step_ns:
        busy = f"{timeline.busy_ns(rank) / timeline.step_ns:.0%} busy"
        margin.append(element("text", busy, x=edge + 64, y=baseline, class_="end"))
    if rank < len(timeline.peak_bytes):
        margin.append(element("text", format_bytes(timeline.peak_bytes[rank]), x=frame.width, y=baseline, class_="end"))
    return margin


def rank_name(timeline: Timeline, row: int, tp: int) -> str:
    """``rank 2``, or ``ranks 4–5`` where a row stands for shards that do the same."""
    count = 1 if timeline.source is Source.MEASURED else tp
    first = row * count
    return f"rank {first}" if count == 1 else f"ranks {first}–{first + count - 1}"


def _bar(span: Span, frame: Frame) -> Markup:
    if span.count == 1:
        height = frame.bar / len(span.mix)
        strips = enumerate(_bar_class(event) for event, _ in span.mix)
        return join(_rect(span, frame, number * height, height, class_) for number, class_ in strips)
    parts = [element("title", _tooltip(span, frame.unit))]
    y = 0.0
    for event, share in span.mix:
        height = share * frame.bar
        x, width = span.start_ns * frame.scale, span.duration_ns * frame.scale
        parts.append(element("rect", x=x, y=y, width=width, height=height, class_=_bar_class(event)))
        y += height
    return element("g", *parts)


def _rect(span: Span, frame: Frame, y: float, height: float, class_: str) -> Markup:
    return element(
        "rect",
        element("title", _tooltip(span, frame.unit)),
        x=span.start_ns * frame.scale,
        y=y,
        width=span.duration_ns * frame.scale,
        height=height,
        class_=class_,
    )


def _tooltip(span: Span, unit: TimeUnit) -> str:
    when = f"{unit.text(span.start_ns, unit=False)} to {unit.text(span.stop_ns)}"
    if span.count > 1:
        return f"{span.count} events, most time in {span.event.action} and its like: {when}"
    if len(span.mix) > 1:
        names = " and ".join(event.action for event, _ in span.mix)
        return f"{names}, overlapped: {unit.text(span.duration_ns)}, {when}"
    kind = compute_kind(span.action)
    what = KIND_NAMES[kind] if kind else span.event.activity.value
    return f"{span.event.action} {what}: {unit.text(span.duration_ns)}, {when}"


def _bar_class(event: Event) -> str:
    action = action_of(event.action)
    kind = compute_kind(action)
    if event.activity is not Activity.COMPUTE:
        return f"bar {event.activity.value}"
    if kind is None:
        return "bar other"
    microbatch = action.microbatch if action else None
    return f"bar {kind.value.lower()} m{(microbatch or 0) % NUM_SHADES}"


_CHARACTER: Final = 6.2
"""Pixels that a digit takes at the labels' size."""


def choose_labels(all_lanes: Sequence[Sequence[Lanes]], frame: Frame) -> Labels:
    """The longest form that fits in four of five compute bars."""
    bars = [span for rows in all_lanes for row in rows for span in row.bars if compute_kind(span.action)]
    for labels in (Labels.FULL, Labels.SLICE):
        if frame.bar >= 11 and sum(_fits(span, labels, frame) for span in bars) >= 0.8 * len(bars):
            return labels
    return Labels.NONE


def _fits(span: Span, labels: Labels, frame: Frame) -> bool:
    if span.action is None or span.count > 1:
        return False
    return len(_words(span, labels)) * _CHARACTER + 2 <= span.duration_ns * frame.scale


def _words(span: Span, labels: Labels) -> str:
    """The bar's label in the form ``labels``: of a pair both actions, the upper one first."""
    actions = (action_of(event.action) for event, _ in span.mix)
    return " ".join(filter(None, (labels.text(action) for action in actions if action)))


def _label(span: Span, frame: Frame) -> list[Markup]:
    """The bar's label in the form ``frame.labels``, where it fits."""
    if span.action is None or not compute_kind(span.action) or not _fits(span, frame.labels, frame):
        return []
    text = _words(span, frame.labels)
    x = (span.start_ns + span.duration_ns / 2) * frame.scale
    return [element("text", text, x=x, y=frame.bar / 2 + 4, class_="on")] if text else []


def kind_styles() -> str:
    """The style of a bar of each kind and of each shade."""
    colours = "".join(f".gantt .{kind.value.lower()}{{fill:var(--{kind_variable(kind)})}}" for kind in KIND_NAMES)
    shades = "".join(f".gantt .m{i}{{fill-opacity:var(--shade-{i})}}" for i in range(1, NUM_SHADES))
    return colours + shades
