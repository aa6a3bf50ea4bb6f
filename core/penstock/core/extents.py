"""Extents: the contiguous pieces of a slot, which its rank's arena places independently of each other.

A slot of a stage and a slice may take a tenth of the arena. A few blocks of such sizes leave gaps that no other block
fits into: arenas of plans with slices took 5.0 % more than the peak of live bytes, and up to 15.4 %. The buffers of a
slot need not be neighbours, since every tensor is a view of one buffer. So a slot is divided between units into up to
`MOST_EXTENTS` extents of about equal bytes, which leaves 1.9 % and at most 6.2 % (`./dev bench arenas`).

A message is sent from one range of memory, so the slots of hidden states have one extent.
"""

from __future__ import annotations

from itertools import groupby

from penstock.core.buckets import even_groups
from penstock.core.layout import HIDDEN_STATE_SLOTS, Precision, Remade, SlotKind, aligned, stage_slot_buffers
from penstock.core.model import ModelSpec
from penstock.core.sharding import Sharding

MOST_EXTENTS = 8
"""Largest number of extents of a slot. More take longer to place and save hardly any memory (docs/log.md)."""


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

    They add up to `penstock.core.layout.stage_slot_bytes`, and each has whole units.
    """
    buffers = stage_slot_buffers(spec, first, stop, slot, batch, tokens, sharding, remade)
    by_unit = [
        sum(aligned(buffer.num_bytes(precision)) for _, buffer in unit) for _, unit in groupby(buffers, lambda b: b[0])
    ]
    if not by_unit or slot in HIDDEN_STATE_SLOTS:
        return tuple(by_unit)
    extents = [0] * min(MOST_EXTENTS, len(by_unit))
    for group, num_bytes in zip(even_groups(by_unit, len(extents)), by_unit, strict=True):
        extents[group] += num_bytes
    return tuple(filter(None, extents))
