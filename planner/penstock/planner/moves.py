"""Plans a step away from a candidate: a boundary between two slices or two stages moved, one at a time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from penstock.planner.candidate import Candidate
from penstock.planner.problem import Problem
from penstock.planner.remainder import remainder_slices

STEPS = (8, 4, 2, 1)
"""Quanta by which boundaries between slices are moved, one after the other."""

Move = Callable[[Candidate], Candidate | None]


def moves(candidate: Candidate, problem: Problem, step: int) -> Iterator[Move]:
    """Boundaries between slices by ``step`` quanta and, with the largest and the smallest step, between stages by a
    unit, both ways.
    """
    if not isinstance(problem.pinned.slices, tuple):
        for i, sign in itertools.product(range(len(candidate.slices) - 1), (-1, 1)):
            yield functools.partial(_move_slice, problem=problem, boundary=i, tokens=sign * step * problem.quantum)
    if step in (STEPS[0], STEPS[-1]) and problem.pinned.stages is None:
        for i, sign in itertools.product(range(len(candidate.stages) - 1), (-1, 1)):
            yield functools.partial(_move_stage, boundary=i, units=sign)


def _move_slice(candidate: Candidate, *, problem: Problem, boundary: int, tokens: int) -> Candidate | None:
    slices = list(candidate.slices)
    slices[boundary] += tokens
    slices[boundary + 1] -= tokens
    if min(slices) <= 0:
        return None
    own = remainder_slices(problem, candidate.mesh, tuple(slices))
    return replace(candidate, slices=tuple(slices), remainder_slices=own)


def _move_stage(candidate: Candidate, *, boundary: int, units: int) -> Candidate | None:
    stages = [list(stage) for stage in candidate.stages]
    stages[boundary][1] += units
    stages[boundary + 1][0] += units
    if any(first >= stop for first, stop in stages):
        return None
    return replace(candidate, stages=tuple((first, stop) for first, stop in stages))
