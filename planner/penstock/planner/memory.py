"""Bytes of a rank, from the layout's arithmetic: parameters and their state, slots, and what is in flight.

The exact figure of a plan is its Program's arena; `in_flight_slices` gives the search its static filter beforehand.
"""

from __future__ import annotations

import collections
import functools
from dataclasses import dataclass

from penstock.core.layout import (
    HIDDEN_STATE_SLOTS,
    Precision,
    SlotKind,
    aligned,
    stage_parameters,
    stage_slot_buffers,
    unit_buffers,
)
from penstock.core.model import ModelSpec, UnitKind

_REPLICATED = frozenset({"y", "normed", "dy", "rstd", "mean", "x", "g_in", "g_out", "h"})


def state_bytes_per_parameter(precision: Precision) -> int:
    """Master weight, gradient and AdamW's two moments in the accumulation type, and the compute copy of bf16."""
    copy = precision.compute_bytes if precision is Precision.BF16 else 0
    return 4 * precision.accumulate_bytes + copy


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes of one stage under tensor parallelism ``tp`` (Megatron-LM's split: hidden states and norms are
    replicated).
    """

    model: ModelSpec
    precision: Precision
    first: int
    stop: int
    batch: int
    tp: int = 1

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer state."""
        elements = stage_parameters(self.model, self.first, self.stop)
        return elements * state_bytes_per_parameter(self.precision) // self.tp

    @property
    def gradient_bytes(self) -> int:
        """What data parallelism sums."""
        elements = stage_parameters(self.model, self.first, self.stop)
        return elements * self.precision.accumulate_bytes // self.tp

    def slot_bytes(self, slot: SlotKind, tokens: int) -> int:
        """Bytes of one slot; ``tokens`` of the slice, or of the sequence for ``kv`` and ``dkv``."""
        shape = (self.model, self.precision, slot, self.batch, tokens, self.tp)
        if slot in HIDDEN_STATE_SLOTS:
            return _unit_bytes(UnitKind.EMBEDDING, *shape)
        total = sum(count * _unit_bytes(kind, *shape) for kind, count in self._kinds)
        leaves = slot is SlotKind.ACTIVATIONS and self.stop < self.model.num_units
        return total - _unit_bytes(UnitKind.EMBEDDING, *shape) if leaves else total

    @property
    def _kinds(self) -> tuple[tuple[UnitKind, int], ...]:
        return _kind_counts(self.model, self.first, self.stop)


@functools.lru_cache(maxsize=65_536)
def _kind_counts(model: ModelSpec, first: int, stop: int) -> tuple[tuple[UnitKind, int], ...]:
    return tuple(collections.Counter(unit.kind for unit in model.units[first:stop]).items())


@functools.lru_cache(maxsize=65_536)
def _unit_bytes(
    kind: UnitKind, model: ModelSpec, precision: Precision, slot: SlotKind, batch: int, tokens: int, tp: int
) -> int:
    """Bytes of one unit in a slot; an embedding keeps one hidden state, as does every slot that carries one."""
    unit = next(unit for unit in model.units if unit.kind is kind)
    buffers = stage_slot_buffers(model, unit.index, unit.index + 1, slot, batch, tokens)
    if slot is SlotKind.ACTIVATIONS:
        buffers = tuple((unit.index, each) for each in unit_buffers(model, kind, slot, batch, tokens))
    return sum(
        aligned(buffer.num_bytes(precision) // (1 if buffer.name in _REPLICATED else tp)) for _, buffer in buffers
    )
