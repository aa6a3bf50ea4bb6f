"""The trained model: a decoder's dimensions, its units, and the counts that follow from them.

Legend for formulas: h hidden, d head dimension, a heads, g key/value heads, f feed-forward width, v vocabulary, L
layers, s sequence length.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from dataclasses import dataclass
from typing import Annotated, Any

from penstock.core.errors import UserError
from penstock.core.limits import LARGEST, MOST_LAYERS, MOST_WIDTH, above_zero, one_to, up_to
from penstock.core.manifest import Manifest, require_all
from penstock.core.rules import Rule


class Family(enum.StrEnum):
    """The architectures that penstock trains."""

    LLAMA = "llama"
    GPT2 = "gpt2"


class UnitKind(enum.StrEnum):
    """The smallest pieces of a model that a stage can own; a block is an attention and an MLP."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "mlp"
    HEAD = "head"


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """One unit: its index in the model, its kind, its block's number (None for embedding and head), and the index of
    the part of a divided head.
    """

    index: int
    kind: UnitKind
    layer: int | None = None
    part: int = 0

    @property
    def name(self) -> str:
        """The prefix of the global names of its parameters, such as ``layers.3.attention``."""
        return self.kind.value if self.layer is None else f"layers.{self.layer}.{self.kind.value}"


MODEL_RULES = (
    Rule(
        id="heads",
        where="heads",
        holds=lambda model: model.heads <= 0 or model.hidden % model.heads == 0,
        what=lambda model: f"hidden {model.hidden} is not divisible by heads {model.heads}",
        remedy=lambda model: f"choose heads among the divisors of {model.hidden}",
        cel="self.hidden % self.heads == 0",
        message="does not divide hidden: choose one of its divisors",
        message_expression="'hidden %d is not divisible by heads %d'.format([self.hidden, self.heads])",
    ),
    Rule(
        id="head-dimension",
        where="heads",
        holds=lambda model: (
            model.family != "llama"
            or model.heads <= 0
            or model.hidden % model.heads != 0
            or model.hidden // model.heads % 2 == 0
        ),
        what=lambda model: f"rotary positions need an even head dimension, not {model.hidden // model.heads}",
        remedy="choose heads so that hidden / heads is even",
        cel="self.family != 'llama' || self.hidden % self.heads != 0 || (self.hidden / self.heads) % 2 == 0",
        message="rotary positions need an even head dimension: choose heads so that hidden / heads is even",
    ),
    Rule(
        id="kv-heads",
        where="kvHeads",
        holds=lambda model: model.kv_heads <= 0 or model.heads % model.kv_heads == 0,
        what=lambda model: f"heads {model.heads} is not divisible by kvHeads {model.kv_heads}",
        remedy=lambda model: f"choose kvHeads among the divisors of {model.heads}",
        cel="self.kvHeads == 0 || self.heads % self.kvHeads == 0",
        message="does not divide heads: choose one of its divisors",
        message_expression="'heads %d is not divisible by kvHeads %d'.format([self.heads, self.kvHeads])",
    ),
    Rule(
        id="gpt2-kv-heads",
        where="kvHeads",
        holds=lambda model: model.family != "gpt2" or model.kv_heads in (0, model.heads),
        what="gpt2 has no grouped-query attention",
        remedy="leave kvHeads out",
        cel="self.family != 'gpt2' || self.kvHeads == 0 || self.kvHeads == self.heads",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec(Manifest):
    """A decoder's dimensions.

    llama: RMSNorm, rotary positions, SwiGLU, grouped-query attention, separate head (arXiv 2302.13971, 2307.09288).
    gpt2: LayerNorm, learned positions, GELU, biases, head tied to the embedding.
    ``kvHeads`` defaults to ``heads``, ``ffnHidden`` to the family's rule: 4 h for gpt2, and 8 h / 3 rounded up to a
    multiple of 64 for llama. ``positions`` bounds the sequence length of gpt2.
    """

    family: Annotated[
        Family,
        (
            "`llama` (RMSNorm, rotary positions, SwiGLU, own head) or `gpt2` (LayerNorm, learned positions, GELU, head"
            " tied to the embedding)"
        ),
    ]
    layers: Annotated[int, one_to(MOST_LAYERS), "blocks"]
    hidden: Annotated[int, one_to(2**18), "width of the hidden state"]
    heads: Annotated[int, one_to(2**17), "query heads; must divide `hidden`"]
    vocab: Annotated[
        int,
        one_to(MOST_WIDTH),
        "number of tokens in the vocabulary; if left out, the size to which the tokenizer is trained",
    ]
    kv_heads: Annotated[
        int,
        up_to(2**17),
        "key and value heads, a divisor of `heads`; 0 means as many as `heads`; llama only",
    ] = 0
    ffn_hidden: Annotated[
        int,
        up_to(MOST_WIDTH),
        "width of the MLP; 0 means 4 x hidden for gpt2 and 8/3 x hidden, rounded up to 64, for llama",
    ] = 0
    positions: Annotated[int, one_to(MOST_WIDTH), "longest sequence of gpt2"] = 1024
    norm_epsilon: Annotated[float, above_zero(LARGEST), "added to variances in norms"] = 1e-5
    rope_theta: Annotated[float, above_zero(LARGEST), "base of the rotary frequencies"] = 10_000.0

    rules = MODEL_RULES

    def __post_init__(self) -> None:
        self._fill_defaults()
        require_all(self)

    def _fill_defaults(self) -> None:
        if not self.kv_heads:
            object.__setattr__(self, "kv_heads", self.heads)
        if not self.ffn_hidden:
            width = 4 * self.hidden if self.family is Family.GPT2 else -(-8 * self.hidden // (3 * 64)) * 64
            object.__setattr__(self, "ffn_hidden", width)

    @property
    def head_dim(self) -> int:
        """Head dimension d = h / a."""
        return self.hidden // self.heads

    @property
    def kv_hidden(self) -> int:
        """Width g d of the keys, and of the values, of one token."""
        return self.kv_heads * self.head_dim

    def can_be_sharded(self, tp: int) -> bool:
        """Whether ``tp`` devices can share every layer: whole heads and equal parts of the feed-forward width.

        Key/value heads are divided, too; if they are fewer than devices, equally many devices hold each. Every device
        has at least one row of the vocabulary, for every part of a divided head.
        """
        is_grouped = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        has_rows = self.vocab // self.head_parts >= tp
        return self.heads % tp == 0 and self.ffn_hidden % tp == 0 and is_grouped and has_rows

    def kv_copies(self, tp: int) -> int:
        """The number of ``tp`` devices that hold the same key/value head: more than one if there are fewer heads."""
        return max(tp // self.kv_heads, 1)

    @property
    def tied(self) -> bool:
        """Whether head and embedding share their matrix."""
        return self.family is Family.GPT2

    @property
    def head_parts(self) -> int:
        """The number of units that share the head (`DividedModel`)."""
        return 1

    @property
    def is_divided(self) -> bool:
        """Whether several units share the head."""
        return self.head_parts > 1

    def part_rows(self, part: int) -> range:
        """The rows of the vocabulary of a part of the head."""
        return range(self.vocab * part // self.head_parts, self.vocab * (part + 1) // self.head_parts)

    def rows_of(self, first: int, stop: int) -> range:
        """The rows of the vocabulary of the parts of the head among units [first, stop)."""
        start = self.part_rows(max(first - self.first_head_unit, 0)).start
        return range(start, self.part_rows(stop - 1 - self.first_head_unit).stop)

    @property
    def first_head_unit(self) -> int:
        """The index of the head, or of its first part."""
        return 2 * self.layers + 1

    @property
    def num_units(self) -> int:
        """Embedding, two units per block, the parts of the head."""
        return 2 * self.layers + 1 + self.head_parts

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units in order."""
        return _units(self.layers, self.head_parts)

    @property
    def whole(self) -> ModelSpec:
        """The same model with its head in one unit."""
        return self

    def divided(self, head_parts: int) -> ModelSpec:
        """The same model with its head in ``head_parts`` units; raises `UserError` if the vocabulary is smaller."""
        return self.whole if head_parts == 1 else DividedModel(**_values(self.whole), parts=head_parts)

    def with_vocab(self, vocab: int) -> ModelSpec:
        """The same model over another vocabulary."""
        return dataclasses.replace(self, vocab=vocab)


@dataclass(frozen=True, kw_only=True, slots=True)
class DividedModel(ModelSpec):
    """A model as a plan divides it: ``parts`` units, 2 or more, share the vocabulary of the head.

    Manifests hold only the model: the number of parts is a field of the plan.
    """

    parts: int

    def __post_init__(self) -> None:
        if not 2 <= self.parts <= self.vocab:
            raise UserError(
                what=f"the head's vocabulary of {self.vocab} cannot be divided into {self.parts} parts",
                where="headParts",
                remedy=f"choose 1 to {self.vocab}",
            )

    @property
    def head_parts(self) -> int:
        """The number of units that share the head."""
        return self.parts

    @property
    def whole(self) -> ModelSpec:
        """The same model with its head in one unit."""
        return ModelSpec(**{name: value for name, value in _values(self).items() if name != "parts"})

    def to_manifest(self) -> dict[str, Any]:
        """The manifest form of the model alone."""
        return self.whole.to_manifest()


def _values(spec: ModelSpec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


@functools.lru_cache(maxsize=64)
def _units(layers: int, head_parts: int) -> tuple[Unit, ...]:
    blocks = [
        Unit(index=1 + 2 * layer + half, kind=kind, layer=layer)
        for layer in range(layers)
        for half, kind in enumerate((UnitKind.ATTENTION, UnitKind.MLP))
    ]
    first = Unit(index=0, kind=UnitKind.EMBEDDING)
    parts = (Unit(index=2 * layers + 1 + part, kind=UnitKind.HEAD, part=part) for part in range(head_parts))
    return (first, *blocks, *parts)


def linear_flops_per_token(spec: ModelSpec, kind: UnitKind) -> int:
    """Forward FLOPs of one token in the unit's matrices: 2 per weight (a multiply and an add).

    attention 2 h (h + 2 g d) + 2 h^2; mlp 2 * 3 h f (llama: gate, up, down) or 2 * 2 h f (gpt2); head 2 h v;
    the embedding is a lookup. Backward is twice that: once for I, once for W.
    """
    hidden = spec.hidden
    if kind is UnitKind.ATTENTION:
        return 2 * hidden * (hidden + 2 * spec.kv_hidden) + 2 * hidden * hidden
    if kind is UnitKind.MLP:
        return 2 * hidden * spec.ffn_hidden * (3 if spec.family is Family.LLAMA else 2)
    return 2 * hidden * spec.vocab if kind is UnitKind.HEAD else 0


def attended_pairs(length: int, prefix: int) -> int:
    """Query-key pairs of a causal slice: length * prefix + length (length + 1) / 2."""
    return length * prefix + length * (length + 1) // 2


def attention_flops(spec: ModelSpec, pairs: int) -> int:
    """Forward FLOPs of scores and weighted sum over ``pairs`` query-key pairs of one layer: 4 h per pair.

    Backward is 10 h per pair: the scores again and four products (FlashAttention-2, arXiv 2307.08691, section 3.1).
    """
    return 4 * spec.hidden * pairs


def step_flops(spec: ModelSpec, num_sequences: int, sequence_length: int) -> int:
    """Forward and backward FLOPs of one step: 3 x linear plus 3 x attention over causal pairs.

    Recomputation does not count, so that utilization is comparable across kernels (`penstock.core.speed`).
    """
    block = sum(linear_flops_per_token(spec, kind) for kind in (UnitKind.ATTENTION, UnitKind.MLP))
    linear = (spec.layers * block + linear_flops_per_token(spec, UnitKind.HEAD)) * sequence_length
    attention = spec.layers * attention_flops(spec, attended_pairs(sequence_length, 0))
    return 3 * num_sequences * (linear + attention)
