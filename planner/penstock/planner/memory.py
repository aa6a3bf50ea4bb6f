"""Bytes of a pipeline's stages, from the layout's arithmetic: parameters and their state, and slots.

Like costs, bytes are sums over units of few kinds, so one matrix product counts all stages and slices. The exact bytes
of a plan are its Program's arena; the search uses these before a Program exists.

A described software stack may keep more than penstock's own trainer: one byte per element of each dropout mask, and
with unfused attention the softmax, its mask and the masked softmax, (2 + 1 + 2) bytes per score in bf16 (Korthikanti et
al., arXiv 2205.05198, section 4.1: 5 a s^2 b of a layer's s b h (34 + 5 a s / h)). A stack that recomputes on demand,
layer by layer inside its backward, holds the recomputed tensors of one layer at a time; penstock's R recomputes
those of a whole stage before its backward.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.buckets import elements_of_buckets
from penstock.core.cluster import PENSTOCK, AttentionKernel, GradientType, SoftwareSpec
from penstock.core.layout import (
    HIDDEN_STATE_SLOTS,
    REMADE_SLOTS,
    SHARED_BY_PARTS,
    Buffer,
    Operation,
    Operations,
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
from penstock.core.moments import WIDENED_ELEMENTS, MomentType
from penstock.core.remaking import Remakes, remade_of
from penstock.core.replicas import ReductionType, exchange_bytes, largest_shard, narrowing_bytes
from penstock.core.sharding import WHOLE, Sharding
from penstock.planner.kernels import MASK_BYTES
from penstock.planner.stagecost import UNIT_KINDS, Integers, Stages, first_like, unit_counts
from penstock.planner.work import MOST_BYTES


def state_bytes_per_parameter(precision: Precision, moment_type: MomentType = MomentType.FP32) -> int:
    """Bytes of the master weight, the gradient and AdamW's two moments, and of the compute copy of bf16."""
    gradient_and_weight = whole_bytes_per_parameter(precision, GradientType.FP32)
    return gradient_and_weight + optimizer_bytes_per_parameter(precision, moment_type)


def whole_bytes_per_parameter(precision: Precision, gradient_type: GradientType = GradientType.FP32) -> int:
    """Bytes that every replica holds per parameter: its gradient, and the weight that products use."""
    return gradient_type.num_bytes(precision) + precision.compute_bytes


def optimizer_bytes_per_parameter(precision: Precision, moment_type: MomentType = MomentType.FP32) -> int:
    """Bytes per parameter that replicas may divide (ZeRO-1): AdamW's two moments, and the master weight in bf16."""
    master_bytes = precision.accumulate_bytes if precision is Precision.BF16 else 0
    return master_bytes + 2 * moment_type.num_bytes(precision)


def widened_bytes(precision: Precision, num_elements: Integers, *, is_cuda: bool) -> Integers:
    """Bytes of the buffers in which the optimizer widens the moments of a part of ``num_elements``, elementwise."""
    return 2 * precision.accumulate_bytes * np.minimum(num_elements, WIDENED_ELEMENTS[is_cuda])


def stepped_elements(num_parameters: Integers, optimizer_shards: int) -> Integers:
    """[stages]: how many of a stage's elements a replica steps, gaps included (`penstock.core.replicas`)."""
    if optimizer_shards == 1:
        return num_parameters
    return np.array([largest_shard(count, optimizer_shards) for count in num_parameters.tolist()], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of stages on one shard, for micro-batches of ``batch`` sequences of ``sequence_length`` tokens, as the
    ``software`` stack holds them.

    Kept scores count as if every query attended to the whole sequence: an upper bound for slices. ``recompute`` is the
    recomputation of each stage, if any (`penstock.core.remaking`). ``optimizer_shards`` replicas divide the optimizer
    state; with 1 each has all of it. With ``has_buckets`` they divide each bucket of a stage (`penstock.core.buckets`).
    Its moments are stored in ``moment_type``.
    """

    model: ModelSpec
    precision: Precision
    stages: Stages
    batch: int
    sharding: Sharding = WHOLE
    software: SoftwareSpec = PENSTOCK
    sequence_length: int = 0
    recompute: tuple[Remakes, ...] = ()
    optimizer_shards: int = 1
    has_buckets: bool = False
    moment_type: MomentType = MomentType.FP32

    @functools.cached_property
    def num_parameters(self) -> Integers:
        """[stages]: elements on the largest shard; a tied copy counts on each stage that holds it, once."""
        tp = self.sharding.tp
        elements = self._body_counts @ _unit_parameters(self.model, tp)
        elements = elements + self._part_counts @ _part_parameters(self.model, tp)
        if self.model.tied:
            rows = [-(-len(self.model.part_rows(part)) // tp) for part in range(self.model.head_parts)]
            has_embedding = [first == 0 for first, _ in self.stages]
            elements = elements - np.array(has_embedding) * (self._part_counts @ np.array(rows)) * self.model.hidden
        return elements

    @functools.cached_property
    def _body_counts(self) -> Integers:
        """[stages, unit kinds]: the number of units of each kind, without the head."""
        counts = unit_counts(self.model, self.stages).copy()
        counts[:, UNIT_KINDS.index(UnitKind.HEAD)] = 0
        return counts

    @functools.cached_property
    def _part_counts(self) -> Integers:
        """[stages, parts of the head]: 1 if the stage has the part; a whole head is the only part."""
        first, stop = np.array(self.stages).T[:, :, None] - self.model.first_head_unit
        parts = np.arange(self.model.head_parts)
        counts: Integers = ((first <= parts) & (parts < stop)).astype(np.int64)
        return counts

    @property
    def stepped_elements(self) -> Integers:
        """[stages]: the elements of which a replica has the optimizer's state."""
        if not self._is_sectioned:
            return stepped_elements(self.num_parameters, self.optimizer_shards)
        return np.array([sum(shards) for shards in self._shards_of_sections], dtype=np.int64)

    @property
    def largest_shards(self) -> Integers:
        """[stages]: the most elements that a replica steps of one section (`penstock.core.replicas`)."""
        if not self._is_sectioned:
            return self.stepped_elements
        return np.array([max(shards) for shards in self._shards_of_sections], dtype=np.int64)

    @property
    def _is_sectioned(self) -> bool:
        return self.has_buckets and self.optimizer_shards > 1

    @functools.cached_property
    def _shards_of_sections(self) -> list[list[int]]:
        """[stages][sections]: elements of a shard of each section, which is a bucket or the whole stage."""
        of_buckets = elements_of_buckets(self.model, self.stages, self.precision, self.sharding.tp)
        return [
            [largest_shard(count, self.optimizer_shards) for count in counts or (whole,)]
            for counts, whole in zip(of_buckets, self.num_parameters.tolist(), strict=True)
        ]

    @property
    def flat_elements(self) -> Integers:
        """[stages]: elements of a replica's weights, and of its gradients, with the gaps that shards leave."""
        return self.stepped_elements * self.optimizer_shards

    @property
    def state_bytes(self) -> Integers:
        """[stages]: parameters, gradients and optimizer state."""
        whole = self.flat_elements * whole_bytes_per_parameter(self.precision, self.software.gradient_type)
        return whole + self.stepped_elements * optimizer_bytes_per_parameter(self.precision, self.moment_type)

    @property
    def weight_bytes(self) -> Integers:
        """[stages]: the weights that products use; with ZeRO-1 replicas gather them after stepping their shards."""
        return self.flat_elements * self.precision.compute_bytes

    @property
    def gradient_bytes(self) -> Integers:
        """[stages]: the gradients that data parallelism sums."""
        return self.flat_elements * self.software.gradient_type.num_bytes(self.precision)

    def summing_bytes(self, shards: Integers, dp: int, reduction_type: ReductionType, *, is_cuda: bool) -> Integers:
        """Bytes in which a rank sums gradients over ``dp`` replicas, elementwise for ``shards``, its largest of
        `largest_shards`. Those of gloo's and NCCL's own sums are not counted.
        """
        element_bytes = self.software.gradient_type.num_bytes(self.precision)
        is_divided = self.optimizer_shards > 1
        if reduction_type.is_narrow and element_bytes > 2:
            parts = shards if is_divided else -(-shards // dp)
            return np.array([narrowing_bytes(part, dp, is_cuda=is_cuda) for part in parts.tolist()])
        if is_divided and not is_cuda:
            return np.array([exchange_bytes(element_bytes * shard, dp) for shard in shards.tolist()])
        return np.zeros_like(shards)

    @property
    def shared_gradient_bytes(self) -> Integers:
        """[stages]: gradients that all shards sum at a step's end: of parameters that each holds for its own tokens."""
        return self._summed_bytes(0)

    @property
    def copied_gradient_bytes(self) -> Integers:
        """[stages]: gradients that the shards with the same key/value heads sum, each for its own queries."""
        return self._summed_bytes(1)

    @property
    def packed_gradient_bytes(self) -> Integers:
        """[stages]: the buffer that either kind of these gradients is packed into, one after the other."""
        packed: Integers = np.maximum(self.shared_gradient_bytes, self.copied_gradient_bytes)
        return packed

    def _summed_bytes(self, row: int) -> Integers:
        elements = self._body_counts @ _summed_parameters(self.model, self.sharding)[row]
        has_norm_of_head = self._part_counts[:, 0]
        head = UNIT_KINDS.index(UnitKind.HEAD)
        elements = elements + has_norm_of_head * _summed_parameters(self.model, self.sharding)[row][head]
        total: Integers = elements * self.software.gradient_type.num_bytes(self.precision)
        return total

    def slot_bytes(self, slot: SlotKind, tokens: Sequence[int]) -> Integers:
        """[stages, len(tokens)]: bytes of one slot; ``tokens`` of slices, or of sequences for ``kv`` and ``dkv``.

        Read-only: tables are cached, since a candidate's are needed for stages, orders and the simulation.
        """
        key = slot, tuple(tokens)
        if key not in self._table_cache:
            table = self._counted_bytes(*key)
            table.setflags(write=False)
            self._table_cache[key] = table
        return self._table_cache[key]

    @functools.cached_property
    def _table_cache(self) -> dict[tuple[SlotKind, tuple[int, ...]], Integers]:
        return {}

    def _counted_bytes(self, slot: SlotKind, tokens: tuple[int, ...]) -> Integers:
        if slot in REMADE_SLOTS.values():
            return self._remade_bytes(slot, tokens, of_one_layer=self.software.recomputes_on_demand)
        unit_memory = self._of_unit
        if slot in HIDDEN_STATE_SLOTS:
            return self._border_bytes(unit_memory, slot, tokens, _hidden_table(unit_memory, tokens))
        sizes = _unit_table(unit_memory, slot, tokens)
        hidden = sizes[UNIT_KINDS.index(UnitKind.EMBEDDING)]
        table: Integers = self._body_counts @ sizes + self._part_counts @ _part_table(unit_memory, slot, tokens)
        if slot is SlotKind.ACTIVATIONS:
            leaves = [first < stop <= self.model.first_head_unit for first, stop in self.stages]
            table = table - np.outer(leaves, hidden)
        more_parts = np.maximum(self._part_counts.sum(axis=1) - 1, 0)
        table = table - np.outer(more_parts, _shared_by_parts(unit_memory, slot, tokens))
        return table - self._remade_bytes(REMADE_SLOTS[slot], tokens) if slot in REMADE_SLOTS else table

    @functools.cached_property
    def _of_unit(self) -> _UnitMemory:
        return _unit_memory(self.model, self.precision, self.batch, self.sharding, self.software, self.sequence_length)

    def _remade_bytes(self, slot: SlotKind, tokens: Sequence[int], *, of_one_layer: bool = False) -> Integers:
        """[stages, len(tokens)]: bytes of ``ra`` or ``rl``, which are subtracted from ``a`` or ``l``: of all units, or
        of the largest of each kind (``of_one_layer``).
        """
        table = np.zeros((len(self.stages), len(tokens)), dtype=np.int64)
        for number, remakes in enumerate(self.recompute):
            if remakes:
                stage = first_like(self.model, self.stages[number])
                table[number] = _stage_remade_bytes(self._of_unit, slot, tuple(tokens), stage, remakes, of_one_layer)
        return table

    def _border_bytes(
        self, unit_memory: _UnitMemory, slot: SlotKind, tokens: Sequence[int], hidden: Integers
    ) -> Integers:
        """Bytes of a slot between stages: a hidden state, or the state that parts of a head pass on."""
        borders = np.array(self.stages)[:, 0 if slot in _IN_FRONT else 1]
        is_inside = self.model.is_divided & (borders > self.model.first_head_unit)
        if not is_inside.any():
            return np.broadcast_to(hidden, (len(self.stages), len(tokens)))
        inside = _passed_on_table(unit_memory, slot, tuple(tokens))
        return np.where(is_inside[:, None], inside, hidden)

    def total_slot_bytes(self, slots: Sequence[SlotKind], tokens: Sequence[int]) -> Integers:
        """[stages, len(tokens)]: the sum over ``slots`` of the bytes of one slot."""
        total: Integers = np.sum([self.slot_bytes(slot, tokens) for slot in slots], axis=0)
        return total


_IN_FRONT = (SlotKind.INPUT, SlotKind.SENT_GRADIENT)
"""Slots at a stage's first unit; the others that carry a hidden state are at its last."""


@functools.lru_cache(maxsize=64)
def _part_parameters(model: ModelSpec, tp: int) -> Integers:
    """[parts of the head]: elements of each on the largest of ``tp`` shards."""
    parts = range(model.head_parts)
    return np.array([unit_parameters(model, UnitKind.HEAD, tp, part) for part in parts], dtype=np.int64)


@functools.lru_cache(maxsize=64)
def _unit_parameters(model: ModelSpec, tp: int) -> Integers:
    """[unit kinds]: elements of one unit on the largest of ``tp`` shards."""
    return np.array([unit_parameters(model, kind, tp) for kind in UNIT_KINDS], dtype=np.int64)


@functools.lru_cache(maxsize=64)
def _summed_parameters(model: ModelSpec, sharding: Sharding) -> Integers:
    """[2, unit kinds]: elements of one unit whose gradients are summed by all shards (row 0), or by those with the same
    heads (row 1).
    """
    num_elements = np.zeros((2, len(UNIT_KINDS)), dtype=np.int64)
    for column, kind in enumerate(UNIT_KINDS):
        unit = Unit(index=0, kind=kind)
        shared = shared_parameters(model, unit, sharding)
        for parameter in parameters(model, unit):
            if parameter.name not in shared:
                continue
            copied = [block for block in parameter.blocks if block.copies(sharding.tp) > 1]
            rows = sum(len(block.part(sharding.tp, 0)) for block in copied)
            row_elements = parameter.num_elements // parameter.shape[parameter.axis]
            num_elements[:, column] += (0, rows * row_elements) if copied else (parameter.num_elements, 0)
    return num_elements


@dataclass(frozen=True, slots=True, eq=False)
class _UnitMemory:
    """The counts of `StageMemory` for one unit. Cached functions take it as a key, so it is compared by identity."""

    model: ModelSpec
    precision: Precision
    batch: int
    sharding: Sharding
    software: SoftwareSpec
    sequence_length: int

    def part_bytes(self, slot: SlotKind, tokens: int, part: int, names: Collection[str] | None = None) -> int:
        """Bytes of a part of a divided head, or of the buffers ``names`` of it; 0 for a whole head."""
        buffers = unit_buffers(self.model, UnitKind.HEAD, slot, self.batch, tokens, self.sharding, part)
        return self._total(buffer for buffer in buffers if names is None or buffer.name in names)

    def border_bytes(self, slot: SlotKind, tokens: int) -> int:
        """Bytes of the state that a part of a divided head passes on."""
        last = self.model.num_units - 1
        buffers = stage_slot_buffers(self.model, last, last + 1, slot, self.batch, tokens, self.sharding)
        return self._total(buffer for _, buffer in buffers)

    def _total(self, buffers: Iterable[Buffer]) -> int:
        num_bytes = sum(aligned(buffer.num_bytes(self.precision)) for buffer in buffers)
        return min(int(num_bytes * (1 + self.software.allocator_slack)), MOST_BYTES)

    def slot_bytes(self, kind: UnitKind, slot: SlotKind, tokens: int) -> int:
        """Bytes of one unit, with the tensors that the software stack keeps in addition and its allocator's slack."""
        num_bytes = _unit_bytes(kind, self.model, self.precision, slot, self.batch, self.sharding, tokens)
        if slot is SlotKind.ACTIVATIONS:
            num_bytes += self._mask_bytes(kind, tokens) + self._score_bytes(kind, tokens)
        return min(int(num_bytes * (1 + self.software.allocator_slack)), MOST_BYTES)

    def remade_bytes(
        self, unit: Unit, slot: SlotKind, tokens: int, operations: Operations, elsewhere: Collection[str]
    ) -> int:
        """Bytes of ``ra`` or ``rl`` of a unit that recomputes ``operations``, without the buffers that lie
        ``elsewhere``. The software stack's additional tensors count with the operation that computes them.
        """
        buffers = unit_buffers(self.model, unit.kind, slot, self.batch, tokens, self.sharding, unit.part, operations)
        own_buffers = [buffer for buffer in buffers if buffer.name not in elsewhere]
        num_bytes = sum(aligned(buffer.num_bytes(self.precision)) for buffer in own_buffers)
        if slot is SlotKind.REMADE_ACTIVATIONS:
            num_bytes += self._mask_bytes(unit.kind, tokens) if Operation.OUTPUT in operations else 0
            num_bytes += self._score_bytes(unit.kind, tokens) if Operation.ATTEND in operations else 0
        return min(int(num_bytes * (1 + self.software.allocator_slack)), MOST_BYTES)

    def _mask_bytes(self, kind: UnitKind, tokens: int) -> int:
        if not self.software.dropout or kind not in (UnitKind.ATTENTION, UnitKind.MLP):
            return 0
        return MASK_BYTES * self.sharding.rows(self.batch * tokens) * self.model.hidden

    def _score_bytes(self, kind: UnitKind, tokens: int) -> int:
        if kind is not UnitKind.ATTENTION or self.software.attention is not AttentionKernel.UNFUSED:
            return 0
        kept_bytes = self.precision.compute_bytes
        if self.software.dropout:
            kept_bytes += self.precision.compute_bytes + MASK_BYTES
        return kept_bytes * self.batch * self.sharding.heads(self.model) * tokens * self.sequence_length


@functools.lru_cache(maxsize=4_096)
def _unit_memory(
    model: ModelSpec,
    precision: Precision,
    batch: int,
    sharding: Sharding,
    software: SoftwareSpec,
    sequence_length: int,
) -> _UnitMemory:
    """Return the same object for equal arguments while it is cached."""
    return _UnitMemory(model, precision, batch, sharding, software, sequence_length)


@functools.lru_cache(maxsize=2_048)
def _unit_table(unit_memory: _UnitMemory, slot: SlotKind, tokens: tuple[int, ...]) -> Integers:
    """[unit kinds, tokens]: bytes of a unit. Cached, since the slices of few slicings recur."""
    distinct, places = np.unique(tokens, return_inverse=True)
    sizes = [[unit_memory.slot_bytes(kind, slot, count) for count in distinct.tolist()] for kind in UNIT_KINDS]
    table: Integers = np.array(sizes, dtype=np.int64)[:, places]
    table.setflags(write=False)
    return table


@functools.lru_cache(maxsize=2_048)
def _hidden_table(unit_memory: _UnitMemory, tokens: tuple[int, ...]) -> Integers:
    """[tokens]: bytes of a hidden state, the same for every slot that holds one."""
    distinct, places = np.unique(tokens, return_inverse=True)
    sizes = [unit_memory.slot_bytes(UnitKind.EMBEDDING, SlotKind.INPUT, count) for count in distinct.tolist()]
    return np.array(sizes, dtype=np.int64)[places]


@functools.lru_cache(maxsize=2_048)
def _part_table(unit_memory: _UnitMemory, slot: SlotKind, tokens: tuple[int, ...]) -> Integers:
    """[parts of the head, tokens]: bytes of each part. Parts with as many rows hold as much, except for the first's
    norm.
    """
    parts = range(unit_memory.model.head_parts)
    kinds = [(part == 0, len(unit_memory.model.part_rows(part))) for part in parts]
    first = {kind: part for part, kind in reversed(list(enumerate(kinds)))}
    rows = {kind: [unit_memory.part_bytes(slot, count, part) for count in tokens] for kind, part in first.items()}
    return np.array([rows[kind] for kind in kinds], dtype=np.int64)


@functools.lru_cache(maxsize=2_048)
def _shared_by_parts(unit_memory: _UnitMemory, slot: SlotKind, tokens: tuple[int, ...]) -> Integers:
    """[tokens]: bytes that each further part of the head in a stage does not need, since the parts share them."""
    sizes = [
        unit_memory.part_bytes(slot, count, 1, SHARED_BY_PARTS) if unit_memory.model.is_divided else 0
        for count in tokens
    ]
    return np.array(sizes, dtype=np.int64)


@functools.lru_cache(maxsize=65_536)
def _stage_remade_bytes(
    unit_memory: _UnitMemory,
    slot: SlotKind,
    tokens: tuple[int, ...],
    stage: tuple[int, int],
    remakes: Remakes,
    of_one_layer: bool,
) -> Integers:
    """[tokens]: bytes of ``ra`` or ``rl`` of a stage of units [first, stop), or of the largest unit of each kind
    (``of_one_layer``). Equal units are computed once.
    """
    first, stop = stage
    head = unit_memory.model.first_head_unit
    counts: Counter[tuple[Unit, Operations, frozenset[str]]] = Counter()
    for unit, operations in zip(
        unit_memory.model.units[first:stop], remade_of(unit_memory.model, stage, remakes), strict=True
    ):
        if operations:
            key_unit = unit if unit.kind is UnitKind.HEAD else Unit(index=0, kind=unit.kind)
            shared_names = SHARED_BY_PARTS if unit.part and unit.index > first else frozenset()
            counts[
                key_unit, operations, frozenset({"y"}) if unit.index == stop - 1 and stop <= head else shared_names
            ] += 1
    of_kinds = np.zeros((len(UNIT_KINDS), len(tokens)), dtype=np.int64)
    for (unit, operations, elsewhere), count in counts.items():
        sizes = _unit_remade_bytes(unit_memory, slot, tokens, unit, operations, elsewhere)
        of_kind = of_kinds[UNIT_KINDS.index(unit.kind)]
        of_kind[:] = np.maximum(of_kind, sizes) if of_one_layer else of_kind + count * sizes
    table: Integers = of_kinds.sum(axis=0)
    table.setflags(write=False)
    return table


@functools.lru_cache(maxsize=8_192)
def _unit_remade_bytes(
    unit_memory: _UnitMemory,
    slot: SlotKind,
    tokens: tuple[int, ...],
    unit: Unit,
    operations: Operations,
    elsewhere: frozenset[str],
) -> Integers:
    """[tokens]: bytes of ``ra`` or ``rl`` of one unit."""
    distinct, places = np.unique(tokens, return_inverse=True)
    sizes = [unit_memory.remade_bytes(unit, slot, length, operations, elsewhere) for length in distinct.tolist()]
    return np.array(sizes, dtype=np.int64)[places]


@functools.lru_cache(maxsize=2_048)
def _passed_on_table(unit_memory: _UnitMemory, slot: SlotKind, tokens: tuple[int, ...]) -> Integers:
    """[tokens]: bytes of a slot between parts of the head."""
    return np.array([unit_memory.border_bytes(slot, count) for count in tokens], dtype=np.int64)


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
    """Bytes of one unit in a slot; an embedding stands for one hidden state in every slot that holds one."""
    unit = next(unit for unit in model.units if unit.kind is kind)
    buffers = stage_slot_buffers(model, unit.index, unit.index + 1, slot, batch, tokens, sharding)
    if slot is SlotKind.ACTIVATIONS:
        buffers = tuple((unit.index, buffer) for buffer in unit_buffers(model, kind, slot, batch, tokens, sharding))
    total = sum(aligned(buffer.num_bytes(precision)) for _, buffer in buffers)
    return min(total, MOST_BYTES)
