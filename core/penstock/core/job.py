"""PipelineJob: the user's request, as one manifest for one machine, the service and Kubernetes."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Self

from penstock.core import job_rules, names
from penstock.core.errors import UserError, mistakes_raised_by, raise_all, shown
from penstock.core.kubernetes_spec import KubernetesSpec
from penstock.core.layout import Precision
from penstock.core.limits import (
    ANY_BYTES,
    BELOW_ONE,
    EXACT,
    INT64,
    LARGEST,
    MOST_ANNOTATION_CHARACTERS,
    MOST_BATCH,
    MOST_CHARACTERS,
    MOST_LABELS,
    MOST_LAYERS,
    MOST_PATH_CHARACTERS,
    MOST_RANKS,
    MOST_REMAKES,
    MOST_SLICES,
    MOST_STAGES,
    MOST_WIDTH,
    MOST_ZERO,
    POSITIVE_BYTES,
    SHARE,
    above_zero,
    characters,
    list_of,
    named,
    one_to,
    up_to,
)
from penstock.core.manifest import (
    Checked,
    Manifest,
    join,
    mistyped,
    placed,
    read_dataclass,
    write_dataclass,
)
from penstock.core.model import ModelSpec
from penstock.core.moments import MomentType
from penstock.core.remaking import RecomputePin, read_recompute
from penstock.core.replicas import ReductionType
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
class TokenizerSpec(Checked):
    """Where tokens come from: ``train: bpe`` with a ``vocab``, ``train: bytes``, or the ``file`` of a
    tokenizer.json.
    """

    train: Annotated[
        str | None,
        {"enum": ["bpe", "bytes", None]},
        "`bpe`: train a byte-level BPE on the data; `bytes`: every byte is a token",
    ] = None
    vocab: Annotated[int | None, one_to(MOST_WIDTH), "size of the trained BPE, at least 257"] = None
    file: Annotated[
        str | None,
        characters(MOST_PATH_CHARACTERS),
        "a `tokenizer.json` made by the tokenizers or transformers library",
    ] = None

    rules = job_rules.TOKENIZER

    @classmethod
    def checks(cls) -> tuple[Callable[[Any], None], ...]:
        """Check the choice."""
        return (cls._check_train,)

    def _check_train(self) -> None:
        if self.train not in (None, "bpe", "bytes"):
            raise UserError(what=f"{self.train!r} is not one of bpe, bytes", where="train", remedy="write train: bpe")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec(Checked):
    """The text to learn, and how it becomes tokens."""

    source: Annotated[
        str,
        characters(MOST_PATH_CHARACTERS),
        (
            "`python-stdlib` (the source code of Python's standard library), a folder of text files, a text file, a "
            "`.jsonl` file, or a token file (`.npy`, or `.bin` with its header); links must not lead out of the folder"
        ),
    ]
    sequence_length: Annotated[int, one_to(MOST_WIDTH), "tokens of one sequence"]
    tokenizer: TokenizerSpec = TokenizerSpec(train="bpe", vocab=4096)
    text_field: Annotated[str, characters(), "the field of a JSONL line that holds the text"] = "text"
    limit_bytes: Annotated[
        int | None,
        ANY_BYTES,
        "read at most this many bytes of text",
    ] = field(default=None, metadata=BYTES)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec(Checked):
    """AdamW (arXiv 1711.05101); decay applies to matrices only."""

    kind: Annotated[str, {"enum": ["adamw"]}, "the only one so far"] = "adamw"
    learning_rate: Annotated[float, above_zero(LARGEST), "the peak"] = 1e-3
    betas: Annotated[
        tuple[float, float],
        {"prefixItems": [BELOW_ONE, BELOW_ONE]},
        "decay of the two moments, each below 1",
    ] = (0.9, 0.95)
    epsilon: Annotated[float, above_zero(LARGEST), "added to the root of the second moment"] = 1e-8
    weight_decay: Annotated[float, up_to(LARGEST), "applies to matrices, not to norms and biases"] = 0.1
    moment_type: Annotated[
        MomentType,
        (
            "type in which the two moments are stored: `fp32`, or `bf16`, which saves 4 bytes per parameter; steps are "
            "computed in fp32 in any case, and with `bf16` each of `betas` may be 0.99 at most"
        ),
    ] = MomentType.FP32

    rules = job_rules.OPTIMIZER

    @classmethod
    def checks(cls) -> tuple[Callable[[Any], None], ...]:
        """Check the choice."""
        return (cls._check_kind,)

    def _check_kind(self) -> None:
        if self.kind != "adamw":
            raise UserError(what=f"{shown(self.kind)} is not an optimizer", where="kind", remedy="write kind: adamw")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSpec(Checked):
    """How to learn."""

    global_batch: Annotated[int, one_to(MOST_BATCH), "sequences per step; never changes with the plan"]
    steps: Annotated[int, one_to(EXACT), "optimizer steps"]
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: Annotated[
        Decay,
        "how the learning rate falls: `cosine`, `wsd` (holds, then falls) or `constant`",
    ] = Decay.COSINE
    warmup_steps: Annotated[int, up_to(EXACT), "steps over which the learning rate rises"] = 10
    min_learning_rate: Annotated[float, SHARE, "final learning rate as a share of the peak, from 0 to 1"] = 0.1
    decay_share: Annotated[float, SHARE, "the last share of steps in which `wsd` falls, from 0 to 1"] = 0.2
    clip: Annotated[float, above_zero(LARGEST), "largest norm of the whole model's gradient"] = 1.0
    precision: Annotated[
        Precision,
        (
            "`fp32` or `bf16` (master weights and gradients stay fp32, and so do reductions without "
            "`gradientReductionType: bf16`); `fp64` is for proofs"
        ),
    ] = Precision.FP32
    gradient_reduction_type: Annotated[
        ReductionType,
        (
            "type in which replicas exchange gradients: `fp32`, or `bf16`, which halves the bytes and rounds gradients "
            "to 8 significant bits; micro-batches are added up in fp32 in any case"
        ),
    ] = ReductionType.FP32
    seed: Annotated[int, INT64, "of parameters and of the order of data"] = 0
    validate_every: Annotated[int, up_to(EXACT), "steps between validation losses; 0: only at the end"] = 0

    rules = job_rules.TRAINING


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourcesSpec(Checked):
    """Resources that the job may use. A job is elastic if ``minRanks`` is below ``ranks``."""

    device: Annotated[Device, "`cpu` or `cuda`"] = Device.CPU
    ranks: Annotated[int, one_to(MOST_RANKS), "processes; on cuda one device each"] = 2
    min_ranks: Annotated[
        int | None,
        one_to(MOST_RANKS),
        (
            "the fewest ranks that a plan may use, and on clusters the fewest that an elastic job shrinks to; none: "
            "`ranks`"
        ),
    ] = None
    memory_per_rank: Annotated[
        int,
        POSITIVE_BYTES,
        (
            "memory limit of a rank: plans that are estimated to need more are not considered; a rank computes the "
            "exact need of a plan with very many actions at its start, and refuses it beyond the limit; on cuda this "
            "is the device's memory"
        ),
    ] = field(default=4 * 2**30, metadata=BYTES)
    threads_per_rank: Annotated[int, one_to(65_536), "CPU threads of one rank"] = 1
    spot: Annotated[
        bool,
        (
            "the job runs on spot devices: on described hardware plans count `spotPricePerHour` and expected "
            "interruptions; on measured hardware no interruptions are counted, and the price is `pricePerDeviceHour`"
        ),
    ] = False

    rules = job_rules.RESOURCES

    def host_memory_bytes(self, num_ranks: int) -> int | None:
        """Memory of the host that ``num_ranks`` ranks may use together, for admission, limits of pods and enforcement.

        None on CUDA: ``memoryPerRank`` is the device's there, and no field limits the use of the host's.
        """
        return None if self.device is Device.CUDA else num_ranks * self.memory_per_rank


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelismSpec(Checked):
    """Pinned parts of the plan. The planner chooses everything that is left out.

    ``sequenceParallel`` says whether shards divide hidden states by tokens, which they do unless it is false
    (`penstock.core.sharding`), ``headParts`` how many parts of the vocabulary are units of their own, which several
    stages can share: 1 leaves the head whole. ``slices`` is a number of slices or their lengths; ``stages`` lists
    blocks per stage, halves allowed (a half is an attention or an MLP); ``schedule`` names a generator or a CSV file of
    actions; ``recompute`` says what stages make again before their backward (`penstock.core.remaking`): all alike by a
    name, or each by a list of its own. ``zero: 1`` divides the optimizer's state between the replicas, if there are
    several.
    """

    dp: Annotated[int | None, one_to(MOST_RANKS), "replicas of the pipeline"] = None
    tp: Annotated[
        int | None,
        one_to(MOST_RANKS),
        (
            "number of devices that share every layer of a pipeline rank: neighbours, on one host or, if it is pinned "
            "or the hardware described, on whole hosts"
        ),
    ] = None
    sequence_parallel: Annotated[
        bool | None,
        (
            "whether the `tp` devices also divide hidden states, norms and messages by tokens; `false`: each device "
            "has whole ones"
        ),
    ] = None
    pp: Annotated[int | None, one_to(MOST_RANKS), "ranks of one pipeline"] = None
    head_parts: Annotated[
        int | None,
        one_to(MOST_RANKS),
        (
            "number of parts that the head is divided into, by vocabulary: each part is a unit, so several stages can "
            "share the head; 1: the head is one unit"
        ),
    ] = None
    zero: Annotated[
        int | None,
        up_to(MOST_ZERO),
        (
            "`1`: replicas divide the optimizer's state between them (ZeRO-1), `0`: each has all of it; left out, the "
            "planner chooses"
        ),
    ] = None
    micro_batch: Annotated[
        int | None,
        one_to(MOST_BATCH),
        "sequences in one micro-batch; the last one of a step has the remaining sequences",
    ] = None
    slices: Annotated[
        int | tuple[int, ...] | None,
        {**one_to(MOST_SLICES), "minItems": 1, "maxItems": MOST_SLICES, "items": one_to(MOST_WIDTH)},
        "number of slices, or their lengths in tokens (their sum is `sequenceLength`)",
    ] = None
    schedule: Annotated[
        str | ScheduleSpec | None,
        characters(MOST_PATH_CHARACTERS),
        "`1f1b`, `zb`, `zbv`, another built-in or installed one, or a CSV file",
    ] = None
    stages: Annotated[
        tuple[float, ...] | None,
        {
            "minItems": 1,
            "maxItems": MOST_STAGES,
            "items": {"type": "number", "minimum": 0, "maximum": MOST_LAYERS, "multipleOf": 0.5},
        },
        (
            "blocks per stage, halves allowed, such as `[4.5, 3.5]`; with `zbv` a rank has two or more stages, so the "
            "list is that much longer"
        ),
    ] = None
    recompute: Annotated[
        RecomputePin | None,
        list_of(2 * MOST_LAYERS + 2, items=list_of(MOST_REMAKES)),
        (
            "operations whose results are recomputed before the backward instead of kept: `none`, `selective` (norms "
            "and activation functions), `full`, or for pinned `stages` a list for each stage of `{unit, count, "
            "operations}`, as in `plan.json`; left out, the planner recomputes where memory requires it"
        ),
    ] = field(default=None, metadata={"read": read_recompute, "also": ({"type": "boolean"},)})

    rules = job_rules.PARALLELISM

    @classmethod
    def checks(cls) -> tuple[Callable[[Any], None], ...]:
        """Check the numbers of blocks one by one."""
        return (cls._check_blocks,)

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether several shards divide hidden states by tokens."""
        return self.sequence_parallel is not False

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
class CheckpointSpec(Checked):
    """When to save, how many to keep, and where to begin."""

    every_steps: Annotated[int, one_to(EXACT), "steps between checkpoints; the last step always has one"] = 50
    keep: Annotated[int, one_to(EXACT), "complete checkpoints that are kept"] = 2
    resume_from: Annotated[str | None, characters(MOST_PATH_CHARACTERS), "a checkpoint's folder to begin from"] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPolicySpec(Checked):
    """How failures, time and waiting are handled."""

    suspend: Annotated[bool, "stop after a checkpoint and wait"] = False
    backoff_limit: Annotated[int, up_to(EXACT), "failed attempts that are tried again"] = 3
    ttl_seconds_after_finished: Annotated[
        int | None,
        up_to(EXACT),
        "seconds after its end until a finished job is removed, by a service or a cluster; none: it is kept",
    ] = None
    active_deadline_seconds: Annotated[
        int,
        up_to(EXACT),
        (
            "the job fails if it takes longer than this; time in a queue does not count, and the count starts at 0 "
            "after a suspension; 0: no limit"
        ),
    ] = 0
    priority: Annotated[int, INT64, "used by queues"] = 0
    replan_on_drift: Annotated[
        bool,
        (
            "plan again once steps differ from the prediction: on a cluster after half an hour, for the next attempt, "
            "which measures again; on one machine after 20 s, next to the training"
        ),
    ] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec(Checked):
    """The ``spec`` of a PipelineJob."""

    model: ModelSpec
    data: DataSpec
    training: TrainingSpec
    resources: ResourcesSpec = ResourcesSpec()
    parallelism: ParallelismSpec = ParallelismSpec()
    objective: Annotated[
        Objective,
        (
            "quantity that the planner minimises: `time` of a step, or `cost`: time x number of devices, or time x "
            "total price if devices have different prices"
        ),
    ] = Objective.TIME
    deadline_seconds: Annotated[
        int | None,
        one_to(EXACT),
        (
            "longest predicted time of all steps, with expected interruptions: plans that take longer are not chosen; "
            "none: no limit"
        ),
    ] = None
    budget: Annotated[
        float | None,
        above_zero(LARGEST),
        (
            "highest predicted cost of all steps, with expected interruptions: more expensive plans are not chosen; it "
            "needs `pricePerDeviceHour`; none: no limit"
        ),
    ] = None
    price_per_device_hour: Annotated[
        float,
        up_to(1e12),
        "needed by `objective: cost`; with it plans state their cost",
    ] = 0.0
    checkpoint: CheckpointSpec = CheckpointSpec()
    run_policy: RunPolicySpec = RunPolicySpec()
    kubernetes: KubernetesSpec = field(default_factory=KubernetesSpec)

    rules = job_rules.JOB

    def to_plan(self, *, has_checkpoint: bool) -> Self:
        """The spec by which an attempt is planned. Once the job has a checkpoint, the deadline and the budget do not
        apply: after a loss, a plan on fewer devices may exceed both, and a refusal would lose the steps so far.
        """
        return dataclasses.replace(self, deadline_seconds=None, budget=None) if has_checkpoint else self


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata(Checked):
    """The job's name; Kubernetes fields beyond name, namespace, labels, annotations and uid are kept out."""

    name: Annotated[
        str,
        named(names.LABEL),
        "at most 63 lower-case letters, digits and dashes; on a cluster at most 40, a letter first",
    ]
    namespace: Annotated[
        str,
        named(names.LABEL),
        (
            "owner of the job on a service: names are unique within a namespace, and tokens may be limited to it; "
            "ignored by `penstock run`"
        ),
    ] = "default"
    labels: Annotated[
        dict[str, str],
        {"maxProperties": MOST_LABELS, "additionalProperties": characters(MOST_CHARACTERS)},
        "free key-value pairs",
    ] = field(default_factory=dict)
    annotations: Annotated[
        dict[str, str],
        {"maxProperties": MOST_LABELS, "additionalProperties": characters(MOST_ANNOTATION_CHARACTERS)},
        "free key-value pairs",
    ] = field(default_factory=dict)
    uid: Annotated[str, characters(), "the job's identity, given by a service or cluster"] = ""


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
    if not isinstance(data, Mapping) or not isinstance(data.get("tokenizer", {}), Mapping):
        return body
    if not job_rules.VOCABULARY.holds(spec):
        raise placed(job_rules.VOCABULARY.mistake(spec), f"spec.{job_rules.VOCABULARY.where}")
    vocab = job_rules.vocabulary_of(spec)
    return {**body, "spec": {**spec, "model": {**model, "vocab": vocab}}}
