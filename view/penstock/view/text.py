"""Pictures for a terminal: a Gantt of characters and a schedule's grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from penstock.core.recomputation import over_ranks, recompute_times
from penstock.core.schedule import Kind, Schedule
from penstock.core.timeline import Activity, Event, Timeline
from penstock.view.axis import TimeUnit, round_ticks, time_unit
from penstock.view.spans import action_of, children_of, compute_kind, end_ns
from penstock.view.theme import KIND_NAMES

_FILL: Final = {Kind.F: "█", Kind.B: "▓", Kind.I: "▓", Kind.W: "▒", Kind.R: "░"}
_OTHER_FILL: Final = {Activity.WAIT: "·", Activity.REDUCE: "=", Activity.STEP: "#"}
_OTHER_NAMES: Final = {Activity.WAIT: "waiting", Activity.REDUCE: "reduction", Activity.STEP: "optimizer"}


def gantt_text(timeline: Timeline, width: int = 100) -> str:
    """One line per rank of at most ``width`` columns (never below 24), a heading, a time axis and a legend.

    A bar starts with its kind's letter, micro-batch and slice, or the letter alone, or nothing: with the longest form
    that fits into four of five compute bars. A column shows what took most of its time. The actions of a pair follow
    each other, with half of its bar each.
    """
    width = max(24, width)
    left = len(f"{max(0, timeline.num_ranks - 1)}") + 6
    columns = width - left
    longest = max(1, end_ns(timeline))
    unit = time_unit(longest)
    heading = f"{timeline.source.value}: {unit.text(timeline.step_ns)}, bubble {timeline.bubble.text}"
    heading += f"; waiting for shards {timeline.collectives.text}" if timeline.collectives else ""
    lines = [heading[:width], *_recompute_lines(timeline, unit, width)]
    parts = [part for event in timeline.events for part in _split_pair(event)]
    form = _choose_form(parts, columns / longest)
    for rank in range(timeline.num_ranks):
        events = [e for e in parts if e.rank == rank and e.activity is not Activity.TRANSFER]
        lines.append(f"{f'rank {rank}':<{left - 1}}│{_cells(events, columns, longest, form)}".rstrip())
    lines.append(" " * (left - 1) + "└" + _axis(columns, longest))
    lines.extend(_wrap(_legend(parts), width))
    return "\n".join(lines)


def _recompute_lines(timeline: Timeline, unit: TimeUnit, width: int) -> list[str]:
    """Lines on recomputation per rank and its hidden share; empty if there is none."""
    times = recompute_times(timeline)
    if not times:
        return []
    total = over_ranks(times)
    return _wrap([f"recompute: {unit.text(total.total_ns / len(times))} per rank", total.hidden_text], width)


def _split_pair(event: Event) -> tuple[Event, ...]:
    """The event, or of a pair both actions, one after the other."""
    children = children_of(event)
    ends = [event.start_ns + event.duration_ns * i // len(children) for i in range(len(children) + 1)]
    return tuple(
        replace(child, start_ns=start, stop_ns=stop, collective_ns=0)
        for child, (start, stop) in zip(children, pairwise(ends), strict=True)
    )


def _cells(events: Sequence[Event], columns: int, longest: int, form: str) -> str:
    share = [dict[str, float]() for _ in range(columns)]
    for event in events:
        first, stop = event.start_ns * columns / longest, event.stop_ns * columns / longest
        for column in range(int(first), min(columns, int(stop) + 1)):
            overlap = min(stop, column + 1) - max(first, column)
            share[column][_fill(event)] = share[column].get(_fill(event), 0.0) + overlap
    cells = [_most(column) for column in share]
    for event in events:
        _write_name(cells, event, columns / longest, form)
    return "".join(cells)


def _most(share: dict[str, float]) -> str:
    """The fill of most of a column's time; a column idle for more than half of it stays blank."""
    best = max(share, key=lambda fill: share[fill], default=" ")
    return best if sum(share.values()) >= 0.5 else " "


def _fill(event: Event) -> str:
    kind = compute_kind(action_of(event.action)) if event.activity is Activity.COMPUTE else None
    return _FILL[kind] if kind else _OTHER_FILL.get(event.activity, "█")


_FORMS: Final = ("{kind}{microbatch}.{slice}", "{kind}", "")
"""Forms of bar names; the same all over a picture."""


def _choose_form(events: Sequence[Event], columns_per_ns: float) -> str:
    """The longest form that leaves a cell of shading on four of five compute bars."""
    compute = [event for event in events if event.activity is Activity.COMPUTE]
    return next(
        form
        for form in _FORMS
        if not form or sum(bool(_name(e, columns_per_ns, form)) for e in compute) >= 0.8 * len(compute)
    )


def _name(event: Event, columns_per_ns: float, form: str) -> str:
    """The bar's name in ``form``; empty where it does not fit or is not compute."""
    action = action_of(event.action)
    kind = compute_kind(action) if event.activity is Activity.COMPUTE else None
    if action is None or kind is None:
        return ""
    name = form.format(kind=kind.value, microbatch=action.microbatch, slice=action.slice)
    return name if len(name) < round(event.stop_ns * columns_per_ns) - round(event.start_ns * columns_per_ns) else ""


def _write_name(cells: list[str], event: Event, columns_per_ns: float, form: str) -> None:
    name = _name(event, columns_per_ns, form)
    first = round(event.start_ns * columns_per_ns)
    if name and first + len(name) <= len(cells):
        cells[first : first + len(name)] = name


def _axis(columns: int, longest: int) -> str:
    unit = time_unit(longest)
    cells = list("─" * columns)
    reached = 0
    for tick in round_ticks(longest / unit.nanoseconds, max(1, columns // 14)):
        label = f"{tick:.6g} {unit.name}"
        start = round(tick * unit.nanoseconds * columns / longest)
        if start >= reached and start + len(label) <= columns:
            cells[start : start + len(label)] = label
            reached = start + len(label) + 1
    return "".join(cells)


def _legend(events: Sequence[Event]) -> list[str]:
    """The legend of the fills that ``events`` hold."""
    kinds = {compute_kind(action_of(e.action)) for e in events if e.activity is Activity.COMPUTE}
    activities = {event.activity for event in events}
    compute = [f"{kind.value}{fill} {KIND_NAMES[kind]}" for kind, fill in _FILL.items() if kind in kinds]
    return [*compute, *(f"{_OTHER_FILL[a]} {name}" for a, name in _OTHER_NAMES.items() if a in activities)]


def _wrap(words: Sequence[str], width: int) -> list[str]:
    """``words`` two blanks apart in lines of at most ``width``."""
    lines = [""]
    for word in words:
        longer = f"{lines[-1]}  {word}" if lines[-1] else word
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(word[:width])
    return lines


def schedule_text(schedule: Schedule, width: int = 100) -> str:
    """The order of actions as a grid: a line per rank, a column per step, cells in their text form.

    Grids wider than ``width`` continue below in blocks of steps. A step is a place in a rank's order, not a time.
    """
    rows = [[str(action) for action in actions] for actions in schedule.ranks]
    num_steps = max(map(len, rows), default=0)
    cell = max((len(text) for row in rows for text in row), default=1)
    left = max(len("step"), len(f"rank {len(rows) - 1}"))
    per_block = max(1, (width - left) // (cell + 2))
    blocks = [
        _block(rows, range(first, min(num_steps, first + per_block)), cell, left)
        for first in range(0, num_steps, per_block)
    ]
    return "\n\n".join(blocks)


def _block(rows: Sequence[Sequence[str]], steps: range, cell: int, left: int) -> str:
    lines = ["  ".join(["step".ljust(left), *(f"{step}".ljust(cell) for step in steps)])]
    for rank, row in enumerate(rows):
        cells = (row[step] if step < len(row) else "" for step in steps)
        lines.append("  ".join([f"rank {rank}".ljust(left), *(text.ljust(cell) for text in cells)]))
    return "\n".join(line.rstrip() for line in lines)
