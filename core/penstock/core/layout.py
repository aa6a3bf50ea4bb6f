"""What every unit keeps in memory: its parameters and the buffers of its slots, as data.

The trainer allocates these shapes and the planner sums their bytes, so a prediction of slot memory is exact by
construction.

Legend for shapes: B sequences of the micro-batch, n tokens of the slice, t = B n, s sequence length, h hidden,
a heads, g key/value heads, d head dimension, f feed-forward width, v vocabulary.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass

from penstock.core.model import Family, ModelSpec, Unit, UnitKind


class Precision(enum.StrEnum):
    """The type of activations and of the weights used in products; fp64 exists for proofs of exactness."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP64 = "fp64"

    @property
    def compute_bytes(self) -> int:
        """Bytes of one activation element."""
        return {"fp32": 4, "bf16": 2, "fp64": 8}[self.value]

    @property
    def accumulate_bytes(self) -> int:
        """Bytes of one element of gradients, norm statistics, dK/dV and master weights: at least fp32."""
        return 8 if self is Precision.FP64 else 4


class SlotKind(enum.StrEnum):
    """The kinds of slot of a Program and their lifetimes (see `penstock.core.program`)."""

    INPUT = "x"
    ACTIVATIONS = "a"
    LINEAR_INPUTS = "l"
    OUTPUT_GRADIENTS = "w"
    OUTPUT = "y"
    SENT_GRADIENT = "g_out"
    RECEIVED_GRADIENT = "g_in"
    HEAD_GRADIENT = "h"
    KEYS_VALUES = "kv"
    KEYS_VALUES_GRADIENTS = "dkv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One named tensor of a slot; ``accumulate`` marks the wider type of statistics and accumulators."""

    name: str
    shape: tuple[int, ...]
    accumulate: bool = False

    def num_bytes(self, precision: Precision) -> int:
        """Bytes of its elements."""
        width = precision.accumulate_bytes if self.accumulate else precision.compute_bytes
        return math.prod(self.shape) * width


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One trained tensor: global name, shape, and whether weight decay applies (matrices yes, norms and biases no)."""

    name: str
    shape: tuple[int, ...]
    decay: bool

    @property
    def num_elements(self) -> int:
        """The product of its shape."""
        return math.prod(self.shape)


@functools.lru_cache(maxsize=4096)
def parameters(spec: ModelSpec, unit: Unit) -> tuple[Parameter, ...]:
    """The parameters of one unit. A tied head names the embedding's matrix: one global name, two copies."""
    matrices = _matrices(spec, unit)
    biased = spec.family is Family.GPT2
    found = []
    if unit.kind is not UnitKind.EMBEDDING:
        found.append(Parameter(name=f"{unit.name}.norm.weight", shape=(spec.hidden,), decay=False))
        if biased:
            found.append(Parameter(name=f"{unit.name}.norm.bias", shape=(spec.hidden,), decay=False))
    for name, shape in matrices:
        found.append(Parameter(name=f"{name}.weight", shape=shape, decay=True))
        if biased and unit.kind in (UnitKind.ATTENTION, UnitKind.MLP):
            found.append(Parameter(name=f"{name}.bias", shape=shape[:1], decay=False))
    if biased and unit.kind is UnitKind.EMBEDDING:
        found.append(Parameter(name=f"{unit.name}.position", shape=(spec.positions, spec.hidden), decay=True))
    return tuple(found)


def _matrices(spec: ModelSpec, unit: Unit) -> list[tuple[str, tuple[int, int]]]:
    h, f = spec.hidden, spec.ffn_hidden
    if unit.kind is UnitKind.ATTENTION:
        return [(f"{unit.name}.qkv", (h + 2 * spec.kv_hidden, h)), (f"{unit.name}.out", (h, h))]
    if unit.kind is UnitKind.MLP:
        rising = ("gate_up", 2 * f) if spec.family is Family.LLAMA else ("up", f)
        return [(f"{unit.name}.{rising[0]}", (rising[1], h)), (f"{unit.name}.down", (h, f))]
    name = "embedding" if spec.tied else unit.name
    return [(name, (spec.vocab, h))]


def num_parameters(spec: ModelSpec) -> int:
    """All trained elements, a tied matrix counted once."""
    return stage_parameters(spec, 0, spec.num_units)


def stage_parameters(spec: ModelSpec, first: int, stop: int) -> int:
    """Elements held by a stage of units [first, stop); a tied copy counts on each stage that holds it, once.

    A formula: units of a kind are alike, so none is built to be counted. Unit 0 is the embedding, then attention and
    MLP take turns, and the head is the last.
    """
    last = spec.num_units - 1
    blocks = range(max(first, 1), min(stop, last))
    num_attention = len(blocks) // 2 + (len(blocks) % 2) * (blocks.start % 2)
    has_embedding, has_head = first <= 0 < stop, first <= last < stop
    counts = {
        UnitKind.EMBEDDING: int(has_embedding),
        UnitKind.ATTENTION: num_attention,
        UnitKind.MLP: len(blocks) - num_attention,
        UnitKind.HEAD: int(has_head),
    }
    held = sum(count * unit_parameters(spec, kind) for kind, count in counts.items())
    return held - (spec.vocab * spec.hidden if spec.tied and has_embedding and has_head else 0)


@functools.lru_cache(maxsize=4096)
def unit_parameters(spec: ModelSpec, kind: UnitKind) -> int:
    """Elements of one unit of a kind, a tied matrix included."""
    return sum(parameter.num_elements for parameter in parameters(spec, Unit(index=0, kind=kind)))


def unit_buffers(spec: ModelSpec, kind: UnitKind, slot: SlotKind, batch: int, tokens: int) -> tuple[Buffer, ...]:
    """The buffers that one unit of ``kind`` keeps in a per-slice slot (``a``, ``l`` or ``w``) for B = batch, n =
    tokens.

    ``a`` holds what only I reads, ``l`` the inputs of the unit's Linears (written by F, read by I and W), ``w`` the
    gradients of their outputs (written by I, read by W). A unit's output ``y`` is the next unit's input: inside a
    stage it lives in ``a``. The embedding keeps only ``dy``; the head keeps nothing, its F does all its work.
    """
    t = batch * tokens
    if slot is SlotKind.OUTPUT_GRADIENTS:
        return _output_gradients(spec, kind, t)
    if kind in (UnitKind.ATTENTION, UnitKind.MLP):
        return (
            _activations(spec, kind, batch, tokens) if slot is SlotKind.ACTIVATIONS else _linear_inputs(spec, kind, t)
        )
    if kind is UnitKind.EMBEDDING and slot is SlotKind.ACTIVATIONS:
        return (Buffer(name="y", shape=(t, spec.hidden)),)
    return ()


def _activations(spec: ModelSpec, kind: UnitKind, batch: int, tokens: int) -> tuple[Buffer, ...]:
    t = batch * tokens
    kept = [Buffer(name="y", shape=(t, spec.hidden)), Buffer(name="rstd", shape=(t,), accumulate=True)]
    if spec.family is Family.GPT2:
        kept.append(Buffer(name="mean", shape=(t,), accumulate=True))
    if kind is UnitKind.ATTENTION:
        kept.append(Buffer(name="q", shape=(batch, tokens, spec.heads, spec.head_dim)))
        kept.append(Buffer(name="lse", shape=(batch, tokens, spec.heads), accumulate=True))
    else:
        kept.append(_before_activation(spec, t))
    return tuple(kept)


def _before_activation(spec: ModelSpec, t: int) -> Buffer:
    if spec.family is Family.LLAMA:
        return Buffer(name="gate_up", shape=(t, 2 * spec.ffn_hidden))
    return Buffer(name="up", shape=(t, spec.ffn_hidden))


def _linear_inputs(spec: ModelSpec, kind: UnitKind, t: int) -> tuple[Buffer, ...]:
    normed = Buffer(name="normed", shape=(t, spec.hidden))
    if kind is UnitKind.ATTENTION:
        return (normed, Buffer(name="attended", shape=(t, spec.hidden)))
    return (normed, Buffer(name="activated", shape=(t, spec.ffn_hidden)))


def _output_gradients(spec: ModelSpec, kind: UnitKind, t: int) -> tuple[Buffer, ...]:
    dy = Buffer(name="dy", shape=(t, spec.hidden))
    if kind is UnitKind.ATTENTION:
        return (dy, Buffer(name="dqkv", shape=(t, spec.hidden + 2 * spec.kv_hidden)))
    if kind is UnitKind.MLP:
        rising = _before_activation(spec, t)
        return (dy, Buffer(name=f"d{rising.name}", shape=rising.shape))
    return (dy,) if kind is UnitKind.EMBEDDING else ()


def prefix_buffers(spec: ModelSpec, slot: SlotKind, batch: int, sequence_length: int) -> tuple[Buffer, ...]:
    """The keys and values (``kv``), or their gradients (``dkv``), of one attention unit for a whole micro-batch.

    A head's keys lie together, since every block of queries reads them again: the CPU kernels take 6 % less time so.
    """
    if slot is SlotKind.KEYS_VALUES:
        by_head = (batch, spec.kv_heads, sequence_length, spec.head_dim)
        return (Buffer(name="k", shape=by_head), Buffer(name="v", shape=by_head))
    shape = (batch, sequence_length, spec.kv_heads, spec.head_dim)
    return (Buffer(name="dk", shape=shape, accumulate=True), Buffer(name="dv", shape=shape, accumulate=True))


ALIGNMENT_BYTES = 64
"""Every buffer starts on a cache line."""

HEAD_CHUNK_TOKENS = 512
"""Tokens whose logits exist at once: their memory is this times the vocabulary.

Fewer means that the head's weight gradient passes through memory more often: with 1,024 tokens of width 512 and a
vocabulary of 4,096 on one CPU core, the products take 145 ms in one chunk, 149 in two, 154 in four, 166 in sixteen.
"""


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def stage_slot_buffers(
    spec: ModelSpec, first: int, stop: int, slot: SlotKind, batch: int, tokens: int
) -> tuple[tuple[int, Buffer], ...]:
    """(unit index, buffer) of every tensor in one slot of the stage that owns units [first, stop).

    ``tokens`` is the slice's length, or the sequence length for ``kv`` and ``dkv``. The slots that carry a hidden
    state between stages (x, y, g_in, g_out, h) hold one [t, h] tensor, filed under the unit next to it.
    """
    if slot in HIDDEN_STATE_SLOTS:
        owner = stop - 1 if slot in (SlotKind.OUTPUT, SlotKind.RECEIVED_GRADIENT, SlotKind.HEAD_GRADIENT) else first
        return ((owner, Buffer(name=slot.value, shape=(batch * tokens, spec.hidden))),)
    return tuple(
        (unit.index, buffer)
        for unit in spec.units[first:stop]
        for buffer in _unit_slot(spec, unit.kind, slot, batch, tokens)
        if not (buffer.name == "y" and _leaves_stage(spec, unit.index, stop))
    )


HIDDEN_STATE_SLOTS = frozenset(
    {
        SlotKind.INPUT,
        SlotKind.OUTPUT,
        SlotKind.SENT_GRADIENT,
        SlotKind.RECEIVED_GRADIENT,
        SlotKind.HEAD_GRADIENT,
    }
)


def _leaves_stage(spec: ModelSpec, index: int, stop: int) -> bool:
    return index == stop - 1 and stop < spec.num_units


def _unit_slot(spec: ModelSpec, kind: UnitKind, slot: SlotKind, batch: int, tokens: int) -> tuple[Buffer, ...]:
    if slot in (SlotKind.KEYS_VALUES, SlotKind.KEYS_VALUES_GRADIENTS):
        return prefix_buffers(spec, slot, batch, tokens) if kind is UnitKind.ATTENTION else ()
    return unit_buffers(spec, kind, slot, batch, tokens)


def stage_slot_bytes(
    spec: ModelSpec, precision: Precision, first: int, stop: int, slot: SlotKind, batch: int, tokens: int
) -> int:
    """Bytes of one slot of a stage, every buffer aligned."""
    buffers = stage_slot_buffers(spec, first, stop, slot, batch, tokens)
    return sum(aligned(buffer.num_bytes(precision)) for _, buffer in buffers)
