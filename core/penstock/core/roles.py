"""The slots that every compute action reads and writes: lowering follows this table, and the proof checks Programs by
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.core.layout import SlotKind
from penstock.core.program import SlotSizes
from penstock.core.schedule import BACKWARD_KINDS, Kind

X, A, L, W = SlotKind.INPUT, SlotKind.ACTIVATIONS, SlotKind.LINEAR_INPUTS, SlotKind.OUTPUT_GRADIENTS
RA, RL = SlotKind.REMADE_ACTIVATIONS, SlotKind.REMADE_LINEAR_INPUTS
Y, G_OUT, G_IN = SlotKind.OUTPUT, SlotKind.SENT_GRADIENT, SlotKind.RECEIVED_GRADIENT
H, KV, DKV = SlotKind.HEAD_GRADIENT, SlotKind.KEYS_VALUES, SlotKind.KEYS_VALUES_GRADIENTS

PREFIX_KINDS = frozenset({KV, DKV})
"""Slots that several slices of a micro-batch touch: one slot of the whole micro-batch, filled slice by slice, or a slot
for each slice.
"""

_BACKWARD = ((X, A, L, RA, RL, KV, DKV, G_IN, H), (DKV, W, G_OUT))

READS_AND_WRITES: Mapping[Kind, tuple[tuple[SlotKind, ...], tuple[SlotKind, ...]]] = {
    Kind.F: ((X, KV), (KV, A, L, Y, H)),
    Kind.R: ((X, A, L, KV), (RA, RL)),
    Kind.I: _BACKWARD,
    Kind.B: _BACKWARD,
    Kind.W: ((L, RL, W), ()),
}
"""All slots that an action may touch, in the order in which instructions list them; `Roles` leaves out those that do
not exist.

An R that continues another finds that one's last output in ``a`` or ``ra``, and needs no ``x``. B writes its ``w`` and
reads it back at once, so it lists it as written. The first F of a micro-batch finds no ``kv`` to read and its first I
no ``dkv``: they only write.

A slice without an R is recomputed inside its backward, in memory that is no slot (`penstock.core.scratch`): its B
touches neither ``ra`` nor ``rl``. Its I touches no ``ra`` and writes ``rl``, since W reads that later.

Where every slice has its own ``kv`` and ``dkv``, an action lists only those of its own slice, and the micro-batch's
first I all ``dkv``, which begin with it. It touches those of earlier slices, too. They are live: forwards run in the
order of slices and backwards in the reverse order (the proof requires both), and each is freed after the backward of
its own slice. Lists of all of them would be as long as the number of slices, for every action.
"""

Cell = tuple[int, int, int]
"""Stage, micro-batch and slice: the work of one F and one B, or I and W."""

SlotName = tuple[SlotKind, int, int, int | None]
"""Kind, stage, micro-batch, slice (none for ``kv`` and ``dkv`` of a whole micro-batch)."""

Place = tuple[SlotKind, int, int | None]
"""A slot's name without its micro-batch: kind, stage, slice."""


def slot_table(
    sizes: SlotSizes, num_stages: int, slices: Sequence[int], *, prefix_by_slice: bool = False
) -> dict[Place, int]:
    """Bytes of every slot of one micro-batch, for slices of the given lengths; those of zero bytes are left out. With
    ``prefix_by_slice`` every slice has its own ``kv`` and ``dkv``.
    """
    table: dict[Place, int] = {}
    for kind in SlotKind:
        for stage in range(num_stages):
            if kind in PREFIX_KINDS and not prefix_by_slice:
                table[kind, stage, None] = sizes(kind, stage, sum(slices))
            else:
                table.update({(kind, stage, i): sizes(kind, stage, length) for i, length in enumerate(slices)})
    return {place: num_bytes for place, num_bytes in table.items() if num_bytes}


@dataclass(frozen=True, slots=True)
class Touched:
    """The places that an action reads and writes."""

    reads: tuple[Place, ...]
    writes: tuple[Place, ...]


class Roles:
    """The table above applied to one pipeline: its stages' ranks, its number of slices, and the slots that exist.

    Neighbouring stages on one rank exchange no messages: F writes the next stage's ``x`` and I the previous stage's
    ``g_in`` instead of ``y`` and ``g_out``.
    """

    def __init__(self, stage_ranks: Sequence[int], num_slices: int, table: Mapping[Place, int]) -> None:
        self._ranks = stage_ranks
        self._num_slices = num_slices
        self._table = table
        self._is_by_slice = any(kind in PREFIX_KINDS and part is not None for kind, _, part in table)
        self._touched: dict[tuple[Kind, int, int, bool, bool], Touched] = {}

    def touched(self, kind: Kind, stage: int, part: int, recomputed: bool, resumes: bool = False) -> Touched:
        """The places that the action of ``kind`` on slice ``part`` touches; ``recomputed``: that slice has an R here;
        ``resumes``: this is an R after the first.
        """
        key = (kind, stage, part, recomputed, resumes)
        if key not in self._touched:
            reads, writes = READS_AND_WRITES[kind]
            if kind in BACKWARD_KINDS and not recomputed:
                reads = tuple(slot for slot in reads if slot not in (RA, RL))
                writes = (RL, *writes) if kind is Kind.I else writes
            if resumes:
                reads = tuple(slot for slot in (RA, *reads) if slot is not X)
            reads = tuple(slot for slot in reads if not self._first_touch(kind, slot, part))
            self._touched[key] = Touched(self._places(reads, stage, part), self._places(writes, stage, part))
        return self._touched[key]

    def remakes(self, stage: int, part: int) -> bool:
        """Whether slice ``part`` is recomputed on ``stage``, by R or inside its backward."""
        return any((slot, stage, part) in self._table for slot in (RA, RL))

    def needs_order(self, stage: int) -> bool:
        """Whether the order of a micro-batch's slices on ``stage`` does not follow from the content of its slots, since
        every slice has its own keys and values.
        """
        return (KV, stage, 0) in self._table

    def is_last(self, part: int) -> bool:
        """Whether ``part`` is the micro-batch's last slice, whose backward is the first."""
        return part == self._num_slices - 1

    def _first_touch(self, kind: Kind, slot: SlotKind, part: int) -> bool:
        is_first_forward = kind is Kind.F and (part == 0 or self._is_by_slice)
        return (slot is KV and is_first_forward) or (slot is DKV and self.is_last(part))

    def _places(self, slots: Sequence[SlotKind], stage: int, part: int) -> tuple[Place, ...]:
        places = (self._place(slot, stage, index) for slot in slots for index in self._slices(slot, part))
        return tuple(place for place in places if place is not None and place in self._table)

    def _slices(self, slot: SlotKind, part: int) -> tuple[int | None, ...]:
        """The slices whose slots an action on ``part`` lists."""
        if slot not in PREFIX_KINDS:
            return (part,)
        if not self._is_by_slice:
            return (None,)
        return tuple(range(self._num_slices)) if slot is DKV and self.is_last(part) else (part,)

    def _place(self, slot: SlotKind, stage: int, part: int | None) -> Place | None:
        last = len(self._ranks) - 1
        if (stage == 0 and slot in (X, G_OUT)) or (stage == last and slot in (Y, G_IN)) or (stage < last and slot is H):
            return None
        if slot is Y and self.is_local(stage):
            return (X, stage + 1, part)
        if slot is G_OUT and self.is_local(stage - 1):
            return (G_IN, stage - 1, part)
        return (slot, stage, part)

    def is_local(self, stage: int) -> bool:
        """Whether ``stage`` and the next one are on the same rank."""
        return self._ranks[stage] == self._ranks[stage + 1]
