"""Seconds of recomputation: R of a unit repeats a part of its F.

R runs the operations that a plan names for each unit (`penstock.core.remaking`), a subset of those of its F, whose
seconds add up to F's (`penstock.planner.cost.CostModel.operation_seconds`). So R of a unit costs at most as much as F.
It omits the results that no backward reads: the output of the last unit before the head or before the stage's end. A
whole head keeps nothing and has no R. A part of a divided head recomputes its logits but not their product with its
rows, so its R is half of its F.

Example, llama with h = 4096, f = 11008 in bf16, a slice of 1,024 tokens on an H100: the norm and the activation of an
MLP move 84 MB, which takes 36 us, its three products take 0.5 ms. Recomputing both costs 7 % of F.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from penstock.core.layout import Operation, Remade, remaking
from penstock.core.model import ModelSpec, Unit, UnitKind
from penstock.core.schedule import Kind
from penstock.planner.cost import CostModel
from penstock.planner.nanoseconds import whole_nanoseconds
from penstock.planner.stagecost import Integers, prefixes
from penstock.planner.work import Floats, Work


def operation_seconds(cost: CostModel, spec: ModelSpec, kind: UnitKind, operation: Operation, work: Work) -> Floats:
    """Seconds of one operation that R can run again, of a unit of a kind."""
    if kind is UnitKind.EMBEDDING:
        return cost.unit_seconds(kind, Kind.F, work)
    if kind is not UnitKind.HEAD:
        return cost.operation_seconds(spec, kind, operation, work)
    half = cost.unit_seconds(kind, Kind.F, work) / 2
    normed = np.minimum(cost.operation_seconds(spec, UnitKind.ATTENTION, Operation.NORM, work), half)
    return half - normed if operation is Operation.ACTIVATE else normed


def remake_seconds(
    cost: CostModel, spec: ModelSpec, kind: UnitKind, work: Work, operations: Collection[Operation], part: int = 0
) -> Floats:
    """Seconds of some operations of a unit, which are summed; ``part`` is the index of a part of a divided head."""
    everything = remaking(spec, kind, part=part)
    own = [operation for operation in everything if operation in operations]
    if own and len(own) == len(everything) and kind is not UnitKind.HEAD:
        return cost.unit_seconds(kind, Kind.F, work)
    total = np.zeros(work.tokens.shape)
    for operation in own:
        total = total + operation_seconds(cost, spec, kind, operation, work)
    return total


def remake_until_ns(
    cost: CostModel,
    spec: ModelSpec,
    stage: tuple[int, int],
    slices: tuple[int, ...],
    batch: int,
    remade: Remade,
) -> Integers:
    """[units + 1, slices]: nanoseconds of recomputation of the first n units of a stage, n = 0, 1, ....

    Only units that keep anything count; ``remade`` has the operations of each unit of the stage.
    """
    work = Work.of(batch, slices, prefixes(slices))
    seconds: dict[tuple[UnitKind, int, frozenset[Operation]], Floats] = {}
    rows = [np.zeros(len(slices))]
    for unit, operations in _needed(spec, stage, remade):
        key = unit.kind, unit.part, operations
        if key not in seconds:
            seconds[key] = remake_seconds(cost, spec, unit.kind, work, operations, unit.part)
        rows.append(rows[-1] + seconds[key])
    until: Integers = whole_nanoseconds(np.stack(rows))
    return until


def _needed(spec: ModelSpec, stage: tuple[int, int], remade: Remade) -> list[tuple[Unit, frozenset[Operation]]]:
    """The stage's units that keep anything, each with the recomputed operations that a backward needs."""
    units = [
        (unit, remade[place] if place < len(remade) else frozenset[Operation]())
        for place, unit in enumerate(spec.units[slice(*stage)])
        if remaking(spec, unit.kind, part=unit.part)
    ]
    last = len(units) - 1
    return [
        (unit, operations.intersection(remaking(spec, unit.kind, with_output=place < last, part=unit.part)))
        for place, (unit, operations) in enumerate(units)
    ]
