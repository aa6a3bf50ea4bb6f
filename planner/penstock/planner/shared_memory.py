"""Bytes of the buffers that all units of a stage share: results that forwards do not keep, those that backwards
recompute inside, and copies of a prefix.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

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
    places = _inside_places(order) if order is not None and any(candidate.recompute) else []
    return _with_inside(problem, candidate, places)


def split_scratch_table(problem: Problem, candidate: Candidate) -> Integers:
    """`scratch_table` for any order in which every I recomputes inside."""
    num_columns = len(candidate.slices) + len(candidate.remainder_slices)
    places = itertools.product([INPUT_GRADIENT], range(len(candidate.stages)), range(num_columns))
    return _with_inside(problem, candidate, places)


def _with_inside(problem: Problem, candidate: Candidate, places: Iterable[Sequence[int]]) -> Integers:
    table = _forward_table(problem, candidate)
    for kind, number, column in places:
        if candidate.recompute[number]:
            table[number] = max(table[number], _inside_bytes(problem, candidate, kind, number, column))
    return table


def _inside_places(order: Order) -> list[list[int]]:
    """Kind, stage and column of backwards without an R, each once."""
    places = np.stack([order.kinds, order.stages, order.columns], axis=1)[order.recomputes_inside()]
    distinct: list[list[int]] = np.unique(places, axis=0).tolist()
    return distinct


def _inside_bytes(problem: Problem, candidate: Candidate, kind: int, number: int, column: int) -> int:
    mesh, model, is_last = candidate.mesh, problem.model, column >= len(candidate.slices)
    tokens = candidate.remainder_slices[column - len(candidate.slices)] if is_last else candidate.slices[column]
    shape = (mesh.remainder if is_last else mesh.microbatch, tokens)
    remade = remade_of(model, candidate.stages[number], candidate.recompute[number])
    place = (candidate.stages[number], *shape, problem.sharding(mesh.tp), remade)
    return min(_segment_bytes(model, problem.precision, *place, is_split=kind == INPUT_GRADIENT), MOST_BYTES)


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
