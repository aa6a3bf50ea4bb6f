"""The frontier of time and money: a table of its plans, and a picture with time to the right and money upward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from penstock.core.explanation import Frontier, FrontierPoint
from penstock.core.speed import format_rate
from penstock.core.units import format_amount, format_seconds
from penstock.view.axis import round_ticks
from penstock.view.markup import Markup, element
from penstock.view.tables import card, drawing, paragraphs, table
from penstock.view.theme import css_variables

WIDE: Final = 1118
NARROW: Final = 334

COLUMNS: Final = ("mesh", "step", "all steps", "cost", "per million tokens", "tokens/s/device")
"""Headers of a table of points after the devices."""

_STYLE: Final = """
.frontier{background:var(--surface);font-family:var(--sans);font-size:12px;font-variant-numeric:tabular-nums}
.frontier text{fill:var(--muted)}.frontier .middle{text-anchor:middle}.frontier .end{text-anchor:end}
.frontier .grid{stroke:var(--line)}.frontier .curve{stroke:var(--series-1);stroke-width:1.6;fill:none}
.frontier circle{fill:var(--series-1);stroke:var(--surface);stroke-width:1.5}
.frontier .strong{fill:var(--ink);font-weight:600}
"""
_HEIGHT: Final = 260.0
_LEFT, _TOP, _RIGHT, _BOTTOM = 64.0, 26.0, 26.0, 42.0
_UNITS: Final = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
_MARGIN: Final = 1.08
"""Axes end at the greatest value times this factor."""


def frontier_card(frontier: Frontier) -> Markup:
    """The frontier as a picture and as a table, whose rows have the picture's numbers."""
    picture = drawing(frontier_svg(frontier, width=WIDE), frontier_svg(frontier, width=NARROW))
    headers = ("", "devices", *COLUMNS)
    rows = [(f"{number}", *cells_of(point)) for number, point in enumerate(frontier.points, 1)]
    listing = table(headers, rows, numbers=range(3, len(headers)))
    return Markup(card(listing, paragraphs([frontier.meaning]), title="Time against money") + picture)


def cells_of(point: FrontierPoint) -> tuple[str, ...]:
    """A point's row in a table: its devices, and then the `COLUMNS`."""
    return (
        point.devices,
        point.mesh,
        format_seconds(point.step_seconds),
        format_seconds(point.run_seconds),
        format_amount(point.cost),
        format_amount(point.cost_per_million_tokens),
        format_rate(point.tokens_per_second_per_device),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """The picture's width in pixels, its unit of time, and the values at the ends of its axes."""

    width: float
    unit_seconds: float
    unit: str
    most_time: float
    most_cost: float

    def x(self, time: float) -> float:
        return _LEFT + (self.width - _LEFT - _RIGHT) * time / self.most_time

    def y(self, cost: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * cost / self.most_cost


def frontier_svg(frontier: Frontier, *, width: int = WIDE) -> str:
    """The frontier as an SVG document ``width`` pixels wide; both axes begin at 0."""
    longest = max((point.run_seconds for point in frontier.points), default=1.0)
    unit_seconds, unit = next((unit for unit in _UNITS if longest >= 2 * unit[0]), _UNITS[-1])
    frame = _Frame(
        width=width,
        unit_seconds=unit_seconds,
        unit=unit,
        most_time=_MARGIN * longest / unit_seconds,
        most_cost=_MARGIN * max((point.cost for point in frontier.points), default=1.0),
    )
    places = [(frame.x(point.run_seconds / unit_seconds), frame.y(point.cost)) for point in frontier.points]
    curve = element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in places), class_="curve")
    return element(
        "svg",
        element("style", Markup(css_variables() + _STYLE)),
        *_axes(frame),
        curve,
        *_points(frontier, places),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {_HEIGHT:g}",
        width=width,
        height=_HEIGHT,
        role="img",
        aria_label=f"cost over time of all steps, {len(frontier.points)} plans, listed in the table",
        class_="frontier",
    )


def _axes(frame: _Frame) -> Iterator[Markup]:
    bottom, right = _HEIGHT - _BOTTOM, frame.width - _RIGHT
    for time in round_ticks(frame.most_time, 10 if frame.width >= 600 else 4):
        x = frame.x(time)
        yield element("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_="grid")
        yield element("text", f"{time:,g}", x=x, y=bottom + 16, class_="middle")
    for cost in round_ticks(frame.most_cost, 5):
        y = frame.y(cost)
        yield element("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid")
        yield element("text", f"{cost:,g}", x=_LEFT - 8, y=y + 4, class_="end")
    yield element("text", "cost of all steps", x=_LEFT, y=14)
    yield element("text", f"time of all steps, {frame.unit}", x=right, y=_HEIGHT - 8, class_="end")


def _points(frontier: Frontier, places: list[tuple[float, float]]) -> Iterator[Markup]:
    for number, (point, (x, y)) in enumerate(zip(frontier.points, places, strict=True), 1):
        name = f"{point.devices}: {format_seconds(point.run_seconds)}, {format_amount(point.cost)}"
        yield element("circle", element("title", name), cx=x, cy=y, r=5.0)
        yield element("text", f"{number}", x=x, y=y - 9, class_="middle strong")
