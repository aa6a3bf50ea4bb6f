"""Which outlines the search tries with pairs of overlapped actions, next to the best without.

Pairs hide collectives over shards, and cost memory and fill: more slices are under way, and both actions of a pair end
together. So they are tried where a rank has several shards, and kept where the simulated step is shorter. What is best
with pairs need not be near what is best without: small micro-batches have long collectives, which pairs hide, and many
of them fill a pipeline. So all outlines are looked at that divide the devices as one of the best candidates does, or as
the best of another degree of tensor parallelism, and tried by rising estimate: that of 1F1B, less the part of a layer's
forward and backward that a pair of them hides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from penstock.core.cluster import PENSTOCK
from penstock.planner.candidate import Candidate
from penstock.planner.order import BACKWARD, FORWARD
from penstock.planner.outlines import Outline
from penstock.planner.pair_costs import collectives_of
from penstock.planner.problem import Mesh, Problem
from penstock.planner.schedules.braided import BRAIDED
from penstock.planner.stagecost import equal_slices

MOST_DIVISIONS = 4
"""Of the best candidates, whatever their degree."""

MOST_SIMULATED = 16
"""Outlines with pairs of which a candidate fits; many do not where memory is short, since more slices are under way."""

NUM_LAYERS = 4
"""Enough that a pair's first and last collective count for little."""

_Division = tuple[int, int, int]


def braided_outlines(problem: Problem, outlines: Iterable[Outline], ranked: Iterable[Candidate]) -> list[Outline]:
    """Outlines with pairs by rising estimate, from those of 1F1B among ``outlines``; ``ranked`` are candidates,
    best first.

    None where a schedule is pinned, and none for another software than penstock's.
    """
    if problem.pinned.schedule is not None or problem.software != PENSTOCK:
        return []
    divisions = set(_divisions(candidate.mesh for candidate in ranked))
    shares: dict[tuple[int, int, int], float] = {}
    estimated = []
    for outline in outlines:
        mesh, could_fit = outline.mesh, outline.least_bytes <= problem.memory_limit_bytes
        if outline.schedule != "1f1b" or not could_fit or _division(mesh) not in divisions:
            continue
        key = (mesh.tp, mesh.microbatch, outline.num_slices)
        if key not in shares:
            shares[key] = hidden_share(problem, mesh, outline.num_slices)
        estimated.append(replace(outline, schedule=BRAIDED, estimate_ns=round(outline.estimate_ns * (1 - shares[key]))))
    return sorted(estimated, key=lambda each: problem.score(each.estimate_ns, each.mesh.num_devices))


def _divisions(meshes: Iterable[Mesh]) -> Iterator[_Division]:
    """Of meshes, best first, those whose outlines are looked at."""
    chosen, degrees = set[_Division](), set[int]()
    for mesh in meshes:
        division = _division(mesh)
        is_wanted = len(chosen) < MOST_DIVISIONS or mesh.tp not in degrees
        if mesh.tp > 1 and division not in chosen and is_wanted:
            chosen.add(division)
            degrees.add(mesh.tp)
            yield division


def _division(mesh: Mesh) -> _Division:
    return mesh.dp, mesh.tp, mesh.pp


def hidden_share(problem: Problem, mesh: Mesh, num_slices: int) -> float:
    """The part of a few layers' forward and backward that a pair of them hides, on the slice in the middle."""
    stop = 1 + 2 * min(NUM_LAYERS, problem.model.layers)
    layers = Candidate(
        mesh=mesh,
        stages=((1, stop),),
        slices=equal_slices(problem.sequence_length, num_slices),
        schedule=BRAIDED,
    )
    collectives = collectives_of(problem, layers)
    if collectives is None:
        return 0.0
    places = [(kind, 0, num_slices // 2) for kind in (BACKWARD, FORWARD)]
    whole = sum(int(collectives.segments_of(place).sum()) for place in places)
    hidden = collectives.hidden_ns(np.array(places[:1]), np.array(places[1:]))
    return float(hidden[0]) / max(whole, 1)
