"""Memory of buffers that a stage gives up, while an action needs them: one per rank, since actions run one at a time.

A forward does not keep all its buffers before a recomputation, in evaluation, and in generation. The buffers of ``a``
and ``l`` that it gives up are needed while one unit runs, except the unit's output, which the next one reads. So all
units share one memory for the former, and neighbours' outputs alternate. Parts of a head alternate for every chunk of
tokens: they need their buffers at the same time, but the probabilities of only one chunk.

A backward whose slice has no R recomputes them itself, *segment* by segment from the last to the first: a segment is a
longest run of units each of which, but the last, gives up its output. Recomputing and reversing any unit of it needs
the outputs before it in the segment, so all its buffers exist at once, and those of only one segment at a time. The
parts of a head are reversed together, so they are in one segment. A split backward needs ``rl`` until W, so its I has
only ``ra`` here.

Example: of three units the first gives up its norm and its output, the others their norms. The segments are units 0 to
1 and unit 2: what units 0 and 1 give up exists at once, and shares its memory with the norm of unit 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

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
    return _end(precision, scratch_buffers(spec, precision, first, stop, batch, tokens, sharding, remade))


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
    dropped = [
        (slot, unit, _of_a_chunk(buffer))
        for slot, remade_slot in REMADE_SLOTS.items()
        for unit, buffer in stage_slot_buffers(spec, first, stop, remade_slot, batch, tokens, sharding, operations)
    ]
    outputs = {unit: aligned(buffer.num_bytes(precision)) for _, unit, buffer in dropped if buffer.name == "y"}
    turns, turn = sorted({unit % 2 for unit in outputs}), max(outputs.values(), default=0)
    ends: dict[int, int] = {}
    for slot, unit, buffer in dropped:
        if buffer.name == "y":
            yield ScratchBuffer(slot=slot, unit=unit, buffer=buffer, offset=turns.index(unit % 2) * turn)
            continue
        owner = min(unit, max(spec.first_head_unit, first))
        offset = ends.get(owner, len(turns) * turn)
        yield ScratchBuffer(slot=slot, unit=unit, buffer=buffer, offset=offset)
        ends[owner] = offset + aligned(buffer.num_bytes(precision))


def segments(spec: ModelSpec, first: int, stop: int, remade: Remade) -> tuple[range, ...]:
    """The segments of the stage of units [first, stop), in order; one of all units without recomputation."""
    if not remade:
        return (range(first, stop),)
    dropped = stage_slot_buffers(spec, first, stop, SlotKind.REMADE_ACTIVATIONS, 1, 1, remade=remade)
    linked = {unit for unit, buffer in dropped if buffer.name == "y"} | set(range(spec.first_head_unit, stop))
    bounds = [first, *(unit for unit in range(first + 1, stop) if unit - 1 not in linked), stop]
    return tuple(range(*pair) for pair in pairwise(bounds))


def segment_bytes(
    spec: ModelSpec,
    precision: Precision,
    first: int,
    stop: int,
    batch: int,
    tokens: int,
    sharding: Sharding,
    remade: Remade,
    *,
    is_split: bool,
) -> int:
    """Bytes of all `segment_buffers`."""
    places = segment_buffers(spec, precision, first, stop, batch, tokens, sharding, remade, is_split=is_split)
    return _end(precision, places)


def segment_buffers(
    spec: ModelSpec,
    precision: Precision,
    first: int,
    stop: int,
    batch: int,
    tokens: int,
    sharding: Sharding,
    remade: Remade,
    *,
    is_split: bool,
) -> Iterator[ScratchBuffer]:
    """The buffers that a B of units [first, stop) recomputes by ``remade``, or an I (``is_split``); those of different
    segments overlap.
    """
    segment_of = {unit: segment for segment in segments(spec, first, stop, remade) for unit in segment}
    ends: dict[range, int] = {}
    slots = (SlotKind.ACTIVATIONS,) if is_split else tuple(REMADE_SLOTS)
    for slot in slots:
        for unit, buffer in stage_slot_buffers(spec, first, stop, REMADE_SLOTS[slot], batch, tokens, sharding, remade):
            segment = segment_of[unit]
            offset = ends.get(segment, 0)
            yield ScratchBuffer(slot=slot, unit=unit, buffer=buffer, offset=offset)
            ends[segment] = offset + aligned(buffer.num_bytes(precision))


def _end(precision: Precision, places: Iterator[ScratchBuffer]) -> int:
    """The end of the last buffer."""
    return max((place.offset + aligned(place.buffer.num_bytes(precision)) for place in places), default=0)


def _of_a_chunk(buffer: Buffer) -> Buffer:
    if buffer.name != "probabilities":
        return buffer
    return dataclasses.replace(buffer, shape=(min(buffer.shape[0], HEAD_CHUNK_TOKENS), *buffer.shape[1:]))
