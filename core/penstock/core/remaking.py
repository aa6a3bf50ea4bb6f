"""Recomputation as data: what the units of a stage do not keep from forward to backward, but make again by R.

A unit's buffers are made by a few operations (`penstock.core.layout.unit_graph`). A `Remake` names some of them: their
buffers are given up after F and made again by R, in the order of the operations, from what was kept. All else is kept,
so every set of operations can run again. Keys and values always stay, since later slices read them.

Example: {norm, activate} of an MLP gives up the norm's output, its statistics and the activated values, and makes them
again without a product of matrices (selective recomputation). All five operations of both units of a block leave
nothing between a stage's input and its output (full recomputation).

What a stage's units make again is written per kind of unit: units of a kind are alike, so it matters how many of them
do, and not which.
"""

from __future__ import annotations

import enum
import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from penstock.core.errors import UserError
from penstock.core.layout import NOTHING_REMADE, Operation, Operations, Remade, remaking
from penstock.core.manifest import Manifest, read_value, require_limits
from penstock.core.model import ModelSpec, UnitKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Remake(Manifest):
    """The next ``count`` units of a kind in a stage run these ``operations`` again; those that none names, nothing."""

    unit: UnitKind
    count: int
    operations: tuple[Operation, ...]

    def __post_init__(self) -> None:
        require_limits(self)


Remakes = tuple[Remake, ...]
"""Of a stage."""


class Recompute(enum.StrEnum):
    """What all units of layers make again, where a job pins it by a name."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Those that run again. Selective ones have no product of matrices: they are cheap for the bytes they make."""
        return {"none": (), "selective": SELECTIVE, "full": tuple(Operation)}[self.value]


SELECTIVE = (Operation.NORM, Operation.ACTIVATE)


RecomputePin = Recompute | tuple[Remakes, ...]
"""What a job pins: a name, or for every stage what it makes again, as a plan says it."""


def pinned_operations(pin: RecomputePin | None) -> tuple[Operation, ...]:
    """The operations that some unit runs again by a pin; none without one."""
    if isinstance(pin, Recompute):
        return pin.operations
    named = {operation for remakes in pin or () for remake in remakes for operation in remake.operations}
    return tuple(operation for operation in Operation if operation in named)


def read_recompute(value: Any, path: str) -> RecomputePin | None:
    """A job's pin; earlier versions knew true and false."""
    if isinstance(value, bool):
        return Recompute.FULL if value else Recompute.NONE
    annotation = tuple[Remakes, ...] if isinstance(value, list | tuple) else Recompute | None
    pin: RecomputePin | None = read_value(annotation, value, path)
    return pin


def full_remakes(spec: ModelSpec, stage: tuple[int, int]) -> Remakes:
    """Everything that R can make again of a stage of units [first, stop), of the embedding and of parts of the head as
    well.
    """
    return _uniform(spec, stage, tuple(Operation), tuple(UnitKind))


def uniform_remakes(spec: ModelSpec, stage: tuple[int, int], operations: Sequence[Operation]) -> Remakes:
    """All units of layers of the stage [first, stop) run those of the ``operations`` again that they have."""
    return _uniform(spec, stage, operations, OF_LAYERS)


OF_LAYERS = (UnitKind.ATTENTION, UnitKind.MLP)
"""The units of which a job's pin and the planner's choice are: others keep little, or have a product to repeat."""


def _uniform(
    spec: ModelSpec, stage: tuple[int, int], operations: Sequence[Operation], kinds: Sequence[UnitKind]
) -> Remakes:
    found = []
    units = [unit for unit in spec.units[slice(*stage)] if unit.kind in kinds]
    for kind in dict.fromkeys(unit.kind for unit in units):
        own = tuple(each for each in _operations_of(spec, kind) if each in operations)
        if own:
            found.append(Remake(unit=kind, count=sum(unit.kind is kind for unit in units), operations=own))
    return tuple(found)


@functools.lru_cache(maxsize=256)
def _operations_of(spec: ModelSpec, kind: UnitKind) -> tuple[Operation, ...]:
    """Those of any unit of the kind: of a head's parts only the first has a norm."""
    parts = range(spec.head_parts if kind is UnitKind.HEAD else 1)
    own = {operation for part in parts for operation in remaking(spec, kind, part=part)}
    return tuple(operation for operation in Operation if operation in own)


@functools.lru_cache(maxsize=4096)
def remade_of(spec: ModelSpec, stage: tuple[int, int], remakes: Remakes) -> Remade:
    """What each unit of the stage [first, stop) runs again."""
    if not remakes:
        return NOTHING_REMADE
    left = [[each.unit, each.count, frozenset(each.operations)] for each in remakes]
    return tuple(_next(left, unit.kind) for unit in spec.units[slice(*stage)])


def _next(left: list[list[object]], kind: UnitKind) -> Operations:
    """The operations of the next unit of a kind; counts it."""
    for each in left:
        unit, count, operations = each
        if unit is kind and isinstance(count, int) and count > 0 and isinstance(operations, frozenset):
            each[1] = count - 1
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
    """What the stage [first, stop) makes again, for people: ``norms of 2 of 4 attention units, outputs of the MLP``."""
    units = spec.units[slice(*stage)]
    phrases = []
    for kind, group in groupby(remakes, key=lambda each: each.unit):
        num_units = sum(unit.kind is kind for unit in units)
        parts = [f"{operations_text(spec, each)} of {_count_text(each.count, num_units)}" for each in group]
        phrases.append(f"{' and '.join(parts)} {_UNIT_NAMES[kind][num_units > 1]}")
    return ", ".join(phrases)


def operations_text(spec: ModelSpec, remake: Remake) -> str:
    """The operations of a remake, for people: ``norms and projections``, or ``everything``."""
    if set(remake.operations) == set(_operations_of(spec, remake.unit)):
        return "everything"
    names = [_OPERATION_NAMES[each] for each in Operation if each in remake.operations]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _count_text(count: int, num_units: int) -> str:
    if count < num_units:
        return f"{count} of {num_units}"
    return {1: "the", 2: "both"}.get(num_units, f"all {num_units}")


def check_remakes(spec: ModelSpec, stage: tuple[int, int], remakes: Remakes, where: str) -> None:
    """Raise `UserError` unless the stage [first, stop) has these units, and they the operations."""
    there = Counter(unit.kind for unit in spec.units[slice(*stage)]) if remakes else Counter[UnitKind]()
    named = Counter[UnitKind]()
    for i, remake in enumerate(remakes):
        place = f"{where}[{i}]"
        named[remake.unit] += remake.count
        known = _operations_of(spec, remake.unit)
        unknown = [each.value for each in remake.operations if each not in known]
        if unknown or not remake.operations:
            what = f"{remake.unit.value} units do not run {unknown[0]} again" if unknown else "names nothing"
            remedy = f"name some of: {', '.join(known)}" if known else "leave it out"
            raise UserError(what=what, where=f"{place}.operations", remedy=remedy)
        if len(set(remake.operations)) < len(remake.operations):
            raise UserError(what="names an operation twice", where=f"{place}.operations", remedy="name each once")
        if named[remake.unit] > there[remake.unit]:
            raise UserError(
                what=f"{named[remake.unit]} {remake.unit.value} units of a stage that has {there[remake.unit]}",
                where=f"{place}.count",
                remedy=f"name at most {there[remake.unit]} together",
            )
