"""Tensors over slot memory: exactly the buffers that `penstock.core.layout` lists, at aligned places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from penstock.core.layout import Buffer, Precision, SlotKind, aligned, stage_slot_buffers, unit_buffers
from penstock.core.model import ModelSpec, UnitKind
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


def scratch_bytes(spec: ModelSpec, precision: Precision, batch: int, tokens: int, sharding: Sharding = WHOLE) -> int:
    """Bytes of `scratch_views`: two outputs that take turns, and what the larger kind of unit needs besides."""
    outputs = 2 * aligned(_output(spec, batch, tokens, sharding).num_bytes(precision))
    kept = (
        sum(
            aligned(buffer.num_bytes(precision))
            for slot in _PASSING
            for buffer in _kept(spec, kind, slot, batch, tokens, sharding)
        )
        for kind in (UnitKind.ATTENTION, UnitKind.MLP)
    )
    return outputs + max(kept)


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

    All units share one memory, and neighbours' outputs take turns: each unit reads its input while it writes its
    output, and nothing older.
    """
    buffer = _output(spec, batch, tokens, sharding)
    turn = aligned(buffer.num_bytes(precision))
    views: dict[SlotKind, dict[int, dict[str, Tensor]]] = {slot: {} for slot in _PASSING}
    for unit in spec.units[first:stop]:
        output = _view(memory, turn * (unit.index % 2), buffer, precision)
        views[SlotKind.ACTIVATIONS][unit.index] = {"y": output}
        offset = 2 * turn
        for slot in _PASSING:
            kept = _kept(spec, unit.kind, slot, batch, tokens, sharding)
            carved = _carve(memory[offset:], ((0, each) for each in kept), precision)
            views[slot].setdefault(unit.index, {}).update(carved.get(0, {}))
            offset += sum(aligned(each.num_bytes(precision)) for each in kept)
    return views


def _output(spec: ModelSpec, batch: int, tokens: int, sharding: Sharding) -> Buffer:
    return Buffer(name="y", shape=(sharding.rows(batch * tokens), spec.hidden))


def _kept(spec: ModelSpec, kind: UnitKind, slot: SlotKind, batch: int, tokens: int, sharding: Sharding) -> list[Buffer]:
    return [buffer for buffer in unit_buffers(spec, kind, slot, batch, tokens, sharding) if buffer.name != "y"]
