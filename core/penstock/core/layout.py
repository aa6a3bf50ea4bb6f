"""What every unit keeps in memory: its parameters and the buffers of its slots, as data.

The trainer allocates these shapes and the planner sums their bytes, so a prediction of slot memory is exact by
construction. `unit_graph` is the one place that declares buffers: each with its slot, the buffers it is made from, and
the operation that makes it. What recomputation has to do for some of them follows (`remaking`).

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
    """One named tensor of a slot; ``accumulate`` marks the wider type of statistics and accumulators, ``sharded`` what
    tensor parallelism divides (Megatron-LM's split: hidden states and norms are replicated).

    ``kv_elements`` of its elements belong to the ``kv_heads`` key/value heads, which more devices than that share.
    """

    name: str
    shape: tuple[int, ...]
    accumulate: bool = False
    sharded: bool = False
    kv_elements: int = 0
    kv_heads: int = 1

    def num_bytes(self, precision: Precision, tp: int = 1) -> int:
        """Bytes of its elements on one of ``tp`` devices."""
        width = precision.accumulate_bytes if self.accumulate else precision.compute_bytes
        elements = math.prod(self.shape)
        if not self.sharded:
            return elements * width
        return (elements - self.kv_elements) * width // tp + self.kv_elements * width // min(tp, self.kv_heads)


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


def copied_parameters(spec: ModelSpec, tp: int) -> int:
    """Elements that ``tp`` devices hold of one attention beyond its own: further copies of projections to keys and
    values, where several devices share a key/value head.
    """
    return (spec.kv_copies(tp) - 1) * 2 * spec.kv_hidden * spec.hidden


class Operation(enum.StrEnum):
    """What makes a unit's buffers. F and R run the first six, in this order; I runs the last."""

    EMBED = "embed"
    NORM = "norm"
    PROJECT = "project"
    ATTEND = "attend"
    ACTIVATE = "activate"
    OUTPUT = "output"
    BACKWARD = "backward"


INPUT, TOKENS, GRADIENT = "x", "tokens", "gradient"
"""What a unit is given: its input, for the embedding the token ids, and the gradient of its output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A buffer that a unit keeps in ``slot``, and the ``operation`` that makes it from ``inputs``: names of the unit's
    other buffers, or of what it is given.
    """

    buffer: Buffer
    slot: SlotKind
    operation: Operation
    inputs: tuple[str, ...]


@functools.lru_cache(maxsize=16_384)
def unit_graph(spec: ModelSpec, kind: UnitKind, batch: int, tokens: int) -> tuple[Saved, ...]:
    """All that one unit of ``kind`` keeps of B = batch, n = tokens, slot by slot in their order in memory.

    ``a`` holds what only I reads, ``l`` the inputs of the unit's Linears (written by F, read by I and W), ``w`` the
    gradients of their outputs (written by I, read by W). ``kv`` and ``dkv`` hold a whole micro-batch: there n is the
    sequence length. A unit's output ``y`` is the next unit's input: inside a stage it lives in ``a``. The embedding
    keeps only ``y`` and ``dy``; the head keeps nothing, its F does all its work.
    """
    if kind is UnitKind.HEAD:
        return ()
    hidden = (batch * tokens, spec.hidden)
    dy = _saved("dy", hidden, SlotKind.OUTPUT_GRADIENTS, Operation.BACKWARD, GRADIENT)
    if kind is UnitKind.EMBEDDING:
        return (_saved("y", hidden, SlotKind.ACTIVATIONS, Operation.EMBED, TOKENS), dy)
    last_input = "attended" if kind is UnitKind.ATTENTION else "activated"
    norm = ["rstd", "mean"] if spec.family is Family.GPT2 else ["rstd"]
    common = (
        _saved("y", hidden, SlotKind.ACTIVATIONS, Operation.OUTPUT, INPUT, last_input),
        *(_saved(n, hidden[:1], SlotKind.ACTIVATIONS, Operation.NORM, INPUT, accumulate=True) for n in norm),
    )
    normed = _saved("normed", hidden, SlotKind.LINEAR_INPUTS, Operation.NORM, INPUT)
    if kind is UnitKind.ATTENTION:
        return (*common, *_attention_graph(spec, batch, tokens, normed, dy))
    return (*common, *_mlp_graph(spec, batch * tokens, normed, dy))


def _attention_graph(spec: ModelSpec, batch: int, tokens: int, normed: Saved, dy: Saved) -> tuple[Saved, ...]:
    """A head's keys lie together, since every block of queries reads them again: the CPU kernels take 6 % less time
    so.
    """
    t, h, kv = batch * tokens, spec.hidden, spec.kv_hidden
    a, l, w = SlotKind.ACTIVATIONS, SlotKind.LINEAR_INPUTS, SlotKind.OUTPUT_GRADIENTS  # noqa: E741  the slot's name
    by_head = (batch, spec.kv_heads, tokens, spec.head_dim)
    by_token = (batch, tokens, spec.kv_heads, spec.head_dim)
    qkv = ("q", "k", "v")
    from_attention = ("dy", "attended", "lse", *qkv)
    shared = functools.partial(_saved, sharded=True, kv_heads=spec.kv_heads)
    return (
        _saved("q", (batch, tokens, spec.heads, spec.head_dim), a, Operation.PROJECT, "normed", sharded=True),
        _saved("lse", (batch, tokens, spec.heads), a, Operation.ATTEND, *qkv, accumulate=True, sharded=True),
        normed,
        _saved("attended", (t, h), l, Operation.ATTEND, *qkv, sharded=True),
        dy,
        shared("dqkv", (t, h + 2 * kv), w, Operation.BACKWARD, *from_attention, "dk", "dv", kv=2 * t * kv),
        *(shared(n, by_head, SlotKind.KEYS_VALUES, Operation.PROJECT, "normed", kv=t * kv) for n in ("k", "v")),
        *(
            shared(
                name,
                by_token,
                SlotKind.KEYS_VALUES_GRADIENTS,
                Operation.BACKWARD,
                *from_attention,
                accumulate=True,
                kv=t * kv,
            )
            for name in ("dk", "dv")
        ),
    )


def _mlp_graph(spec: ModelSpec, t: int, normed: Saved, dy: Saved) -> tuple[Saved, ...]:
    name, width = ("gate_up", 2 * spec.ffn_hidden) if spec.family is Family.LLAMA else ("up", spec.ffn_hidden)
    from_activation = ("dy", name, "activated")
    return (
        _saved(name, (t, width), SlotKind.ACTIVATIONS, Operation.PROJECT, "normed", sharded=True),
        normed,
        _saved("activated", (t, spec.ffn_hidden), SlotKind.LINEAR_INPUTS, Operation.ACTIVATE, name, sharded=True),
        dy,
        _saved(f"d{name}", (t, width), SlotKind.OUTPUT_GRADIENTS, Operation.BACKWARD, *from_activation, sharded=True),
    )


def _saved(
    name: str,
    shape: tuple[int, ...],
    slot: SlotKind,
    operation: Operation,
    *inputs: str,
    accumulate: bool = False,
    sharded: bool = False,
    kv: int = 0,
    kv_heads: int = 1,
) -> Saved:
    buffer = Buffer(name=name, shape=shape, accumulate=accumulate, sharded=sharded, kv_elements=kv, kv_heads=kv_heads)
    return Saved(buffer=buffer, slot=slot, operation=operation, inputs=inputs)


REMADE_SLOTS = frozenset({SlotKind.ACTIVATIONS, SlotKind.LINEAR_INPUTS})
"""What a forward leaves out where a recompute follows; keys and values stay."""


@functools.lru_cache(maxsize=4096)
def remaking(spec: ModelSpec, kind: UnitKind, *, with_output: bool = True) -> tuple[Operation, ...]:
    """The operations by which R makes a unit's ``a`` and ``l`` again, in their order; its output only if wanted.

    Everything that they are made from is made again, too, back to what the unit is given.
    """
    graph = {saved.buffer.name: saved for saved in unit_graph(spec, kind, 1, 1)}
    wanted = [name for name, saved in graph.items() if saved.slot in REMADE_SLOTS and (with_output or name != "y")]
    needed: set[Operation] = set()
    while wanted:
        saved = graph.get(wanted.pop())
        if saved is not None:
            needed.add(saved.operation)
            wanted += saved.inputs
    return tuple(operation for operation in Operation if operation in needed)


def num_remade_units(spec: ModelSpec, first: int, stop: int) -> int:
    """How many units of a stage keep anything that R makes again: all but the head."""
    return sum(bool(remaking(spec, unit.kind)) for unit in spec.units[first:stop])


@functools.lru_cache(maxsize=16_384)
def unit_buffers(spec: ModelSpec, kind: UnitKind, slot: SlotKind, batch: int, tokens: int) -> tuple[Buffer, ...]:
    """The buffers of `unit_graph` that one unit keeps in ``slot``."""
    return tuple(saved.buffer for saved in unit_graph(spec, kind, batch, tokens) if saved.slot is slot)


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
        for buffer in unit_buffers(spec, unit.kind, slot, batch, tokens)
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


def stage_slot_bytes(
    spec: ModelSpec, precision: Precision, first: int, stop: int, slot: SlotKind, batch: int, tokens: int, tp: int = 1
) -> int:
    """Bytes of one slot of a stage on one of ``tp`` devices, every buffer aligned."""
    buffers = stage_slot_buffers(spec, first, stop, slot, batch, tokens)
    return sum(aligned(buffer.num_bytes(precision, tp)) for _, buffer in buffers)
