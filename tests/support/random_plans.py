"""Planning problems at random, pins that a user might think of, and what must hold between the plans of both."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.core.cluster import ClusterSpec, DeviceSpec, LinkSpec
from penstock.core.errors import UserError
from penstock.core.job import DataSpec, Device, JobSpec, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.layout import Precision, num_parameters
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.remaking import Recompute
from penstock.planner.budget import Budget
from penstock.planner.decide import decide
from penstock.planner.memory import state_bytes_per_parameter
from penstock.planner.problem import problem_from_cluster

SLOWER_THAN_A_PIN = 1.01
SLOWER_THAN_WITH_LESS = 1.005

ONLY_SIMULATED = Budget(neighbours=0, moves=0)
"""For plans of which everything is pinned."""

NO_PIN = ParallelismSpec()

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb", "zbv")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """What problems are drawn from: devices, (layers, hidden, heads) of models, tokens, and sequences of a step, either
    for every device or in all.
    """

    devices: Sequence[int]
    models: Sequence[tuple[int, int, int]]
    tokens: Sequence[int]
    batches: Sequence[int]
    is_per_device: bool = True


SMALL = Sizes(
    devices=(2, 4, 8, 16),
    models=((4, 512, 8), (8, 1024, 16), (12, 2048, 16), (24, 2048, 16), (32, 4096, 32)),
    tokens=(512, 1024, 2048, 4096, 8192, 16384),
    batches=(1, 2, 4, 8, 16),
)

LARGE = Sizes(
    devices=(8, 16, 32, 64, 128, 384, 1024, 1536, 3072, 4096, 16384),
    models=((24, 2048, 16), (32, 4096, 32), (80, 8192, 64), (96, 12288, 96), (126, 16384, 128), (128, 25600, 160)),
    tokens=(2048, 4096, 8192, 32768, 131072, 262144, 1048576),
    batches=(1, 2, 4, 8, 16, 32, 72, 128, 256, 512, 1024, 1536, 2048, 3072, 4096),
    is_per_device=False,
)
"""From 1 to 1,000 billion parameters."""


SHORT_OF_MEMORY = Sizes(
    devices=(2, 4, 8),
    models=((4, 512, 8), (8, 1024, 16), (12, 2048, 16), (24, 2048, 16)),
    tokens=(4096, 16384, 32768, 65536, 131072),
    batches=(1, 2, 4, 8),
    is_per_device=False,
)
"""Few devices for long contexts."""


def random_job(chance: random.Random, sizes: Sizes = SMALL) -> tuple[JobSpec, ClusterSpec]:
    """A job without pins, and the hardware for it."""
    ranks = chance.choice(sizes.devices)
    layers, hidden, heads = chance.choice(sizes.models)
    tokens = chance.choice(sizes.tokens)
    model = ModelSpec(
        family=Family.LLAMA, layers=layers, hidden=hidden, heads=heads, kv_heads=chance.choice((8, heads)), vocab=32000
    )
    memory = chance.choice((16, 24, 40, 80, 141)) * 10**9
    batch = chance.choice(sizes.batches) * (ranks if sizes.is_per_device else 1)
    spec = JobSpec(
        model=model,
        data=DataSpec(source="", sequence_length=tokens),
        training=TrainingSpec(global_batch=batch, steps=1, precision=Precision.BF16),
        resources=ResourcesSpec(device=Device.CUDA, ranks=ranks, memory_per_rank=memory),
    )
    return spec, random_cluster(chance, ranks)


def tight_job(chance: random.Random, sizes: Sizes = SHORT_OF_MEMORY) -> tuple[JobSpec, ClusterSpec]:
    """A random job whose ranks have memory for parameters and for a part of the activations of a micro-batch."""
    spec, cluster = random_job(chance, sizes)
    model, ranks = spec.model, spec.resources.ranks
    state = state_bytes_per_parameter(Precision.BF16) * num_parameters(model) // ranks
    activations = 34 * model.layers * model.hidden * spec.data.sequence_length // ranks
    memory = state + 3 * 2**29 + round(activations * chance.choice((0.3, 0.6, 1.2)))
    return dataclasses.replace(spec, resources=dataclasses.replace(spec.resources, memory_per_rank=memory)), cluster


def random_cluster(chance: random.Random, ranks: int) -> ClusterSpec:
    """Devices and links of a speed that there is, about."""
    per_node = min(ranks, chance.choice((1, 2, 4, 8)))
    device = DeviceSpec(
        name="device",
        peak_flops=chance.choice((125e12, 312e12, 989e12)),
        memory_bytes=200 * 10**9,
        memory_bandwidth=chance.choice((0.9e12, 2e12, 3.3e12)),
        constant_bytes=2**30,
        action_overhead_seconds=chance.choice((5e-6, 30e-6)),
    )
    return ClusterSpec(
        name="random",
        device=device,
        num_nodes=-(-ranks // per_node),
        devices_per_node=per_node,
        intra_node=LinkSpec(latency_seconds=5e-6, bytes_per_second=chance.choice((60e9, 250e9, 450e9))),
        inter_node=LinkSpec(latency_seconds=1e-5, bytes_per_second=chance.choice((3e9, 12e9, 45e9))),
    )


def planned(
    spec: JobSpec, cluster: ClusterSpec, budget: Budget | None = None, pin: ParallelismSpec = NO_PIN
) -> Plan | None:
    """The plan, or none where the planner says that nothing fits or a pin cannot be."""
    try:
        pinned = dataclasses.replace(spec, parallelism=pin)
        return decide(problem_from_cluster(pinned, cluster), budget).plan
    except UserError:
        return None


def step_seconds(plan: Plan) -> float:
    """As predicted."""
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def neighbours(plan: Plan) -> Iterator[ParallelismSpec]:
    """The plan with one field a step or a factor of two away, and all others pinned."""
    here = full_pin(plan)
    count = len(plan.slices)
    for slices in sorted({count - 1, count + 1, count // 2, 2 * count} - {0}):
        yield dataclasses.replace(here, slices=slices)
    for schedule in SCHEDULES:
        yield dataclasses.replace(here, schedule=schedule)
    for batch in sorted({plan.microbatch // 2, 2 * plan.microbatch} - {0}):
        yield dataclasses.replace(here, micro_batch=batch)
    for recompute in Recompute:
        yield dataclasses.replace(here, recompute=recompute)
    for zero in (0, 1):
        yield dataclasses.replace(here, zero=zero)
    for parts in sorted({1, plan.head_parts // 2, 2 * plan.head_parts, plan.pp} - {0, plan.head_parts}):
        yield dataclasses.replace(here, head_parts=parts)
    for up, down in itertools.permutations(("dp", "tp", "pp"), 2):
        smaller = getattr(plan, down) // 2
        if smaller:
            yield dataclasses.replace(here, **{up: 2 * getattr(plan, up), down: smaller})


def full_pin(plan: Plan) -> ParallelismSpec:
    """All that a user can pin of the plan but the stages and the lengths of slices. What stages make again can be
    pinned only where that is nothing, and is the planner's choice elsewhere.
    """
    return ParallelismSpec(
        dp=plan.dp,
        tp=plan.tp,
        pp=plan.pp,
        micro_batch=plan.microbatch,
        slices=len(plan.slices),
        schedule=plan.schedule.generator,
        head_parts=plan.head_parts,
        zero=plan.zero,
        recompute=None if plan.recompute else Recompute.NONE,
    )


def random_pin(chance: random.Random, spec: JobSpec) -> ParallelismSpec:
    """Everything pinned at random."""
    ranks, batch = spec.resources.ranks, spec.training.global_batch
    tp = chance.choice([n for n in (1, 2, 4, 8) if ranks % n == 0])
    pp = chance.choice([n for n in range(1, ranks // tp + 1) if (ranks // tp) % n == 0])
    dp = ranks // tp // pp
    share = max(batch // dp, 1)
    return ParallelismSpec(
        dp=dp,
        tp=tp,
        pp=pp,
        micro_batch=chance.choice([n for n in range(1, share + 1) if share % n == 0]),
        slices=chance.choice((1, 2, 3, 4, 6, 8, 12, 16, 32)),
        schedule=chance.choice(SCHEDULES),
        recompute=chance.choice((None, None, *Recompute)),
    )


def beating(
    spec: JobSpec,
    cluster: ClusterSpec,
    free: Plan | None,
    pins: Sequence[ParallelismSpec],
    tolerated: float = SLOWER_THAN_A_PIN,
) -> list[str]:
    """What is wrong: pins that are faster than the free plan, or fit where that found nothing."""
    found = []
    for pin in pins:
        pinned = planned(spec, cluster, ONLY_SIMULATED, pin)
        if pinned is None:
            continue
        seconds = step_seconds(pinned)
        if free is None:
            found.append(f"nothing fits, but {pin_text(pin)} does, in {seconds:.4g} s")
        elif step_seconds(free) > tolerated * seconds:
            found.append(
                f"{step_seconds(free):.4g} s free ({pin_text(full_pin(free))}), {seconds:.4g} s with {pin_text(pin)}"
            )
    return found


def slower_with_more(
    less: Plan | None, more: Plan | None, of_what: str, tolerated: float = SLOWER_THAN_WITH_LESS
) -> list[str]:
    """What is wrong if a plan with more of something is slower than with less of it, or there is none."""
    if less is None:
        return []
    if more is None:
        return [f"nothing fits with {of_what}"]
    if step_seconds(more) > tolerated * step_seconds(less):
        return [f"{step_seconds(less):.4g} s, and {step_seconds(more):.4g} s with {of_what}"]
    return []


def pin_text(pin: ParallelismSpec) -> str:
    """A pin in a line."""
    head = "" if pin.head_parts in (None, 1) else f", head in {pin.head_parts} parts"
    mesh = f"dp {pin.dp} tp {pin.tp} pp {pin.pp}, micro-batch {pin.micro_batch}"
    recompute = "" if pin.recompute is None else f", recompute {pin.recompute}"
    zero = "" if pin.zero is None else f", zero {pin.zero}"
    return f"{mesh}, {pin.slices} slices, {pin.schedule}{head}{recompute}{zero}"


def pins_of(chance: random.Random, spec: JobSpec, free: Plan | None, count: int) -> list[ParallelismSpec]:
    """``count`` pins: neighbours of the free plan in random order for one half of them, random ones for the other."""
    near = [] if free is None else list(neighbours(free))
    chosen = chance.sample(near, min(len(near), count // 2))
    return chosen + [random_pin(chance, spec) for _ in range(count - len(chosen))]
