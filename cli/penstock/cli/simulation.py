"""A simulated step as a picture of characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cli.output import terminal_width
from penstock.cli.summary import plan_line
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.units import format_bytes, format_seconds, to_seconds
from penstock.view.text import gantt_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def timeline_lines(plan: Plan, timeline: Timeline) -> list[RenderableType]:
    """The step as a picture of characters, and where the time of every rank goes."""
    from rich.table import Table

    has_shards = timeline.collectives is not None
    columns = ("rank", "compute", *(["of it for shards"] if has_shards else []), "other", "memory")
    table = Table(*columns, box=None, padding=(0, 2))
    for rank in range(timeline.num_ranks):
        busy = timeline.busy_ns(rank)
        peak = format_bytes(timeline.peak_bytes[rank]) if timeline.peak_bytes else "–"
        waited = [_share(timeline.waited_ns(rank), timeline)] if has_shards else []
        table.add_row(str(rank), _share(busy, timeline), *waited, _share(timeline.step_ns - busy, timeline), peak)
    speed = plan.speed(to_seconds(timeline.step_ns))
    told = [] if speed is None else [f"step {format_seconds(to_seconds(timeline.step_ns))}, {speed.text}"]
    return [plan_line(plan), *told, "", gantt_text(timeline, width=terminal_width()), "", table]


def _share(nanoseconds: int, timeline: Timeline) -> str:
    return f"{format_seconds(to_seconds(nanoseconds))} ({nanoseconds / max(timeline.step_ns, 1):.0%})"
