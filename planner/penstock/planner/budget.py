"""How much a search may do, in counts: so equal inputs give equal plans on any machine."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much the search may do, in counts. ``actions`` are compute actions simulated, over all candidates.

    ``opened`` outlines may be made into candidates by their estimates. ``shortages`` are slicings of which no stages
    fit: after so many, and none that does, outlines are opened that hold the least, until ``lean_fits`` candidates fit
    or ``lean_shortages`` more do not. ``neighbours`` candidates may be simulated around the best.
    Boundaries are moved from the best ``starts`` kinds of plan, up to ``moves`` times each, and together for as long as
    ``moved_actions`` last.
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
        """So many times less of everything."""
        counts = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: max(count // divisor, min(count, 1)) for name, count in counts.items()})


def usual_budget(num_devices: int) -> Budget:
    """Some 4 processor seconds for up to 64 devices, 10 for 1,024, 11 for 16,384, where nothing is recomputed
    (`benchmarks/planning_speed.py`).
    """
    return Budget(actions=round(2_500_000 * max(num_devices / 64, 1) ** 0.43))
