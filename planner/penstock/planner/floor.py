"""Lower bound of every plan's step: the model's work with its cheapest slicing and the optimizer's, spread evenly over
all ranks.

The busiest rank of a pipeline has at least the mean work: M micro-batches of the model's F, I and W, divided by the
ranks. The update of a mean share of the parameters follows. The cheapest slicing of a sequence is that of a flush of
one micro-batch over one stage (`penstock.planner.slicing_flush`), among slices that begin at one of `MOST_SLICE_STARTS`
places. The bound holds for plans with such slices, and with the given numbers of parts of the head, whose work differs
from a whole head's. Collectives over shards do not count, since pairs of actions can hide them. Waiting, messages and
reductions only add to it. It ignores memory, so a plan above it may still be the best.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.core.layout import num_parameters
from penstock.core.units import to_nanoseconds
from penstock.planner.nanoseconds import whole_nanoseconds
from penstock.planner.problem import Mesh, Problem, zero_degrees
from penstock.planner.slicing import SlicingProblem, summable_unit_ns, tabulate
from penstock.planner.slicing_flush import least_total_ns
from penstock.planner.stagecost import Integers, collective_seconds, pass_seconds, unit_counts

MOST_SLICE_STARTS = 64


def grid(problem: Problem) -> int:
    """Tokens between the places where slices of the bound may begin."""
    return -(-problem.sequence_length // MOST_SLICE_STARTS)


def floor_ns(problem: Problem, meshes: Iterable[Mesh], head_parts: Iterable[int] = (1,)) -> int:
    """Lower bound in nanoseconds of a step on any of the meshes, with any of the numbers of parts of the head. Parts
    without known costs on a mesh are skipped there.
    """
    work: dict[tuple[int, int], int] = {}
    parts_of_head, least_ns = tuple(head_parts), None
    for mesh in meshes:
        divided = [problem.divided(parts) for parts in parts_of_head if parts in problem.head_degrees(mesh.tp)]
        if not divided:
            continue
        for batch in filter(None, (mesh.microbatch, mesh.remainder)):
            if (mesh.tp, batch) not in work:
                work[mesh.tp, batch] = min(_work_ns(part_problem, mesh.tp, batch) for part_problem in divided)
        work_ns = mesh.num_alike * work[mesh.tp, mesh.microbatch] + work.get((mesh.tp, mesh.remainder), 0)
        replicas = mesh.dp if 1 in zero_degrees(problem, mesh.dp) else 1
        elements = num_parameters(problem.model) // (mesh.tp * mesh.pp * replicas)
        least_slowness = min(problem.slowness, default=1.0)
        update_ns = to_nanoseconds(least_slowness * problem.cost_of(mesh.tp).optimizer_seconds(elements))
        floor = int(work_ns / _speed(problem, mesh)) + update_ns
        least_ns = floor if least_ns is None else min(least_ns, floor)
    assert least_ns is not None, "there is a mesh"
    return least_ns


def _speed(problem: Problem, mesh: Mesh) -> float:
    """Upper bound of the total speed of a pipeline's ranks, relative to a device of slowness 1. A rank is at most as
    fast as the mean of its devices in all replicas, and the mesh has at best the fastest devices.
    """
    if not problem.slowness:
        return mesh.pp
    fastest = np.sort(1 / problem.slowness_of(range(problem.num_devices)))[-mesh.num_devices :]
    return float(fastest.sum()) / (mesh.dp * mesh.tp)


def _work_ns(problem: Problem, tp: int, batch: int) -> int:
    """F, I and W of the whole model for one micro-batch with the cheapest slicing, while no other rank computes."""
    cost, model = problem.cost_of(tp), problem.model
    counts = unit_counts(model, ((0, model.num_units),))[0]

    def slice_ns(lengths: Integers, prefixes: Integers) -> Integers:
        points = lengths.astype(np.float64), prefixes.astype(np.float64)
        compute = np.maximum(pass_seconds(cost, batch, *points) - collective_seconds(cost, batch, *points), 0.0)
        return whole_nanoseconds((counts @ compute).sum(axis=0))

    shape = {"sequence_length": problem.sequence_length, "quantum": grid(problem)}
    cost_ns = tabulate(slice_ns, **shape)
    unit_ns = summable_unit_ns(cost_ns)
    return unit_ns * least_total_ns(SlicingProblem(cost_ns=cost_ns // unit_ns, **shape))
