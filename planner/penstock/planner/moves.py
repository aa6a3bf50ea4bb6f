"""Plans a step away from a candidate: a boundary between two slices or two stages moved, one at a time, and outlines
that differ in a field or two. What a moved candidate makes again is for the room to say
(`penstock.planner.room.Room.moved`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from penstock.planner.candidate import Candidate
from penstock.planner.outlines import Outline
from penstock.planner.problem import Mesh, Problem
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


def relieving(
    candidate: Candidate, problem: Problem, owners: Sequence[int], peak_bytes: Sequence[int]
) -> Iterator[Candidate]:
    """The candidate with a unit less on the rank that holds most, given to a stage of another: each way there is."""
    if problem.pinned.stages is not None:
        return
    fullest = max(range(len(peak_bytes)), key=lambda rank: peak_bytes[rank])
    for i in range(len(candidate.stages) - 1):
        for giver, taker, units in ((i, i + 1, -1), (i + 1, i, 1)):
            if owners[giver] == fullest != owners[taker]:
                moved = _move_stage(candidate, boundary=i, units=units)
                if moved is not None:
                    yield moved


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


Key = tuple[int, int, int, int, int, object, int, bool]
"""An outline: dp, tp, pp, sequences of a micro-batch, number of slices, schedule, parts of the head, and whether ranks
make again what they have no room for.
"""


def kind_of(candidate: Candidate) -> tuple[object, ...]:
    """The candidate without its boundaries."""
    return candidate.mesh, candidate.schedule, len(candidate.slices), candidate.head_parts, any(candidate.recompute)


def key_of(outline: Outline) -> Key:
    """Its key."""
    mesh, what = outline.mesh, (outline.num_slices, outline.schedule, outline.head_parts, outline.recomputes)
    return (mesh.dp, mesh.tp, mesh.pp, mesh.microbatch, *what)


def neighbours(candidate: Candidate, known: Iterable[Key]) -> Iterator[list[Key]]:
    """Keys a step away: those that differ in one field, where a degree grows at the cost of another, then those with
    another schedule and other slices or micro-batches, which need its memory, and those that differ in more. Where
    known ones have the head in other parts, those come first, with every schedule.
    """
    mesh, num_slices, schedule = candidate.mesh, len(candidate.slices), candidate.schedule
    again = any(candidate.recompute)
    keys, rest = [key for key in known if key[7] == again], (candidate.head_parts, again)
    counts = [num_slices, *_around({key[4] for key in keys}, num_slices)]
    batches = [mesh.microbatch, *_around({key[3] for key in keys}, mesh.microbatch)]
    here = (mesh.dp, mesh.tp, mesh.pp)
    degrees = [here, *sorted({key[:3] for key in keys if _is_next_mesh(key, mesh)})]
    schedules = [schedule, *sorted({key[5] for key in keys} - {schedule}, key=str)]
    others = sorted({key[6] for key in keys if key[:4] == (*here, mesh.microbatch)} - {candidate.head_parts})
    yield [(*here, mesh.microbatch, num_slices, *both, again) for both in itertools.product(schedules, others)]
    yield [(*here, mesh.microbatch, num_slices, each, *rest) for each in schedules[1:]]
    yield [(*here, mesh.microbatch, count, schedule, *rest) for count in counts[1:]]
    yield [(*here, batch, num_slices, schedule, *rest) for batch in batches[1:]]
    yield [(*degree, mesh.microbatch, num_slices, schedule, *rest) for degree in degrees[1:]]
    yield [(*here, mesh.microbatch, *both, *rest) for both in itertools.product(counts[1:], schedules[1:])]
    yield [(*here, batch, num_slices, each, *rest) for batch, each in itertools.product(batches[1:], schedules[1:])]
    more = itertools.product(degrees, batches, counts)
    yield [(*degree, batch, count, schedule, *rest) for degree, batch, count in more]


def _is_next_mesh(key: Key, mesh: Mesh) -> bool:
    """Whether one of the three degrees is the same, and the other two are others."""
    dp, tp, pp = key[:3]
    return (dp == mesh.dp) + (tp == mesh.tp) + (pp == mesh.pp) == 1 and dp * tp * pp == mesh.num_devices


def _around(values: set[int], value: int) -> list[int]:
    """The next smaller and the next larger one."""
    below, above = sorted(each for each in values if each < value), sorted(each for each in values if each > value)
    return below[-1:] + above[:1]
