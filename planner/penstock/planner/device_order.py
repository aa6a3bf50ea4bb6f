"""Which devices a mesh's ranks have before anything is known of links, and how fast ranks of unequal devices are.

Devices that differ in speed are ordered by it. Shards of a rank and replicas of a stage go in step, so the slowest of
them counts, and the others wait. In the order of speed they are about equally fast, and few devices wait. Stages then
have work in proportion to their ranks' speed (`penstock.planner.stages.slowed_bounds`).

Which rank gets which of these groups of devices matters if units are few: a head suits a fast last rank, or leaves a
slow one with nothing else. Of all orders of the groups, if they are few, the one counts whose step is shortest with one
stage per rank: all sequences on the busiest rank, and one on the others.

Example: eight devices, of which 2 and 5 take twice as long, as dp 2 x pp 4. By number the replicas of rank 1 have the
devices 2 and 3, those of rank 2 the devices 4 and 5: two ranks of four are slow. By speed, devices 2 and 5 are the
replicas of the last rank, and only that one is slow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from penstock.planner.problem import Mesh, Problem
from penstock.planner.stagecost import Integers, UnitTable, unit_totals
from penstock.planner.stages import rank_loads, slowed_bounds
from penstock.planner.work import Floats

Placement = Callable[[Mesh], tuple[int, ...]]
"""The first device of every rank, replica after replica."""


def devices_by_number(mesh: Mesh) -> tuple[int, ...]:
    """Tensor-parallel peers adjacent, then a stage's replicas (they exchange the most bytes), then stages."""
    groups = np.arange(mesh.pp) * mesh.dp + np.arange(mesh.dp)[:, None]
    return tuple((mesh.tp * groups).ravel().tolist())


MOST_ORDERS, MOST_ORDERED = 100, 64
"""With more different orders of ranks, only the fastest first and the slowest first are compared; with more ranks none
are, and the fastest are first.
"""


def devices_in_order(problem: Problem, mesh: Mesh) -> tuple[int, ...]:
    """`devices_by_number`, with devices of unequal speed ordered, so that replicas of a stage, which go in step, are
    about equally fast. The order depends on the degrees of parallelism alone.
    """
    if not problem.slowness or problem.has_fixed_ranks:
        return devices_by_number(mesh)
    return problem.kept((devices_in_order, mesh.dp, mesh.tp, mesh.pp), lambda: _by_speed(problem, mesh))


def _by_speed(problem: Problem, mesh: Mesh) -> tuple[int, ...]:
    """The first devices of ranks: the fastest ones, or if money counts those that do the same work for least; about
    equally fast ones on each pipeline rank.
    """
    groups = np.arange(problem.num_devices // mesh.tp) * mesh.tp
    members = groups[:, None] + np.arange(mesh.tp)
    slowness, rates = problem.slowness_of(members).max(axis=1), problem.cost_rates(members).max(axis=1)
    used = np.sort(np.argsort(rates, kind="stable")[: mesh.dp * mesh.pp])
    fastest = groups[used[np.argsort(slowness[used], kind="stable")]].reshape(mesh.pp, mesh.dp)
    of_ranks = slowness[fastest // mesh.tp].max(axis=1).tolist()
    model = problem.model.whole
    if mesh.pp > min(model.num_units, MOST_ORDERED):
        return tuple(fastest.T.ravel().tolist())
    table = UnitTable.of(problem.costs(mesh.tp, 1), 1, (problem.sequence_length,))
    unit_ns, ranks = unit_totals(table, model).tolist(), tuple(range(mesh.pp))

    def step_ns(order: Sequence[int]) -> float:
        """All sequences on the busiest rank, and one of them on the others."""
        slowness_in_order = [of_ranks[rank] for rank in order]
        loads = rank_loads(unit_ns, slowed_bounds(unit_ns, ranks, slowness_in_order), ranks) * slowness_in_order
        return float((problem.global_batch / mesh.dp - 1) * loads.max() + loads.sum())

    best = min(_orders(of_ranks), key=step_ns)
    return tuple(fastest[list(best)].T.ravel().tolist())


def _orders(slowness: Sequence[float]) -> list[tuple[int, ...]]:
    """Orders of ranks that differ in their ``slowness``, which is ascending: first the one with the fastest first."""
    ascending = tuple(range(len(slowness)))
    equal = Counter(slowness).values()
    if math.factorial(len(slowness)) // math.prod(map(math.factorial, equal)) > MOST_ORDERS:
        return [ascending, ascending[::-1]]
    return list(_arrangements(ascending, slowness))


def _arrangements(left: Sequence[int], slowness: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Orders of the ranks ``left``, of which equally fast ones stay in order."""
    if not left:
        yield ()
    firsts = {slowness[rank]: rank for rank in reversed(left)}
    for first in sorted(firsts.values()):
        for rest in _arrangements([rank for rank in left if rank != first], slowness):
            yield (first, *rest)


def devices_of(first: Sequence[int], tp: int) -> list[int]:
    """The devices of all shards of ranks with these first devices."""
    return [device + shard for device in first for shard in range(tp)]


def first_replica_in_order(problem: Problem, mesh: Mesh) -> Integers:
    """[ranks]: those of the first replica, the first of `devices_in_order`."""
    if not problem.slowness:
        return np.arange(mesh.pp) * (mesh.dp * mesh.tp)
    return np.array(devices_in_order(problem, mesh)[: mesh.pp])


def slowness_in_order(problem: Problem, mesh: Mesh) -> Floats:
    """[pipeline ranks]: `slowness_of_ranks` in the order of `devices_in_order`."""
    return slowness_of_ranks(problem, mesh, devices_in_order(problem, mesh) if problem.slowness else ())


def slowness_of_ranks(problem: Problem, mesh: Mesh, devices: Sequence[int]) -> Floats:
    """[pipeline ranks]: how many times as long a rank computes as the costs say. ``devices`` are the first ones of all
    ranks; shards and replicas go in step, so the slowest counts.
    """
    if not problem.slowness:
        return np.ones(mesh.pp)
    first = np.reshape(devices, (mesh.dp, mesh.pp, 1))
    slowness: Floats = problem.slowness_of(first + np.arange(mesh.tp)).max(axis=(0, 2))
    return slowness


def peak_in_order(problem: Problem, mesh: Mesh) -> float | None:
    """`peak_flops` of the mesh's devices in order."""
    return (
        peak_flops(problem, devices_of(devices_in_order(problem, mesh), mesh.tp))
        if problem.peaks
        else problem.peak_flops
    )


def peak_flops(problem: Problem, devices: Sequence[int]) -> float | None:
    """The mean peak of these devices, if it is known."""
    if not problem.peaks:
        return problem.peak_flops
    return sum(problem.peaks[device] for device in devices) / len(devices)


def slowed(durations: Integers, slowness: Floats) -> Integers:
    """Durations in nanoseconds times the ``slowness``, elementwise."""
    rounded: Integers = np.rint(durations * slowness).astype(np.int64)
    return rounded
