"""Bytes of a pipeline's stages, from the layout's arithmetic: parameters and their state, and slots.

Like costs, bytes are sums over units of few kinds, so all stages and slices are counted by one product. The exact
figure of a plan is its Program's arena; these are what the search goes by before there is one.

A described software stack may keep more than penstock's own trainer: one byte per element of each dropout mask, and
with unfused attention the softmax, its mask and what the mask leaves of it, (2 + 1 + 2) bytes per score in bf16
(Korthikanti et al., arXiv 2205.05198, section 4.1: 5 a s^2 b of a layer's s b h (34 + 5 a s / h)).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.cluster import PENSTOCK, AttentionKernel, GradientType, SoftwareSpec
from penstock.core.layout import (
    HIDDEN_STATE_SLOTS,
    Precision,
    SlotKind,
    aligned,
    parameters,
    shared_parameters,
    stage_slot_buffers,
    unit_buffers,
    unit_parameters,
)
from penstock.core.model import ModelSpec, Unit, UnitKind
from penstock.core.sharding import WHOLE, Sharding
from penstock.planner.kernels import MASK_BYTES
from penstock.planner.stagecost import UNIT_KINDS, Integers, Stages, unit_counts
from penstock.planner.work import MOST_BYTES


def state_bytes_per_parameter(precision: Precision, gradient_type: GradientType = GradientType.FP32) -> int:
    """Master weight, gradient and AdamW's two moments in the accumulation type, and the compute copy of bf16."""
    copy = precision.compute_bytes if precision is Precision.BF16 else 0
    return 3 * precision.accumulate_bytes + gradient_bytes(precision, gradient_type) + copy


def gradient_bytes(precision: Precision, gradient_type: GradientType) -> int:
    """Of one element of an accumulated gradient."""
    return precision.accumulate_bytes if gradient_type is GradientType.FP32 else precision.compute_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes of stages on one shard, for micro-batches of ``batch`` sequences of ``sequence_length`` tokens, as the
    ``software`` stack holds them.

    Scores that are kept count as if every query attended to the whole sequence: an upper bound for slices.
    """

    model: ModelSpec
    precision: Precision
    stages: Stages
    batch: int
    sharding: Sharding = WHOLE
    software: SoftwareSpec = PENSTOCK
    sequence_length: int = 0

    @property
    def num_parameters(self) -> Integers:
        """[stages]: elements on the largest shard; a tied copy counts on each stage that holds it, once."""
        elements = unit_counts(self.model, self.stages) @ _unit_parameters(self.model, self.sharding.tp)
        if self.model.tied:
            whole = [stop - first == self.model.num_units for first, stop in self.stages]
            elements = elements - np.array(whole) * self.sharding.vocab(self.model) * self.model.hidden
        return elements

    @property
    def state_bytes(self) -> Integers:
        """[stages]: parameters, gradients and optimizer state."""
        width = state_bytes_per_parameter(self.precision, self.software.gradient_type)
        return self.num_parameters * width

    @property
    def gradient_bytes(self) -> Integers:
        """[stages]: what data parallelism sums."""
        return self.num_parameters * gradient_bytes(self.precision, self.software.gradient_type)

    @property
    def shared_gradient_bytes(self) -> Integers:
        """[stages]: what all shards sum at a step's end: of parameters that each holds, for its own tokens."""
        return self._summed_bytes(0)

    @property
    def copied_gradient_bytes(self) -> Integers:
        """[stages]: what the shards that hold the same key/value heads sum, each for its own queries."""
        return self._summed_bytes(1)

    @property
    def packed_gradient_bytes(self) -> Integers:
        """[stages]: the buffer that either of them are packed into, one after the other."""
        packed: Integers = np.maximum(self.shared_gradient_bytes, self.copied_gradient_bytes)
        return packed

    def _summed_bytes(self, place: int) -> Integers:
        elements: Integers = unit_counts(self.model, self.stages) @ _summed_parameters(self.model, self.sharding)[place]
        return elements * gradient_bytes(self.precision, self.software.gradient_type)

    def slot_bytes(self, slot: SlotKind, tokens: Sequence[int]) -> Integers:
        """[stages, len(tokens)]: bytes of one slot; ``tokens`` of slices, or of sequences for ``kv`` and ``dkv``."""
        one = _UnitMemory(self.model, self.precision, self.batch, self.sharding, self.software, self.sequence_length)
        sizes = _unit_table(one, slot, tuple(tokens))
        hidden = sizes[UNIT_KINDS.index(UnitKind.EMBEDDING)]
        if slot in HIDDEN_STATE_SLOTS:
            return np.broadcast_to(hidden, (len(self.stages), len(tokens)))
        table: Integers = unit_counts(self.model, self.stages) @ sizes
        if slot is SlotKind.ACTIVATIONS:
            leaves = [stop <= 1 + 2 * self.model.layers for _, stop in self.stages]
            table = table - np.outer(leaves, hidden)
        return table

    def together_bytes(self, slots: Sequence[SlotKind], tokens: Sequence[int]) -> Integers:
        """[stages, len(tokens)]: bytes of one of each of these slots."""
        total: Integers = np.sum([self.slot_bytes(slot, tokens) for slot in slots], axis=0)
        return total


@functools.lru_cache(maxsize=64)
def _unit_parameters(model: ModelSpec, tp: int) -> Integers:
    """[unit kinds]: elements of one unit on the largest of ``tp`` shards."""
    return np.array([unit_parameters(model, kind, tp) for kind in UNIT_KINDS], dtype=np.int64)


@functools.lru_cache(maxsize=64)
def _summed_parameters(model: ModelSpec, sharding: Sharding) -> Integers:
    """[all shards or those with the same heads, unit kinds]: elements of one unit whose gradients they sum."""
    found = np.zeros((2, len(UNIT_KINDS)), dtype=np.int64)
    for column, kind in enumerate(UNIT_KINDS):
        unit = Unit(index=0, kind=kind)
        shared = shared_parameters(model, unit, sharding)
        for parameter in parameters(model, unit):
            if parameter.name not in shared:
                continue
            copied = [block for block in parameter.blocks if block.copies(sharding.tp) > 1]
            rows = sum(len(block.part(sharding.tp, 0)) for block in copied)
            of_row = parameter.num_elements // parameter.shape[parameter.axis]
            found[:, column] += (0, rows * of_row) if copied else (parameter.num_elements, 0)
    return found


@dataclass(frozen=True, slots=True)
class _UnitMemory:
    """What `StageMemory` counts, of one unit."""

    model: ModelSpec
    precision: Precision
    batch: int
    sharding: Sharding
    software: SoftwareSpec
    sequence_length: int

    def slot_bytes(self, kind: UnitKind, slot: SlotKind, tokens: int) -> int:
        """With what the software stack keeps besides, and with what its allocator loses."""
        num_bytes = _unit_bytes(kind, self.model, self.precision, slot, self.batch, self.sharding, tokens)
        if slot is SlotKind.ACTIVATIONS:
            if self.software.dropout and kind in (UnitKind.ATTENTION, UnitKind.MLP):
                num_bytes += MASK_BYTES * self.sharding.rows(self.batch * tokens) * self.model.hidden
            if kind is UnitKind.ATTENTION and self.software.attention is AttentionKernel.UNFUSED:
                kept = self.precision.compute_bytes
                if self.software.dropout:
                    kept += self.precision.compute_bytes + MASK_BYTES
                num_bytes += kept * self.batch * self.sharding.heads(self.model) * tokens * self.sequence_length
        return min(int(num_bytes * (1 + self.software.allocator_slack)), MOST_BYTES)


@functools.lru_cache(maxsize=2_048)
def _unit_table(one: _UnitMemory, slot: SlotKind, tokens: tuple[int, ...]) -> Integers:
    """[unit kinds, tokens]; asked for again and again with the slices of a few slicings."""
    distinct, places = np.unique(tokens, return_inverse=True)
    sizes = [[one.slot_bytes(kind, slot, count) for count in distinct.tolist()] for kind in UNIT_KINDS]
    table: Integers = np.array(sizes, dtype=np.int64)[:, places]
    table.setflags(write=False)
    return table


@functools.lru_cache(maxsize=65_536)
def _unit_bytes(
    kind: UnitKind,
    model: ModelSpec,
    precision: Precision,
    slot: SlotKind,
    batch: int,
    sharding: Sharding,
    tokens: int,
) -> int:
    """Bytes of one unit in a slot; an embedding keeps one hidden state, as does every slot that carries one."""
    unit = next(unit for unit in model.units if unit.kind is kind)
    buffers = stage_slot_buffers(model, unit.index, unit.index + 1, slot, batch, tokens, sharding)
    if slot is SlotKind.ACTIVATIONS:
        buffers = tuple((unit.index, each) for each in unit_buffers(model, kind, slot, batch, tokens, sharding))
    total = sum(aligned(buffer.num_bytes(precision)) for _, buffer in buffers)
    return min(total, MOST_BYTES)
