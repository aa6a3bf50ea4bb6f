"""Bytes of the buffers that all units of a stage share: results that forwards do not keep, those that backwards
recompute inside, and copies of a prefix.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from penstock.core.layout import Precision, Remade, prefix_bytes
from penstock.core.model import ModelSpec, UnitKind
from penstock.core.remaking import Remakes, remade_of
from penstock.core.scratch import scratch_bytes, segment_bytes
from penstock.core.sharding import Sharding
from penstock.planner.candidate import Candidate
from penstock.planner.order import INPUT_GRADIENT, Order
from penstock.planner.problem import Problem
from penstock.planner.stagecost import UNIT_KINDS, Integers, first_like, unit_counts
from penstock.planner.work import MOST_BYTES


def prefix_table(problem: Problem, candidate: Candidate) -> Integers:
    """[stages]: `prefix_bytes`, on stages with attention."""
    mesh, model = candidate.mesh, problem.model
    shapes = [(mesh.microbatch, candidate.slices)]
    if mesh.remainder:
        shapes.append((mesh.remainder, candidate.remainder_slices))
    sharding = problem.sharding(mesh.tp)
    needed_bytes = max(prefix_bytes(model, problem.precision, *shape, sharding) for shape in shapes)
    has_attention = unit_counts(model, candidate.stages)[:, UNIT_KINDS.index(UnitKind.ATTENTION)] > 0
    table: Integers = has_attention * np.int64(min(needed_bytes, MOST_BYTES))
    return table


def scratch_table(problem: Problem, candidate: Candidate, order: Order | None = None) -> Integers:
    """[stages]: bytes of the buffers that a forward of the longest slice does not keep (`penstock.core.scratch`), or if
    that is more, of those that a backward of ``order`` recomputes inside.
    """
    table = _forward_table(problem, candidate)
    if order is not None and any(candidate.recompute):
        inside = order.recomputes_inside()
        is_split = (order.kinds == INPUT_GRADIENT)[inside].astype(np.int64)
        longest = np.zeros((2, len(candidate.stages), 2), dtype=np.int64)
        lengths, is_last = _lengths(candidate)
        columns = order.columns[inside]
        np.maximum.at(longest, (is_split, order.stages[inside], is_last[columns]), lengths[columns])
        _raise_to_inside(table, problem, candidate, longest)
    return table


def split_scratch_table(problem: Problem, candidate: Candidate) -> Integers:
    """`scratch_table` for any order in which every I recomputes inside."""
    table = _forward_table(problem, candidate)
    lengths, is_last = _lengths(candidate)
    longest = np.zeros((2, len(candidate.stages), 2), dtype=np.int64)
    longest[1] = [lengths[is_last == part].max(initial=0) for part in (0, 1)]
    _raise_to_inside(table, problem, candidate, longest)
    return table


def _lengths(candidate: Candidate) -> tuple[Integers, Integers]:
    """[columns]: tokens of each slice, and 1 for those of a smaller last micro-batch."""
    lengths = np.array([*candidate.slices, *candidate.remainder_slices], dtype=np.int64)
    return lengths, (np.arange(len(lengths)) >= len(candidate.slices)).astype(np.int64)


def _raise_to_inside(table: Integers, problem: Problem, candidate: Candidate, longest: Integers) -> None:
    """Raise ``table`` to the bytes of backwards that recompute inside. Only the ``longest`` slices count, since bytes
    grow with tokens: [I or B, stages, usual or smaller last micro-batch], in tokens, 0 for none.
    """
    mesh, model, sharding = candidate.mesh, problem.model, problem.sharding(candidate.mesh.tp)
    for split, number, part in np.argwhere(longest).tolist():
        if not candidate.recompute[number]:
            continue
        stage = candidate.stages[number]
        shape = ((mesh.microbatch, mesh.remainder)[part], int(longest[split, number, part]))
        remade = remade_of(model, stage, candidate.recompute[number])
        place = (first_like(model, stage), *shape, sharding, remade)
        needed_bytes = _segment_bytes(model, problem.precision, *place, is_split=bool(split))
        table[number] = max(table[number], min(needed_bytes, MOST_BYTES))


@functools.lru_cache(maxsize=65_536)
def _segment_bytes(
    model: ModelSpec,
    precision: Precision,
    stage: tuple[int, int],
    batch: int,
    tokens: int,
    sharding: Sharding,
    remade: Remade,
    *,
    is_split: bool,
) -> int:
    return segment_bytes(model, precision, *stage, batch, tokens, sharding, remade, is_split=is_split)


def _forward_table(problem: Problem, candidate: Candidate) -> Integers:
    mesh, model = candidate.mesh, problem.model
    shapes = [(mesh.microbatch, max(candidate.slices))]
    if mesh.remainder:
        shapes.append((mesh.remainder, max(candidate.remainder_slices)))
    sharding = problem.sharding(mesh.tp)
    table = np.zeros(len(candidate.stages), dtype=np.int64)
    for number, (stage, remakes) in enumerate(zip(candidate.stages, candidate.recompute, strict=True)):
        if remakes:
            stage, remade = _shortest_like(model, stage, remakes)
            table[number] = max(
                min(_scratch_bytes(model, problem.precision, stage, *shape, sharding, remade), MOST_BYTES)
                for shape in shapes
            )
    return table


def _shortest_like(model: ModelSpec, stage: tuple[int, int], remakes: Remakes) -> tuple[tuple[int, int], Remade]:
    """A shorter stage with equal scratch, since a forward runs its units one after the other: layers with the same
    recomputation as an earlier one are left out. The last units keep their place. Returned with its recomputation.
    """
    first, stop = first_like(model, stage)
    remade = remade_of(model, (first, stop), remakes)
    if first == 0 or stop > model.first_head_unit:
        return (first, stop), remade
    layers = [remade[place : place + 2] for place in range(0, len(remade), 2)]
    num_last = 1 + len(layers[-1]) % 2
    distinct = [*dict.fromkeys(layers[:-num_last]), *layers[-num_last:]]
    shortest = tuple(itertools.chain.from_iterable(distinct))
    return (first, first + len(shortest)), shortest


@functools.lru_cache(maxsize=65_536)
def _scratch_bytes(
    model: ModelSpec,
    precision: Precision,
    stage: tuple[int, int],
    batch: int,
    tokens: int,
    sharding: Sharding,
    remade: Remade,
) -> int:
    return scratch_bytes(model, precision, *stage, batch, tokens, sharding, remade)
