"""Memory of a forward that does not keep all its buffers: before a recomputation, in evaluation, in generation.

The buffers of ``a`` and ``l`` that it gives up are needed while one unit runs, except the unit's output, which the next
one reads. So all units share one memory for the former, and neighbours' outputs alternate. Parts of a head alternate
for every chunk of tokens: they need their buffers at the same time, but the probabilities of only one chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.core.layout import (
    EVERY_OPERATION,
    HEAD_CHUNK_TOKENS,
    REMADE_SLOTS,
    Buffer,
    Precision,
    Remade,
    SlotKind,
    aligned,
    stage_slot_buffers,
)
from penstock.core.model import ModelSpec
from penstock.core.sharding import WHOLE, Sharding


@dataclass(frozen=True, kw_only=True, slots=True)
class ScratchBuffer:
    """A buffer that a unit would keep in ``slot``, and its offset in the memory for given-up buffers."""

    slot: SlotKind
    unit: int
    buffer: Buffer
    offset: int


def scratch_bytes(
    spec: ModelSpec,
    precision: Precision,
    first: int,
    stop: int,
    batch: int,
    tokens: int,
    sharding: Sharding = WHOLE,
    remade: Remade | None = None,
) -> int:
    """Bytes of all `scratch_buffers`."""
    places = scratch_buffers(spec, precision, first, stop, batch, tokens, sharding, remade)
    return max((place.offset + aligned(place.buffer.num_bytes(precision)) for place in places), default=0)


def scratch_buffers(
    spec: ModelSpec,
    precision: Precision,
    first: int,
    stop: int,
    batch: int,
    tokens: int,
    sharding: Sharding = WHOLE,
    remade: Remade | None = None,
) -> Iterator[ScratchBuffer]:
    """The buffers that F of units [first, stop) does not keep: all of ``a`` and ``l``, or those that R recomputes by
    ``remade``.
    """
    operations = (EVERY_OPERATION,) * (stop - first) if remade is None else remade
    given_up = [
        (slot, unit, _of_a_chunk(buffer))
        for slot, remade_slot in REMADE_SLOTS.items()
        for unit, buffer in stage_slot_buffers(spec, first, stop, remade_slot, batch, tokens, sharding, operations)
    ]
    outputs = {unit: aligned(buffer.num_bytes(precision)) for _, unit, buffer in given_up if buffer.name == "y"}
    turns, turn = sorted({unit % 2 for unit in outputs}), max(outputs.values(), default=0)
    ends: dict[int, int] = {}
    for slot, unit, buffer in given_up:
        if buffer.name == "y":
            yield ScratchBuffer(slot=slot, unit=unit, buffer=buffer, offset=turns.index(unit % 2) * turn)
            continue
        owner = min(unit, max(spec.first_head_unit, first))
        offset = ends.get(owner, len(turns) * turn)
        yield ScratchBuffer(slot=slot, unit=unit, buffer=buffer, offset=offset)
        ends[owner] = offset + aligned(buffer.num_bytes(precision))


def _of_a_chunk(buffer: Buffer) -> Buffer:
    if buffer.name != "probabilities":
        return buffer
    return dataclasses.replace(buffer, shape=(min(buffer.shape[0], HEAD_CHUNK_TOKENS), *buffer.shape[1:]))
