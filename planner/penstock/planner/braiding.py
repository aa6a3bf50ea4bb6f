"""Outlines with pairs of overlapped actions that the search tries, next to the best without pairs.

Pairs hide collectives over shards, but cost memory and a longer warm-up: more slices are in flight, and both actions of
a pair end together. So they are tried if a rank has several shards, and kept if the simulated step is shorter. The best
plan with pairs need not be close to the best without: small micro-batches have long collectives, which pairs hide, and
many of them fill a pipeline. So the search tries all outlines with the degrees of parallelism of one of the best
candidates, or of the best at another degree of tensor parallelism, by rising estimate: that of 1F1B, less the fraction
of a layer's forward and backward that a pair hides.
"""

from __future__ import annotations

import itertools
import math
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
"""Number of the best divisions that are tried, at any degree of tensor parallelism."""

MOST_SIMULATED = 16
"""Maximum number of outlines with pairs that are simulated. Many have no candidate that fits, since more slices are in
flight.
"""

NUM_LAYERS = 4
"""Layers in a pair for its estimate: enough that its first and last collective count for little."""

_Division = tuple[int, int, int]


def braided_outlines(
    problem: Problem, outlines: Iterable[Outline], ranked: Iterable[Candidate], most_score: float = math.inf
) -> list[Outline]:
    """Outlines with pairs by rising estimate, made from those of 1F1B among ``outlines``, with and without
    recomputation; ``ranked`` are candidates, best first. Those whose score cannot be below ``most_score`` are left out:
    a pair takes at least as long as the longer of its actions, so it hides at most a half.

    Empty if a schedule is pinned, and for other software than penstock's.
    """
    if problem.pinned.schedule is not None or problem.software != PENSTOCK:
        return []
    divisions = set(_divisions(candidate.mesh for candidate in ranked))
    shares: dict[tuple[int, int, int], float] = {}
    estimated = []
    usual = (outline for outline in outlines if outline.schedule == "1f1b" and not outline.recomputes)
    for outline in itertools.chain.from_iterable(
        (outline, outline.relieved) for outline in usual if _division(outline.mesh) in divisions
    ):
        if outline is None or outline.least_bytes > problem.memory_limit_bytes:
            continue
        mesh = outline.mesh
        if problem.score(outline.estimate_ns // 2, mesh.num_devices) >= most_score:
            continue
        key = (mesh.tp, mesh.microbatch, outline.num_slices)
        if key not in shares:
            shares[key] = hidden_share(problem, mesh, outline.num_slices)
        estimated.append(replace(outline, schedule=BRAIDED, estimate_ns=round(outline.estimate_ns * (1 - shares[key]))))
    return sorted(estimated, key=lambda outline: problem.score(outline.estimate_ns, outline.mesh.num_devices))


def _divisions(meshes: Iterable[Mesh]) -> Iterator[_Division]:
    """The divisions whose outlines are tried; ``meshes`` are sorted, best first."""
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
    """The fraction of a few layers' forward and backward that a pair hides, on the middle slice."""
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
    whole_ns = sum(int(collectives.segments_of(place).sum()) for place in places)
    hidden = collectives.hidden_ns(np.array(places[:1]), np.array(places[1:]))
    return float(hidden[0]) / max(whole_ns, 1)
