"""Devices of a mesh's ranks before links are considered, and the slowness of ranks on devices of unequal speed.

The shards of a rank and the replicas of a stage wait for each other, so the slowest of their devices determines the
time of all. Therefore groups of tp devices with successive numbers are ordered by speed, and dp neighbours in this
order become one pipeline rank in all replicas. They are about equally fast, so few devices wait. Stages then have work
in proportion to the speed of their ranks (`penstock.planner.stages.slowed_bounds`).

The order of ranks along the pipeline matters if there are few units: the head, a long unit at the end, needs a fast
last rank, or a slow one that has no other unit. It also matters where links differ: an order by speed may cross a slow
link between nodes several times. For every order, if there are few, and for the devices by number, a step with one
stage per rank is estimated: all sequences on the busiest rank or link, and one sequence on every other one. The order
with the shortest estimate is taken.

Example: eight devices, of which 2 and 5 take twice as long, as dp 2 x pp 4. By number, the replicas of rank 1 have the
devices 2 and 3, and those of rank 2 have the devices 4 and 5: two ranks of four are slow. By speed, devices 2 and 5 are
the replicas of the same rank, and only that rank is slow.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from penstock.core.units import NANOSECONDS_PER_SECOND
from penstock.planner.problem import Mesh, Problem
from penstock.planner.stagecost import Integers, UnitTable, unit_totals
from penstock.planner.stages import rank_loads, slowed_bounds
from penstock.planner.work import Floats

Placement = Callable[[Mesh], tuple[int, ...]]
"""Function that returns the first device of every rank of a mesh, replica after replica."""


def devices_by_number(mesh: Mesh) -> tuple[int, ...]:
    """Tensor-parallel peers adjacent, then a stage's replicas (they exchange the most bytes), then stages."""
    groups = np.arange(mesh.pp) * mesh.dp + np.arange(mesh.dp)[:, None]
    return tuple((mesh.tp * groups).ravel().tolist())


MOST_ORDERS, MOST_ORDERED = 100, 64
"""Limits of the search for an order. With more different orders than the first, only three are compared: fastest rank
first, slowest rank first, and by number. With more ranks than the second, or than units, none are compared: the fastest
is first.
"""
MESSAGES = 2
"""Messages between neighbours for one sequence, one in each direction, for which its compute waits."""


def devices_in_order(problem: Problem, mesh: Mesh) -> tuple[int, ...]:
    """The first device of every rank, replica after replica: `devices_by_number`, unless devices differ in speed. Then
    the devices of a pipeline rank, in all replicas, are about equally fast. The order depends only on dp, tp and pp.
    """
    if not problem.slowness or problem.has_fixed_ranks:
        return devices_by_number(mesh)
    return problem.kept((devices_in_order, mesh.dp, mesh.tp, mesh.pp), lambda: _by_speed(problem, mesh))


def _by_speed(problem: Problem, mesh: Mesh) -> tuple[int, ...]:
    """The first device of every rank, replica after replica. The mesh uses the fastest devices, or with prices those
    that do the same work at the lowest cost. The devices of a pipeline rank are about equally fast.
    """
    groups = np.arange(problem.num_devices // mesh.tp) * mesh.tp
    members = groups[:, None] + np.arange(mesh.tp)
    slowness, rates = problem.slowness_of(members).max(axis=1), problem.cost_rates(members).max(axis=1)
    used = np.sort(np.argsort(rates, kind="stable")[: mesh.dp * mesh.pp])
    by_speed = groups[used[np.argsort(slowness[used], kind="stable")]].reshape(mesh.pp, mesh.dp)
    if mesh.pp > min(problem.model.whole.num_units, MOST_ORDERED):
        return tuple(by_speed.T.ravel().tolist())
    of_ranks = slowness[by_speed // mesh.tp].max(axis=1).tolist()
    options = [by_speed[list(order)] for order in _orders(of_ranks)]
    options.append(groups[used].reshape(mesh.pp, mesh.dp))
    best = min(options, key=_estimate_of(problem, mesh, slowness))
    return tuple(best.T.ravel().tolist())


def _estimate_of(problem: Problem, mesh: Mesh, slowness: Floats) -> Callable[[Integers], float]:
    """The estimate of a step in nanoseconds by the first devices [pipeline ranks, replicas]: all sequences on the
    busiest rank or link, and one sequence on every other one. ``slowness`` is that of every group of shards.
    """
    costs, ranks = problem.costs(mesh.tp, 1), tuple(range(mesh.pp))
    table = UnitTable.of(costs, 1, (problem.sequence_length,))
    unit_ns = unit_totals(table, problem.model.whole).tolist()
    num_bytes = problem.message_bytes(mesh.tp, np.array(float(problem.sequence_length)))

    def step_ns(devices: Integers) -> float:
        of_ranks = slowness[devices // mesh.tp].max(axis=1)
        loads = rank_loads(unit_ns, slowed_bounds(unit_ns, ranks, of_ranks.tolist()), ranks) * of_ranks
        latency, per_byte = costs.transfer(devices[:-1], devices[1:])
        messages = NANOSECONDS_PER_SECOND * (latency + per_byte * num_bytes).max(axis=1)
        busiest = max(loads.max(), messages.max(initial=0.0))
        return float((problem.global_batch / mesh.dp - 1) * busiest + loads.sum() + MESSAGES * messages.sum())

    return step_ns


def _orders(slowness: Sequence[float]) -> list[tuple[int, ...]]:
    """Distinct orders of ranks with this ascending ``slowness``. The first one has the fastest rank first."""
    ascending = tuple(range(len(slowness)))
    equal = Counter(slowness).values()
    if math.factorial(len(slowness)) // math.prod(map(math.factorial, equal)) > MOST_ORDERS:
        return [ascending, ascending[::-1]]
    return list(_arrangements(ascending, slowness))


def _arrangements(left: Sequence[int], slowness: Sequence[float]) -> Iterator[tuple[int, ...]]:
    """Orders of the ranks ``left`` in which equally fast ranks keep their order."""
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
    """[pipeline ranks]: the first devices of the first replica, by `devices_in_order`."""
    if not problem.slowness:
        return np.arange(mesh.pp) * (mesh.dp * mesh.tp)
    return np.array(devices_in_order(problem, mesh)[: mesh.pp])


def slowness_in_order(problem: Problem, mesh: Mesh) -> Floats:
    """[pipeline ranks]: `slowness_of_ranks` on the devices of `devices_in_order`."""
    return slowness_of_ranks(problem, mesh, devices_in_order(problem, mesh) if problem.slowness else ())


def slowness_of_ranks(problem: Problem, mesh: Mesh, devices: Sequence[int]) -> Floats:
    """[pipeline ranks]: a rank's time divided by the costs. ``devices`` are the first devices of the ranks of all
    replicas. The slowest device of all shards and replicas of a rank counts, because the others wait for it.
    """
    if not problem.slowness:
        return np.ones(mesh.pp)
    first = np.reshape(devices, (mesh.dp, mesh.pp, 1))
    slowness: Floats = problem.slowness_of(first + np.arange(mesh.tp)).max(axis=(0, 2))
    return slowness


def peak_in_order(problem: Problem, mesh: Mesh) -> float | None:
    """`peak_flops` of the devices of `devices_in_order`."""
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
