"""A step that no plan is shorter than: the model's work by its cheapest slicing, spread evenly over all ranks.

Every rank is busy for the work of its stages, so the busiest is for at least the mean: M micro-batches of the model's
F, I and W, over the ranks of a pipeline. The cheapest way to slice a sequence is that of a flush of one micro-batch
over one stage (`penstock.planner.slicing_flush`), among slices that begin at one of `MOST_QUANTA` places: the floor
holds for plans with such slices, and of a head that is divided for the numbers of parts that are named: their work is
another than the whole head's. Collectives over shards do not count, since pairs of actions hide them behind each other.
Waiting, messages and reductions only add to it, and it says nothing of memory: a plan above it may be the best there
is.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.core.layout import num_parameters
from penstock.core.units import to_nanoseconds
from penstock.planner.nanoseconds import whole_nanoseconds
from penstock.planner.problem import Mesh, Problem, zero_degrees
from penstock.planner.slicing import SlicingProblem, summable_unit_ns, tabulate
from penstock.planner.slicing_flush import best_flush_slicing
from penstock.planner.stagecost import Integers, collective_seconds, pass_seconds, unit_counts

MOST_QUANTA = 64


def grid(problem: Problem) -> int:
    """The tokens between places where slices of the floor may begin."""
    return -(-problem.sequence_length // MOST_QUANTA)


def floor_ns(problem: Problem, meshes: Iterable[Mesh], head_parts: Iterable[int] = (1,)) -> int:
    """Nanoseconds that no step on any of the meshes is shorter than, with the head in any of so many parts. On a mesh
    those count that costs are known of there.
    """
    work: dict[tuple[int, int], int] = {}
    wanted, least = tuple(head_parts), None
    for mesh in meshes:
        divided = [problem.divided(parts) for parts in wanted if parts in problem.head_degrees(mesh.tp)]
        if not divided:
            continue
        for batch in filter(None, (mesh.microbatch, mesh.remainder)):
            if (mesh.tp, batch) not in work:
                work[mesh.tp, batch] = min(_work_ns(each, mesh.tp, batch) for each in divided)
        total = mesh.num_alike * work[mesh.tp, mesh.microbatch] + work.get((mesh.tp, mesh.remainder), 0)
        replicas = mesh.dp if 1 in zero_degrees(problem, mesh.dp) else 1
        elements = num_parameters(problem.model) // (mesh.tp * mesh.pp * replicas)
        update = to_nanoseconds(problem.cost_of(mesh.tp).optimizer_seconds(elements))
        found = total // mesh.pp + update
        least = found if least is None else min(least, found)
    assert least is not None, "there is a mesh"
    return least


def _work_ns(problem: Problem, tp: int, batch: int) -> int:
    """F, I and W of the whole model for one micro-batch, nobody else computing, by the cheapest slicing."""
    cost, model = problem.cost_of(tp), problem.model
    counts = unit_counts(model, ((0, model.num_units),))[0]

    def slice_ns(lengths: Integers, before: Integers) -> Integers:
        points = lengths.astype(np.float64), before.astype(np.float64)
        compute = np.maximum(pass_seconds(cost, batch, *points) - collective_seconds(cost, batch, *points), 0.0)
        return whole_nanoseconds((counts @ compute).sum(axis=0))

    shape = {"sequence_length": problem.sequence_length, "quantum": grid(problem)}
    cost_ns = tabulate(slice_ns, **shape)
    unit_ns = summable_unit_ns(cost_ns)
    slicing = best_flush_slicing(SlicingProblem(cost_ns=cost_ns // unit_ns, **shape), num_microbatches=1, num_stages=1)
    assert slicing is not None, "every slicing is allowed"
    return unit_ns * slicing.total_ns
