"""PipelineJob: the user's request, as one manifest for one machine, the service and Kubernetes."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from penstock.core.errors import UserError, mistakes_raised_by, raise_all, shown
from penstock.core.kubernetes_spec import KubernetesSpec
from penstock.core.layout import Precision
from penstock.core.manifest import (
    Manifest,
    join,
    mistyped,
    read_dataclass,
    require_all,
    require_limits,
    write_dataclass,
)
from penstock.core.model import Family, ModelSpec
from penstock.core.names import LABEL, require_name
from penstock.core.remaking import RecomputePin, read_recompute
from penstock.core.schedule import ScheduleSpec
from penstock.core.units import BYTES

API_VERSION = "penstock.dev/v1alpha1"
KIND = "PipelineJob"
STDLIB_CORPUS = "python-stdlib"


class Decay(enum.StrEnum):
    """How the learning rate falls after warm-up."""

    COSINE = "cosine"
    WSD = "wsd"
    CONSTANT = "constant"


class Device(enum.StrEnum):
    """The kind of device that ranks compute on."""

    CPU = "cpu"
    CUDA = "cuda"


class Objective(enum.StrEnum):
    """The objective of the planner: seconds of a step, or money for it."""

    TIME = "time"
    COST = "cost"


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSpec(Manifest):
    """Where tokens come from: ``train: bpe`` with a ``vocab``, ``train: bytes``, or the ``file`` of a
    tokenizer.json.
    """

    train: str | None = None
    vocab: int | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        require_all(self, self._check_source, self._check_train, self._check_vocab)

    def _check_source(self) -> None:
        if (self.train is None) == (self.file is None):
            raise UserError(
                what="needs exactly one of train and file", where="", remedy="write {train: bpe, vocab: 4096}"
            )

    def _check_train(self) -> None:
        if self.train not in (None, "bpe", "bytes"):
            raise UserError(what=f"{self.train!r} is not one of bpe, bytes", where="train", remedy="write train: bpe")

    def _check_vocab(self) -> None:
        if self.train == "bpe" and (self.vocab is None or self.vocab < 257):
            raise UserError(what="byte-level BPE needs at least 257 tokens", where="vocab", remedy="write vocab: 4096")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec(Manifest):
    """The text to learn: ``python-stdlib``, or a folder, JSONL or token file; ``limitBytes`` reads only so much of
    it.
    """

    source: str
    sequence_length: int
    tokenizer: TokenizerSpec = TokenizerSpec(train="bpe", vocab=4096)
    text_field: str = "text"
    limit_bytes: int | None = field(default=None, metadata=BYTES)

    def __post_init__(self) -> None:
        require_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec(Manifest):
    """AdamW (arXiv 1711.05101); decay applies to matrices only."""

    kind: str = "adamw"
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        require_all(self, self._check_kind)

    def _check_kind(self) -> None:
        if self.kind != "adamw":
            raise UserError(what=f"{shown(self.kind)} is not an optimizer", where="kind", remedy="write kind: adamw")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSpec(Manifest):
    """How to learn. ``globalBatch`` counts sequences per step and never changes with the plan.

    ``schedule`` falls to ``minLearningRate`` (a share of the peak) after ``warmupSteps``; ``wsd`` holds the peak and
    falls over the last ``decayShare`` of the steps. ``validateEvery`` steps the held-out loss is taken; 0 only at
    the end.
    """

    global_batch: int
    steps: int
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: Decay = Decay.COSINE
    warmup_steps: int = 10
    min_learning_rate: float = 0.1
    decay_share: float = 0.2
    clip: float = 1.0
    precision: Precision = Precision.FP32
    seed: int = 0
    validate_every: int = 0

    def __post_init__(self) -> None:
        require_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourcesSpec(Manifest):
    """Resources that the job may use. A job is elastic if ``minRanks`` is below ``ranks``."""

    device: Device = Device.CPU
    ranks: int = 2
    min_ranks: int | None = None
    memory_per_rank: int = field(default=4 * 2**30, metadata=BYTES)
    threads_per_rank: int = 1

    def __post_init__(self) -> None:
        require_all(self, self._check_min_ranks)

    def host_memory_bytes(self, num_ranks: int) -> int | None:
        """Memory of the host that ``num_ranks`` ranks may use together, for admission, limits of pods and enforcement.

        None on CUDA: ``memoryPerRank`` is the device's there, and no field limits the use of the host's.
        """
        return None if self.device is Device.CUDA else num_ranks * self.memory_per_rank

    def _check_min_ranks(self) -> None:
        if self.min_ranks is not None and self.min_ranks > self.ranks:
            raise UserError(
                what=f"{self.min_ranks} is more than ranks {self.ranks}", where="minRanks", remedy="lower it"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismSpec(Manifest):
    """Pinned parts of the plan. The planner chooses everything that is left out.

    ``sequenceParallel`` says whether shards divide hidden states by tokens, which they do unless it is false
    (`penstock.core.sharding`), ``headParts`` how many parts of the vocabulary are units of their own, which several
    stages can share: 1 leaves the head whole. ``slices`` is a number of slices or their lengths; ``stages`` lists
    blocks per stage, halves allowed (a half is an attention or an MLP); ``schedule`` names a generator or a CSV file of
    actions; ``recompute`` says what stages make again before their backward (`penstock.core.remaking`): all alike by a
    name, or each by a list of its own. ``zero: 1`` divides the optimizer's state between the replicas, if there are
    several.
    """

    dp: int | None = None
    tp: int | None = None
    sequence_parallel: bool | None = None
    pp: int | None = None
    head_parts: int | None = None
    zero: int | None = None
    micro_batch: int | None = None
    slices: int | tuple[int, ...] | None = None
    schedule: str | ScheduleSpec | None = None
    stages: tuple[float, ...] | None = None
    recompute: RecomputePin | None = field(
        default=None, metadata={"read": read_recompute, "also": ({"type": "boolean"},)}
    )

    def __post_init__(self) -> None:
        require_all(self, self._check_blocks, self._check_recompute)

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether several shards divide hidden states by tokens."""
        return self.sequence_parallel is not False

    def _check_recompute(self) -> None:
        """Check that a list is for pinned stages, whose units are known."""
        if not isinstance(self.recompute, tuple):
            return
        where = "recompute"
        if self.stages is None:
            raise UserError(
                what="lists recomputation by stage, but stages are not pinned",
                where=where,
                remedy="pin stages as well, or write none, selective or full",
            )
        if len(self.recompute) != len(self.stages):
            raise UserError(
                what=f"is of {len(self.recompute)} stages, and {len(self.stages)} are pinned",
                where=where,
                remedy="give one list per stage, an empty one for a stage that keeps everything",
            )

    def _check_blocks(self) -> None:
        raise_all(
            [
                UserError(
                    what=f"{blocks} is not a number of half blocks",
                    where=f"stages[{i}]",
                    remedy=f"write {math.floor(blocks):g} or {math.floor(blocks) + 0.5:g}",
                )
                for i, blocks in enumerate(self.stages or ())
                if (2 * blocks) % 1
            ]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSpec(Manifest):
    """When to save, how many to keep, and where to begin."""

    every_steps: int = 50
    keep: int = 2
    resume_from: str | None = None

    def __post_init__(self) -> None:
        require_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPolicySpec(Manifest):
    """How failures, time and waiting are handled.

    A finished job is kept unless ``ttlSecondsAfterFinished`` is set. ``activeDeadlineSeconds: 0`` means no limit.
    """

    suspend: bool = False
    backoff_limit: int = 3
    ttl_seconds_after_finished: int | None = None
    active_deadline_seconds: int = 0
    priority: int = 0
    replan_on_drift: bool = False

    def __post_init__(self) -> None:
        require_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec(Manifest):
    """The ``spec`` of a PipelineJob."""

    model: ModelSpec
    data: DataSpec
    training: TrainingSpec
    resources: ResourcesSpec = ResourcesSpec()
    parallelism: ParallelismSpec = ParallelismSpec()
    objective: Objective = Objective.TIME
    price_per_device_hour: float = 0.0
    checkpoint: CheckpointSpec = CheckpointSpec()
    run_policy: RunPolicySpec = RunPolicySpec()
    kubernetes: KubernetesSpec = field(default_factory=KubernetesSpec)

    def __post_init__(self) -> None:
        require_all(self, *(partial(check, self) for check in self.checks()))

    @classmethod
    def checks(cls) -> tuple[Callable[[Any], None], ...]:
        """Checks of agreement between parts, which are also made if another part is wrong."""
        return (
            cls._check_length,
            cls._check_slices,
            cls._check_degrees,
            cls._check_pods,
            cls._check_batch,
            cls._check_stages,
            cls._check_vocabulary,
            cls._check_price,
        )

    def _check_length(self) -> None:
        length = self.data.sequence_length
        if self.model.family is Family.GPT2 and self.model.positions < length:
            raise UserError(
                what=f"sequence length {length} exceeds the model's {self.model.positions} positions",
                where="data.sequenceLength",
                remedy=f"set model.positions to {length} or shorten the sequence",
            )

    def _check_price(self) -> None:
        if self.objective is Objective.COST and self.price_per_device_hour <= 0:
            raise UserError(what="cost needs a price", where="pricePerDeviceHour", remedy="write a price above 0")

    def _check_slices(self) -> None:
        slices, length = self.parallelism.slices, self.data.sequence_length
        if isinstance(slices, tuple) and sum(slices) != length:
            raise UserError(
                what=f"slices sum to {sum(slices)}, the sequence length is {length}",
                where="parallelism.slices",
                remedy="change a length so that the sum agrees",
            )
        if isinstance(slices, int) and slices > length:
            raise UserError(
                what=f"{slices} slices of {length} tokens",
                where="parallelism.slices",
                remedy="use fewer slices",
            )

    def _check_degrees(self) -> None:
        pinned, ranks, fewest = self.parallelism, self.resources.ranks, self.resources.min_ranks
        product = (pinned.dp or 1) * (pinned.tp or 1) * (pinned.pp or 1)
        if ranks // product * product < (fewest or ranks):
            numbers = f"ranks {ranks}" if fewest is None else f"any number of ranks from {fewest} to {ranks}"
            raise UserError(
                what=f"dp x tp x pp = {product} does not divide {numbers}",
                where="parallelism",
                remedy="pin factors of resources.ranks",
            )

    def _check_pods(self) -> None:
        if self.resources.ranks % self.kubernetes.ranks_per_pod:
            raise UserError(
                what=f"{self.kubernetes.ranks_per_pod} does not divide ranks {self.resources.ranks}",
                where="kubernetes.ranksPerPod",
                remedy="choose a divisor of resources.ranks",
            )

    def _check_batch(self) -> None:
        batch, dp, micro_batch = self.training.global_batch, self.parallelism.dp or 1, self.parallelism.micro_batch or 1
        if batch % dp:
            raise UserError(
                what=f"dp {dp} does not divide globalBatch {batch}",
                where="parallelism",
                remedy="pin a divisor of training.globalBatch",
            )
        if micro_batch > batch // dp:
            raise UserError(
                what=f"microBatch {micro_batch} is more than the {batch // dp} sequences of a replica",
                where="parallelism",
                remedy=f"pin at most {batch // dp}",
            )

    def _check_stages(self) -> None:
        stages = self.parallelism.stages
        if stages is not None and sum(stages) != self.model.layers:
            raise UserError(
                what=f"stages hold {sum(stages):g} blocks, the model has {self.model.layers}",
                where="parallelism.stages",
                remedy="change the numbers so that their sum agrees",
            )

    def _check_vocabulary(self) -> None:
        vocab, parts, tp = self.model.vocab, self.parallelism.head_parts or 1, self.parallelism.tp or 1
        if parts > 1 and parts * tp > vocab:
            raise UserError(
                what=f"a vocabulary of {vocab} does not give each of {parts} x {tp} parts a token",
                where="parallelism.headParts",
                remedy=f"pin at most {vocab // tp}",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata(Manifest):
    """The job's name; Kubernetes fields beyond name, namespace, labels, annotations and uid are kept out."""

    name: str
    namespace: str = "default"
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    uid: str = ""

    def __post_init__(self) -> None:
        require_all(
            self,
            lambda: require_name(self.name, "name", LABEL),
            lambda: require_name(self.namespace, "namespace", LABEL),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineJob(Manifest):
    """The manifest: `metadata` and `spec` under the API version and kind."""

    metadata: Metadata
    spec: JobSpec

    @classmethod
    def from_manifest(cls, value: Any, path: str = "") -> Self:
        """The job described by ``value``; raises `UserError` with the field's path.

        A model without ``vocab`` takes the vocabulary that its tokenizer is trained to.
        """
        body = body_of(KIND, value, path)
        try:
            whole = _with_vocab(body)
        except UserError as missing:
            others = mistakes_raised_by(lambda: read_dataclass(cls, body, path))
            raise_all([missing, *(mistake for mistake in others if mistake.where != missing.where)])
            raise
        return read_dataclass(cls, whole, path)

    def to_manifest(self) -> dict[str, Any]:
        """The manifest; defaults are left out."""
        return write_headed(KIND, self)

    def with_spec(self, **changes: Any) -> PipelineJob:
        """The same job with parts of its spec replaced."""
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **changes))


def body_of(kind: str, value: Any, path: str) -> dict[str, Any]:
    """Metadata and spec of a manifest; raises `UserError` unless it has the API version and ``kind``."""
    if not isinstance(value, Mapping):
        raise mistyped(value, "a mapping of fields", path)
    raise_all(
        [
            UserError(
                what=f"{shown(value.get(name))} is not {expected}",
                where=join(path, name),
                remedy=f"write {name}: {expected}",
            )
            for name, expected in (("apiVersion", API_VERSION), ("kind", kind))
            if value.get(name) != expected
        ]
    )
    return {name: item for name, item in value.items() if name not in ("apiVersion", "kind", "status")}


def write_headed(kind: str, instance: Any) -> dict[str, Any]:
    """The manifest of an instance of that kind; defaults are left out."""
    return {"apiVersion": API_VERSION, "kind": kind, **write_dataclass(instance)}


def _with_vocab(body: dict[str, Any]) -> dict[str, Any]:
    spec = body.get("spec")
    model = spec.get("model") if isinstance(spec, Mapping) else None
    if not isinstance(spec, Mapping) or not isinstance(model, Mapping) or "vocab" in model:
        return body
    data = spec.get("data")
    tokenizer = data.get("tokenizer", {"train": "bpe", "vocab": 4096}) if isinstance(data, Mapping) else None
    if not isinstance(tokenizer, Mapping):
        return body
    vocab = tokenizer.get("vocab") or (257 if tokenizer.get("train") == "bytes" else None)
    if vocab is None:
        raise UserError(
            what="is missing, and the tokenizer does not say it",
            where="spec.model.vocab",
            remedy="write the tokenizer's number of tokens",
        )
    return {**body, "spec": {**spec, "model": {**model, "vocab": vocab}}}
