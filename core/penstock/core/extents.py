"""Extents: the contiguous pieces of a slot, which its rank's arena places independently of each other.

A slot of a stage and a slice may take a tenth of the arena. A few blocks of such sizes leave gaps that no other block
fits into: with four unequal slices arenas took 6 % more than the peak of live bytes, and up to 15 %. The buffers of a
slot need not be neighbours, since every tensor is a view of one buffer. So a slot is divided between units into up to
`MOST_EXTENTS` extents of about equal bytes, which leaves 2.2 % and at most 6.2 % (docs/adr/0055-slots-in-extents.md).

A message is sent from one range of memory, so the slots of hidden states have one extent.
"""

from __future__ import annotations

from itertools import groupby

from penstock.core.layout import HIDDEN_STATE_SLOTS, Precision, Remade, SlotKind, aligned, stage_slot_buffers
from penstock.core.model import ModelSpec
from penstock.core.sharding import Sharding

MOST_EXTENTS = 8
"""Largest number of extents of a slot. More make more to place and leave hardly less: with 16 it is 2.1 %."""


def extent_bytes(
    spec: ModelSpec,
    precision: Precision,
    first: int,
    stop: int,
    slot: SlotKind,
    batch: int,
    tokens: int,
    sharding: Sharding,
    remade: Remade,
) -> tuple[int, ...]:
    """Bytes of the extents of one slot of the stage of units [first, stop), in the order of its buffers.

    They add up to `penstock.core.layout.stage_slot_bytes`. With n extents a unit is in extent k if the middle of its
    bytes is in the k-th n-th of all bytes, as with buckets of gradients.
    """
    buffers = stage_slot_buffers(spec, first, stop, slot, batch, tokens, sharding, remade)
    by_unit = [
        sum(aligned(buffer.num_bytes(precision)) for _, buffer in unit) for _, unit in groupby(buffers, lambda b: b[0])
    ]
    total = sum(by_unit)
    if not total or slot in HIDDEN_STATE_SLOTS:
        return (total,) if total else ()
    count = min(MOST_EXTENTS, len(by_unit))
    extents = [0] * count
    before = 0
    for num_bytes in by_unit:
        extents[min(count * (2 * before + num_bytes) // (2 * total), count - 1)] += num_bytes
        before += num_bytes
    return tuple(filter(None, extents))
