"""Lowering: from a Schedule, which orders the compute, to a Program, which lists all instructions of every rank.

The passes add, in turn: order, transfers, reductions and step, slots, frees, arena.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from penstock.core.errors import UserError
from penstock.core.layout import NOTHING_REMADE, Precision, Remade, SlotKind, stage_slot_bytes
from penstock.core.model import ModelSpec
from penstock.core.program import Program, RankProgram, Slot, SlotSizes
from penstock.core.roles import Cell, Place, Roles, SlotName, slot_table
from penstock.core.schedule import Action, Kind, Schedule
from penstock.core.sharding import WHOLE, Sharding
from penstock.planner.passes.arena import place
from penstock.planner.passes.draft import Draft
from penstock.planner.passes.frees import add_frees
from penstock.planner.passes.reductions import Buckets, add_reductions, reductions_of
from penstock.planner.passes.rounds import find_rounds
from penstock.planner.passes.slots import add_slots
from penstock.planner.passes.transfers import add_transfers

Transients = Mapping[tuple[Kind, int, int], int]
"""Bytes that an action needs only while it runs, by kind, stage and column (`Schedule.column_of`); 0 if missing."""

NO_TRANSIENTS: Transients = MappingProxyType({})


SlotExtents = Callable[[SlotKind, int, int], Sequence[int]]
"""Bytes of a slot's extents, by the same arguments as `SlotSizes`, which has their sum."""


@dataclass(frozen=True, slots=True)
class Remainder:
    """A last micro-batch that is smaller than the others: the bytes of its slots, the lengths of its slices in tokens,
    and the extents of its slots.
    """

    sizes: SlotSizes
    slices: tuple[int, ...]
    extents: SlotExtents | None = None


def slot_sizes(
    spec: ModelSpec,
    precision: Precision,
    stages: Sequence[tuple[int, int]],
    microbatch: int,
    sharding: Sharding = WHOLE,
    remade: Sequence[Remade] = (),
) -> SlotSizes:
    """Bytes of the slots on one shard, for stages of units [first, stop) and micro-batches of ``microbatch`` sequences;
    ``remade`` has the recomputed operations of every stage's units, if any.
    """

    def num_bytes(kind: SlotKind, stage: int, tokens: int) -> int:
        first, stop = stages[stage]
        stage_remade = remade[stage] if remade else NOTHING_REMADE
        return stage_slot_bytes(spec, precision, first, stop, kind, microbatch, tokens, sharding, stage_remade)

    return num_bytes


def lower(
    schedule: Schedule,
    sizes: SlotSizes,
    *,
    slices: tuple[int, ...],
    extents: SlotExtents | None = None,
    remainder: Remainder | None = None,
    receive_ahead: int,
    late_receives: bool = False,
    prefix_by_slice: bool = False,
    dp: bool,
    tp: bool = False,
    tie: tuple[int, ...] = (),
    zero: int = 0,
    buckets: Buckets = (),
    num_units: Sequence[int] = (),
    transients: Transients = NO_TRANSIENTS,
    keep_pairs: bool = False,
) -> Program:
    """The Program of ``schedule`` for slices of the given lengths in tokens, and a ``remainder`` if it has one. Slots
    may be divided into ``extents``; by default each is one.

    At most ``receive_ahead`` receives of a channel are posted, with ``late_receives`` no earlier than their messages
    are due (`penstock.planner.passes.transfers`). With ``prefix_by_slice`` every slice has its own ``kv`` and ``dkv``.
    ``dp``, ``tp`` and ``tie`` (stages) select the reductions, ``zero`` the gathers of parameters, and ``buckets`` the
    parts in which a stage is reduced (`penstock.planner.passes.reductions`). ``num_units`` of every stage keep
    something that R recomputes (default: as many as the parts of the schedule's R name). With ``keep_pairs`` a pair of
    overlapped actions is one instruction. The children of all other overlaps run one after the other.

    Raises `UserError` if the schedule is incomplete or cannot run in its order.
    """
    own_slices = remainder.slices if remainder else ()
    _check_counts(schedule, slices, own_slices, receive_ahead)
    ordered = find_rounds(schedule, num_units, keep_pairs=keep_pairs)
    owners = ordered.stage_ranks
    reductions = reductions_of(owners, dp=dp, tp=tp, tie=tie)
    usual_slots = last_slots = _Slots.of(owners, sizes, slices, extents, prefix_by_slice)
    if remainder:
        last_slots = _Slots.of(owners, remainder.sizes, remainder.slices, remainder.extents, prefix_by_slice)
    slots_of = partial(_last_or_usual, schedule, last_slots, usual_slots)
    drafts = [
        add_reductions(row, rank, owners, reductions, late=late_receives, gathers=zero > 0, buckets=buckets)
        for rank, row in enumerate(add_transfers(ordered, receive_ahead, late_receives))
    ]
    lay_out = partial(_rank_program, slots_of, ordered.recomputed, transients, schedule.column_of)
    return Program(
        ranks=tuple(lay_out(rank, row) for rank, row in enumerate(drafts)),
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        slice_capacities=slices,
        receive_ahead=receive_ahead,
        late_receives=late_receives,
        reductions=reductions,
        remainder_capacities=own_slices,
        zero=zero,
        prefix_by_slice=prefix_by_slice,
    )


def _last_or_usual(schedule: Schedule, last_slots: _Slots, usual_slots: _Slots, microbatch: int) -> _Slots:
    return last_slots if schedule.is_remainder(microbatch) else usual_slots


def _check_counts(
    schedule: Schedule, slices: Sequence[int], remainder_slices: Sequence[int], receive_ahead: int
) -> None:
    for count, lengths in ((schedule.num_slices, slices), (schedule.num_remainder_slices, remainder_slices)):
        if count != len(lengths):
            raise UserError(what=f"has {count} slices, but {len(lengths)} lengths are given", where="schedule")
    if receive_ahead < 1:
        raise UserError(what=f"{receive_ahead} is not positive", where="receiveAhead", remedy="write at least 1")


@dataclass(frozen=True, slots=True)
class _Slots:
    """Slots of one micro-batch: the actions that use them, their bytes, and those of their extents."""

    roles: Roles
    table: Mapping[Place, int]
    slices: Sequence[int]
    extents: SlotExtents | None

    @classmethod
    def of(
        cls,
        stage_ranks: Sequence[int],
        sizes: SlotSizes,
        slices: Sequence[int],
        extents: SlotExtents | None,
        prefix_by_slice: bool,
    ) -> _Slots:
        table = slot_table(sizes, len(stage_ranks), slices, prefix_by_slice=prefix_by_slice)
        return cls(Roles(stage_ranks, len(slices), table), table, slices, extents)

    def extents_of(self, name: SlotName) -> Sequence[int]:
        kind, stage, _, part = name
        num_bytes = self.table.get((kind, stage, part), 0)
        if self.extents is None or not num_bytes:
            return (num_bytes,)
        return self.extents(kind, stage, sum(self.slices) if part is None else self.slices[part])


def _rank_program(
    slots_of: Callable[[int], _Slots],
    recomputed: Set[Cell],
    transients: Transients,
    column_of: Callable[[Action], int],
    rank: int,
    drafts: Sequence[Draft],
) -> RankProgram:
    """The drafts with slots, frees and the arena."""
    names = add_slots(drafts, lambda microbatch: slots_of(microbatch).roles, recomputed)
    instructions, lives = add_frees(drafts, len(names), transients, column_of)
    places, arena_bytes = place(names, lives, [slots_of(name[2]).extents_of(name) for name in names])
    slots = [Slot(*name, extents) for name, extents in zip(names, places, strict=True)]
    return RankProgram(rank=rank, instructions=instructions, slots=tuple(slots), arena_bytes=arena_bytes)
