"""The schedule of an imported recipe, whose text is penstock's form of CSV (`penstock.core.schedule.import_spec`)."""

from __future__ import annotations

from penstock.core.errors import UserError
from penstock.core.schedule import Schedule, ScheduleSpec, parse_schedule


def imported(spec: ScheduleSpec, *, num_ranks: int, num_microbatches: int, num_slices: int) -> Schedule:
    """The schedule of an imported recipe; raises `UserError` if it is made for another shape."""
    schedule, _ = parse_schedule(spec.text, "imported schedule")
    for name, actual, expected in (
        ("ranks", len(schedule.ranks), num_ranks),
        ("micro-batches", schedule.num_microbatches, num_microbatches),
        ("slices", schedule.num_slices, num_slices),
    ):
        if actual != expected:
            raise UserError(
                what=f"is for {actual} {name}, the plan has {expected}",
                where="imported schedule",
                remedy=f"pin the plan to {actual} {name} or write the schedule for {expected}",
            )
    return schedule
