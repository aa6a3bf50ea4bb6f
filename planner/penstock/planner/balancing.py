"""Stages balanced by time, and the numbers of parts into which a heavy head is worth dividing.

A head is one unit, so the busiest rank has at least its work, however layers are assigned. Divided by the vocabulary it
is several units, which stages share like layers. The gain is known before any simulation: the work of the busiest rank.
With t the work of all units, the busiest of K ranks has at least t / K. So the head is not divided if its busiest rank
has hardly more than that, or if the head is a small fraction of t / K. Otherwise more parts are searched as long as
each step lowers the work of the busiest rank considerably.

Example: two ranks with one stage each, layers of 30 in all, a head of 70. Whole: the busiest rank works 70. In two
parts it works 65 (the layers and a part of 35), in three 53.3, in four 52.5 (three parts of 17.5), in seven 50.

More parts cost more: each reads and writes a hidden state, and a message if they are on different ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from penstock.planner.device_order import slowness_in_order
from penstock.planner.pins import parts_of_pinned_stages, pinned_stages
from penstock.planner.problem import MOST_PARTS, Mesh, Problem, imported_schedule
from penstock.planner.stagecost import Stages, unit_totals
from penstock.planner.stages import (
    balanced_bounds,
    evened_bounds,
    headed_bounds,
    rank_loads,
    shared_head_bounds,
    slowed_bounds,
)

LIGHT = 0.2
"""A head below this fraction of an even share of the work is not divided."""

UNEVEN = 1.02
"""A head is divided if the busiest rank has more than an even share times this factor."""

LIGHTER = 1.01
"""A larger number of parts is searched if it divides the busiest rank's work by this factor."""

MOST_DEGREES = 4
"""Searched numbers of parts per mesh, in addition to 1."""

SMALL = (2, 3, 4, 5, 6, 7, 8, 12)
"""Numbers of parts that are searched for any number of ranks."""


def time_balanced_stages(problem: Problem, mesh: Mesh, slices: Sequence[int], owners: Sequence[int]) -> Stages:
    """The pinned stages, or those with the smallest bottleneck, without a memory limit. If ``owners`` [stages] have
    several stages each, the busiest owner gives units to others. Results are kept.
    """
    model, pinned = problem.model, problem.pinned.stages
    if pinned is not None:
        return pinned_stages(pinned, model.num_units, model.head_parts)
    slowness = tuple(slowness_in_order(problem, mesh)) if problem.slowness else ()
    key = (time_balanced_stages, mesh.tp, mesh.microbatch, tuple(slices), tuple(owners), slowness)

    def balance() -> Stages:
        unit_ns = _unit_ns(problem, mesh, slices)
        if slowness:
            return tuple(itertools.pairwise(slowed_bounds(unit_ns, owners, slowness)))
        return tuple(itertools.pairwise(_bounds(unit_ns, model.head_parts, owners)))

    return problem.kept(key, balance)


def _unit_ns(problem: Problem, mesh: Mesh, slices: Sequence[int]) -> list[int]:
    units: list[int] = unit_totals(problem.units(mesh.tp, mesh.microbatch, tuple(slices)), problem.model).tolist()
    return units


def _bounds(unit_ns: Sequence[int], head_parts: int, owners: Sequence[int]) -> tuple[int, ...]:
    if len(set(owners)) == len(owners):
        return balanced_bounds(unit_ns, len(owners))
    if head_parts > 1:
        return shared_head_bounds(unit_ns, head_parts, owners)
    return evened_bounds(unit_ns, balanced_bounds(unit_ns, len(owners)), owners)


def head_degrees(
    problem: Problem, mesh: Mesh, slices: Sequence[int], placements: Iterable[Sequence[int]]
) -> tuple[int, ...]:
    """Searched numbers of parts of the head for the mesh, ascending: the pinned one, else 1 and those that reduce the
    busiest rank's work. ``placements`` are the owners of the stages, per schedule; if a whole head leaves too few units
    for all of them, the fewest parts that suffice are included.
    """
    pinned = problem.pinned
    if pinned.head_parts is not None:
        return (pinned.head_parts,) if pinned.head_parts in problem.head_degrees(mesh.tp) else ()
    imported = imported_schedule(pinned)
    if imported is not None and imported.recomputed_units:
        return (1,)
    if pinned.stages is not None:
        possible = parts_of_pinned_stages(pinned.stages, problem.model.layers)
        return tuple(parts for parts in possible if parts in problem.head_degrees(mesh.tp))
    stage_counts = sorted({len(owners) for owners in placements})
    candidates = _possible(problem, mesh, stage_counts[0])
    if mesh.pp == 1 or not candidates:
        return (1,)
    unit_ns = _unit_ns(problem, mesh, slices)
    head_ns, even_ns = unit_ns[-1], sum(unit_ns) / mesh.pp
    can_be_whole = stage_counts[0] <= problem.model.num_units
    if can_be_whole and head_ns < LIGHT * even_ns:
        return (1,)
    degrees, best_ns = (
        ([1], _busiest_ns(unit_ns, 1, mesh.pp, stage_counts)) if can_be_whole else ([], float(max(unit_ns)))
    )
    for parts in candidates:
        if degrees and (best_ns <= UNEVEN * even_ns or len(degrees) > MOST_DEGREES):
            break
        divided = problem.divided(parts)
        if stage_counts[0] > divided.model.num_units:
            continue
        busiest_ns = _busiest_ns(_unit_ns(divided, mesh, slices), parts, mesh.pp, stage_counts)
        if not degrees or LIGHTER * busiest_ns <= best_ns:
            degrees.append(parts)
            best_ns = min(busiest_ns, best_ns)
    return tuple(degrees)


def _possible(problem: Problem, mesh: Mesh, fewest: int) -> list[int]:
    """Candidate numbers of parts above one, ascending: small ones, one or two per rank, and the number that gives each
    of ``fewest`` stages a unit.
    """
    needed = fewest - (problem.model.num_units - 1)
    of_ranks = {parts for parts in (mesh.pp, 2 * mesh.pp) if parts <= MOST_PARTS}
    degrees = problem.head_degrees(mesh.tp)
    return [parts for parts in sorted({*SMALL, *of_ranks, max(needed, 2)}) if parts in degrees]


def _busiest_ns(unit_ns: Sequence[int], head_parts: int, pp: int, counts: Sequence[int]) -> float:
    """The work of the busiest rank with the best number of stages. Approximate if ranks have several stages, since a
    better cut may exist.
    """
    least_ns = float("inf")
    for count in counts:
        if count > len(unit_ns):
            continue
        owners = tuple(stage % pp for stage in range(count))
        if count > pp and head_parts > 1:
            bounds = headed_bounds(unit_ns, head_parts, owners, min(head_parts, count - pp))
        elif count > pp:
            bounds = evened_bounds(unit_ns, balanced_bounds(unit_ns, count), owners)
        else:
            bounds = balanced_bounds(unit_ns, count)
        if bounds is not None:
            least_ns = min(least_ns, float(rank_loads(unit_ns, bounds, owners).max()))
    return least_ns
