"""Seconds of recomputation: what R of a unit does, as a part of its F.

R runs the operations that make what the unit saves again (`penstock.core.layout.remaking`), not all of F: a whole head
keeps nothing, a part of a divided one makes its logits again but not their product with its rows, which is half of F,
and no backward reads the output of the last unit before the head or before the stage's end. A profile measures whole
passes, so an operation counts as its share of the pass's FLOPs; norms and activations have none. So R is priced a
little low where it leaves out the output product, and exactly where it does all that F does.

Example, llama with h = 4096, f = 11008, a slice of 1,024 tokens without prefix: the output product is 0.33 of the MLP's
FLOPs, and 0.24 of those of an attention unit whose projections are 12,288 wide.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import zip_longest

import numpy as np

from penstock.core.layout import NOTHING_REMADE, Operation, Remade, remaking, unit_graph
from penstock.core.model import ModelSpec, UnitKind, attention_flops, linear_flops_per_token
from penstock.core.schedule import Kind
from penstock.planner.cost import CostModel
from penstock.planner.nanoseconds import whole_nanoseconds
from penstock.planner.stagecost import Integers, prefixes
from penstock.planner.work import Floats, Work


def operation_flops(spec: ModelSpec, kind: UnitKind, operation: Operation, work: Work) -> Floats:
    """Forward FLOPs of one operation of an attention unit or an MLP."""
    if operation is Operation.ATTEND:
        return attention_flops(spec, 1) * work.pairs
    falling = 2 * spec.hidden * (spec.hidden if kind is UnitKind.ATTENTION else spec.ffn_hidden)
    per_token = {Operation.PROJECT: linear_flops_per_token(spec, kind) - falling, Operation.OUTPUT: falling}
    return per_token.get(operation, 0) * work.tokens


def remake_seconds(
    cost: CostModel, spec: ModelSpec, kind: UnitKind, work: Work, operations: Collection[Operation]
) -> Floats:
    """Seconds of some of the operations of a unit's F."""
    everything = remaking(spec, kind)
    if not operations:
        return np.zeros(work.tokens.shape)
    seconds = cost.unit_seconds(kind, Kind.F, work)
    if len(operations) == len(everything):
        return seconds
    total = sum(operation_flops(spec, kind, operation, work) for operation in everything)
    wanted = sum(operation_flops(spec, kind, operation, work) for operation in operations)
    return seconds * wanted / total


def remake_until_ns(
    cost: CostModel,
    spec: ModelSpec,
    stage: tuple[int, int],
    slices: tuple[int, ...],
    batch: int,
    remade: Remade = NOTHING_REMADE,
) -> Integers:
    """[units + 1, slices]: nanoseconds of making again what the first so many units of a stage save."""
    work = Work.of(batch, slices, prefixes(slices))
    units = [unit for unit in spec.units[slice(*stage)] if unit_graph(spec, unit.kind, 1, 1)]
    rows = [np.zeros(len(slices))]
    for place, (unit, again) in enumerate(zip_longest(units, remade[: len(units)], fillvalue=frozenset()), start=1):
        if unit.kind is UnitKind.HEAD:
            rows.append(rows[-1] + (cost.unit_seconds(unit.kind, Kind.F, work) / 2 if again else 0))
            continue
        operations = tuple(each for each in remaking(spec, unit.kind, with_output=place < len(units)) if each in again)
        rows.append(rows[-1] + remake_seconds(cost, spec, unit.kind, work, operations))
    until: Integers = whole_nanoseconds(np.stack(rows))
    return until
