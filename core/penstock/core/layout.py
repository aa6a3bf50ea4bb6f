"""Memory of every unit: its parameters and the buffers of its slots, as data.

The trainer allocates these shapes and the planner sums their bytes, so a prediction of slot memory is exact by
construction. `unit_graph` is the one place that declares buffers: each with its slot, the buffers it is made from, and
the operation that makes it. The operations that recomputation of some of them needs follow from that (`remaking`).

Shapes are those of one shard (`penstock.core.sharding`): a hidden state has the rows that a shard holds, q, k, v and
the MLP's inner buffers have its heads and its part of the width.

Legend for shapes: B sequences of the micro-batch, n tokens of the slice, t = B n, s sequence length, h hidden, a heads,
g key/value heads, d head dimension, f feed-forward width, v vocabulary; for a part of the head, its own rows.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.model import Family, ModelSpec, Unit, UnitKind
from penstock.core.sharding import WHOLE, Block, Piece, Sharding


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
    """The kinds of slot of a Program; `penstock.core.program` has their live ranges."""

    INPUT = "x"
    ACTIVATIONS = "a"
    LINEAR_INPUTS = "l"
    REMADE_ACTIVATIONS = "ra"
    REMADE_LINEAR_INPUTS = "rl"
    OUTPUT_GRADIENTS = "w"
    OUTPUT = "y"
    SENT_GRADIENT = "g_out"
    RECEIVED_GRADIENT = "g_in"
    HEAD_GRADIENT = "h"
    KEYS_VALUES = "kv"
    KEYS_VALUES_GRADIENTS = "dkv"


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One named tensor of a slot, as one shard holds it; ``accumulate`` marks the wider type of statistics and
    accumulators.
    """

    name: str
    shape: tuple[int, ...]
    accumulate: bool = False

    def num_bytes(self, precision: Precision) -> int:
        """Bytes of its elements."""
        width = precision.accumulate_bytes if self.accumulate else precision.compute_bytes
        return math.prod(self.shape) * width


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One trained tensor: global name and shape, whether weight decay applies (matrices yes, norms and biases no), and
    its division over shards: along ``axis`` the ``blocks`` one after the other, from row or column ``start`` on.
    Without blocks every shard holds all of it.

    Blocks cover the whole tensor, except for parts of the head, whose shape is that of the whole matrix. ``is_copy``:
    the first stage has the same rows, and they are counted and stored there.
    """

    name: str
    shape: tuple[int, ...]
    decay: bool
    axis: int = 0
    blocks: tuple[Block, ...] = ()
    start: int = 0
    is_copy: bool = False

    @property
    def num_elements(self) -> int:
        """Number of elements on all shards together, copies counted once."""
        if not self.blocks:
            return math.prod(self.shape)
        return math.prod(self.shape) // self.shape[self.axis] * sum(block.size for block in self.blocks)

    def pieces(self, tp: int, shard: int) -> tuple[Piece, ...]:
        """The pieces along ``axis`` that ``shard`` of ``tp`` holds, in the order of its own tensor."""
        if not self.blocks:
            return (Piece(0, self.shape[self.axis], shard == 0),)
        pieces, start = [], self.start
        for block in self.blocks:
            part = block.part(tp, shard)
            pieces.append(Piece(start + part.start, start + part.stop, shard % block.copies(tp) == 0))
            start += block.size
        return tuple(pieces)

    def shard_shape(self, tp: int, shard: int) -> tuple[int, ...]:
        """The shape of the tensor that ``shard`` of ``tp`` holds: its pieces one after the other."""
        shape = list(self.shape)
        shape[self.axis] = sum(piece.size for piece in self.pieces(tp, shard))
        return tuple(shape)

    def place_of(self, rows: range, tp: int, shard: int) -> slice:
        """The range in the tensor of ``shard`` that corresponds to these rows or columns, which are whole blocks."""
        pieces = self.pieces(tp, shard)
        start = sum(piece.size for piece in pieces if piece.start < rows.start)
        return slice(start, start + sum(piece.size for piece in pieces if piece.start in rows))


@functools.lru_cache(maxsize=4096)
def parameters(spec: ModelSpec, unit: Unit) -> tuple[Parameter, ...]:
    """The parameters of one unit. A tied head names the embedding's matrix: one global name, two copies.

    Each part of a divided head has its rows of the matrix, and the first one has the norm.
    """
    matrices = _matrices(spec, unit)
    biased = spec.family is Family.GPT2
    declared = []
    if unit.kind is not UnitKind.EMBEDDING and not unit.part:
        declared.append(Parameter(name=f"{unit.name}.norm.weight", shape=(spec.hidden,), decay=False))
        if biased:
            declared.append(Parameter(name=f"{unit.name}.norm.bias", shape=(spec.hidden,), decay=False))
    for matrix in matrices:
        declared.append(matrix)
        if biased and unit.kind in (UnitKind.ATTENTION, UnitKind.MLP):
            declared.append(_bias_of(matrix))
    if biased and unit.kind is UnitKind.EMBEDDING:
        declared.append(Parameter(name=f"{unit.name}.position", shape=(spec.positions, spec.hidden), decay=True))
    return tuple(declared)


def _matrices(spec: ModelSpec, unit: Unit) -> tuple[Parameter, ...]:
    """First products are divided by rows, second ones by columns, embedding and head by the vocabulary."""
    h, kv, f = spec.hidden, spec.kv_hidden, spec.ffn_hidden
    if unit.kind is UnitKind.ATTENTION:
        heads = (Block(h, spec.heads), *(Block(kv, spec.kv_heads) for _ in range(2)))
        return _matrix(f"{unit.name}.qkv", (h + 2 * kv, h), heads), _matrix(f"{unit.name}.out", (h, h), (Block(h),), 1)
    if unit.kind is UnitKind.MLP:
        name, count = ("gate_up", 2) if spec.family is Family.LLAMA else ("up", 1)
        rising = _matrix(f"{unit.name}.{name}", (count * f, h), (Block(f),) * count)
        return rising, _matrix(f"{unit.name}.down", (h, f), (Block(f),), 1)
    name = "embedding" if spec.tied else unit.name
    blocks, start = _vocabulary(spec, unit)
    matrix = _matrix(name, (spec.vocab, h), blocks)
    is_copy = spec.tied and unit.kind is UnitKind.HEAD
    return (dataclasses.replace(matrix, start=start, is_copy=is_copy),)


def _vocabulary(spec: ModelSpec, unit: Unit) -> tuple[tuple[Block, ...], int]:
    """The blocks of an embedding or a head, and their start. Shards of a tied embedding divide each part of the head by
    itself, so that the same shard has the same rows of both copies.
    """
    if unit.kind is UnitKind.HEAD:
        rows = spec.part_rows(unit.part)
        return (Block(len(rows)),), rows.start
    parts = range(spec.head_parts) if spec.tied else ()
    return tuple(Block(len(spec.part_rows(part))) for part in parts) or (Block(spec.vocab),), 0


def _matrix(name: str, shape: tuple[int, int], blocks: tuple[Block, ...], axis: int = 0) -> Parameter:
    return Parameter(name=f"{name}.weight", shape=shape, decay=True, axis=axis, blocks=blocks)


def _bias_of(matrix: Parameter) -> Parameter:
    """The bias of a matrix, divided like its rows; if these are not divided, every shard has all of it and adds it
    once.
    """
    name = f"{matrix.name.removesuffix('.weight')}.bias"
    return Parameter(name=name, shape=matrix.shape[:1], decay=False, blocks=() if matrix.axis else matrix.blocks)


@functools.lru_cache(maxsize=1024)
def declared_parameters(spec: ModelSpec, first: int, stop: int) -> dict[str, Parameter]:
    """Parameters of a stage of units [first, stop), by name in the units' order. Parts of the head are one tensor,
    which is part of a tied embedding if the stage has both.
    """
    declared: dict[str, Parameter] = {}
    for unit in spec.units[first:stop]:
        for parameter in parameters(spec, unit):
            other = declared.setdefault(parameter.name, parameter)
            if other is not parameter and not (spec.tied and first == 0):
                declared[parameter.name] = dataclasses.replace(other, blocks=other.blocks + parameter.blocks)
    return declared


def tied_stages(spec: ModelSpec, stages: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """The stages with rows of a matrix that embedding and head share: the first, and those with parts of the head;
    empty if nothing is tied.
    """
    parts = (number for number, (_, stop) in enumerate(stages) if number and stop > spec.first_head_unit)
    return (0, *parts) if spec.tied else ()


def num_parameters(spec: ModelSpec) -> int:
    """Number of all trained elements; a tied matrix counts once."""
    return stage_parameters(spec, 0, spec.num_units)


def stage_parameters(spec: ModelSpec, first: int, stop: int, tp: int = 1) -> int:
    """Number of elements on the largest of ``tp`` shards of a stage of units [first, stop); a tied copy counts once on
    each stage that holds it.

    A formula: units of a kind are equal, so none is built to be counted. Unit 0 is the embedding, then attention and
    MLP alternate, and the head's parts are the last.
    """
    head = spec.first_head_unit
    blocks = range(max(first, 1), min(stop, head))
    num_attention = len(blocks) // 2 + (len(blocks) % 2) * (blocks.start % 2)
    has_embedding = first <= 0 < stop
    counts = {
        UnitKind.EMBEDDING: int(has_embedding),
        UnitKind.ATTENTION: num_attention,
        UnitKind.MLP: len(blocks) - num_attention,
    }
    held = sum(count * unit_parameters(spec, kind, tp) for kind, count in counts.items() if count)
    for part in range(max(first, head) - head, stop - head):
        held += unit_parameters(spec, UnitKind.HEAD, tp, part)
        held -= -(-len(spec.part_rows(part)) // tp) * spec.hidden if spec.tied and has_embedding else 0
    return held


@functools.lru_cache(maxsize=4096)
def unit_parameters(spec: ModelSpec, kind: UnitKind, tp: int = 1, part: int = 0) -> int:
    """Number of elements on the largest of ``tp`` shards of one unit of a kind, a tied matrix included; ``part`` is the
    index of a part of the head.
    """
    unit = Unit(index=0, kind=kind, part=part)
    return sum(_shard_elements(parameter, tp) for parameter in parameters(spec, unit))


def _shard_elements(parameter: Parameter, tp: int) -> int:
    return max(math.prod(parameter.shard_shape(tp, shard)) for shard in range(tp))


def shared_parameters(spec: ModelSpec, unit: Unit, sharding: Sharding) -> tuple[str, ...]:
    """Names of a unit's parameters for whose gradients a shard has only an addend, in whole or in part.

    With sequence parallelism these are the parameters that every shard holds, since each adds its own tokens; and
    key/value heads of which several shards hold copies.
    """
    return tuple(
        parameter.name
        for parameter in parameters(spec, unit)
        if sharding.tp > 1
        and (
            any(block.copies(sharding.tp) > 1 for block in parameter.blocks) if parameter.blocks else sharding.by_tokens
        )
    )


class Operation(enum.StrEnum):
    """The operation that makes a buffer. F and R run the first six, in this order; I runs the last."""

    EMBED = "embed"
    NORM = "norm"
    PROJECT = "project"
    ATTEND = "attend"
    ACTIVATE = "activate"
    OUTPUT = "output"
    BACKWARD = "backward"


NUM_STATISTICS = 3
"""Numbers per token that parts of a head pass on: the highest logit, the sum of exponentials of logits less the
highest, and the target's logit.
"""

NUM_OWN_STATISTICS = 2
"""The first of these, which a part keeps for its own rows."""

INPUT, TOKENS, GRADIENT = "x", "tokens", "gradient"
"""Inputs of a unit: its input, for the embedding the token ids, and the gradient of its output."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A buffer that a unit keeps in ``slot``, and the ``operation`` that makes it from ``inputs``: names of the unit's
    other buffers, or of its own inputs.
    """

    buffer: Buffer
    slot: SlotKind
    operation: Operation
    inputs: tuple[str, ...]


@functools.lru_cache(maxsize=16_384)
def unit_graph(
    spec: ModelSpec, kind: UnitKind, batch: int, tokens: int, sharding: Sharding = WHOLE, part: int = 0
) -> tuple[Saved, ...]:
    """All buffers of a shard of one unit of ``kind`` for B = batch, n = tokens, slot by slot in their order in memory.

    ``a`` holds buffers that only I reads, ``l`` the inputs of the unit's Linears (written by F, read by I and W), ``w``
    the gradients of their outputs (written by I, read by W). ``kv`` and ``dkv`` hold one slice or a whole micro-batch
    (`penstock.core.plan.Plan.prefix_by_slice`), for which n is the sequence length. A unit's output ``y`` is the next
    unit's input: inside a stage it is in ``a``. The embedding keeps only ``y`` and ``dy``; a whole head keeps nothing,
    its F does all its work. ``dy`` has space for all shards' rows. ``part`` is the index of a part of a divided head,
    whose output is in its stage's slots (`stage_slot_buffers`).
    """
    if kind is UnitKind.HEAD:
        return _part_graph(spec, batch * tokens, sharding, part) if spec.is_divided else ()
    hidden = (sharding.rows(batch * tokens), spec.hidden)
    gathered = (sharding.padded_rows(batch * tokens), spec.hidden)
    dy = _saved("dy", gathered, SlotKind.OUTPUT_GRADIENTS, Operation.BACKWARD, GRADIENT)
    if kind is UnitKind.EMBEDDING:
        return (_saved("y", hidden, SlotKind.ACTIVATIONS, Operation.EMBED, TOKENS), dy)
    last_input = "attended" if kind is UnitKind.ATTENTION else "activated"
    common = (
        _saved("y", hidden, SlotKind.ACTIVATIONS, Operation.OUTPUT, INPUT, last_input),
        *_norm_statistics(spec, hidden[0]),
    )
    normed = _saved("normed", hidden, SlotKind.LINEAR_INPUTS, Operation.NORM, INPUT)
    if kind is UnitKind.ATTENTION:
        return (*common, *_attention_graph(spec, batch, tokens, sharding, normed, dy))
    return (*common, *_mlp_graph(spec, batch * tokens, sharding, normed, dy))


def _norm_statistics(spec: ModelSpec, rows: int) -> tuple[Saved, ...]:
    names = ["rstd", "mean"] if spec.family is Family.GPT2 else ["rstd"]
    return tuple(_saved(name, (rows,), SlotKind.ACTIVATIONS, Operation.NORM, INPUT, accumulate=True) for name in names)


def _part_graph(spec: ModelSpec, t: int, sharding: Sharding, part: int) -> tuple[Saved, ...]:
    """The softmax over the shard's rows of the part, without the targets', and its statistics; I receives those of the
    whole vocabulary. Only the first part has a norm, the others receive the normed state.
    """
    l, w, rows = SlotKind.LINEAR_INPUTS, SlotKind.OUTPUT_GRADIENTS, sharding.rows(t)  # noqa: E741  the slot's name
    vocab = -(-len(spec.part_rows(part)) // sharding.tp)
    return (
        *(_norm_statistics(spec, rows) if part == 0 else ()),
        _saved("normed", (rows, spec.hidden), l, Operation.PROJECT if part else Operation.NORM, INPUT),
        _saved("probabilities", (t, vocab), l, Operation.ACTIVATE, "normed"),
        _saved("own_statistics", (NUM_OWN_STATISTICS, t), l, Operation.ACTIVATE, "normed", accumulate=True),
        _saved("statistics", (NUM_STATISTICS, t), w, Operation.BACKWARD, GRADIENT, accumulate=True),
    )


def _attention_graph(
    spec: ModelSpec, batch: int, tokens: int, sharding: Sharding, normed: Saved, dy: Saved
) -> tuple[Saved, ...]:
    """A head's keys are contiguous, since every block of queries reads them again: the CPU kernels are 6 % faster that
    way.
    """
    t, h, kv = batch * tokens, sharding.hidden(spec), sharding.kv_hidden(spec)
    a, l, w = SlotKind.ACTIVATIONS, SlotKind.LINEAR_INPUTS, SlotKind.OUTPUT_GRADIENTS  # noqa: E741  the slot's name
    heads, kv_heads = sharding.heads(spec), sharding.kv_heads(spec)
    by_head = (batch, kv_heads, tokens, spec.head_dim)
    by_token = (batch, tokens, kv_heads, spec.head_dim)
    qkv = ("q", "k", "v")
    from_attention = ("dy", "attended", "lse", *qkv)
    dkv, backward = SlotKind.KEYS_VALUES_GRADIENTS, Operation.BACKWARD
    return (
        _saved("q", (batch, tokens, heads, spec.head_dim), a, Operation.PROJECT, "normed"),
        _saved("lse", (batch, tokens, heads), a, Operation.ATTEND, *qkv, accumulate=True),
        normed,
        _saved("attended", (t, h), l, Operation.ATTEND, *qkv),
        dy,
        _saved("dqkv", (t, h + 2 * kv), w, backward, *from_attention, "dk", "dv"),
        *(_saved(name, by_head, SlotKind.KEYS_VALUES, Operation.PROJECT, "normed") for name in ("k", "v")),
        *(_saved(name, by_token, dkv, backward, *from_attention, accumulate=True) for name in ("dk", "dv")),
    )


def _mlp_graph(spec: ModelSpec, t: int, sharding: Sharding, normed: Saved, dy: Saved) -> tuple[Saved, ...]:
    f = sharding.ffn_hidden(spec)
    name, width = ("gate_up", 2 * f) if spec.family is Family.LLAMA else ("up", f)
    from_activation = ("dy", name, "activated")
    return (
        _saved(name, (t, width), SlotKind.ACTIVATIONS, Operation.PROJECT, "normed"),
        normed,
        _saved("activated", (t, f), SlotKind.LINEAR_INPUTS, Operation.ACTIVATE, name),
        dy,
        _saved(f"d{name}", (t, width), SlotKind.OUTPUT_GRADIENTS, Operation.BACKWARD, *from_activation),
    )


def _saved(
    name: str,
    shape: tuple[int, ...],
    slot: SlotKind,
    operation: Operation,
    *inputs: str,
    accumulate: bool = False,
) -> Saved:
    buffer = Buffer(name=name, shape=shape, accumulate=accumulate)
    return Saved(buffer=buffer, slot=slot, operation=operation, inputs=inputs)


REMADE_SLOTS = {
    SlotKind.ACTIVATIONS: SlotKind.REMADE_ACTIVATIONS,
    SlotKind.LINEAR_INPUTS: SlotKind.REMADE_LINEAR_INPUTS,
}
"""The slots of recomputed buffers, for those of ``a`` and ``l``; keys and values are kept."""

Operations = frozenset[Operation]
"""The operations that a unit runs again in R (`penstock.core.remaking`)."""

EVERY_OPERATION: Operations = frozenset(Operation)

Remade = tuple[Operations, ...]
"""The operations that each unit of a stage runs again; units beyond the last entry run none again."""

NOTHING_REMADE: Remade = ()


@functools.lru_cache(maxsize=4096)
def remaking(spec: ModelSpec, kind: UnitKind, *, with_output: bool = True, part: int = 0) -> tuple[Operation, ...]:
    """The operations by which R recomputes a unit's ``a`` and ``l``, in their order; its output only ``with_output``.

    Their inputs are recomputed, too, back to the unit's own inputs.
    """
    graph = {saved.buffer.name: saved for saved in unit_graph(spec, kind, 1, 1, part=part)}
    needed_names = [
        name for name, saved in graph.items() if saved.slot in REMADE_SLOTS and (with_output or name != "y")
    ]
    needed: set[Operation] = set()
    while needed_names:
        saved = graph.get(needed_names.pop())
        if saved is not None:
            needed.add(saved.operation)
            needed_names += saved.inputs
    return tuple(operation for operation in Operation if operation in needed)


def num_remade_units(spec: ModelSpec, first: int, stop: int) -> int:
    """Number of units of a stage that keep anything that R recomputes: all but a whole head."""
    return sum(bool(remaking(spec, unit.kind, part=unit.part)) for unit in spec.units[first:stop])


@functools.lru_cache(maxsize=16_384)
def unit_buffers(
    spec: ModelSpec,
    kind: UnitKind,
    slot: SlotKind,
    batch: int,
    tokens: int,
    sharding: Sharding = WHOLE,
    part: int = 0,
    operations: Operations = frozenset(),
) -> tuple[Buffer, ...]:
    """The buffers of `unit_graph` that one unit keeps in ``slot`` if it runs ``operations`` again."""
    return tuple(
        saved.buffer
        for saved in unit_graph(spec, kind, batch, tokens, sharding, part)
        if (REMADE_SLOTS.get(saved.slot, saved.slot) if saved.operation in operations else saved.slot) is slot
    )


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
    spec: ModelSpec,
    first: int,
    stop: int,
    slot: SlotKind,
    batch: int,
    tokens: int,
    sharding: Sharding = WHOLE,
    remade: Remade = NOTHING_REMADE,
) -> tuple[tuple[int, Buffer], ...]:
    """(unit index, buffer) of every tensor in one slot of the stage of units [first, stop), whose recomputation is
    ``remade``.

    ``tokens`` is the slice's length, or the sequence length for ``kv`` and ``dkv`` of a whole micro-batch. The slots
    that carry a hidden state between stages (x, y, g_in, g_out, h) hold one [rows, h] tensor, filed under the unit next
    to it. Those inside a divided head and at its end hold the state that its parts pass on (`_passed_on`). A stage
    has one copy of the buffers in ``SHARED_BY_PARTS``.
    """
    if slot in HIDDEN_STATE_SLOTS:
        is_behind = slot in (SlotKind.OUTPUT, SlotKind.RECEIVED_GRADIENT, SlotKind.HEAD_GRADIENT)
        border, owner = (stop, stop - 1) if is_behind else (first, first)
        if spec.is_divided and border > spec.first_head_unit:
            return tuple((owner, buffer) for buffer in _passed_on(spec, slot, batch * tokens, sharding))
        return ((owner, Buffer(name=slot.value, shape=(sharding.rows(batch * tokens), spec.hidden))),)
    kept_whole = (frozenset[Operation](),) * (stop - first - len(remade))
    return tuple(
        (unit.index, buffer)
        for unit, operations in zip(spec.units[first:stop], (*remade, *kept_whole), strict=True)
        for buffer in unit_buffers(spec, unit.kind, slot, batch, tokens, sharding, unit.part, operations)
        if not (buffer.name == "y" and _leaves_stage(spec, unit.index, stop))
        and not (buffer.name in SHARED_BY_PARTS and unit.part and unit.index > first)
    )


LONG_SEQUENCE = 16_384
"""From this number of tokens on, every slice has its own keys and values, which are freed with its backward. For every
F and I of attention a rank copies those that the slice attends to into one buffer. That takes little time next to the
attention of the many queries that read the copy.
"""

KEYS_AT_ONCE = 32_768
"""Maximum number of keys copied together. More take more memory; with fewer there are more results to join."""


def prefix_bytes(
    spec: ModelSpec, precision: Precision, batch: int, slices: Sequence[int], sharding: Sharding = WHOLE
) -> int:
    """Bytes that attention needs on one shard where every slice has its own keys and values: for the copy of one unit's
    keys and values, and for the sum over several such copies, as wide as the queries of the longest slice.
    """
    if len(slices) == 1:
        return 0
    num_keys = min(sum(slices), KEYS_AT_ONCE)
    copies = aligned(2 * batch * num_keys * sharding.kv_hidden(spec) * precision.compute_bytes)
    sums = aligned(batch * max(slices) * sharding.hidden(spec) * precision.accumulate_bytes)
    return copies + (sums if sum(slices) > KEYS_AT_ONCE else 0)


HIDDEN_STATE_SLOTS = frozenset(
    {
        SlotKind.INPUT,
        SlotKind.OUTPUT,
        SlotKind.SENT_GRADIENT,
        SlotKind.RECEIVED_GRADIENT,
        SlotKind.HEAD_GRADIENT,
    }
)

SHARED_BY_PARTS = frozenset({"normed", "statistics"})
"""Buffers that the parts of the head in one stage share, filed under the first part."""


def _passed_on(spec: ModelSpec, slot: SlotKind, tokens: int, sharding: Sharding) -> tuple[Buffer, ...]:
    """The state that a part of a divided head passes to the next one, or with the gradients to the previous one.

    Forward: the norm's output, and the sum of softmax times rows over the vocabulary up to there. Backward: the
    gradient of the norm's output. The statistics are of all tokens on every shard.
    """
    hidden = (sharding.rows(tokens), spec.hidden)
    names = ("normed", "addend") if slot in (SlotKind.INPUT, SlotKind.OUTPUT) else ("dnormed",)
    statistics = Buffer(name="statistics", shape=(NUM_STATISTICS, tokens), accumulate=True)
    return (*(Buffer(name=name, shape=hidden) for name in names), statistics)


def _leaves_stage(spec: ModelSpec, index: int, stop: int) -> bool:
    return index == stop - 1 and stop < spec.num_units


def stage_slot_bytes(
    spec: ModelSpec,
    precision: Precision,
    first: int,
    stop: int,
    slot: SlotKind,
    batch: int,
    tokens: int,
    sharding: Sharding = WHOLE,
    remade: Remade = NOTHING_REMADE,
) -> int:
    """Bytes of one slot of a stage on one shard, every buffer aligned."""
    buffers = stage_slot_buffers(spec, first, stop, slot, batch, tokens, sharding, remade)
    return sum(aligned(buffer.num_bytes(precision)) for _, buffer in buffers)
