"""Rules about several fields (`penstock.core.rules`) of a job's spec and of a cluster profile's.

The rules of a model are in `penstock.core.model`, those of pods and volumes in `penstock.core.kubernetes_spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.core.rules import Rule, exactly_one


def _pinned(name: str) -> str:
    """The pinned number, or 1, in CEL."""
    return f"(has(self.parallelism.{name}) ? self.parallelism.{name} : 1)"


_DP, _MICRO_BATCH = _pinned("dp"), _pinned("microBatch")
_PRODUCT = f"({_DP} * {_pinned('tp')} * {_pinned('pp')})"


def _product(spec: Any) -> int:
    pinned = spec.parallelism
    product: int = (pinned.dp or 1) * (pinned.tp or 1) * (pinned.pp or 1)
    return product


def _replica_batch(spec: Any) -> int:
    return int(spec.training.global_batch // (spec.parallelism.dp or 1))


def _are_degrees_factors(spec: Any) -> bool:
    ranks, product = spec.resources.ranks, _product(spec)
    return bool(ranks // product * product >= (spec.resources.min_ranks or ranks))


def _degrees(spec: Any) -> str:
    ranks, fewest = spec.resources.ranks, spec.resources.min_ranks
    numbers = f"ranks {ranks}" if fewest is None else f"any number of ranks from {fewest} to {ranks}"
    return f"dp x tp x pp = {_product(spec)} does not divide {numbers}"


def _has_token_for_every_part(spec: Any) -> bool:
    vocab, parts, tp = spec.model.vocab, spec.parallelism.head_parts or 1, spec.parallelism.tp or 1
    return bool(parts == 1 or parts * tp <= vocab)


def vocabulary_of(spec: Mapping[str, Any]) -> int | None:
    """The vocabulary to which the tokenizer of a spec, as a mapping, is trained; None if it defines none."""
    tokenizer = spec["data"].get("tokenizer", {"train": "bpe", "vocab": 4096})
    return tokenizer.get("vocab") or (257 if tokenizer.get("train") == "bytes" else None)


VOCABULARY = Rule(
    id="vocabulary",
    where="model.vocab",
    holds=lambda spec: "vocab" in spec["model"] or vocabulary_of(spec) is not None,
    what="is missing, and the tokenizer does not define it",
    remedy="write the tokenizer's number of tokens",
    cel="has(self.model.vocab) || has(self.data.tokenizer.vocab) || "
    "(has(self.data.tokenizer.train) && self.data.tokenizer.train == 'bytes')",
    reason="FieldValueRequired",
)
"""Of a spec as a mapping, before it is read: a model that was read has its vocabulary."""

POSITIONS = Rule(
    id="positions",
    where="data.sequenceLength",
    holds=lambda spec: spec.model.family != "gpt2" or spec.model.positions >= spec.data.sequence_length,
    what=lambda spec: (
        f"sequence length {spec.data.sequence_length} exceeds the model's {spec.model.positions} positions"
    ),
    remedy=lambda spec: f"set model.positions to {spec.data.sequence_length} or shorten the sequence",
    cel="self.model.family != 'gpt2' || self.model.positions >= self.data.sequenceLength",
    message="exceeds the model's positions: set model.positions or shorten the sequence",
    message_expression="'exceeds the model\\'s %d positions: set model.positions to %d or shorten the sequence'"
    ".format([self.model.positions, self.data.sequenceLength])",
)
SLICES_SUM = Rule(
    id="slices-sum",
    where="parallelism.slices",
    holds=lambda spec: (
        not isinstance(spec.parallelism.slices, tuple) or sum(spec.parallelism.slices) == spec.data.sequence_length
    ),
    what=lambda spec: (
        f"slices sum to {sum(spec.parallelism.slices)}, the sequence length is {spec.data.sequence_length}"
    ),
    remedy="change a length so that the sum agrees",
    is_untyped=True,
    cel="!variables.lengths.all(each, type(each) == int) || variables.lengths.sum() == variables.length",
    message="does not sum to data.sequenceLength: change a length so that the sum agrees",
    message_expression="'slices sum to %d, the sequence length is %d: change a length so that the sum agrees'"
    ".format([variables.lengths.sum(), variables.length])",
)
SLICES_COUNT = Rule(
    id="slices-count",
    where="parallelism.slices",
    holds=lambda spec: (
        not isinstance(spec.parallelism.slices, int) or spec.parallelism.slices <= spec.data.sequence_length
    ),
    what=lambda spec: f"{spec.parallelism.slices} slices of {spec.data.sequence_length} tokens",
    remedy="use fewer slices",
    is_untyped=True,
    cel="type(variables.slices) != int || variables.slices <= variables.length",
    message="more slices than tokens: use fewer",
    message_expression="'%d slices of %d tokens: use fewer slices'.format([variables.slices, variables.length])",
)
DEGREES = Rule(
    id="degrees",
    where="parallelism",
    holds=_are_degrees_factors,
    what=_degrees,
    remedy="pin factors of resources.ranks",
    cel=f"self.resources.ranks / {_PRODUCT} * {_PRODUCT} >= "
    "(has(self.resources.minRanks) ? self.resources.minRanks : self.resources.ranks)",
    message="dp x tp x pp does not divide ranks, or a number from minRanks on: pin factors of resources.ranks",
    message_expression="'dp x tp x pp = %d does not divide %s: pin factors of resources.ranks'.format("
    f"[{_PRODUCT}, has(self.resources.minRanks) ? 'any number of ranks from %d to %d'"
    ".format([self.resources.minRanks, self.resources.ranks]) : 'ranks %d'.format([self.resources.ranks])])",
)
_RANKS_PER_POD_MESSAGE = "does not divide ranks: choose a divisor"
RANKS_PER_POD = Rule(
    id="ranks-per-pod",
    where="kubernetes.ranksPerPod",
    holds=lambda spec: spec.resources.ranks % spec.kubernetes.ranks_per_pod == 0,
    what=lambda spec: f"{spec.kubernetes.ranks_per_pod} does not divide ranks {spec.resources.ranks}",
    remedy="choose a divisor of resources.ranks",
    cel="self.resources.ranks % self.kubernetes.ranksPerPod == 0",
    message=_RANKS_PER_POD_MESSAGE,
)
GLOBAL_BATCH = Rule(
    id="global-batch",
    where="parallelism",
    holds=lambda spec: spec.training.global_batch % (spec.parallelism.dp or 1) == 0,
    what=lambda spec: f"dp {spec.parallelism.dp} does not divide globalBatch {spec.training.global_batch}",
    remedy="pin a divisor of training.globalBatch",
    cel=f"self.training.globalBatch % {_DP} == 0",
    message="dp does not divide globalBatch: pin a divisor of training.globalBatch",
    message_expression="'dp %d does not divide globalBatch %d: pin a divisor of training.globalBatch'"
    f".format([{_DP}, self.training.globalBatch])",
)
MICRO_BATCH = Rule(
    id="micro-batch",
    where="parallelism",
    holds=lambda spec: (spec.parallelism.micro_batch or 1) <= _replica_batch(spec),
    what=lambda spec: (
        f"microBatch {spec.parallelism.micro_batch or 1} is more than the {_replica_batch(spec)} sequences of a replica"
    ),
    remedy=lambda spec: f"pin at most {_replica_batch(spec)}",
    cel=f"{_MICRO_BATCH} * {_DP} <= self.training.globalBatch",
    message="microBatch is more than the sequences of a replica: pin at most as many",
    message_expression="'microBatch %d is more than the %d sequences of a replica: pin at most as many'"
    f".format([{_MICRO_BATCH}, self.training.globalBatch / {_DP}])",
)
STAGES = Rule(
    id="stages",
    where="parallelism.stages",
    holds=lambda spec: spec.parallelism.stages is None or sum(spec.parallelism.stages) == spec.model.layers,
    what=lambda spec: f"stages hold {sum(spec.parallelism.stages):g} blocks, the model has {spec.model.layers}",
    remedy="change the numbers so that their sum agrees",
    cel="!has(self.parallelism.stages) || self.parallelism.stages.sum() == double(self.model.layers)",
    message="does not sum to the model's layers: change the numbers so that their sum agrees",
    message_expression="'stages hold %s blocks, the model has %d: change the numbers so that their sum agrees'"
    ".format([self.parallelism.stages.sum(), self.model.layers])",
)
HEAD_PARTS = Rule(
    id="head-parts",
    where="parallelism.headParts",
    holds=_has_token_for_every_part,
    what=lambda spec: (
        f"a vocabulary of {spec.model.vocab} does not give each of "
        f"{spec.parallelism.head_parts} x {spec.parallelism.tp or 1} parts a token"
    ),
    remedy=lambda spec: f"pin at most {spec.model.vocab // (spec.parallelism.tp or 1)}",
)
PRICE = Rule(
    id="price",
    where="pricePerDeviceHour",
    holds=lambda spec: spec.objective != "cost" or spec.price_per_device_hour > 0,
    what="cost needs a price",
    remedy="write a price above 0",
    cel="self.objective != 'cost' || self.pricePerDeviceHour > 0.0",
    message="cost needs a price: write one above 0",
)
BUDGET_PRICE = Rule(
    id="budget-price",
    where="pricePerDeviceHour",
    holds=lambda spec: spec.budget is None or spec.price_per_device_hour > 0,
    what="a budget needs pricePerDeviceHour, also if the described devices have prices",
    remedy="write a price above 0, or leave out budget",
    cel="!has(self.budget) || self.pricePerDeviceHour > 0.0",
    message="a budget needs pricePerDeviceHour: write a price above 0, or leave out budget",
)
JOB = (
    POSITIONS,
    SLICES_SUM,
    SLICES_COUNT,
    DEGREES,
    RANKS_PER_POD,
    GLOBAL_BATCH,
    MICRO_BATCH,
    STAGES,
    HEAD_PARTS,
    PRICE,
    BUDGET_PRICE,
)
"""In the order in which mistakes are reported."""

TOKENIZER = (
    exactly_one("write {train: bpe, vocab: 4096}", train="train", file="file"),
    Rule(
        id="bpe-vocabulary",
        where="vocab",
        holds=lambda tokenizer: tokenizer.train != "bpe" or (tokenizer.vocab is not None and tokenizer.vocab >= 257),
        what="byte-level BPE needs at least 257 tokens",
        remedy="write vocab: 4096",
        cel="!has(self.train) || self.train != 'bpe' || (has(self.vocab) && self.vocab >= 257)",
    ),
)
MOST_BF16_BETA = 0.99
"""Largest beta for moments in bf16, which lose a change of less than half of the last bit: 1 part in 256 to 512. A step
changes a moment by (1 - beta) times its distance from the new value. So with a beta of 0.99 a moment may stop 64 % away
from a constant value, and from 0.998 on it hardly moves.
"""

OPTIMIZER = (
    Rule(
        id="bf16-moments",
        where="betas",
        holds=lambda optimizer: optimizer.moment_type != "bf16" or max(optimizer.betas) <= MOST_BF16_BETA,
        what=lambda optimizer: f"{max(optimizer.betas)} is above {MOST_BF16_BETA}, the most for moments in bf16",
        remedy="write momentType: fp32, or smaller betas",
        cel="!has(self.momentType) || self.momentType != 'bf16' || !has(self.betas) || "
        f"self.betas.all(beta, beta <= {MOST_BF16_BETA})",
        message=f"above {MOST_BF16_BETA}, the most for moments in bf16: write momentType: fp32, or smaller betas",
    ),
)
TRAINING = (
    Rule(
        id="bf16-reduction",
        where="gradientReductionType",
        holds=lambda training: training.gradient_reduction_type != "bf16" or training.precision != "fp64",
        what="bf16 would round the gradients of precision fp64, which is for proofs",
        remedy="write gradientReductionType: fp32, or precision: fp32 or bf16",
        cel="!has(self.gradientReductionType) || self.gradientReductionType != 'bf16' || !has(self.precision) || "
        "self.precision != 'fp64'",
    ),
)
RESOURCES = (
    Rule(
        id="min-ranks",
        where="minRanks",
        holds=lambda resources: resources.min_ranks is None or resources.min_ranks <= resources.ranks,
        what=lambda resources: f"{resources.min_ranks} is more than ranks {resources.ranks}",
        remedy="lower it",
        cel="!has(self.minRanks) || self.minRanks <= self.ranks",
        message="is more than ranks: lower it",
    ),
)
PARALLELISM = (
    Rule(
        id="recompute-pinned",
        where="recompute",
        holds=lambda pinned: not isinstance(pinned.recompute, tuple) or pinned.stages is not None,
        what="lists recomputation by stage, but stages are not pinned",
        remedy="pin stages as well, or write none, selective or full",
    ),
    Rule(
        id="recompute-stages",
        where="recompute",
        holds=lambda pinned: (
            not isinstance(pinned.recompute, tuple)
            or pinned.stages is None
            or len(pinned.recompute) == len(pinned.stages)
        ),
        what=lambda pinned: f"is of {len(pinned.recompute)} stages, and {len(pinned.stages)} are pinned",
        remedy="give one list per stage, an empty one for a stage that keeps everything",
    ),
)
CLUSTER_PROFILE = (
    Rule(
        id="ranks-per-pod",
        where="ranksPerPod",
        holds=lambda spec: spec.ranks_per_pod <= 0 or spec.ranks % spec.ranks_per_pod == 0,
        what=lambda spec: f"{spec.ranks_per_pod} does not divide ranks {spec.ranks}",
        remedy="choose a divisor of ranks",
        cel="self.ranks % self.ranksPerPod == 0",
        message=_RANKS_PER_POD_MESSAGE,
    ),
)
