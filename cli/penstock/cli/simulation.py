"""A simulated step as a picture of characters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.cli.output import terminal_width
from penstock.cli.summary import plan_line
from penstock.core.plan import Plan
from penstock.core.recomputation import recompute_times
from penstock.core.timeline import Timeline
from penstock.core.units import format_bytes, format_seconds, to_seconds
from penstock.view.text import gantt_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def timeline_lines(plan: Plan, timeline: Timeline) -> list[RenderableType]:
    """The step as a picture of characters, and where the time of every rank goes."""
    from rich.table import Table

    table = Table(*_headers(timeline), box=None, padding=(0, 2))
    for row in _rows(timeline):
        table.add_row(*row)
    speed = plan.speed(to_seconds(timeline.step_ns))
    told = [] if speed is None else [f"step {format_seconds(to_seconds(timeline.step_ns))}, {speed.text}"]
    return [plan_line(plan), *told, "", gantt_text(timeline, width=terminal_width()), "", table]


def _headers(timeline: Timeline) -> list[str]:
    shards = ["of it for shards"] if timeline.collectives else []
    recompute = ["of it recompute", "of that hidden"] if recompute_times(timeline) else []
    return ["rank", "compute", *shards, *recompute, "other", "memory"]


def _rows(timeline: Timeline) -> Iterator[list[str]]:
    has_shards, again = timeline.collectives is not None, recompute_times(timeline)
    for rank in range(timeline.num_ranks):
        busy = timeline.busy_ns(rank)
        peak = format_bytes(timeline.peak_bytes[rank]) if timeline.peak_bytes else "–"
        waited = [_share(timeline.waited_ns(rank), timeline)] if has_shards else []
        spent = [_share(again[rank].total_ns, timeline), f"{again[rank].hidden_share:.0%}"] if again else []
        other = _share(timeline.step_ns - busy, timeline)
        yield [str(rank), _share(busy, timeline), *waited, *spent, other, peak]


def _share(nanoseconds: int, timeline: Timeline) -> str:
    return f"{format_seconds(to_seconds(nanoseconds))} ({nanoseconds / max(timeline.step_ns, 1):.0%})"
