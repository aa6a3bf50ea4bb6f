"""Drawing of a simulated step in characters."""

from __future__ import annotations

from penstock.cli import output
from penstock.cli.output import Lines
from penstock.cli.summary import plan_line
from penstock.core.plan import Plan
from penstock.core.recomputation import recompute_times
from penstock.core.timeline import Timeline
from penstock.core.units import format_bytes, format_seconds, to_seconds
from penstock.view.text import gantt_text


def timeline_lines(plan: Plan, timeline: Timeline) -> Lines:
    """Return the step drawn in characters, and the use of every rank's time."""
    has_shards, recompute = timeline.collectives is not None, recompute_times(timeline)
    shards_columns = ["of it for shards"] if has_shards else []
    recompute_columns = ["of it recompute", "of that hidden"] if recompute else []
    columns = ("rank", "compute", *shards_columns, *recompute_columns, "other", "memory")
    table = output.table(*columns, padding=(0, 2))
    for rank in range(timeline.num_ranks):
        busy = timeline.busy_ns(rank)
        peak = format_bytes(timeline.peak_bytes[rank]) if timeline.peak_bytes else "–"
        waited = [_share(timeline.waited_ns(rank), timeline)] if has_shards else []
        recomputed = (
            [_share(recompute[rank].total_ns, timeline), f"{recompute[rank].hidden_share:.0%}"] if recompute else []
        )
        other = _share(timeline.step_ns - busy, timeline)
        table.add_row(str(rank), _share(busy, timeline), *waited, *recomputed, other, peak)
    speed = plan.speed(to_seconds(timeline.step_ns))
    heading = [] if speed is None else [f"step {format_seconds(to_seconds(timeline.step_ns))}, {speed.text}"]
    return [plan_line(plan), *heading, "", gantt_text(timeline, width=output.terminal_width()), "", table]


def _share(nanoseconds: int, timeline: Timeline) -> str:
    return f"{format_seconds(to_seconds(nanoseconds))} ({nanoseconds / max(timeline.step_ns, 1):.0%})"
