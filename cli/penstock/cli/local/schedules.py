"""Schedules by name or file, checked and drawn."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.manifests import SCHEDULE_SUFFIX, Warn, import_schedule
from penstock.cli.output import Lines, terminal_width
from penstock.core.invariants import prove
from penstock.core.layout import SlotKind
from penstock.core.schedule import Schedule, parse_schedule
from penstock.core.units import format_count
from penstock.planner.lowering import Remainder, lower
from penstock.planner.order import to_schedule
from penstock.planner.passes.rounds import can_join
from penstock.planner.schedules.registry import find
from penstock.view.text import schedule_text


def make_schedule(name: str, num_ranks: int, num_microbatches: int, num_slices: int, warn: Warn) -> Schedule:
    """Return the schedule called ``name`` with equal costs of all actions, or the one in a CSV file.

    It is checked as ranks of several shards would run it, with pairs joined, if they can be.

    Raises:
        UserError: no schedule has that name, or it cannot run.
    """
    if name.endswith(SCHEDULE_SUFFIX):
        schedule, _ = parse_schedule(import_schedule(Path(name), warn).text, name)
    else:
        order = find(name).of_shape(num_ranks=num_ranks, num_microbatches=num_microbatches, num_slices=num_slices)
        schedule = to_schedule(order)
    slices, last = ((1,) * count for count in (schedule.num_slices, schedule.num_remainder_slices))
    remainder = Remainder(_one_byte_each, last) if last else None
    joined = can_join(schedule)
    program = lower(
        schedule, _one_byte_each, slices=slices, remainder=remainder, receive_ahead=2, dp=False, keep_pairs=joined
    )
    prove(program)
    return schedule


def _one_byte_each(kind: SlotKind, stage: int, tokens: int) -> int:
    """Size of every slot: whether an order can run does not depend on sizes."""
    return 1


def schedule_lines(schedule: Schedule) -> Lines:
    """Return the grid, and the legend of its letters."""
    last = schedule.num_remainder_slices
    heading = (
        f"{format_count(len(schedule.ranks), 'rank')}, {format_count(schedule.num_stages, 'stage')}, "
        f"{format_count(schedule.num_microbatches - (last > 0), 'micro-batch', 'micro-batches')} of "
        f"{format_count(schedule.num_slices, 'slice')}" + (f" and one of {last}" if last else "")
    )
    if not can_join(schedule):
        heading += "; with tp 1 only: both actions of an overlap cannot begin together"
    legend = "F forward, B backward, I input gradient, W weight gradient; 1F3.2: stage 1, micro-batch 3, slice 2"
    return [heading, "", schedule_text(schedule, width=terminal_width()), "", legend]
