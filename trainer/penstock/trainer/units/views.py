"""Tensors over slot memory: exactly the buffers that `penstock.core.layout` lists, at aligned places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from penstock.core.layout import Buffer, Precision, SlotKind, aligned, stage_slot_buffers, unit_buffers
from penstock.core.model import ModelSpec, UnitKind
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
) -> dict[int, dict[str, Tensor]]:
    """Views of one slot in ``memory`` (bytes, at least `penstock.core.layout.stage_slot_bytes` of them)."""
    return _carve(memory, stage_slot_buffers(spec, first, stop, slot, batch, tokens), precision)


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


def scratch_bytes(spec: ModelSpec, precision: Precision, batch: int, tokens: int) -> int:
    """Bytes of `scratch_views`: two outputs that take turns, and what the larger kind of unit needs besides."""
    outputs = 2 * aligned(_output(spec, batch, tokens).num_bytes(precision))
    kept = (
        sum(aligned(b.num_bytes(precision)) for slot in _PASSING for b in _kept(spec, kind, slot, batch, tokens))
        for kind in (UnitKind.ATTENTION, UnitKind.MLP)
    )
    return outputs + max(kept)


def scratch_views(
    memory: Tensor, spec: ModelSpec, precision: Precision, first: int, stop: int, batch: int, tokens: int
) -> dict[SlotKind, dict[int, dict[str, Tensor]]]:
    """``a`` and ``l`` for a forward that leaves nothing behind (before a recompute, evaluation, generation).

    All units share one memory, and neighbours' outputs take turns: each unit reads its input while it writes its
    output, and nothing older.
    """
    turn = aligned(_output(spec, batch, tokens).num_bytes(precision))
    views: dict[SlotKind, dict[int, dict[str, Tensor]]] = {slot: {} for slot in _PASSING}
    for unit in spec.units[first:stop]:
        output = _view(memory, turn * (unit.index % 2), _output(spec, batch, tokens), precision)
        views[SlotKind.ACTIVATIONS][unit.index] = {"y": output}
        offset = 2 * turn
        for slot in _PASSING:
            kept = _carve(memory[offset:], ((0, b) for b in _kept(spec, unit.kind, slot, batch, tokens)), precision)
            views[slot].setdefault(unit.index, {}).update(kept.get(0, {}))
            offset += sum(aligned(b.num_bytes(precision)) for b in _kept(spec, unit.kind, slot, batch, tokens))
    return views


def _output(spec: ModelSpec, batch: int, tokens: int) -> Buffer:
    return Buffer(name="y", shape=(batch * tokens, spec.hidden))


def _kept(spec: ModelSpec, kind: UnitKind, slot: SlotKind, batch: int, tokens: int) -> list[Buffer]:
    return [buffer for buffer in unit_buffers(spec, kind, slot, batch, tokens) if buffer.name != "y"]
