"""Any valid instance of every manifest type of core, for Hypothesis: by annotations, and by hand where fields agree."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import itertools
import pkgutil
import types
import typing
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

import penstock.core
from penstock.core.cluster import (
    ClusterSpec,
    DeviceSpec,
    KernelSpec,
    LinkOverride,
    LinkSpec,
    OtherDevices,
    SoftwareSpec,
)
from penstock.core.cluster_profile import ClusterProfileSpec
from penstock.core.cost_table import CostRow
from penstock.core.instants import INSTANT
from penstock.core.job import (
    DataSpec,
    JobSpec,
    Metadata,
    OptimizerSpec,
    ParallelismSpec,
    ResourcesSpec,
    TokenizerSpec,
    TrainingSpec,
)
from penstock.core.job_policy import Allowance, JobPolicy
from penstock.core.job_rules import MOST_BF16_BETA
from penstock.core.kubernetes_spec import (
    AccessMode,
    ClaimTemplate,
    Effect,
    EnvSource,
    EnvVar,
    FieldRef,
    KeyRef,
    KubernetesSpec,
    Operator,
    Reclaim,
    Toleration,
    VolumeSpec,
)
from penstock.core.layout import Precision
from penstock.core.manifest import Checked, Manifest, camel, declarations
from penstock.core.model import DividedModel, Family, ModelSpec
from penstock.core.plan import Alternative, Plan, Prediction
from penstock.core.pod import PodBinding
from penstock.core.profile import Profile
from penstock.core.program import Instruction, RankProgram, Slot
from penstock.core.remaking import Recompute, Remakes
from penstock.core.replicas import ReductionType
from penstock.core.schedule import Action, Group, Kind, ScheduleSpec
from penstock.core.timeline import Activity, Event

Values = st.SearchStrategy[Any]

SHARES = st.floats(0, 1)
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,10}[a-z0-9])?", fullmatch=True)
VARIABLES = st.from_regex(r"[A-Za-z_][A-Z_a-z0-9]{0,9}", fullmatch=True)
HALVES = st.integers(0, 9).map(lambda halves: halves / 2)
INSTANTS = st.none() | st.integers(0, 4 * 10**12).map(lambda milliseconds: milliseconds / 1000)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SECONDS = st.integers(0, 2**53 - 1)
PLAIN: Values = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
PATTERNS = st.lists(st.from_regex(r"[a-z0-9/:-]{0,9}\*?", fullmatch=True), max_size=3).map(tuple)
"""Names, or the beginnings of names."""
IMAGES = st.lists(st.from_regex(r"[a-z0-9]{0,9}([/:@]\*)?|\*", fullmatch=True), max_size=3).map(tuple)
SCALARS: dict[Any, Values] = {
    Any: PLAIN,
    bool: st.booleans(),
    int: st.integers(1, 10**18),
    float: st.floats(1e-12, 1e12),
    str: st.text(max_size=12),
    type(None): st.none(),
}

BY_FIELD: dict[type, dict[str, Values]] = {
    OptimizerSpec: {
        "kind": st.just("adamw"),
        "betas": st.tuples(st.floats(0, MOST_BF16_BETA), st.floats(0, MOST_BF16_BETA)),
        "weight_decay": st.floats(0, 10),
    },
    TrainingSpec: {
        "min_learning_rate": SHARES,
        "decay_share": SHARES,
        "warmup_steps": st.integers(0, 100),
        "seed": st.integers(-(2**40), 2**40),
        "gradient_reduction_type": st.just(ReductionType.FP32),
    },
    DataSpec: {"sequence_length": st.integers(1, 64)},
    ParallelismSpec: {
        "zero": st.sampled_from([None, 0, 1]),
        "slices": st.none() | st.integers(1, 64) | st.lists(st.integers(1, 64), min_size=1, max_size=4).map(tuple),
        "stages": st.none() | st.lists(HALVES, min_size=1, max_size=4).map(tuple),
        "recompute": st.none() | st.sampled_from(Recompute),
    },
    Metadata: {"name": NAMES, "namespace": NAMES},
    Allowance: {
        "images": IMAGES,
        **dict.fromkeys(("secrets", "claims", "storage_classes", "tolerations", "node_selectors"), PATTERNS),
    },
    JobPolicy: {"namespaces": PATTERNS},
    KeyRef: {"name": NAMES, "key": NAMES},
    ClaimTemplate: {
        "storage_class": NAMES,
        "access_modes": st.lists(st.sampled_from(AccessMode), min_size=1, max_size=3).map(tuple),
    },
    PodBinding: {"node_rank": st.integers(0, 3), "num_nodes": st.integers(4, 9)},
    Profile: {
        "num_ranks": st.just(3),
        "hosts": st.sampled_from([(), (0, 0, 0), (0, 1, 0)]),
        "slowness": st.sampled_from([(), (1.0, 0.5, 2.0)]),
    },
    Prediction: dict.fromkeys(("peak_bytes", "slot_bytes"), st.tuples(*[st.integers(0, 10**18)] * 2)),
    KernelSpec: dict.fromkeys(
        (
            "product_share",
            "product_memory_share",
            "attention_share",
            "attention_backward_share",
            "stream_share",
            "row_share",
        ),
        st.floats(0.01, 1),
    ),
    SoftwareSpec: {"allocator_slack": SHARES},
    CostRow: {"pairs": st.integers(0, 10**12)},
    DeviceSpec: {
        "efficiency": st.dictionaries(st.integers(1, 4096), st.floats(0.01, 1), min_size=1, max_size=4).map(
            lambda points: tuple(sorted(points.items()))
        )
    },
}
"""What a field holds where its annotation allows more than its type does."""


def manifest_types() -> list[type[Manifest]]:
    """Every manifest type that a module of core defines. A `DividedModel` has its model's manifest."""
    names = [f"penstock.core.{module.name}" for module in pkgutil.iter_modules(penstock.core.__path__)]
    found = [
        value for name in names for value in vars(importlib.import_module(name)).values() if _is_defined_in(value, name)
    ]
    return sorted(found, key=lambda cls: f"{cls.__module__}.{cls.__qualname__}")


def _is_defined_in(value: object, module: str) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, Manifest)
        and value.__module__ == module
        and value not in (Manifest, Checked, DividedModel)
    )


def valid(cls: Any) -> Values:
    """Any instance of a manifest type."""
    if cls in BY_HAND:
        return BY_HAND[cls]()
    hints, own = typing.get_type_hints(cls), {**_instants(cls), **BY_FIELD.get(cls, {})}
    fields = {name: own[name] if name in own else _within(cls, name, hint) for name, hint in hints.items()}
    return st.builds(cls, **fields)


def _within(cls: Any, name: str, hint: Any) -> Values:
    """Any value of a field; a whole number in its range."""
    limit, kinds = declarations(cls)[camel(name)].limit, set(typing.get_args(hint) or (hint,))
    if "maximum" not in limit or not kinds <= {int, type(None)}:
        return _of(hint)
    numbers = st.integers(max(limit["minimum"], 1), min(limit["maximum"], 2**60))
    return numbers | st.none() if type(None) in kinds else numbers


def _instants(cls: Any) -> dict[str, Values]:
    """For fields that hold one: they are written to the millisecond."""
    return {each.name: INSTANTS for each in dataclasses.fields(cls) if each.metadata == INSTANT}


def _of(annotation: Any) -> Values:
    """Any value of a type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in SCALARS:
        return SCALARS[annotation]
    if dataclasses.is_dataclass(annotation):
        return valid(annotation)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return st.sampled_from(annotation)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*map(_of, arguments))
    if origin is tuple and arguments[-1] is ...:
        return st.lists(_of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(_of, arguments))
    assert origin is dict, f"no values are known for {annotation}"
    return st.dictionaries(st.text(max_size=8), _of(arguments[1]), max_size=3)


def _tokenizers() -> Values:
    trained = st.builds(TokenizerSpec, train=st.just("bpe"), vocab=st.integers(257, 10**6))
    read = st.builds(TokenizerSpec, file=st.text(max_size=12))
    return trained | read | st.builds(TokenizerSpec, train=st.just("bytes"))


@st.composite
def _models(draw: st.DrawFn) -> ModelSpec:
    family, heads = draw(st.sampled_from(Family)), draw(st.sampled_from([1, 2, 6]))
    return ModelSpec(
        family=family,
        layers=draw(st.integers(1, 9)),
        hidden=heads * draw(st.sampled_from([2, 64])),
        heads=heads,
        vocab=draw(st.integers(1, 10**6)),
        kv_heads=draw(st.sampled_from([0, 1, heads] if family is Family.LLAMA else [0, heads])),
        ffn_hidden=draw(st.integers(0, 10**5)),
        positions=draw(st.integers(64, 4096)),
        norm_epsilon=draw(st.floats(1e-12, 1)),
        rope_theta=draw(st.floats(1, 1e7)),
    )


@st.composite
def _resources(draw: st.DrawFn) -> ResourcesSpec:
    ranks = draw(st.integers(1, 64))
    least = draw(st.none() | st.integers(1, ranks))
    fields = {"memory_per_rank": draw(SCALARS[int]), "threads_per_rank": draw(st.integers(1, 65_536))}
    return ResourcesSpec(ranks=ranks, min_ranks=least, **fields)


def _tolerations() -> Values:
    seconds = st.none() | st.integers(0, 999)
    some = st.builds(Toleration, key=NAMES, value=NAMES, effect=st.none() | st.sampled_from(Effect))
    short = st.builds(Toleration, key=NAMES, effect=st.just(Effect.NO_EXECUTE), toleration_seconds=seconds)
    return some | short | st.builds(Toleration, operator=st.just(Operator.EXISTS))


def _env_sources() -> Values:
    kinds: dict[str, Values] = {
        "secret_key_ref": valid(KeyRef),
        "config_map_key_ref": valid(KeyRef),
        "field_ref": valid(FieldRef),
    }
    return st.one_of(*(st.builds(EnvSource, **{name: value}) for name, value in kinds.items()))


def _env_vars() -> Values:
    named = VARIABLES.map(lambda name: EnvVar(name=name))
    texts = st.builds(EnvVar, name=VARIABLES, value=SCALARS[str])
    return named | texts | st.builds(EnvVar, name=VARIABLES, value_from=valid(EnvSource))


def _volumes() -> Values:
    made = st.builds(VolumeSpec, template=valid(ClaimTemplate), reclaim=st.sampled_from(Reclaim))
    return made | st.builds(VolumeSpec, claim=NAMES)


def _kubernetes() -> Values:
    roots = st.just("out") | NAMES.map(lambda name: f"data/{name}")
    return st.builds(
        KubernetesSpec,
        image=SCALARS[str],
        queue_name=NAMES,
        ranks_per_pod=st.sampled_from([1, 2]),
        node_selector=st.dictionaries(NAMES, NAMES, max_size=3),
        tolerations=st.lists(valid(Toleration), max_size=3).map(tuple),
        accelerator_resource=NAMES,
        volumes=st.dictionaries(roots, valid(VolumeSpec), max_size=3),
        env=st.lists(valid(EnvVar), max_size=3, unique_by=lambda each: each.name).map(tuple),
    )


def _cluster_profiles() -> Values:
    counts = {
        "sequence_length": st.integers(1, 2**24),
        "memory_per_rank": st.integers(1, 10**18),
        "threads_per_rank": st.integers(1, 65_536),
        "max_age_seconds": SECONDS,
    }
    return st.builds(
        ClusterProfileSpec,
        model=valid(ModelSpec),
        ranks=st.just(4),
        ranks_per_pod=st.sampled_from([1, 2, 4]),
        node_selector=st.dictionaries(NAMES, NAMES, max_size=3),
        tolerations=st.lists(valid(Toleration), max_size=3).map(tuple),
        **counts,
    )


@st.composite
def _jobs(draw: st.DrawFn) -> JobSpec:
    """Degrees divide ranks and batch, slices add up to the sequence, stages to the model, and each part has a token."""
    fields = {name: draw(_of(hint)) for name, hint in typing.get_type_hints(JobSpec).items()}
    degrees = {name: draw(st.sampled_from([None, 1, 2])) for name in ("dp", "tp", "pp", "micro_batch")}
    length, layers = fields["data"].sequence_length, fields["model"].layers
    degrees["head_parts"] = draw(st.sampled_from([None, 1, min(max(fields["model"].vocab // 2, 1), 64)]))
    cut = draw(st.integers(1, length))
    slices = draw(st.sampled_from([None, cut, tuple(part for part in (cut, length - cut) if part)]))
    stages = draw(st.sampled_from([None, (layers - 0.5, 0.5)]))
    fields["parallelism"] = dataclasses.replace(fields["parallelism"], slices=slices, stages=stages, **degrees)
    if stages is not None and draw(st.booleans()):
        policy = tuple(draw(_of(Remakes)) for _ in stages)
        fields["parallelism"] = dataclasses.replace(fields["parallelism"], recompute=policy)
    fields["resources"] = dataclasses.replace(fields["resources"], ranks=64)
    fields["deadline_seconds"] = draw(st.none() | st.integers(1, 2**53 - 1))
    types = [ReductionType.FP32] if fields["training"].precision is Precision.FP64 else list(ReductionType)
    reduction_type = draw(st.sampled_from(types))
    fields["training"] = dataclasses.replace(fields["training"], global_batch=8, gradient_reduction_type=reduction_type)
    return JobSpec(**fields)


@st.composite
def _clusters(draw: st.DrawFn) -> ClusterSpec:
    num_nodes = draw(st.integers(1, 8))
    node = st.integers(0, num_nodes - 1)
    links = st.lists(st.builds(LinkOverride, source=node, target=node, link=valid(LinkSpec)), max_size=3)
    devices_per_node = draw(st.integers(1, 8))
    costs = tuple(draw(st.lists(valid(CostRow), max_size=2)))
    others = st.builds(OtherDevices, device=valid(DeviceSpec), num_nodes=st.integers(1, max(num_nodes - 1, 1)))
    return ClusterSpec(
        other_devices=(draw(others),) if num_nodes > 1 and not costs and draw(st.booleans()) else (),
        name=draw(SCALARS[str]),
        device=draw(valid(DeviceSpec)),
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        nics_per_node=draw(st.none() | st.integers(1, devices_per_node)),
        intra_node_peer=draw(st.none() | valid(LinkSpec)),
        software=draw(valid(SoftwareSpec)),
        error=draw(SHARES),
        costs=costs,
        intra_node=draw(valid(LinkSpec)),
        inter_node=draw(valid(LinkSpec)),
        links=tuple(draw(links)),
    )


@st.composite
def _plans(draw: st.DrawFn) -> Plan:
    model, dp = draw(valid(ModelSpec)), draw(st.integers(1, 3))
    cuts = draw(st.sets(st.integers(1, model.num_units - 1), max_size=3))
    num_stages = len(cuts) + 1
    pp, tp = (
        draw(st.sampled_from([count for count in (1, 2, 3, 4) if num_stages % count == 0])),
        draw(st.integers(1, 8)),
    )
    return Plan(
        model=model,
        precision=draw(st.sampled_from(Precision)),
        dp=dp,
        tp=tp,
        sequence_parallel=draw(st.booleans()),
        pp=pp,
        microbatch=draw(st.integers(1, 8)),
        num_microbatches=draw(st.integers(1, 64)),
        slices=tuple(draw(st.lists(st.integers(1, 99), min_size=1, max_size=4))),
        stages=tuple(itertools.pairwise([0, *sorted(cuts), model.num_units])),
        schedule=draw(valid(ScheduleSpec)),
        receive_ahead=draw(st.integers(1, 9)),
        late_receives=draw(st.booleans()),
        prefix_by_slice=draw(st.booleans()),
        split_slots=draw(st.booleans()),
        placement=draw(st.sampled_from([(), tuple(reversed(range(0, dp * pp * tp, tp)))])),
        program_digest=draw(SCALARS[str]),
        profile_digest=draw(SCALARS[str]),
        prediction=draw(st.none() | valid(Prediction)),
        reasons=tuple(draw(st.lists(SCALARS[str], max_size=2))),
        alternatives=tuple(draw(st.lists(valid(Alternative), max_size=2))),
    )


@st.composite
def _events(draw: st.DrawFn) -> Event:
    start = draw(st.integers(0, 2**40))
    activity, action = draw(st.sampled_from(Activity)), draw(SCALARS[str])
    return Event(draw(st.integers(0, 99)), activity, action, start, start + draw(st.integers(0, 2**40)))


@st.composite
def _actions(draw: st.DrawFn) -> Action:
    """Any but an overlap; a slice only after a micro-batch, as their text has it."""
    microbatch = draw(st.none() | st.integers(0, 99))
    return Action(
        draw(st.sampled_from([kind for kind in Kind if kind is not Kind.OVERLAP])),
        draw(st.integers(0, 99)),
        microbatch,
        None if microbatch is None else draw(st.none() | st.integers(0, 99)),
        draw(st.none() | st.sampled_from(Group)),
    )


@st.composite
def _rank_programs(draw: st.DrawFn) -> RankProgram:
    """Instructions name slots that the rank has."""
    slots = draw(st.lists(valid(Slot), min_size=1, max_size=3))
    named = st.lists(st.integers(0, len(slots) - 1), max_size=2).map(tuple)
    uses = dict.fromkeys(("acquires", "reads", "writes", "frees"), named)
    channels = _of(typing.get_type_hints(Instruction)["channel"])
    instructions = st.builds(Instruction, _actions(), **uses, channel=channels, sequence=st.integers(0, 9))
    return RankProgram(
        rank=draw(st.integers(0, 63)),
        instructions=tuple(draw(st.lists(instructions, max_size=3))),
        slots=tuple(slots),
        arena_bytes=draw(SCALARS[int]),
    )


BY_HAND: dict[type, Callable[[], Values]] = {
    TokenizerSpec: _tokenizers,
    Toleration: _tolerations,
    EnvSource: _env_sources,
    EnvVar: _env_vars,
    VolumeSpec: _volumes,
    KubernetesSpec: _kubernetes,
    ClusterProfileSpec: _cluster_profiles,
    ModelSpec: _models,
    ResourcesSpec: _resources,
    JobSpec: _jobs,
    ClusterSpec: _clusters,
    Plan: _plans,
    Event: _events,
    Action: _actions,
    RankProgram: _rank_programs,
}
"""Types whose fields have to agree with each other."""
