"""What holds the least, for when nothing that was proposed fits: stages cut by the bytes that the simulator counts.

Partitions are proposed by time and by an estimate of memory, so where none of them fits another still may. Under an
order that does not depend on the stages a rank's bytes follow from its own units, and grow with them. So every rank in
turn takes as many units as it can hold, and where that does not place all of them no partition does.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from penstock.planner.candidates import MOST_SLICES, Candidate, Proposer, equal_slices
from penstock.planner.order import Order
from penstock.planner.pins import pinned_stages
from penstock.planner.problem import Mesh, Problem, meshes
from penstock.planner.schedules.zero_bubble import H1
from penstock.planner.simulate.memory import high_water_bytes
from penstock.planner.stagecost import Integers, Stages
from penstock.planner.tables import stage_memory, static_bytes

MOST_SHAPES = 32
MOST_ACTIONS = 20_000
"""Shapes with longer steps are left out: their order is walked a dozen times."""

FEW_SLICES = 8
LEAN_SCHEDULES = ("1f1b", "zb-h1", "gpipe")
"""The built-in schedules whose order follows from the shape, those that hold little first."""

Fits = Callable[[Stages], npt.NDArray[np.bool_]]
"""Per rank, whether it can hold the units of its range; ranges need not follow each other."""


def lean_shapes(problem: Problem) -> Iterator[Candidate]:
    """Divisions, slicings and orders that could hold little, with stages that only stand for others.

    Those with several stages per rank are left out, and so are orders that are not built in.
    """
    return itertools.islice(_shapes(problem), MOST_SHAPES)


def _shapes(problem: Problem) -> Iterator[Candidate]:
    proposer = Proposer(problem)
    roomy = [mesh for mesh in meshes(problem) if proposer.static_shortage(mesh) is None]
    leanest_first = sorted(roomy, key=lambda mesh: (mesh.microbatch, -mesh.pp * mesh.tp))
    for schedule, slices, mesh in itertools.product(_schedules(problem), _slicings(problem), leanest_first):
        stages, num_actions = _some_stages(problem, mesh), 3 * mesh.pp * mesh.num_microbatches * len(slices)
        if len(stages) == mesh.pp and num_actions <= MOST_ACTIONS:
            variant = H1 if schedule == "zb" else None
            yield Candidate(mesh=mesh, stages=stages, slices=slices, schedule=schedule, variant=variant)


def _some_stages(problem: Problem, mesh: Mesh) -> Stages:
    num_units, pinned = problem.model.num_units, problem.pinned.stages
    if pinned is not None:
        return pinned_stages(pinned, num_units)
    return tuple(itertools.pairwise(num_units * rank // mesh.pp for rank in range(mesh.pp + 1)))


def _slicings(problem: Problem) -> list[tuple[int, ...]]:
    """Short slices hold the least besides what every order holds."""
    pinned, length = problem.pinned.slices, problem.sequence_length
    if isinstance(pinned, tuple):
        return [pinned]
    counts = (MOST_SLICES, FEW_SLICES, 1) if pinned is None else (pinned,)
    return list(dict.fromkeys(equal_slices(length, min(count, length)) for count in counts))


def _schedules(problem: Problem) -> tuple[str, ...]:
    pinned = problem.pinned.schedule
    if pinned is None:
        return LEAN_SCHEDULES
    return (pinned,) if isinstance(pinned, str) and pinned in (*LEAN_SCHEDULES, "zb") else ()


def squeezed(problem: Problem, shape: Candidate, order: Order, receive_ahead: int) -> Stages | None:
    """Stages by which every rank stays within the limit under the shape's ``order``; none if there are none."""
    num_units, num_ranks = problem.model.num_units, shape.mesh.pp

    def fits(ranges: Stages) -> npt.NDArray[np.bool_]:
        trial = dataclasses.replace(shape, stages=ranges)
        slots = high_water_bytes(
            order,
            stage_memory(problem, trial).slot_bytes,
            trial.slices,
            receive_ahead,
            late_receives=problem.late_receives,
        )
        always = np.array(static_bytes(problem, trial, tuple(range(num_ranks))))
        holds: npt.NDArray[np.bool_] = always + slots <= problem.memory_limit_bytes
        return holds

    if problem.pinned.stages is not None or num_ranks == 1:
        return shape.stages if fits(shape.stages).all() else None
    return _dealt(_most_units(fits, num_units, num_ranks), num_units)


def _most_units(fits: Fits, num_units: int, num_ranks: int) -> Integers:
    """[2, ranks]: how many units each rank can hold, from an attention on and from an MLP on; the first rank from the
    embedding on, the last one up to the head.
    """
    most = np.zeros((2, num_ranks), dtype=np.int64)
    for half in range(2):
        low, high = most[half], np.full(num_ranks, num_units - num_ranks + 1)
        high[1:-1] = np.minimum(high[1:-1], num_units - 2 - half)
        while (low < high).any():
            middle = (low + high + 1) // 2
            holds = fits(_ranges(middle, half, num_units))
            low[:] = np.where(holds, middle, low)
            high = np.where(holds, high, middle - 1)
    return most


def _ranges(lengths: Integers, half: int, num_units: int) -> Stages:
    first = np.full(len(lengths), 1 + half)
    first[0], first[-1] = 0, num_units - lengths[-1]
    return tuple(zip(first.tolist(), (first + lengths).tolist(), strict=True))


def _dealt(most: Integers, num_units: int) -> Stages | None:
    """All units, to each rank as many as it can hold and at least one; none if some are left over."""
    last = most.shape[1] - 1
    bounds = [0]
    for rank in range(last):
        held = int(most[(bounds[-1] - 1) % 2 if rank else 0, rank])
        bounds.append(min(bounds[-1] + held, num_units - last + rank))
    if num_units - bounds[-1] > most[0, last]:
        return None
    stages = tuple(itertools.pairwise([*bounds, num_units]))
    return stages if all(first < stop for first, stop in stages) else None
