"""Plans one step away from a candidate: one boundary between two slices or two stages moved, and outlines that differ
in one or two fields. `penstock.planner.memory_fit.MemoryFit.moved` chooses the recomputation of a moved candidate.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from penstock.planner.candidate import Candidate
from penstock.planner.judge import Evaluation, Judge
from penstock.planner.memory_fit import MemoryFit
from penstock.planner.outlines import Outline
from penstock.planner.problem import Mesh, Problem
from penstock.planner.remainder import remainder_slices
from penstock.planner.schedules.zero_bubble import H1

STEPS = (8, 4, 2, 1)
"""Quanta by which boundaries between slices are moved, in this order."""

Move = Callable[[Candidate], Candidate | None]


def moves(candidate: Candidate, problem: Problem, step: int) -> Iterator[Move]:
    """Moves of boundaries between slices by ``step`` quanta and, with the largest and the smallest step, between stages
    by a unit, in both directions.
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
    """Candidates with one unit less on the fullest rank, moved to an adjacent stage of another rank."""
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
    remainder = remainder_slices(problem, candidate.mesh, tuple(slices))
    return replace(candidate, slices=tuple(slices), remainder_slices=remainder)


def _move_stage(candidate: Candidate, *, boundary: int, units: int) -> Candidate | None:
    stages = [list(stage) for stage in candidate.stages]
    stages[boundary][1] += units
    stages[boundary + 1][0] += units
    if any(first >= stop for first, stop in stages):
        return None
    return replace(candidate, stages=tuple((first, stop) for first, stop in stages))


AHEAD = (2, 4, 8)
"""Distances in actions between recomputations and their backwards. Earlier ones fill more waits and hold more bytes."""

NEAR = 1.05
"""The best plan of the other kind, with or without recomputation, is improved too if it takes at most this multiple of
the best step.
"""

MOST_PRICES = 3
"""How often stages are cut again with recomputation priced by its exposed share."""

PRICED_PARTS = (1.0, 0.5)
"""Fractions of the hidden recomputation that count as free when stages are cut; new stages may hide less of it."""


def other_orders(judge: Judge, problem: Problem, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with other orders of its schedule, with single actions moved, and with recomputation in other waits
    unless its order is recorded.
    """
    orders = dict.fromkeys((candidate, with_h1(candidate), judge.best_variant(candidate)))
    yield from orders
    moved = judge.with_moved_actions(candidate)
    if moved is not None:
        yield moved
    is_recorded = not isinstance(candidate.schedule, str) and candidate.schedule != problem.pinned.schedule
    if not any(candidate.recompute) or problem.software.recomputes_on_demand or is_recorded:
        return
    for ahead in () if candidate.recompute_inside else AHEAD:
        yield replace(candidate, recompute_ahead=ahead)
    yield from filter(None, map(judge.with_windows, orders))


def with_h1(candidate: Candidate) -> Candidate:
    """The candidate with the order of H1 if it has one of ``zb``, whose orders were compared over few micro-batches
    only.
    """
    return replace(candidate, variant=H1) if candidate.schedule == "zb" else candidate


def recut(memory_fit: MemoryFit, candidate: Candidate, exposed: Sequence[float]) -> Iterator[Candidate]:
    """The candidate with stages cut for the ``exposed`` share of each rank's recomputation: hidden time counts half or
    not at all. Nothing if ``exposed`` is empty.
    """
    shape = replace(candidate, variant=None, recompute_ahead=0)
    for part in PRICED_PARTS if exposed else ():
        shares = [1 - part * (1 - share) for share in exposed]
        yield from (cut for cut in memory_fit.recomputing(shape, exposed=shares) if isinstance(cut, Candidate))


def inside_of(candidate: Candidate) -> Candidate:
    """The candidate with all of its recomputation inside its backwards, and the name of its schedule."""
    schedule = candidate.schedule if isinstance(candidate.schedule, str) else candidate.schedule.generator
    return replace(candidate, schedule=schedule, variant=None, recompute_ahead=0, recompute_inside=True)


Key = tuple[int, int, int, int, int, object, int, bool]
"""An outline: dp, tp, pp, sequences of a micro-batch, number of slices, schedule, parts of the head, and whether ranks
recompute what exceeds the limit.
"""


def kind_of(candidate: Candidate) -> tuple[object, ...]:
    """The candidate without its boundaries."""
    return candidate.mesh, candidate.schedule, len(candidate.slices), candidate.head_parts, any(candidate.recompute)


def best_of_kinds(ranked: Sequence[Evaluation], count: int) -> list[Evaluation]:
    """The best evaluation of each of the best ``count`` kinds, best first. If all of these recompute, or none does,
    also the best of the others, unless it is far from the best: its boundaries may gain more from being moved.
    """
    kinds: dict[tuple[object, ...], Evaluation] = {}
    for evaluation in ranked:
        kinds.setdefault(kind_of(evaluation.candidate), evaluation)
    best = list(kinds.values())
    chosen, rest = best[:count], best[count:]
    recompute = {any(evaluation.candidate.recompute) for evaluation in chosen}
    others = (evaluation for evaluation in rest if any(evaluation.candidate.recompute) not in recompute)
    if len(recompute) == 1:
        chosen += [other for other in itertools.islice(others, 1) if other.step_ns <= NEAR * best[0].step_ns]
    return chosen


def by_key(outlines: Iterable[Outline]) -> dict[Key, list[Outline]]:
    """The outlines by their keys."""
    outlines_by_key: dict[Key, list[Outline]] = {}
    for outline in outlines:
        outlines_by_key.setdefault(key_of(outline), []).append(outline)
    return outlines_by_key


def key_of(outline: Outline) -> Key:
    """The outline's `Key`."""
    mesh, rest = outline.mesh, (outline.num_slices, outline.schedule, outline.head_parts, outline.recomputes)
    return (mesh.dp, mesh.tp, mesh.pp, mesh.microbatch, *rest)


def relieved_of(outlines: Iterable[Outline]) -> Iterator[Outline]:
    """The outlines with recomputation of what exceeds the limit, where there is any."""
    return filter(None, (outline.relieved for outline in outlines))


MOST_CLOSEST = 3
"""Number of kinds of candidates for which a sufficient limit is searched first if nothing fits."""


def closest_of_kinds(needs: Iterable[tuple[int, Candidate]]) -> list[tuple[int, Candidate]]:
    """The least need of each of the `MOST_CLOSEST` kinds that need least; ``needs`` are bytes and the candidate."""
    by_kind: dict[tuple[object, ...], tuple[int, Candidate]] = {}
    for num_bytes, candidate in sorted(needs, key=lambda need: (need[0], need[1].label)):
        by_kind.setdefault(kind_of(candidate), (num_bytes, candidate))
    return [*by_kind.values()][:MOST_CLOSEST]


def similar_groups(outline: Outline) -> Iterator[tuple[float, object]]:
    """Groups of outlines with similar errors of estimates, narrowest first, with the fraction of the error to apply:
    the same mesh, the same degrees of parallelism, and any mesh. Only outlines of the same schedule are compared, and a
    whole head never with a divided one. Nothing is inferred from pipelines, which wait, for meshes without one.
    """
    mesh, kind = outline.mesh, (outline.schedule, outline.head_parts > 1, outline.recomputes)
    yield 1 / 2, (mesh, kind)
    yield 1 / 2, (mesh.dp, mesh.tp, mesh.pp, kind)
    yield 1 / 4 if mesh.pp > 1 else 0.0, kind


def neighbours(candidate: Candidate, known: Iterable[Key]) -> Iterator[list[Key]]:
    """Keys one step away, in groups: those that differ in one field, where one degree grows at the cost of another;
    then those with another schedule and other slices or micro-batches, which that schedule's memory may require; then
    those that differ in more. If known keys have other numbers of parts of the head, those come first, with every
    schedule.
    """
    mesh, num_slices, schedule = candidate.mesh, len(candidate.slices), candidate.schedule
    recomputes = any(candidate.recompute)
    keys, rest = [key for key in known if key[7] == recomputes], (candidate.head_parts, recomputes)
    counts = [num_slices, *_adjacent_values({key[4] for key in keys}, num_slices)]
    batches = [mesh.microbatch, *_adjacent_values({key[3] for key in keys}, mesh.microbatch)]
    degrees_of_mesh = (mesh.dp, mesh.tp, mesh.pp)
    degrees = [degrees_of_mesh, *sorted({key[:3] for key in keys if _is_next_mesh(key, mesh)})]
    schedules = [schedule, *sorted({key[5] for key in keys} - {schedule}, key=str)]
    others = sorted({key[6] for key in keys if key[:4] == (*degrees_of_mesh, mesh.microbatch)} - {candidate.head_parts})
    yield [
        (*degrees_of_mesh, mesh.microbatch, num_slices, *both, recomputes)
        for both in itertools.product(schedules, others)
    ]
    yield [(*degrees_of_mesh, mesh.microbatch, num_slices, other_schedule, *rest) for other_schedule in schedules[1:]]
    yield [(*degrees_of_mesh, mesh.microbatch, count, schedule, *rest) for count in counts[1:]]
    yield [(*degrees_of_mesh, batch, num_slices, schedule, *rest) for batch in batches[1:]]
    yield [(*degree, mesh.microbatch, num_slices, schedule, *rest) for degree in degrees[1:]]
    yield [(*degrees_of_mesh, mesh.microbatch, *both, *rest) for both in itertools.product(counts[1:], schedules[1:])]
    yield [
        (*degrees_of_mesh, batch, num_slices, other_schedule, *rest)
        for batch, other_schedule in itertools.product(batches[1:], schedules[1:])
    ]
    more = itertools.product(degrees, batches, counts)
    yield [(*degree, batch, count, schedule, *rest) for degree, batch, count in more]


def _is_next_mesh(key: Key, mesh: Mesh) -> bool:
    """Whether exactly one of the three degrees is equal and the device counts agree."""
    dp, tp, pp = key[:3]
    return (dp == mesh.dp) + (tp == mesh.tp) + (pp == mesh.pp) == 1 and dp * tp * pp == mesh.num_devices


def _adjacent_values(values: set[int], value: int) -> list[int]:
    """The next smaller and the next larger value."""
    below, above = (
        sorted(other for other in values if other < value),
        sorted(other for other in values if other > value),
    )
    return below[-1:] + above[:1]
