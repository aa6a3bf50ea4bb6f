"""Which devices a mesh's ranks have before anything is known of links, and how fast ranks of unequal devices are.

Devices that differ in speed are ordered by it. Shards of a rank and replicas of a stage go in step, so the slowest of
them counts, and the others wait. In the order of speed they are about equally fast, and few devices wait. Stages then
have work in proportion to their ranks' speed (`penstock.planner.stages.slowed_bounds`).

Example: eight devices, of which 2 and 5 take twice as long, as dp 2 x pp 4. By number the replicas of rank 1 have the
devices 2 and 3, those of rank 2 the devices 4 and 5: two ranks of four are slow. By speed, devices 2 and 5 are the
replicas of the last rank, and only that one is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.planner.problem import Mesh, Problem
from penstock.planner.stagecost import Integers
from penstock.planner.work import Floats

Placement = Callable[[Mesh], tuple[int, ...]]
"""The first device of every rank, replica after replica."""


def devices_by_number(mesh: Mesh) -> tuple[int, ...]:
    """Tensor-parallel peers adjacent, then a stage's replicas (they exchange the most bytes), then stages."""
    groups = np.arange(mesh.pp) * mesh.dp + np.arange(mesh.dp)[:, None]
    return tuple((mesh.tp * groups).ravel().tolist())


def devices_in_order(problem: Problem, mesh: Mesh) -> tuple[int, ...]:
    """`devices_by_number`, with devices of unequal speed ordered: the fastest ones on the first ranks, so that replicas
    of a stage, which go in step, are about equally fast.
    """
    if not problem.slowness:
        return devices_by_number(mesh)
    groups = np.arange(problem.num_devices // mesh.tp) * mesh.tp
    slowness = problem.slowness_of(groups[:, None] + np.arange(mesh.tp)).max(axis=1)
    by_speed = groups[np.argsort(slowness, kind="stable")]
    return tuple(by_speed[np.array(devices_by_number(mesh)) // mesh.tp].tolist())


def first_replica_in_order(problem: Problem, mesh: Mesh) -> Integers:
    """[ranks]: those of the first replica, the first of `devices_in_order`."""
    return np.array(devices_in_order(problem, mesh)[: mesh.pp])


def slowness_of_ranks(problem: Problem, mesh: Mesh, devices: Sequence[int]) -> Floats:
    """[pipeline ranks]: how many times as long a rank computes as the costs say. ``devices`` are the first ones of all
    ranks; shards and replicas go in step, so the slowest counts.
    """
    first = np.reshape(devices, (mesh.dp, mesh.pp, 1))
    slowness: Floats = problem.slowness_of(first + np.arange(mesh.tp)).max(axis=(0, 2))
    return slowness


def slowed(durations: Integers, slowness: Floats) -> Integers:
    """Durations in nanoseconds times the ``slowness``, elementwise."""
    rounded: Integers = np.rint(durations * slowness).astype(np.int64)
    return rounded
