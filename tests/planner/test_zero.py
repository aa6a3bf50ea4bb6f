"""Replicas divide the optimizer's state where that is faster, or what fits; its bytes and seconds are counted."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.core.buckets import MOST_BUCKETS, elements_of_buckets
from penstock.core.cluster import GradientType, SoftwareSpec
from penstock.core.errors import UserError
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.moments import MomentType
from penstock.core.replicas import BLOCK, ROUND_BYTES, ReductionType, exchange_bytes, largest_shard, narrowing_bytes
from penstock.core.schedule import Group
from penstock.core.sharding import Sharding
from penstock.core.timeline import Activity
from penstock.planner.budget import Budget
from penstock.planner.candidate import Candidate
from penstock.planner.cost import DescribedCost
from penstock.planner.decide import decide
from penstock.planner.evaluate import Simulated, owners_of
from penstock.planner.judge import Evaluation, NothingFitsError
from penstock.planner.memory import (
    StageMemory,
    optimizer_bytes_per_parameter,
    state_bytes_per_parameter,
    whole_bytes_per_parameter,
)
from penstock.planner.outlines import outlines, outlines_of
from penstock.planner.problem import Mesh, Problem, all_meshes, zero_degrees
from penstock.planner.replay import candidate_of, simulated
from penstock.planner.search import search
from penstock.planner.tables import resident_bytes, stage_memory
from tests.support.planning import BETWEEN, DEVICE, INSIDE, cluster, problem

LLAMA = ModelSpec(family=Family.LLAMA, layers=4, hidden=64, heads=4, kv_heads=4, vocab=256)
GPT2 = ModelSpec(family=Family.GPT2, layers=3, hidden=64, heads=4, vocab=512, positions=64)
LARGE = ModelSpec(family=Family.LLAMA, layers=2, hidden=4096, heads=32, kv_heads=8, vocab=32_000)
HOST_LLAMA = ModelSpec(family=Family.LLAMA, layers=8, hidden=256, heads=4, vocab=512)
WITHOUT_MOVES = Budget(candidates=10_000, opened=10_000, shortages=10_000, actions=10**10, moves=0)


def memory(model: ModelSpec, precision: Precision, shards: int, software: SoftwareSpec | None = None) -> StageMemory:
    """Of the model in one stage."""
    return StageMemory(
        model=model,
        precision=precision,
        stages=((0, model.num_units),),
        batch=1,
        software=software or SoftwareSpec(),
        optimizer_shards=shards,
    )


@pytest.mark.parametrize("dp", [1, 2, 8, 64])
@pytest.mark.parametrize(
    ("precision", "gradients", "whole", "sharded"),
    [
        (Precision.BF16, GradientType.FP32, 6, 12),
        (Precision.BF16, GradientType.BF16, 4, 12),
        (Precision.FP32, GradientType.FP32, 8, 8),
        (Precision.FP64, GradientType.FP32, 16, 16),
    ],
)
def test_a_parameter_takes_what_megatrons_distributed_optimizer_says(
    dp: int, precision: Precision, gradients: GradientType, whole: int, sharded: int
) -> None:
    """In bf16 6 + 12 / dp bytes with gradients of fp32, in fp32 8 + 8 / dp (Megatron Core, distributed optimizer)."""
    assert whole_bytes_per_parameter(precision, gradients) == whole
    assert optimizer_bytes_per_parameter(precision) == sharded
    found = memory(LARGE, precision, dp, SoftwareSpec(gradient_type=gradients))
    per_parameter = float((found.state_bytes / found.num_parameters)[0])
    assert per_parameter == pytest.approx(whole + sharded / dp, rel=2e-3)
    assert per_parameter >= whole + sharded / dp


@pytest.mark.parametrize(
    ("precision", "total"), [(Precision.BF16, 6 + 4 + 2 * 2), (Precision.FP32, 8 + 2 * 2), (Precision.FP64, 16 + 2 * 2)]
)
def test_moments_in_bf16_take_two_bytes_each(precision: Precision, total: int) -> None:
    moment_type = MomentType.BF16
    assert state_bytes_per_parameter(precision, moment_type) == total
    narrow = dataclasses.replace(memory(LARGE, precision, 1), moment_type=moment_type)
    assert (narrow.state_bytes == narrow.num_parameters * total).all()


@given(st.sampled_from([LLAMA, GPT2]), st.integers(1, 70), st.data())
def test_no_shard_is_larger_than_the_trainers(model: ModelSpec, dp: int, data: st.DataObject) -> None:
    cuts = data.draw(st.sets(st.integers(1, model.num_units - 1)))
    stages = tuple(itertools.pairwise((0, *sorted(cuts), model.num_units)))
    found = StageMemory(model=model, precision=Precision.BF16, stages=stages, batch=1, optimizer_shards=dp)
    counts = found.num_parameters.tolist()
    assert found.stepped_elements.tolist() == [largest_shard(count, dp) for count in counts]
    assert (found.flat_elements == dp * found.stepped_elements).all()
    assert (found.flat_elements >= found.num_parameters).all()


@given(st.sampled_from([LLAMA, GPT2, LARGE]), st.integers(2, 9), st.integers(1, 2), st.data())
def test_shards_of_buckets_are_counted_one_by_one(model: ModelSpec, dp: int, tp: int, data: st.DataObject) -> None:
    cuts = data.draw(st.sets(st.integers(1, model.num_units - 1), max_size=2))
    stages = tuple(itertools.pairwise((0, *sorted(cuts), model.num_units)))
    fields: dict[str, Any] = {"model": model, "precision": Precision.FP32, "stages": stages, "batch": 1}
    counted = StageMemory(**fields, sharding=Sharding(tp), optimizer_shards=dp, has_buckets=True)
    whole = dataclasses.replace(counted, has_buckets=False)
    of_buckets = elements_of_buckets(model, stages, Precision.FP32, tp)
    columns = counted.stepped_elements, whole.stepped_elements, counted.largest_shards
    for elements, stepped, as_one, largest in zip(of_buckets, *map(np.ndarray.tolist, columns), strict=True):
        if not elements:
            assert stepped == largest == as_one
            continue
        assert stepped == sum(largest_shard(count, dp) for count in elements)
        assert largest == max(largest_shard(count, dp) for count in elements) < as_one
        assert as_one <= stepped <= as_one + 2 * len(elements) * BLOCK + tp * model.num_units
    undivided = dataclasses.replace(counted, optimizer_shards=1)
    assert (undivided.stepped_elements == undivided.num_parameters).all()


@pytest.mark.parametrize("zero", [0, 1])
def test_buckets_are_reduced_as_their_stage_is_in_parts(zero: int) -> None:
    """Of links without latency, whose time is that of the bytes. A rank has what the largest bucket exchanges."""
    host = dataclasses.replace(llama_problem(model=HOST_LLAMA, memory=2**34), num_places=None)
    candidate = on_two_replicas(zero, stages=((0, 9), (9, 18)))
    costs, memory_ = Simulated(host).costs(candidate, (0, 1)), stage_memory(host, candidate)
    for stage, buckets in enumerate(costs.buckets):
        assert len(buckets) == MOST_BUCKETS
        reduced = [bucket.reduce_ns[Group.DP] for bucket in buckets]
        latencies = (1 if zero else 2) * (len(buckets) - 1) * INSIDE.latency_seconds * 1e9
        assert sum(reduced) == pytest.approx(costs.reduce_ns[Group.DP][stage] + latencies, abs=len(buckets) + 1)
    shards = memory_.largest_shards.tolist() if zero else (0, 0)
    device = dataclasses.replace(host, num_places=8)
    more = resident_bytes(host, candidate, (0, 1)) - resident_bytes(device, candidate, (0, 1))
    gaps = memory_.state_bytes - stage_memory(device, candidate).state_bytes
    assert more.tolist() == [exchange_bytes(4 * shard, 2) + gap for shard, gap in zip(shards, gaps, strict=True)]


MESH = Mesh(dp=2, tp=1, pp=2, microbatch=1, num_microbatches=3)
HALVES = ((0, 5), (5, 10))


def on_two_replicas(zero: int, **changes: Any) -> Candidate:
    """LLAMA in two stages."""
    fields: dict[str, Any] = {"mesh": MESH, "stages": HALVES, "slices": (16,), "schedule": "1f1b", "zero": zero}
    return Candidate(**fields | changes)


def llama_problem(**changes: Any) -> Problem:
    """LLAMA on four devices."""
    fields: dict[str, Any] = {"model": LLAMA, "ranks": 4, "global_batch": 6}
    return problem(**fields | changes)


def ring_ns(passes: int, num_bytes: int) -> float:
    """Over two devices of a node."""
    return passes * (INSIDE.latency_seconds + num_bytes / 2 / INSIDE.bytes_per_second) * 1e9


def test_a_sharded_step_scatters_sums_and_gathers_weights() -> None:
    """A ring's two passes, one before and one after the update of one shard."""
    judge, owners = Simulated(llama_problem()), (0, 1)
    whole, sharded = (judge.costs(on_two_replicas(zero), owners) for zero in (0, 1))
    counts = memory(LLAMA, Precision.FP32, 1).num_parameters
    assert whole.gather_ns == ()
    of_stages = [dataclasses.replace(memory(LLAMA, Precision.FP32, shards), stages=HALVES) for shards in (1, 2)]
    assert counts == of_stages[0].num_parameters.sum()
    for costs, found, passes in ((whole, of_stages[0], 2), (sharded, of_stages[1], 1)):
        expected = [ring_ns(passes, 4 * count) for count in found.flat_elements.tolist()]
        assert costs.reduce_ns[Group.DP] == pytest.approx(expected, abs=1)
        stepped = [count * (16 + 12) for count in found.stepped_elements.tolist()]
        assert costs.optimizer_ns == pytest.approx([1e9 * each / DEVICE.memory_bandwidth for each in stepped], abs=1)
    assert sharded.gather_ns == sharded.reduce_ns[Group.DP]


def test_in_bf16_weights_are_half_as_wide_as_their_gradients() -> None:
    narrow = dataclasses.replace(llama_problem(), precision=Precision.BF16)
    costs = Simulated(narrow).costs(on_two_replicas(1), (0, 1))
    elements = stage_memory(narrow, on_two_replicas(1)).flat_elements.tolist()
    assert costs.reduce_ns[Group.DP] == pytest.approx([ring_ns(1, 4 * count) for count in elements], abs=1)
    assert costs.gather_ns == pytest.approx([ring_ns(1, 2 * count) for count in elements], abs=1)


@pytest.mark.parametrize("cards", [None, 1, 2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_two_passes_take_as_long_as_the_sum(cards: int | None, size: int) -> None:
    cost = problem(cluster(num_nodes=2, devices_per_node=2, nics_per_node=cards)).cost_of(1)
    both = [each(10**6, range(size)) for each in (cost.reduce_scatter_seconds, cost.all_gather_seconds)]
    assert sum(both) == pytest.approx(cost.all_reduce_seconds(10**6, range(size)))
    assert both[0] == both[1]


@settings(max_examples=60)
@given(
    st.sampled_from([LLAMA, GPT2]),
    st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb", "zbv", "interleaved-zb"]),
    st.integers(1, 4),
    st.sampled_from([Precision.FP32, Precision.BF16]),
)
def test_only_reductions_and_optimizers_are_others(
    model: ModelSpec, schedule: str, count: int, precision: Precision
) -> None:
    """The parts of steps add up, and no step is shorter than its bound."""
    per_rank = 2 if schedule in ("zbv", "interleaved-zb") else 1
    cuts = np.linspace(0, model.num_units, 2 * per_rank + 1).astype(int).tolist()
    mesh = Mesh(dp=2, tp=1, pp=2, microbatch=1, num_microbatches=count)
    shape: dict[str, Any] = {"mesh": mesh, "stages": tuple(itertools.pairwise(cuts)), "schedule": schedule}
    judge = Simulated(dataclasses.replace(llama_problem(model=model, global_batch=2 * count), precision=precision))
    whole = on_two_replicas(0, **shape)
    if judge.best_variant(whole) is not whole:
        whole = judge.evaluate(whole).candidate
    found = [judge.evaluate(dataclasses.replace(whole, zero=zero)) for zero in (0, 1)]
    assert found[0].compute_ns == found[1].compute_ns
    for each in found:
        parts = (each.compute_ns, each.bubble_ns, each.communication_ns, each.reduction_ns, each.optimizer_ns)
        assert sum(parts) == each.step_ns
        assert judge.bound_ns(each.candidate) <= each.step_ns
    assert found[1].optimizer_ns < found[0].optimizer_ns
    assert found[1].slot_bytes == found[0].slot_bytes


@pytest.mark.parametrize("late", [False, True])
def test_every_stage_is_gathered_before_its_first_forward(late: bool) -> None:
    """One after the other, as forwards need them; on devices before anything else."""
    plan = decide(llama_problem(dp=2, pp=2, zero=1, schedule="zbv")).plan
    plan = dataclasses.replace(plan, late_receives=late, program_digest="")
    timeline = simulated(plan, cluster()).timeline
    for rank, stages in ((0, (0, 3)), (1, (1, 2))):
        own = [event for event in timeline.events if event.rank == rank]
        running = {event.action: event for event in own if "START_GATHER" in event.action}
        waits = {event.action: event for event in own if "WAIT_GATHER" in event.action}
        computed = [event for event in own if event.activity is Activity.COMPUTE]
        gathers = [running[f"{stage}START_GATHER(dp)"] for stage in stages]
        assert len(gathers) == len(running)
        assert [gather.start_ns for gather in gathers] == [0, gathers[0].stop_ns]
        for stage, gather in zip(stages, gathers, strict=True):
            waiting = computed if late else [event for event in computed if event.action.startswith(f"{stage}F")]
            assert gather.stop_ns <= min(event.start_ns for event in waiting)
            wait = waits.get(f"{stage}WAIT_GATHER(dp)")
            assert wait is None or wait.stop_ns == gather.stop_ns
        assert len(waits) == 2 or not late
    assert timeline.step_ns == max(event.stop_ns for event in timeline.events if event.activity is Activity.STEP)


def test_with_one_replica_nothing_changes() -> None:
    shape: dict[str, Any] = {"model": LLAMA, "ranks": 2, "global_batch": 4, "dp": 1}
    plans = [decide(problem(**shape, zero=zero)).plan for zero in (None, 0, 1)]
    assert [plan.zero for plan in plans] == [0, 0, 0]
    assert not any("optimizer state" in reason for plan in plans for reason in plan.reasons)
    assert len({dataclasses.replace(plan, reasons=(), prediction=None).digest for plan in plans}) == 1


def test_pins_are_obeyed_and_explained() -> None:
    for zero, text in ((0, "optimizer state whole on each of 4 replicas: pinned"), (1, "sharded over 4 replicas")):
        plan = decide(llama_problem(global_batch=4, dp=4, zero=zero)).plan
        assert plan.zero == zero
        assert candidate_of(plan).zero == zero
        assert f"zero {zero}" in "".join(plan.reasons)
        (sentence,) = [reason for reason in plan.reasons if reason.startswith("optimizer state")]
        assert text in sentence
        assert sentence.endswith(": pinned")
        assert plan.reasons[0].startswith(candidate_of(plan).label)
        assert ("ZeRO-1" in plan.reasons[0]) == bool(zero)


def test_other_software_shares_out_only_where_it_is_pinned() -> None:
    megatron = cluster(software=SoftwareSpec(dropout=True))
    free, pinned = (problem(megatron, ranks=2, zero=zero) for zero in (None, 1))
    assert (zero_degrees(free, 2), zero_degrees(pinned, 2), zero_degrees(pinned, 1)) == ((0,), (1,), (0,))
    assert {outline.zero for outline in outlines(free)} == {0}


CHOICES = st.fixed_dictionaries(
    {
        "model": st.sampled_from([LLAMA, GPT2]),
        "sequence_length": st.sampled_from([4, 16, 40]),
        "ranks": st.sampled_from([2, 4]),
        "global_batch": st.sampled_from([2, 4, 12]),
        "memory": st.sampled_from([2**30, 6_000_000, 3_000_000, 1_500_000]),
        "dp": st.sampled_from([None, 2]),
    }
)


HIDDEN_SUMS: dict[str, Any] = {
    "model": LLAMA,
    "sequence_length": 40,
    "ranks": 4,
    "global_batch": 12,
    "memory": 2**30,
    "dp": 2,
}
"""Under ``zbv`` all replicas' sums but those of one stage per rank run next to compute."""


def everything(problem_: Problem) -> Iterator[Evaluation]:
    """All that fits."""
    judge = Simulated(problem_)
    for outline in outlines_of(problem_, all_meshes(problem_)):
        for candidate in judge.proposer.candidates(outline):
            if isinstance(candidate, Candidate):
                evaluation = judge.evaluate(candidate, in_full=True)
                if max(evaluation.peak_bytes) <= problem_.memory_limit_bytes:
                    yield evaluation


@settings(max_examples=8)
@given(CHOICES, st.sampled_from([Precision.FP32, Precision.BF16]), st.sampled_from([1.0, 30.0]))
@example(HIDDEN_SUMS, Precision.BF16, 30.0)
def test_the_choice_is_as_good_as_trying_every_plan_both_ways(
    chosen: dict[str, Any], precision: Precision, slower: float
) -> None:
    link = dataclasses.replace(BETWEEN, bytes_per_second=BETWEEN.bytes_per_second / slower)
    described = cluster(num_nodes=4, devices_per_node=1, inter_node=link)
    free, *both = (
        dataclasses.replace(problem(described, **chosen, zero=zero), precision=precision) for zero in (None, 0, 1)
    )
    steps = [evaluation.step_ns for pinned in both for evaluation in everything(pinned)]
    if not steps:
        with pytest.raises(NothingFitsError):
            search(free, Simulated(free), WITHOUT_MOVES)
        return
    assert search(free, Simulated(free), WITHOUT_MOVES).best.step_ns <= 1.01 * min(steps)


def test_a_gather_that_nothing_hides_may_cost_more_than_it_saves() -> None:
    """The last rank has most parameters, and is done while the first still works, so that its sum costs nothing."""
    slow = dataclasses.replace(BETWEEN, bytes_per_second=BETWEEN.bytes_per_second / 100)
    described = cluster(num_nodes=4, devices_per_node=1, inter_node=slow)
    heavy = dataclasses.replace(LLAMA, layers=6, hidden=64)
    shape: dict[str, Any] = {"model": heavy, "ranks": 4, "dp": 2, "pp": 2, "global_batch": 2, "stages": (1, 5)}
    shape |= {"sequence_length": 40, "schedule": "1f1b"}
    plans = [decide(problem(described, **shape, zero=zero)).plan for zero in (None, 0, 1)]
    free, whole, sharded = ((plan.prediction.step_seconds if plan.prediction else 0.0) for plan in plans)
    assert whole < sharded
    assert plans[0].zero == 0
    assert free == whole
    (sentence,) = [reason for reason in plans[0].reasons if reason.startswith("optimizer state")]
    assert re.fullmatch(r"optimizer state whole on each of 2 replicas: sharded, the step is [\d.]+ % slower", sentence)


def test_what_fits_only_sharded_is_planned_so() -> None:
    """What replicas exchange takes 4 MiB at most, little next to a state that is large enough."""
    large = dataclasses.replace(LLAMA, hidden=512, vocab=1024)
    shape: dict[str, Any] = {"model": large, "ranks": 4, "dp": 4, "global_batch": 4}
    roomy = decide(llama_problem(**shape, zero=1)).plan
    assert roomy.prediction is not None
    limit = max(roomy.prediction.peak_bytes)
    free = decide(llama_problem(**shape, memory=limit)).plan
    assert free.zero == 1
    (sentence,) = [reason for reason in free.reasons if reason.startswith("optimizer state")]
    assert "less on a rank: without, the step is" in sentence
    assert "and a rank needs" in sentence
    with pytest.raises(UserError, match="nothing fits") as caught:
        decide(llama_problem(**shape, memory=limit, zero=0))
    assert "leave out parallelism.zero" in (caught.value.remedy or "")


@pytest.mark.parametrize("zero", [None, 0, 1])
def test_a_step_is_never_longer_with_more_memory(zero: int | None) -> None:
    before = float("inf")
    for limit in (1_200_000, 1_600_000, 2_400_000, 4_000_000, 2**30):
        try:
            plan = decide(llama_problem(memory=limit, zero=zero)).plan
        except UserError:
            assert before == float("inf")
            continue
        assert plan.prediction is not None
        assert plan.prediction.step_seconds <= 1.005 * before
        before = plan.prediction.step_seconds


def test_bytes_fall_by_the_shards_on_every_rank() -> None:
    about = llama_problem()
    whole, sharded = (resident_bytes(about, on_two_replicas(zero), owners_of(on_two_replicas(zero))) for zero in (0, 1))
    counts = stage_memory(about, on_two_replicas(0)).num_parameters
    gaps = 2 * BLOCK * (2 * 8 + 8)
    exchanged = 2 * 4 * stage_memory(about, on_two_replicas(1)).stepped_elements
    assert (np.abs(whole - sharded - 8 * counts / 2 + exchanged) <= gaps).all()


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("is_cuda", [False, True])
def test_sums_in_bf16_take_few_bytes_and_less_time_on_the_link(zero: int, *, is_cuda: bool) -> None:
    """Of memory so fast that conversions take no time. The bytes are those of rounds in bf16 and of conversions."""
    described = llama_problem().cost_of(1)
    assert isinstance(described, DescribedCost)
    fast = dataclasses.replace(described.cluster.device, memory_bandwidth=1e15)
    described = dataclasses.replace(described, cluster=dataclasses.replace(described.cluster, device=fast))
    in_bf16 = dataclasses.replace(described, reduction_type=ReductionType.BF16)
    places = 8 if is_cuda else None
    wide = dataclasses.replace(llama_problem(), num_places=places, costs=lambda tp, head_parts: described)
    narrow = dataclasses.replace(wide, gradient_reduction_type=ReductionType.BF16, costs=lambda tp, head_parts: in_bf16)
    candidate = on_two_replicas(zero)
    before, after = (resident_bytes(one, candidate, (0, 1)) for one in (wide, narrow))
    memory = stage_memory(wide, candidate)
    parts = memory.largest_shards if zero else -(-memory.largest_shards // 2)
    exchanged = [exchange_bytes(4 * part, 2) if zero and not is_cuda else 0 for part in parts.tolist()]
    added = [narrowing_bytes(part, 2, is_cuda=is_cuda) for part in parts.tolist()]
    assert (after - before).tolist() == [more - less for more, less in zip(added, exchanged, strict=True)]
    sums = [Simulated(one).costs(candidate, (0, 1)).reduce_ns[Group.DP] for one in (wide, narrow)]
    assert all(0.5 * one < other < one for one, other in zip(*sums, strict=True))


def test_narrowing_takes_bounded_bytes() -> None:
    assert narrowing_bytes(10**9, 64, is_cuda=False) == 2 * ROUND_BYTES + 6 * 2**14
    assert narrowing_bytes(1000, 4, is_cuda=False) == 2 * 3 * 2000 + 6 * 2**14
    assert narrowing_bytes(10**9, 64, is_cuda=True) == 8 * 2**20


def test_what_replicas_on_the_host_exchange_is_bounded_and_on_devices_nothing() -> None:
    shard = largest_shard(10**9, 2) * 4
    assert exchange_bytes(shard, 2) == exchange_bytes(shard, 64) == 2 * ROUND_BYTES == 4 * 2**20
    assert exchange_bytes(1000, 4) == 6000
    host = dataclasses.replace(llama_problem(), num_places=None)
    device = dataclasses.replace(host, num_places=8)
    candidate = on_two_replicas(1)
    more = resident_bytes(host, candidate, (0, 1)) - resident_bytes(device, candidate, (0, 1))
    assert more.tolist() == [2 * each // 2 for each in stage_memory(host, candidate).gradient_bytes.tolist()]


def test_estimates_keep_what_is_shorter_or_holds_less() -> None:
    """Sums and gathers are one ring, so shards are not estimated to be slower. On the host sums are in buckets next to
    backward, and gathers of weights in bf16 take less than the update that shards save. Small stages have more gaps
    than state, and are tried both ways.
    """
    host = dataclasses.replace(llama_problem(model=LARGE, memory=2**40), precision=Precision.BF16)
    devices = dataclasses.replace(host, num_places=8)
    assert {outline.zero for outline in outlines(devices) if outline.mesh.dp > 1} == {1}
    assert {outline.zero for outline in outlines(host) if outline.mesh.dp > 1} == {1}
    assert {outline.zero for outline in outlines(host) if outline.mesh.dp == 1} == {0}
    tiny = llama_problem(model=dataclasses.replace(LLAMA, hidden=16, vocab=16))
    assert {outline.zero for outline in outlines(tiny) if outline.mesh.dp > 1} == {0, 1}
