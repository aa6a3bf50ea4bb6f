"""Lowering: from a Schedule, which orders the compute, to a Program, which says everything that every rank does.

Each pass adds one kind of knowledge: order, transfers, reductions and step, slots, frees, arena.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from penstock.core.errors import UserError
from penstock.core.layout import Precision, SlotKind, stage_slot_bytes
from penstock.core.model import ModelSpec
from penstock.core.program import Program, RankProgram, Slot, SlotSizes
from penstock.core.roles import Place, Roles, SlotName, slot_table
from penstock.core.schedule import Kind, Schedule
from penstock.planner.passes.arena import place
from penstock.planner.passes.draft import Draft
from penstock.planner.passes.frees import add_frees
from penstock.planner.passes.reductions import add_reductions, reductions_of
from penstock.planner.passes.rounds import find_rounds
from penstock.planner.passes.slots import add_slots
from penstock.planner.passes.transfers import add_transfers

Transients = Mapping[tuple[Kind, int, int], int]
"""Bytes that an action needs only while it runs, by kind, stage and slice; nothing where not named."""

NO_TRANSIENTS: Transients = MappingProxyType({})


def slot_sizes(
    spec: ModelSpec, precision: Precision, stages: Sequence[tuple[int, int]], microbatch: int, tp: int = 1
) -> SlotSizes:
    """The slots' bytes on one of ``tp`` devices, for stages of units [first, stop) and micro-batches of ``microbatch``
    sequences.
    """

    def num_bytes(kind: SlotKind, stage: int, tokens: int) -> int:
        first, stop = stages[stage]
        return stage_slot_bytes(spec, precision, first, stop, kind, microbatch, tokens, tp)

    return num_bytes


def lower(
    schedule: Schedule,
    sizes: SlotSizes,
    *,
    slices: tuple[int, ...],
    receive_ahead: int,
    late_receives: bool = False,
    dp: bool,
    tie: tuple[int, int] | None = None,
    num_units: Sequence[int] = (),
    transients: Transients = NO_TRANSIENTS,
) -> Program:
    """The Program of ``schedule`` for slices of the given lengths in tokens.

    At most ``receive_ahead`` receives of a channel are posted, with ``late_receives`` no earlier than their messages
    are due (`penstock.planner.passes.transfers`); ``dp`` says whether there are other replicas to reduce with, ``tie``
    names the ranks of the first and the last stage when both hold the tied matrix; ``num_units`` of every stage keep
    something that R makes again (by default as many as the parts of the schedule's R name).
    Raises `UserError` when the schedule is incomplete or cannot run in its order.
    """
    if len(slices) != schedule.num_slices:
        raise UserError(what=f"has {schedule.num_slices} slices, but {len(slices)} lengths are given", where="schedule")
    if receive_ahead < 1:
        raise UserError(what=f"{receive_ahead} is not positive", where="receiveAhead", remedy="write at least 1")
    ordered = find_rounds(schedule, num_units)
    reductions = reductions_of(len(ordered.rows), dp, tie)
    table = slot_table(sizes, schedule.num_stages, slices)
    roles = Roles(ordered.stage_ranks, len(slices), table)
    drafts = [
        add_reductions(row, rank, ordered.stage_ranks, reductions, late=late_receives)
        for rank, row in enumerate(add_transfers(ordered, receive_ahead, late_receives))
    ]
    names = [add_slots(row, roles, ordered.recomputed) for row in drafts]
    return Program(
        ranks=tuple(_rank_program(rank, row, names[rank], table, transients) for rank, row in enumerate(drafts)),
        num_stages=schedule.num_stages,
        num_microbatches=schedule.num_microbatches,
        slice_capacities=slices,
        receive_ahead=receive_ahead,
        late_receives=late_receives,
        reductions=reductions,
    )


def _rank_program(
    rank: int, drafts: list[Draft], names: Sequence[SlotName], table: Mapping[Place, int], transients: Transients
) -> RankProgram:
    instructions, lives = add_frees(drafts, len(names), transients)
    sizes = [table.get((kind, stage, part), 0) for kind, stage, _, part in names]
    offsets, arena_bytes = place(names, lives, sizes)
    slots = [
        Slot(*name, num_bytes=num_bytes, offset=offset)
        for name, num_bytes, offset in zip(names, sizes, offsets, strict=True)
    ]
    return RankProgram(rank=rank, instructions=instructions, slots=tuple(slots), arena_bytes=arena_bytes)
