"""Stages balanced by time, and the numbers of parts that a heavy head is worth being divided into.

A head is one unit, and the busiest rank works at least for that, however layers are dealt. Divided by its vocabulary it
is several units, which stages share as they share layers. What that gains is known before anything is simulated: the
work of the busiest rank. With t the work of all units, the busiest of K ranks works for t / K at least. So a head in
one part is left alone where its busiest rank works hardly more than that, or where the head is a small part of t / K.
Otherwise more parts are looked at as long as each step lowers the work of the busiest rank by a considerable share.

Example: two ranks with one stage each, layers of 30 in all, a head of 70. Whole: the busiest rank works 70. In two
parts it works 65 (the layers and a part of 35), in three 53.3, in four 52.5 (three parts of 17.5), in seven 50.

More parts cost more: each reads and writes a hidden state, and where they are on different ranks a message.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from penstock.planner.pins import parts_of_pinned_stages, pinned_stages
from penstock.planner.problem import MOST_PARTS, Mesh, Problem, imported_schedule
from penstock.planner.stagecost import Stages, unit_totals
from penstock.planner.stages import balanced_bounds, evened_bounds, headed_bounds, rank_loads, shared_head_bounds

LIGHT = 0.2
"""A head of less than this part of an even share of the work is not divided."""

UNEVEN = 1.02
"""The busiest rank works at least so many times an even share where the head is divided."""

LIGHTER = 1.01
"""With more parts the busiest rank works so many times less."""

MOST_DEGREES = 4
"""Numbers of parts that are looked at for a mesh."""

SMALL = (2, 3, 4, 5, 6, 7, 8, 12)
"""Numbers of parts that are tried, whatever the number of ranks."""


def time_balanced_stages(problem: Problem, mesh: Mesh, slices: Sequence[int], owners: Sequence[int]) -> Stages:
    """The pinned stages, or those with the shortest longest one, whatever they hold. Where ``owners`` [stages] have
    several stages each, the busiest of them gives units to others.
    """
    model, pinned = problem.model, problem.pinned.stages
    if pinned is not None:
        return pinned_stages(pinned, model.num_units, model.head_parts)
    return tuple(itertools.pairwise(_bounds(_unit_ns(problem, mesh, slices), model.head_parts, owners)))


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
    """The numbers of parts of the head that plans for the mesh are looked at with, ascending: what is pinned, else one
    and those that make the busiest rank's work shorter. ``placements`` are the owners of stages of the schedules; where
    a whole head leaves too few units for any of them, the fewest parts that do not are among the numbers.
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
    counts = sorted({len(owners) for owners in placements})
    others = _possible(problem, mesh, counts[0])
    if mesh.pp == 1 or not others:
        return (1,)
    unit_ns = _unit_ns(problem, mesh, slices)
    head_ns, even_ns = unit_ns[-1], sum(unit_ns) / mesh.pp
    can_be_whole = counts[0] <= problem.model.num_units
    if can_be_whole and head_ns < LIGHT * even_ns:
        return (1,)
    found, best_ns = ([1], _busiest_ns(unit_ns, 1, mesh.pp, counts)) if can_be_whole else ([], float(max(unit_ns)))
    for parts in others:
        if found and (best_ns <= UNEVEN * even_ns or len(found) > MOST_DEGREES):
            break
        divided = problem.divided(parts)
        if counts[0] > divided.model.num_units:
            continue
        busiest_ns = _busiest_ns(_unit_ns(divided, mesh, slices), parts, mesh.pp, counts)
        if not found or LIGHTER * busiest_ns <= best_ns:
            found.append(parts)
            best_ns = min(busiest_ns, best_ns)
    return tuple(found)


def _possible(problem: Problem, mesh: Mesh, fewest: int) -> list[int]:
    """The numbers of parts beyond one that are tried, ascending: small ones, one or two for every rank, and what
    ``fewest`` stages need to have a unit each.
    """
    needed = fewest - (problem.model.num_units - 1)
    of_ranks = {parts for parts in (mesh.pp, 2 * mesh.pp) if parts <= MOST_PARTS}
    degrees = problem.head_degrees(mesh.tp)
    return [parts for parts in sorted({*SMALL, *of_ranks, max(needed, 2)}) if parts in degrees]


def _busiest_ns(unit_ns: Sequence[int], head_parts: int, pp: int, counts: Sequence[int]) -> float:
    """The work of the busiest rank with the number of stages that suits it best: about, where ranks have several, which
    may cut better.
    """
    least = float("inf")
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
            least = min(least, float(rank_loads(unit_ns, bounds, owners).max()))
    return least
