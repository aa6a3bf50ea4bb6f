"""Which outlines the search tries with pairs of overlapped actions, next to the best without.

Pairs hide collectives over shards, and cost memory and fill: more slices are under way, and both actions of a pair end
together. So they are tried where a rank has several shards, and kept where the simulated step is shorter. A degree of
tensor parallelism may be the best only with pairs: they are tried for the best candidate of every degree, besides those
of the best few kinds. Finer slices make the same warm-up hold fewer tokens, so twice and four times as many are tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from penstock.core.cluster import PENSTOCK
from penstock.planner.candidate import Candidate
from penstock.planner.outlines import Outline
from penstock.planner.problem import Problem
from penstock.planner.schedules.braided import BRAIDED

FINER = (1, 2, 4)
"""Slices, in multiples of those of a candidate without pairs."""

MOST_BEST = 4
"""Of the best candidates so many are tried with pairs, whatever their degree."""


def braided_outlines(problem: Problem, outlines: Iterable[Outline], ranked: Iterable[Candidate]) -> Iterator[Outline]:
    """Outlines with pairs for the meshes of some of the ``ranked`` candidates, best first; ``outlines`` are those that
    there are without.

    None where a schedule is pinned, or several stages per rank, and none for another software than penstock's.
    """
    if problem.pinned.schedule is not None or problem.software != PENSTOCK:
        return
    known = {(each.mesh, each.num_slices): each for each in outlines if each.schedule == "1f1b"}
    tried = set[tuple[object, int]]()
    degrees = set[int]()
    for number, candidate in enumerate(ranked):
        mesh = candidate.mesh
        if mesh.tp == 1 or (number >= MOST_BEST and mesh.tp in degrees):
            continue
        degrees.add(mesh.tp)
        for key in [(mesh, factor * len(candidate.slices)) for factor in FINER]:
            if key in known and key not in tried:
                tried.add(key)
                yield replace(known[key], schedule=BRAIDED)
