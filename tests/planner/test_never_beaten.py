"""What the planner chooses itself is hardly ever beaten by a pin, or by its own plan with less of something.

The bar is 1 %, and 0.5 % with less memory, fewer devices or slower links. `./dev soak plans` and
`./dev soak small-plans` hold more and larger problems to it. Greedy orders of `zb` and `zbv` change by 1 or 2 % with a
slice or a byte, so a few of a hundred problems miss it. Here, with one seed, none may by more than `TOLERATED`.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection

import pytest

from penstock.core.cluster import ClusterSpec, DeviceSpec, LinkSpec
from penstock.core.job import DataSpec, Device, JobSpec, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.remaking import Recompute
from tests.support.random_plans import (
    SHORT_OF_MEMORY,
    SLOWER_THAN_A_PIN,
    SLOWER_THAN_WITH_LESS,
    SMALL,
    beating,
    full_pin,
    pins_of,
    planned,
    random_job,
    slower_with_more,
    step_seconds,
    tight_job,
)

SEED, PROBLEMS, PINS = "2026-11-26", 24, 10
TOLERATED = 1.03


def numbers(count: int, long: Collection[int]) -> list[object]:
    """Return numbers of random problems from 0 on. Those in ``long`` run with long tests only."""
    return [pytest.param(number, marks=[pytest.mark.long] if number in long else []) for number in range(count)]


@pytest.mark.parametrize("number", numbers(PROBLEMS, long=range(8, PROBLEMS)))
def test_no_pin_and_no_tighter_limit_gives_a_faster_plan(number: int) -> None:
    chance = random.Random(f"{SEED} {number}")
    spec, cluster = random_job(chance)
    free = planned(spec, cluster)
    more = dataclasses.replace(spec.resources, memory_per_rank=spec.resources.memory_per_rank * 5 // 4)
    roomy = planned(dataclasses.replace(spec, resources=more), cluster)
    wrong = beating(spec, cluster, free, pins_of(chance, spec, free, PINS), TOLERATED)
    assert [*wrong, *slower_with_more(free, roomy, "a quarter more memory", TOLERATED)] == [], (SEED, number)


SHORT = 5


@pytest.mark.parametrize("number", numbers(SHORT, long=(0, 4)))
def test_no_pinned_recomputation_and_no_less_memory_gives_a_faster_plan(number: int) -> None:
    """Jobs with little memory: no plan that fits with full recomputation is missed."""
    chance = random.Random(f"{SEED} short {number}")
    spec, cluster = tight_job(chance)
    free, roomy = (planned(with_memory(spec, part), cluster) for part in (1.0, 1.25))
    pins = [ParallelismSpec(recompute=recompute) for recompute in Recompute]
    pins += pins_of(chance, spec, free, 2)
    wrong = beating(spec, cluster, free, pins, TOLERATED)
    assert [*wrong, *slower_with_more(free, roomy, "a quarter more memory", TOLERATED)] == [], (SEED, number)


def with_memory(spec: JobSpec, part: float) -> JobSpec:
    """Return the job with its memory multiplied by ``part``."""
    memory = round(part * spec.resources.memory_per_rank)
    return dataclasses.replace(spec, resources=dataclasses.replace(spec.resources, memory_per_rank=memory))


@pytest.mark.parametrize("number", numbers(4, long=(0,)))
def test_a_plan_that_fits_recomputes_nothing_and_a_plan_exists_just_below_its_memory(number: int) -> None:
    chance = random.Random(f"{SEED} spare {number}")
    spec, cluster = tight_job(chance, dataclasses.replace(SHORT_OF_MEMORY, models=SHORT_OF_MEMORY.models[:3]))
    limit = cluster.device.memory_bytes
    most = planned(with_memory(spec, limit / spec.resources.memory_per_rank), cluster)
    assert most is not None
    assert most.prediction is not None
    assert not most.recompute
    needed = max(most.prediction.peak_bytes) / spec.resources.memory_per_rank
    at, below = (planned(with_memory(spec, part * needed), cluster) for part in (1.0, 0.98))
    assert at is not None
    assert step_seconds(at) <= TOLERATED * step_seconds(most)
    assert below is not None
    assert below.prediction is not None
    assert max(below.prediction.peak_bytes) <= 0.98 * needed * spec.resources.memory_per_rank + 1


MORE_DEVICES, FEWEST = 6, 4


@pytest.mark.parametrize("number", numbers(MORE_DEVICES, long=range(3, MORE_DEVICES)))
def test_no_plan_is_slower_with_more_devices_or_faster_links(number: int) -> None:
    """If `minRanks` allows it, a plan leaves devices unused that would not make it faster."""
    chance = random.Random(f"{SEED} more {number}")
    spec, cluster = random_job(chance, dataclasses.replace(SMALL, devices=(4, 6, 8), models=SMALL.models[:3]))
    spec = dataclasses.replace(spec, resources=dataclasses.replace(spec.resources, min_ranks=FEWEST))
    ranks = spec.resources.ranks + chance.choice((1, 2, 3))
    larger = dataclasses.replace(cluster, num_nodes=cluster.num_nodes + 3)
    free = planned(spec, larger)
    wide = planned(dataclasses.replace(spec, resources=dataclasses.replace(spec.resources, ranks=ranks)), larger)
    faster = planned(spec, dataclasses.replace(larger, inter_node=larger.intra_node))
    wrong = slower_with_more(free, wide, f"{ranks} devices", TOLERATED)
    assert [*wrong, *slower_with_more(free, faster, "faster links", TOLERATED)] == [], (SEED, number)


def test_pinning_the_fields_of_a_plan_gives_no_faster_plan() -> None:
    """They once did, by 1 %: stage boundaries were tuned for a quick schedule and suited the best one less."""
    spec, cluster = random_job(random.Random("or-b 14"))
    free = planned(spec, cluster)
    assert free is not None
    assert beating(spec, cluster, free, [full_pin(free)], SLOWER_THAN_WITH_LESS) == []


def test_a_device_more_does_not_hide_replicas_without_a_pipeline() -> None:
    """Its plan was 45 % slower than without the sixth device: pipelines of small messages take five times their
    estimates, and replicas that need no pipeline were thought to do so, too.
    """
    spec = JobSpec(
        model=ModelSpec(family=Family.GPT2, layers=6, hidden=768, heads=12, vocab=32000, positions=1000),
        data=DataSpec(source="", sequence_length=1000),
        training=TrainingSpec(global_batch=50, steps=1, precision=Precision.BF16),
        resources=ResourcesSpec(device=Device.CUDA, ranks=5, memory_per_rank=16 * 10**9),
    )
    device = DeviceSpec(
        name="device",
        peak_flops=989e12,
        memory_bytes=80 * 10**9,
        memory_bandwidth=3.3e12,
        constant_bytes=2**30,
        action_overhead_seconds=5e-6,
    )
    slow = LinkSpec(latency_seconds=1e-5, bytes_per_second=3e9)
    cluster = dataclasses.replace(h100(8), device=device, num_nodes=4, devices_per_node=5, inter_node=slow)
    more = dataclasses.replace(spec, resources=dataclasses.replace(spec.resources, ranks=6, min_ranks=5))
    assert slower_with_more(planned(spec, cluster), planned(more, cluster), "a device more") == []


def gpt2_of_width_2048(layers: int, vocab: int, tokens: int, batch: int, ranks: int) -> JobSpec:
    """A job on devices of 24 GB."""
    return JobSpec(
        model=ModelSpec(family=Family.GPT2, layers=layers, hidden=2048, heads=16, vocab=vocab, positions=tokens),
        data=DataSpec(source="", sequence_length=tokens),
        training=TrainingSpec(global_batch=batch, steps=1, precision=Precision.BF16),
        resources=ResourcesSpec(device=Device.CUDA, ranks=ranks, memory_per_rank=24 * 10**9),
    )


DEVICE = DeviceSpec(
    name="device",
    peak_flops=125e12,
    memory_bytes=80 * 10**9,
    memory_bandwidth=2e12,
    efficiency=((1, 0.02), (64, 0.2), (256, 0.4), (1024, 0.5), (4096, 0.55)),
    constant_bytes=2**30,
    action_overhead_seconds=3e-5,
)


def test_devices_that_do_not_help_a_tied_model_stay_unused() -> None:
    """Two more made it 1.9 % slower: estimates left out the sum of the tied matrix, which takes a third of such a step
    where its copies are on two ranks, so the plans without that sum were not simulated.
    """
    spec = gpt2_of_width_2048(layers=13, vocab=50257, tokens=1000, batch=12, ranks=12)
    slow = LinkSpec(latency_seconds=1e-5, bytes_per_second=3e9)
    cluster = dataclasses.replace(h100(8), device=DEVICE, num_nodes=15, devices_per_node=1, inter_node=slow)
    more = dataclasses.replace(spec, resources=dataclasses.replace(spec.resources, ranks=14, min_ranks=12))
    assert slower_with_more(planned(spec, cluster), planned(more, cluster), "two devices more") == []


def test_an_order_that_holds_a_little_too_much_gets_other_stages() -> None:
    """Links of twice the speed made it 2 % slower: the best order then exceeded the memory by 0.4 %."""
    spec = gpt2_of_width_2048(layers=24, vocab=128256, tokens=16384, batch=64, ranks=8)
    device = dataclasses.replace(DEVICE, peak_flops=312e12, memory_bandwidth=3.3e12)

    def cluster(faster: float) -> ClusterSpec:
        return dataclasses.replace(
            h100(8),
            device=device,
            num_nodes=4,
            devices_per_node=2,
            intra_node=LinkSpec(latency_seconds=5e-6, bytes_per_second=faster * 60e9),
            inter_node=LinkSpec(latency_seconds=1e-5, bytes_per_second=faster * 45e9),
        )

    assert slower_with_more(planned(spec, cluster(1.0)), planned(spec, cluster(2.0)), "faster links") == []


GPT_175B = ModelSpec(family=Family.GPT2, layers=96, hidden=12288, heads=96, vocab=50257, positions=8192)
LLAMA_405B = ModelSpec(
    family=Family.LLAMA, layers=126, hidden=16384, heads=128, kv_heads=8, ffn_hidden=53248, vocab=128256
)
LLAMA_70B = ModelSpec(family=Family.LLAMA, layers=80, hidden=8192, heads=64, kv_heads=8, ffn_hidden=28672, vocab=128256)


def h100(ranks: int) -> ClusterSpec:
    """The cluster of the review that found plans 10.9 times slower than with a pin (ADR 0036)."""
    device = DeviceSpec(
        name="H100",
        peak_flops=989e12,
        memory_bytes=80 * 10**9,
        memory_bandwidth=3.35e12,
        efficiency=((1, 0.01), (64, 0.15), (256, 0.40), (1024, 0.55), (4096, 0.62)),
        constant_bytes=2 * 2**30,
        action_overhead_seconds=30e-6,
    )
    return ClusterSpec(
        name="H100",
        device=device,
        num_nodes=ranks // 8,
        devices_per_node=8,
        intra_node=LinkSpec(latency_seconds=5e-6, bytes_per_second=370e9),
        inter_node=LinkSpec(latency_seconds=1e-5, bytes_per_second=45e9),
    )


def plan_on_h100s(model: ModelSpec, ranks: int, batch: int, tokens: int, **pins: object) -> Plan:
    """The plan for H100s; there is one."""
    spec = JobSpec(
        model=model,
        data=DataSpec(source="", sequence_length=tokens),
        training=TrainingSpec(global_batch=batch, steps=1, precision=Precision.BF16),
        resources=ResourcesSpec(device=Device.CUDA, ranks=ranks, memory_per_rank=80 * 10**9),
    )
    plan = planned(spec, h100(ranks), pin=ParallelismSpec(**pins))  # type: ignore[arg-type]  # a test's own pins
    assert plan is not None
    return plan


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "ranks", "batch", "tokens", "pins"),
    [
        (GPT_175B, 1024, 2048, 8192, {"slices": 4}),
        (LLAMA_405B, 384, 512, 8192, {"slices": 8}),
        (LLAMA_405B, 384, 2048, 8192, {"dp": 2, "tp": 8, "pp": 24, "micro_batch": 1, "slices": 8}),
        (LLAMA_70B, 384, 512, 131072, {"dp": 1, "tp": 8, "pp": 48, "micro_batch": 1, "slices": 64, "schedule": "1f1b"}),
    ],
    ids=["175B", "405B", "405B-all", "128k"],
)
def test_pins_that_were_faster_once(
    model: ModelSpec, ranks: int, batch: int, tokens: int, pins: dict[str, object]
) -> None:
    pinned, free = (plan_on_h100s(model, ranks, batch, tokens, **each) for each in (pins, {}))
    assert step_seconds(free) <= SLOWER_THAN_A_PIN * step_seconds(pinned)


def test_stages_are_estimated_for_the_micro_batches_they_run() -> None:
    """With a head of half the work they differ much. It was 3.7 % slower than with dp pinned."""
    spec, cluster = random_job(random.Random("tip-c 6"))
    free, pinned = (planned(spec, cluster, pin=ParallelismSpec(dp=dp)) for dp in (None, 4))
    assert free is not None
    assert pinned is not None
    assert step_seconds(free) <= SLOWER_THAN_A_PIN * step_seconds(pinned)


@pytest.mark.parametrize("number", range(4))
def test_no_pin_gives_a_faster_plan_where_the_head_is_heavy(number: int) -> None:
    """Few layers and a vocabulary of 128k: the head is as long as 5 to 40 layers."""
    chance = random.Random(f"{SEED} heads {number}")
    spec, cluster = random_job(chance, dataclasses.replace(SMALL, devices=(2, 4, 8), models=SMALL.models[:3]))
    spec = dataclasses.replace(spec, model=spec.model.with_vocab(128_256))
    free = planned(spec, cluster)
    whole = dataclasses.replace(full_pin(free), head_parts=1) if free else ParallelismSpec(head_parts=1)
    pins = [whole, *pins_of(chance, spec, free, PINS)]
    assert beating(spec, cluster, free, pins, TOLERATED) == [], (SEED, number)


def test_slices_are_found_that_a_mesh_needs() -> None:
    """It was refused without them pinned, although 64 slices need 42 of 74 GiB."""
    plan = plan_on_h100s(LLAMA_70B, 384, 512, 131072, dp=1, tp=8, pp=48, micro_batch=1)
    assert len(plan.slices) > 8
