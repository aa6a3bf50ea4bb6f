"""Recomputation as data: the buffers that the units of a stage do not keep from forward to backward, but recompute by
R.

A unit's buffers are made by a few operations (`penstock.core.layout.unit_graph`). A `Remake` names some of them: their
buffers are given up after F and made again by R, in the order of the operations, from the kept ones. All else is kept,
so every set of operations can run again. Keys and values are always kept, since later slices read them.

Example: {norm, activate} of an MLP gives up the norm's output, its statistics and the activated values, and recomputes
them without a product of matrices (selective recomputation). All operations of both units of a block together leave
only keys and values between a stage's input and its output (full recomputation).

The recomputation of a stage is written per kind of unit: units of a kind are equal, so only the number of those that
recompute matters.
"""

from __future__ import annotations

import enum
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

from penstock.core.errors import UserError
from penstock.core.layout import NOTHING_REMADE, Operation, Operations, Remade, remaking
from penstock.core.limits import MOST_LAYERS, MOST_OPERATIONS, list_of, one_to
from penstock.core.manifest import Checked, read_value
from penstock.core.model import ModelSpec, UnitKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Remake(Checked):
    """The next ``count`` units of a kind in a stage run these ``operations`` again; units without an entry, none."""

    unit: UnitKind
    count: Annotated[int, one_to(2 * MOST_LAYERS + 2)]
    operations: Annotated[tuple[Operation, ...], list_of(MOST_OPERATIONS)]


Remakes = tuple[Remake, ...]
"""The recomputation of a stage."""


class Recompute(enum.StrEnum):
    """Recomputation of all units of layers, where a job pins it by a name."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"

    @property
    def operations(self) -> tuple[Operation, ...]:
        """The operations that run again. Selective ones have no product of matrices, so they cost little for their
        bytes.
        """
        return {"none": (), "selective": SELECTIVE, "full": tuple(Operation)}[self.value]


SELECTIVE = (Operation.NORM, Operation.ACTIVATE)


RecomputePin = Recompute | tuple[Remakes, ...]
"""A job's pin: a name, or the recomputation of every stage, as in a plan."""


def pinned_operations(pin: RecomputePin | None) -> tuple[Operation, ...]:
    """The operations that any unit runs again by a pin; empty without one."""
    if isinstance(pin, Recompute):
        return pin.operations
    named = {operation for remakes in pin or () for remake in remakes for operation in remake.operations}
    return tuple(operation for operation in Operation if operation in named)


def read_recompute(value: Any, path: str) -> RecomputePin | None:
    """A job's pin; earlier versions had true and false."""
    if isinstance(value, bool):
        return Recompute.FULL if value else Recompute.NONE
    annotation = tuple[Remakes, ...] if isinstance(value, list | tuple) else Recompute | None
    pin: RecomputePin | None = read_value(annotation, value, path)
    return pin


def full_remakes(spec: ModelSpec, stage: tuple[int, int]) -> Remakes:
    """All recomputation that a stage of units [first, stop) can do, including the embedding and parts of the head."""
    return _uniform(spec, stage, tuple(Operation), tuple(UnitKind))


def uniform_remakes(spec: ModelSpec, stage: tuple[int, int], operations: Sequence[Operation]) -> Remakes:
    """All units of layers of the stage [first, stop) run again those of the ``operations`` that they have."""
    return _uniform(spec, stage, operations, OF_LAYERS)


OF_LAYERS = (UnitKind.ATTENTION, UnitKind.MLP)
"""Units that a job's pin and the planner's choice apply to: others keep little, or would repeat a product."""


def _uniform(
    spec: ModelSpec, stage: tuple[int, int], operations: Sequence[Operation], kinds: Sequence[UnitKind]
) -> Remakes:
    remakes = []
    units = [unit for unit in spec.units[slice(*stage)] if unit.kind in kinds]
    for kind in dict.fromkeys(unit.kind for unit in units):
        own_operations = tuple(operation for operation in _operations_of(spec, kind) if operation in operations)
        if own_operations:
            remakes.append(Remake(unit=kind, count=sum(unit.kind is kind for unit in units), operations=own_operations))
    return tuple(remakes)


@functools.lru_cache(maxsize=256)
def _operations_of(spec: ModelSpec, kind: UnitKind) -> tuple[Operation, ...]:
    """The operations of any unit of the kind: of a head's parts only the first has a norm."""
    parts = range(spec.head_parts if kind is UnitKind.HEAD else 1)
    recomputable = {operation for part in parts for operation in remaking(spec, kind, part=part)}
    return tuple(operation for operation in Operation if operation in recomputable)


@functools.lru_cache(maxsize=4096)
def remade_of(spec: ModelSpec, stage: tuple[int, int], remakes: Remakes) -> Remade:
    """The operations that each unit of the stage [first, stop) runs again."""
    if not remakes:
        return NOTHING_REMADE
    remaining = [[remake.unit, remake.count, frozenset(remake.operations)] for remake in remakes]
    return tuple(_next_operations(remaining, unit.kind) for unit in spec.units[slice(*stage)])


def _next_operations(remaining: list[list[object]], kind: UnitKind) -> Operations:
    """The operations of the next unit of a kind, which is counted off."""
    for entry in remaining:
        unit, count, operations = entry
        if unit is kind and isinstance(count, int) and count > 0 and isinstance(operations, frozenset):
            entry[1] = count - 1
            return operations
    return frozenset()


_OPERATION_NAMES = {
    Operation.EMBED: "outputs",
    Operation.NORM: "norms",
    Operation.PROJECT: "projections",
    Operation.ATTEND: "attention",
    Operation.ACTIVATE: "activation functions",
    Operation.OUTPUT: "outputs",
}
_UNIT_NAMES = {
    UnitKind.EMBEDDING: ("embedding", "embeddings"),
    UnitKind.ATTENTION: ("attention unit", "attention units"),
    UnitKind.MLP: ("MLP", "MLPs"),
    UnitKind.HEAD: ("part of the head", "parts of the head"),
}


def remakes_text(spec: ModelSpec, stage: tuple[int, int], remakes: Remakes) -> str:
    """Text of the recomputation of the stage [first, stop): ``norms of 2 of 4 attention units, outputs of the MLP``."""
    units = spec.units[slice(*stage)]
    phrases = []
    for kind, group in groupby(remakes, key=lambda remake: remake.unit):
        num_units = sum(unit.kind is kind for unit in units)
        parts = [f"{operations_text(spec, remake)} of {_count_text(remake.count, num_units)}" for remake in group]
        phrases.append(f"{' and '.join(parts)} {_UNIT_NAMES[kind][num_units > 1]}")
    return ", ".join(phrases)


def operations_text(spec: ModelSpec, remake: Remake) -> str:
    """Text of the operations of a remake: ``norms and projections``, or ``everything``."""
    if set(remake.operations) == set(_operations_of(spec, remake.unit)):
        return "everything"
    names = [_OPERATION_NAMES[operation] for operation in Operation if operation in remake.operations]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _count_text(count: int, num_units: int) -> str:
    if count < num_units:
        return f"{count} of {num_units}"
    return {1: "the", 2: "both"}.get(num_units, f"all {num_units}")


def check_remakes(spec: ModelSpec, stage: tuple[int, int], remakes: Remakes, where: str) -> None:
    """Raise `UserError` unless the stage [first, stop) has these units, and every entry names operations of its kind of
    unit, each once.
    """
    unit_counts = Counter(unit.kind for unit in spec.units[slice(*stage)]) if remakes else Counter[UnitKind]()
    named = Counter[UnitKind]()
    for i, remake in enumerate(remakes):
        place = f"{where}[{i}]"
        named[remake.unit] += remake.count
        known = _operations_of(spec, remake.unit)
        unknown = [operation.value for operation in remake.operations if operation not in known]
        if unknown or not remake.operations:
            what = f"{remake.unit.value} units do not run {unknown[0]} again" if unknown else "names nothing"
            remedy = f"name some of: {', '.join(known)}" if known else "leave it out"
            raise UserError(what=what, where=f"{place}.operations", remedy=remedy)
        if len(set(remake.operations)) < len(remake.operations):
            raise UserError(what="names an operation twice", where=f"{place}.operations", remedy="name each once")
        if named[remake.unit] > unit_counts[remake.unit]:
            raise UserError(
                what=f"{named[remake.unit]} {remake.unit.value} units of a stage that has {unit_counts[remake.unit]}",
                where=f"{place}.count",
                remedy=f"name at most {unit_counts[remake.unit]} together",
            )
