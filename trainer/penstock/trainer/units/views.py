"""Tensors over slot memory: exactly the buffers that `penstock.core.layout` lists, at aligned places."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from torch import Tensor

from penstock.core.layout import (
    HEAD_CHUNK_TOKENS,
    Buffer,
    Precision,
    SlotKind,
    aligned,
    stage_slot_buffers,
)
from penstock.core.model import ModelSpec
from penstock.core.sharding import WHOLE, Sharding
from penstock.trainer.dtypes import accumulate_dtype, compute_dtype

UnitViews = Mapping[int, Mapping[str, Tensor]]
"""The tensors of one slot: unit index, then buffer name."""

SlotViews = Mapping[SlotKind, UnitViews]
"""The tensors one action may touch, by slot."""


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
) -> dict[int, dict[str, Tensor]]:
    """Views of one slot in ``memory`` (bytes, at least `penstock.core.layout.stage_slot_bytes` of them)."""
    return _carve(memory, stage_slot_buffers(spec, first, stop, slot, batch, tokens, sharding), precision)


def _carve(memory: Tensor, buffers: Iterable[tuple[int, Buffer]], precision: Precision) -> dict[int, dict[str, Tensor]]:
    views: dict[int, dict[str, Tensor]] = {}
    offset = 0
    for unit, buffer in buffers:
        views.setdefault(unit, {})[buffer.name] = _view(memory, offset, buffer, precision)
        offset += aligned(buffer.num_bytes(precision))
    return views


def _view(memory: Tensor, offset: int, buffer: Buffer, precision: Precision) -> Tensor:
    dtype = accumulate_dtype(precision) if buffer.accumulate else compute_dtype(precision)
    return memory[offset : offset + buffer.num_bytes(precision)].view(dtype).view(buffer.shape)


_PASSING = (SlotKind.ACTIVATIONS, SlotKind.LINEAR_INPUTS)


def scratch_bytes(
    spec: ModelSpec, precision: Precision, first: int, stop: int, batch: int, tokens: int, sharding: Sharding = WHOLE
) -> int:
    """Bytes of `scratch_views`: two outputs that take turns, and what the largest unit needs besides; parts of a head
    need theirs together.
    """
    outputs = 2 * aligned(_output(spec, batch, tokens, sharding).num_bytes(precision))
    needed = [0] * (stop - first)
    for slot in _PASSING:
        for index, buffer in _kept(spec, first, stop, slot, batch, tokens, sharding):
            needed[min(index, max(spec.first_head_unit, first)) - first] += aligned(buffer.num_bytes(precision))
    return outputs + max(needed)


def scratch_views(
    memory: Tensor,
    spec: ModelSpec,
    precision: Precision,
    first: int,
    stop: int,
    batch: int,
    tokens: int,
    sharding: Sharding = WHOLE,
) -> dict[SlotKind, dict[int, dict[str, Tensor]]]:
    """``a`` and ``l`` for a forward that leaves nothing behind (before a recompute, evaluation, generation).

    All units but parts of a head share one memory, and neighbours' outputs take turns: each unit reads its input while
    it writes its output, and nothing older. Parts of a head take turns for every chunk of tokens, and have room for
    the probabilities of one.
    """
    buffer = _output(spec, batch, tokens, sharding)
    turn = aligned(buffer.num_bytes(precision))
    views: dict[SlotKind, dict[int, dict[str, Tensor]]] = {slot: {} for slot in _PASSING}
    kept = {slot: _kept(spec, first, stop, slot, batch, tokens, sharding) for slot in _PASSING}
    offset = 2 * turn
    for unit in spec.units[first:stop]:
        output = _view(memory, turn * (unit.index % 2), buffer, precision)
        views[SlotKind.ACTIVATIONS][unit.index] = {"y": output}
        offset = offset if unit.part else 2 * turn
        for slot in _PASSING:
            own = [(index, each) for index, each in kept[slot] if index == unit.index]
            carved = _carve(memory[offset:], own, precision)
            views[slot].setdefault(unit.index, {}).update(carved.get(unit.index, {}))
            offset += sum(aligned(each.num_bytes(precision)) for _, each in own)
    return views


def _output(spec: ModelSpec, batch: int, tokens: int, sharding: Sharding) -> Buffer:
    return Buffer(name="y", shape=(sharding.rows(batch * tokens), spec.hidden))


def _kept(
    spec: ModelSpec, first: int, stop: int, slot: SlotKind, batch: int, tokens: int, sharding: Sharding
) -> list[tuple[int, Buffer]]:
    """What units keep in a slot, but for outputs."""
    buffers = stage_slot_buffers(spec, first, stop, slot, batch, tokens, sharding)
    return [(index, _of_a_chunk(buffer)) for index, buffer in buffers if buffer.name != "y"]


def _of_a_chunk(buffer: Buffer) -> Buffer:
    if buffer.name != "probabilities":
        return buffer
    return dataclasses.replace(buffer, shape=(min(buffer.shape[0], HEAD_CHUNK_TOKENS), *buffer.shape[1:]))
