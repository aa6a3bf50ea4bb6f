"""Chooses which units are in memory during a measurement, so that it needs no more memory than a plan may use.

The best choice is embedding, `MOST_BLOCKS` blocks and head, which run in turn, so that a unit finds the caches as cold
as in training. A rank of the plan may have memory for a much smaller part of a large model. Then fewer blocks are
measured at a time, and finally each kind of unit by itself. A rank that cannot hold a single unit cannot hold a stage
either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.core.errors import UserError
from penstock.core.layout import (
    LONG_SEQUENCE,
    Precision,
    SlotKind,
    prefix_bytes,
    stage_parameters,
    stage_slot_bytes,
)
from penstock.core.model import ModelSpec, Unit, UnitKind
from penstock.core.schedule import Kind
from penstock.core.sharding import WHOLE, Sharding, exchange_bytes, unit_collectives
from penstock.core.units import format_bytes
from penstock.trainer.profiling.grid import Point
from penstock.trainer.units.workspace import workspace_bytes

MOST_BLOCKS = 4

MOST_SLICES = 64
"""Largest number of slices that a prefix is divided into; plans rarely have more."""

_WHOLE_SEQUENCE = (SlotKind.KEYS_VALUES, SlotKind.KEYS_VALUES_GRADIENTS)
_PARTS_OF_THE_HEAD = (((UnitKind.HEAD,),),)
_GROUPINGS: tuple[tuple[tuple[UnitKind, ...], ...], ...] = (
    ((UnitKind.EMBEDDING, UnitKind.ATTENTION, UnitKind.MLP, UnitKind.HEAD),),
    ((UnitKind.EMBEDDING,), (UnitKind.ATTENTION, UnitKind.MLP), (UnitKind.HEAD,)),
    ((UnitKind.EMBEDDING,), (UnitKind.ATTENTION,), (UnitKind.MLP,), (UnitKind.HEAD,)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Measurements of a shard of a model's units: times at the points ``timed``, memory at the points ``weighed``.

    For a model with a divided head only the parts of the head are measured.
    """

    model: ModelSpec
    precision: Precision
    sequence_length: int
    timed: tuple[Point, ...]
    weighed: tuple[Point, ...]
    sharding: Sharding = WHOLE

    def slot_shape(self, unit: Unit, slot: SlotKind, point: Point) -> tuple[int, int, SlotKind, int, int, Sharding]:
        """First unit, end of the units, slot, batch, tokens and sharding of a slot of a one-unit stage."""
        tokens = self.sequence_length if slot in _WHOLE_SEQUENCE else point.length
        return unit.index, unit.index + 1, slot, point.batch, tokens, self.sharding

    def slot_bytes(self, unit: Unit, slot: SlotKind, point: Point) -> int:
        """Bytes of one slot."""
        return stage_slot_bytes(self.model, self.precision, *self.slot_shape(unit, slot, point))

    def workspace_bytes(self, unit: Unit, point: Point) -> int:
        """Bytes of the workspace that a unit declares."""
        return workspace_bytes(self.model, self.precision, unit.index, unit.index + 1, point.tokens, self.sharding)

    @property
    def prefix_by_slice(self) -> bool:
        """Whether slices have their own keys and values, as in a plan for so long sequences."""
        return self.sequence_length >= LONG_SEQUENCE

    def slices_up_to(self, point: Point) -> tuple[int, ...]:
        """Lengths of slices with their own keys and values: the point's own, after a prefix in slices as long, but no
        more than `MOST_SLICES`.
        """
        if not self.prefix_by_slice:
            return (point.prefix + point.length,)
        size = max(point.length, -(-point.prefix // MOST_SLICES))
        whole, rest = divmod(point.prefix, size)
        return (*((rest,) if rest else ()), *(size,) * whole, point.length)

    def prefix_bytes(self, point: Point) -> int:
        """Bytes that attention needs there for its prefix."""
        return prefix_bytes(self.model, self.precision, point.batch, self.slices_up_to(point), self.sharding)

    def exchange_bytes(self, unit: Unit, kind: Kind, point: Point) -> int:
        """Bytes that shards on the host keep for the collectives of one pass of the unit."""
        num_bytes = self.sharding.padded_rows(point.tokens) * self.model.hidden * self.precision.compute_bytes
        parts = self.model.head_parts
        collectives = unit_collectives(unit.kind, kind, self.sharding, head_parts=parts, part=unit.part)
        return max((exchange_bytes(collective, num_bytes, self.sharding.tp) for collective in collectives), default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Units that are in memory at the same time, each as a separate stage, and their workload."""

    units: tuple[Unit, ...]
    load: Workload

    @property
    def one_of_each(self) -> tuple[Unit, ...]:
        """The last unit of each kind, and every part of a head. Memory is measured with these."""
        return tuple({(unit.kind, unit.part): unit for unit in self.units}.values())

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots at the point that needs most."""
        timed = [(self.units_at(point), point) for point in self.load.timed]
        weighed = [(self.one_of_each, point) for point in self.load.weighed]
        return max(
            sum(self.load.slot_bytes(unit, slot, point) for unit in units for slot in SlotKind)
            for units, point in (*timed, *weighed)
        )

    def units_at(self, point: Point) -> tuple[Unit, ...]:
        """The units that are timed at ``point``."""
        return self.one_of_each if point.single else self.units

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace at the point that needs most."""
        points = (*self.load.timed, *self.load.weighed)
        return max(self.load.workspace_bytes(unit, point) for unit in self.one_of_each for point in points)

    @property
    def prefix_bytes(self) -> int:
        """Bytes for the prefix of attention, at the point that needs most."""
        has_attention = any(unit.kind is UnitKind.ATTENTION for unit in self.units)
        points = (*self.load.timed, *self.load.weighed) if has_attention else ()
        return max(map(self.load.prefix_bytes, points), default=0)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of masters, gradients and the weights in the compute type."""
        precision = self.load.precision
        narrow = 0 if precision.compute_bytes == precision.accumulate_bytes else precision.compute_bytes
        tp = self.load.sharding.tp
        elements = sum(stage_parameters(self.load.model, unit.index, unit.index + 1, tp) for unit in self.units)
        return elements * (2 * precision.accumulate_bytes + narrow)

    @property
    def num_bytes(self) -> int:
        """Bytes of parameters, slots, workspace and prefix."""
        return self.parameter_bytes + self.slot_bytes + self.workspace_bytes + self.prefix_bytes


def choose_parts(load: Workload, available_bytes: int) -> tuple[Part, ...]:
    """The parts to measure one after the other, each within ``available_bytes``.

    If a single unit needs more, points with several whole sequences are left out, and the planner extrapolates to them.
    Raises `UserError` if that is not enough.
    """
    groupings = _GROUPINGS if load.model.head_parts == 1 else _PARTS_OF_THE_HEAD
    for kinds in groupings:
        parts = [_largest_part(load, group, available_bytes) for group in kinds]
        chosen = tuple(part for part in parts if part is not None)
        if len(chosen) == len(parts):
            return chosen
    needed = max(min(part.num_bytes for part in _candidates(load, group)) for group in groupings[-1])
    raise UserError(
        what=f"measuring one unit of this model needs {format_bytes(needed)}, memoryPerRank leaves "
        f"{format_bytes(max(available_bytes, 0))}",
        where="spec.resources.memoryPerRank",
        remedy=f"raise it by at least {format_bytes(needed - available_bytes)}, or use a smaller model",
    )


def _largest_part(load: Workload, kinds: tuple[UnitKind, ...], available_bytes: int) -> Part | None:
    return next((part for part in _candidates(load, kinds) if part.num_bytes <= available_bytes), None)


def _candidates(load: Workload, kinds: tuple[UnitKind, ...]) -> Iterator[Part]:
    """Parts with these kinds of units, the preferred one first."""
    for blocks in range(min(load.model.layers, MOST_BLOCKS), 0, -1):
        yield Part(units=_units(load.model, kinds, blocks), load=load)
    if len(kinds) == 1:
        timed = tuple(point for point in load.timed if not point.single)
        weighed = tuple(point for point in load.weighed if point.batch == 1)
        yield Part(units=_units(load.model, kinds, 1), load=dataclasses.replace(load, timed=timed, weighed=weighed))


def _units(model: ModelSpec, kinds: Sequence[UnitKind], blocks: int) -> tuple[Unit, ...]:
    """Units of these kinds. For a divided head the first and the last part: the costs of the others lie between."""
    some = (*model.units[: 1 + 2 * blocks], *dict.fromkeys((model.units[-model.head_parts], model.units[-1])))
    return tuple(unit for unit in some if unit.kind in kinds)
