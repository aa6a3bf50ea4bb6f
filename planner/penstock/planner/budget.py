"""Budget of a search, in counts, so that equal inputs give equal plans on any machine."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Limits of a search, in counts. ``actions`` are simulated compute actions, over all candidates.

    ``opened`` outlines may be opened by their estimates, and ``candidates`` of theirs simulated. ``shortages`` are
    slicings without stages that fit: after so many without any candidate that fits, the outlines with the smallest
    memory bounds are opened, until ``lean_fits`` candidates fit or ``lean_shortages`` more do not. ``neighbours``
    candidates may be simulated around the best. Boundaries are moved from the best ``starts`` kinds of plan, up to
    ``moves`` times each, until ``moved_actions`` are spent on all together.
    """

    candidates: int = 160
    opened: int = 300
    shortages: int = 200
    lean_shortages: int = 200
    lean_fits: int = 8
    actions: int = 2_500_000
    neighbours: int = 60
    moves: int = 60
    starts: int = 4
    moved_actions: int = 250_000

    def part(self, divisor: int) -> Budget:
        """The budget divided by ``divisor``."""
        counts = {count_field.name: getattr(self, count_field.name) for count_field in fields(self)}
        return replace(self, **{name: max(count // divisor, min(count, 1)) for name, count in counts.items()})


def usual_budget(num_devices: int) -> Budget:
    """About 4 processor seconds for up to 64 devices, 10 for 1,024, 11 for 16,384, without recomputation
    (`benchmarks/planning_speed.py`).
    """
    return Budget(actions=round(2_500_000 * max(num_devices / 64, 1) ** 0.43))
