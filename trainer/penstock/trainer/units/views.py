"""Tensors over slot memory: exactly the buffers that `penstock.core.layout` lists, at aligned offsets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from penstock.core.errors import RunError
from penstock.core.layout import (
    NOTHING_REMADE,
    Buffer,
    Precision,
    Remade,
    SlotKind,
    aligned,
    stage_slot_buffers,
)
from penstock.core.model import ModelSpec
from penstock.core.scratch import ScratchBuffer, scratch_buffers, segment_buffers
from penstock.core.sharding import WHOLE, Sharding
from penstock.trainer.dtypes import accumulate_dtype, compute_dtype

UnitViews = Mapping[int, Mapping[str, Tensor]]
"""The tensors of one slot: unit index, then buffer name."""

SlotViews = Mapping[SlotKind, UnitViews]
"""The tensors that one action may access, by slot."""


def slot_views(
    memory: Tensor,
    spec: ModelSpec,
    precision: Precision,
    first: int,
    stop: int,
    slot: SlotKind,
    batch: int,
    tokens: int,
    sharding: Sharding = WHOLE,
    remade: Remade = NOTHING_REMADE,
) -> dict[int, dict[str, Tensor]]:
    """Views of one slot in ``memory`` (bytes, at least `penstock.core.layout.stage_slot_bytes` of them)."""
    return extent_views([memory], spec, precision, first, stop, slot, batch, tokens, sharding, remade)


def extent_views(
    extents: Sequence[Tensor],
    spec: ModelSpec,
    precision: Precision,
    first: int,
    stop: int,
    slot: SlotKind,
    batch: int,
    tokens: int,
    sharding: Sharding = WHOLE,
    remade: Remade = NOTHING_REMADE,
) -> dict[int, dict[str, Tensor]]:
    """Views of one slot that lies in several ``extents`` (bytes), which its buffers fill one after the other.

    Raises `RunError` if a buffer would begin in one extent and end in another.
    """
    views: dict[int, dict[str, Tensor]] = {}
    remaining = iter(extents)
    memory, offset = next(remaining, None), 0
    for unit, buffer in stage_slot_buffers(spec, first, stop, slot, batch, tokens, sharding, remade):
        num_bytes = aligned(buffer.num_bytes(precision))
        if memory is not None and offset == memory.numel():
            memory, offset = next(remaining, None), 0
        if memory is None or offset + num_bytes > memory.numel():
            raise RunError(f"the buffer {buffer.name} of unit {unit} in slot {slot.value} does not lie in one extent")
        views.setdefault(unit, {})[buffer.name] = _view(memory, offset, buffer, precision)
        offset += num_bytes
    return views


def _view(memory: Tensor, offset: int, buffer: Buffer, precision: Precision) -> Tensor:
    dtype = accumulate_dtype(precision) if buffer.accumulate else compute_dtype(precision)
    return memory[offset : offset + buffer.num_bytes(precision)].view(dtype).view(buffer.shape)


def scratch_views(
    memory: Tensor,
    spec: ModelSpec,
    precision: Precision,
    first: int,
    stop: int,
    batch: int,
    tokens: int,
    sharding: Sharding = WHOLE,
    remade: Remade | None = None,
) -> dict[SlotKind, dict[int, dict[str, Tensor]]]:
    """Views of the buffers of ``a`` and ``l`` that a forward does not keep: all of them, or those of ``remade``.

    ``memory`` has at least `penstock.core.scratch.scratch_bytes`.
    """
    return _placed(memory, precision, scratch_buffers(spec, precision, first, stop, batch, tokens, sharding, remade))


def segment_views(
    memory: Tensor,
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
) -> dict[SlotKind, dict[int, dict[str, Tensor]]]:
    """Views of the buffers that a backward recomputes itself: of ``ra``, and of ``rl`` unless it ``is_split``.

    ``memory`` has at least `penstock.core.scratch.segment_bytes`.
    """
    places = segment_buffers(spec, precision, first, stop, batch, tokens, sharding, remade, is_split=is_split)
    return _placed(memory, precision, places)


def _placed(
    memory: Tensor, precision: Precision, places: Iterator[ScratchBuffer]
) -> dict[SlotKind, dict[int, dict[str, Tensor]]]:
    views: dict[SlotKind, dict[int, dict[str, Tensor]]] = {SlotKind.ACTIVATIONS: {}, SlotKind.LINEAR_INPUTS: {}}
    for place in places:
        tensor = _view(memory, place.offset, place.buffer, precision)
        views[place.slot].setdefault(place.unit, {})[place.buffer.name] = tensor
    return views


def joined(first: UnitViews, second: UnitViews) -> UnitViews:
    """Merge the tensors of two slots, which have different buffers of the same units."""
    if not first or not second:
        return first or second
    return {unit: {**first.get(unit, {}), **second.get(unit, {})} for unit in {**first, **second}}
