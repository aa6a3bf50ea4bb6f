"""Costs of described hardware against sums by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.cluster import GradientType, LinkSpec, SoftwareSpec
from penstock.core.layout import HEAD_CHUNK_TOKENS, Precision
from penstock.core.model import ModelSpec, UnitKind
from penstock.core.replicas import ReductionType
from penstock.core.schedule import Kind
from penstock.core.sharding import Collective, Sharding, unit_collectives
from penstock.planner.cost import DescribedCost
from penstock.planner.work import Work
from tests.support.planning import BETWEEN, DEVICE, INSIDE, TINY_GPT2, TINY_LLAMA, cluster, slow_link

PASSES = (Kind.F, Kind.I, Kind.W)


def described(
    tp: int = 1, *, sequence_parallel: bool = True, model: ModelSpec = TINY_LLAMA, **changes: object
) -> DescribedCost:
    sharding = Sharding(tp, sequence_parallel)
    return DescribedCost(model=model, cluster=cluster(**changes), precision=Precision.FP32, sharding=sharding)  # type: ignore[arg-type]


def traffic(tokens: int, width: int) -> float:
    return tokens * width * TINY_LLAMA.hidden * 4 / DEVICE.memory_bandwidth


def test_an_mlp_is_its_three_matrices_at_the_efficiency_of_its_tokens() -> None:
    flops = 2 * 3 * TINY_LLAMA.hidden * TINY_LLAMA.ffn_hidden * 16
    expected = flops / (0.5 * DEVICE.peak_flops) + traffic(16, 6)
    for kind in PASSES:
        assert described().unit_seconds(UnitKind.MLP, kind, Work.of(1, 16, 0)) == pytest.approx(expected)
        assert described().unit_seconds(UnitKind.MLP, kind, Work.of(2, 8, 5)) == pytest.approx(expected)


def test_efficiency_is_interpolated_in_the_logarithm_of_tokens() -> None:
    flops = 2 * 3 * TINY_LLAMA.hidden * TINY_LLAMA.ffn_hidden
    for tokens, share in ((1, 0.1), (2, 0.2), (4, 0.3), (16, 0.5), (4096, 0.5)):
        expected = tokens * flops / (share * DEVICE.peak_flops) + traffic(tokens, 6)
        assert described().unit_seconds(UnitKind.MLP, Kind.W, Work.of(1, tokens, 0)) == pytest.approx(expected)


def test_attention_attends_to_the_prefix_and_to_itself() -> None:
    hidden, n, c = TINY_LLAMA.hidden, 3, 5
    pairs = sum(c + i + 1 for i in range(n))
    matrices = 2 * 4 * hidden * hidden * n
    share = 0.1 + 0.1 * math.log2(n)
    base = matrices / (share * DEVICE.peak_flops) + traffic(n, 6)
    scores = 4 * hidden * pairs / (0.5 * DEVICE.peak_flops)
    cost = described()
    assert cost.unit_seconds(UnitKind.ATTENTION, Kind.F, Work.of(1, n, c)) == pytest.approx(base + scores)
    assert cost.unit_seconds(UnitKind.ATTENTION, Kind.I, Work.of(1, n, c)) == pytest.approx(base + 2.5 * scores)
    assert cost.unit_seconds(UnitKind.ATTENTION, Kind.W, Work.of(1, n, c)) == pytest.approx(base)


def test_the_ends_do_their_work_once() -> None:
    cost, logits = described(), 2 * TINY_LLAMA.hidden * TINY_LLAMA.vocab * 16 / (0.5 * DEVICE.peak_flops)
    assert cost.unit_seconds(UnitKind.HEAD, Kind.F, Work.of(1, 16, 0)) == pytest.approx(3 * logits + traffic(16, 6))
    for unit, kind in ((UnitKind.HEAD, Kind.I), (UnitKind.HEAD, Kind.W), (UnitKind.EMBEDDING, Kind.I)):
        assert cost.unit_seconds(unit, kind, Work.of(1, [16, 8], [0, 16])).tolist() == [0.0, 0.0]


def test_tensor_parallelism_divides_the_work_and_adds_a_ring() -> None:
    one, two = described(), described(tp=2, sequence_parallel=False)
    work = one.unit_seconds(UnitKind.MLP, Kind.F, Work.of(1, 16, 0)) - traffic(16, 6)
    ring = 2 * INSIDE.latency_seconds + 2 * (1 / 2) * 16 * TINY_LLAMA.hidden * 4 / INSIDE.bytes_per_second
    assert two.unit_seconds(UnitKind.MLP, Kind.F, Work.of(1, 16, 0)) == pytest.approx(work / 2 + traffic(16, 6) + ring)
    assert two.unit_seconds(UnitKind.MLP, Kind.W, Work.of(1, 16, 0)) == pytest.approx(work / 2 + traffic(16, 6))


def test_sequence_parallelism_divides_hidden_states_and_gathers_for_weights_as_well() -> None:
    """Of 15 tokens each of two devices has 8, one of them padded."""
    one, two = described(), described(tp=2)
    work, tokens = one.unit_seconds(UnitKind.MLP, Kind.F, Work.of(1, 15, 0)) - traffic(15, 6), Work.of(1, 15, 0)
    half_ring = INSIDE.latency_seconds + (1 / 2) * 16 * TINY_LLAMA.hidden * 4 / INSIDE.bytes_per_second
    for kind, count in ((Kind.F, 2), (Kind.I, 2), (Kind.W, 1)):
        expected = work / 2 + traffic(8, 6) + count * half_ring
        assert two.unit_seconds(UnitKind.MLP, kind, tokens) == pytest.approx(expected)


GROUPED = dataclasses.replace(TINY_LLAMA, kv_heads=2)


def test_devices_that_share_a_key_value_head_each_project_it() -> None:
    """Of four heads of width 8 and two key/value heads a device has one of each."""
    width, h = 8, GROUPED.hidden
    flops = 2 * 16 * h * (3 * width) + 2 * 16 * width * h
    four = described(tp=4, sequence_parallel=False, model=GROUPED, devices_per_node=4)
    found = four.unit_seconds(UnitKind.ATTENTION, Kind.W, Work.of(1, 16, 0))
    assert found == pytest.approx(flops / (0.5 * DEVICE.peak_flops) + traffic(16, 6))


def sum_seconds(tokens: int = 16, *, sequence_parallel: bool = False, **changes: object) -> float:
    """What the sum over four devices adds to an MLP's F, or the scatter and the gather in its place."""
    four = described(tp=4, sequence_parallel=sequence_parallel, **changes)  # type: ignore[arg-type]  # a test's own fields
    one = described(**changes)  # type: ignore[arg-type]
    work = Work.of(1, tokens, 0)
    alone = one.unit_seconds(UnitKind.MLP, Kind.F, work) - traffic(tokens, 6)
    rest = traffic(four.sharding.rows(tokens), 6)
    return float(four.unit_seconds(UnitKind.MLP, Kind.F, work) - alone / 4 - rest)


@pytest.mark.parametrize("changes", [{}, {"devices_per_node": 4}, {"nics_per_node": 1}, {"nics_per_node": 2}])
@given(st.integers(1, 64).map(lambda rows: 4 * rows))
def test_a_scatter_and_a_gather_take_as_long_as_the_sum_that_they_replace(changes: dict[str, Any], tokens: int) -> None:
    together = sum_seconds(tokens, sequence_parallel=True, **changes)
    assert together == pytest.approx(sum_seconds(tokens, **changes), rel=1e-6)


RING_PASSES = {Collective.GATHER: 1, Collective.SCATTER: 1, Collective.SUM: 2}


@given(
    st.sampled_from([TINY_GPT2, TINY_LLAMA]),
    st.sampled_from([2, 4]),
    st.booleans(),
    st.sampled_from(UnitKind),
    st.sampled_from(PASSES),
    st.integers(1, 2000),
)
def test_the_time_of_a_pass_is_the_compute_of_a_shard_and_its_collectives(
    model: ModelSpec, tp: int, sequence_parallel: bool, unit: UnitKind, kind: Kind, tokens: int
) -> None:
    """Against the same device with a network that takes no time; the head's F adds a small gather for each chunk."""
    nothing = LinkSpec(latency_seconds=0.0, bytes_per_second=1e30)
    shape = {"tp": tp, "sequence_parallel": sequence_parallel, "model": model, "devices_per_node": 4}
    with_ring, without = described(**shape), described(**shape, intra_node=nothing)  # type: ignore[arg-type]
    work = Work.of(1, tokens, 0)
    taken = float(with_ring.unit_seconds(unit, kind, work) - without.unit_seconds(unit, kind, work))
    sharding = Sharding(tp, sequence_parallel)
    passes = sum(RING_PASSES[each] for each in unit_collectives(unit, kind, sharding))
    num_bytes = sharding.padded_rows(tokens) * model.hidden * 4
    expected = passes * (tp - 1) * (INSIDE.latency_seconds + num_bytes / tp / INSIDE.bytes_per_second)
    if unit is UnitKind.HEAD and kind is Kind.F:
        chunks = -(-tokens // HEAD_CHUNK_TOKENS)
        expected += (tp - 1) * (chunks * INSIDE.latency_seconds + 3 * tokens * 4 / INSIDE.bytes_per_second)
    assert taken == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(
    st.sampled_from([2, 4]), st.booleans(), st.sampled_from([UnitKind.ATTENTION, UnitKind.MLP]), st.integers(1, 2000)
)
def test_what_runs_next_to_products_is_waited_for_where_it_takes_longer(
    tp: int, sequence_parallel: bool, unit: UnitKind, tokens: int
) -> None:
    """Of a backward all but the gather of the output's gradient."""
    nothing = LinkSpec(latency_seconds=0.0, bytes_per_second=1e30)
    shape = {"tp": tp, "sequence_parallel": sequence_parallel, "devices_per_node": 4}
    overlapped = SoftwareSpec(overlapped_collectives=True)
    found, waiting, computing = (
        {kind: float(described(**each).unit_seconds(unit, kind, Work.of(1, tokens, 0))) for kind in PASSES}
        for each in (shape | {"software": overlapped}, shape, shape | {"intra_node": nothing})
    )
    half = (waiting[Kind.F] - computing[Kind.F]) / 2
    expected = {Kind.F: waiting[Kind.F], Kind.I: computing[Kind.I], Kind.W: max(computing[Kind.W], 2 * half)}
    if sequence_parallel:
        expected |= {Kind.I: half + max(computing[Kind.I], half), Kind.W: max(computing[Kind.W], half)}
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_head_in_three_passes_has_the_collectives_of_one() -> None:
    """W gathers its input once more, as Megatron-LM's does."""
    tokens, latency = 16, INSIDE.latency_seconds
    ring = latency + tokens * TINY_LLAMA.hidden * 4 / 2 / INSIDE.bytes_per_second
    statistics = latency + 3 * tokens * 4 / INSIDE.bytes_per_second
    nothing = LinkSpec(latency_seconds=0.0, bytes_per_second=1e30)
    split = SoftwareSpec(head_in_forward=False)
    for sequence_parallel, rings in ((True, (1, 1, 1)), (False, (0, 2, 0))):
        shape = {"tp": 2, "sequence_parallel": sequence_parallel, "software": split}
        with_ring, without = described(**shape), described(**shape, intra_node=nothing)  # type: ignore[arg-type]
        for kind, count in zip(PASSES, rings, strict=True):
            work = Work.of(1, tokens, 0)
            taken = with_ring.unit_seconds(UnitKind.HEAD, kind, work) - without.unit_seconds(UnitKind.HEAD, kind, work)
            assert float(taken) == pytest.approx(count * ring + (kind is Kind.F) * statistics, rel=1e-6)


@given(
    st.sampled_from([2, 4]),
    st.booleans(),
    st.sampled_from(UnitKind),
    st.sampled_from(PASSES),
    st.integers(1, 2000),
    st.floats(1.0, 8.0),
)
def test_a_faster_network_never_takes_longer(
    tp: int, sequence_parallel: bool, unit: UnitKind, kind: Kind, tokens: int, factor: float
) -> None:
    faster = dataclasses.replace(INSIDE, bytes_per_second=factor * INSIDE.bytes_per_second)
    shape = {"tp": tp, "sequence_parallel": sequence_parallel, "devices_per_node": 4}
    usual, quick = described(**shape), described(**shape, intra_node=faster)  # type: ignore[arg-type]
    work = Work.of(1, tokens, 0)
    assert quick.unit_seconds(unit, kind, work) <= usual.unit_seconds(unit, kind, work) + 1e-15


def test_tensor_parallelism_over_nodes_is_as_slow_as_the_link_between_them() -> None:
    num_bytes = 16 * TINY_LLAMA.hidden * 4
    assert sum_seconds(devices_per_node=4) == pytest.approx(6 * (1e-6 + num_bytes / 4 / 1e9))
    assert sum_seconds(devices_per_node=2) == pytest.approx(6 * (1e-5 + num_bytes / 4 / 1e8))
    assert sum_seconds(devices_per_node=1, num_nodes=4) == pytest.approx(6 * (1e-5 + num_bytes / 4 / 1e8))


def test_tensor_parallelism_over_nodes_takes_the_algorithm_of_their_cards() -> None:
    cards = described(tp=4, nics_per_node=2)
    num_bytes = 16 * TINY_LLAMA.hidden * 4
    assert sum_seconds(nics_per_node=2) == pytest.approx(
        float(cards.topology(range(4)).all_reduce_seconds(num_bytes)), rel=1e-6
    )
    assert sum_seconds(nics_per_node=2) < sum_seconds(nics_per_node=1) < sum_seconds()


def test_the_slowest_group_of_whole_nodes_counts() -> None:
    """A rank may be placed on any of them. Links between groups are no matter."""
    usual, num_bytes = sum_seconds(num_nodes=6), 16 * TINY_LLAMA.hidden * 4
    assert sum_seconds(num_nodes=6, links=(slow_link(1, 2, 4), slow_link(0, 5, 4))) == pytest.approx(usual)
    slow = sum_seconds(num_nodes=6, links=(slow_link(4, 5, 4),))
    assert slow == pytest.approx(6 * (1e-5 + num_bytes / 4 / 0.25e8))
    assert sum_seconds(num_nodes=6, links=(slow_link(0, 1, 0.5),)) == pytest.approx(usual)
    fast = sum_seconds(num_nodes=2, links=(slow_link(0, 1, 0.5),))
    assert fast == pytest.approx(6 * (1e-5 + num_bytes / 4 / 2e8))


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    cost = described(links=(slow_link(0, 1, 4),))
    assert cost.all_reduce_seconds(1000, [0]) == 0.0
    assert cost.all_reduce_seconds(1000, [0, 1]) == pytest.approx(2 * (1e-6 + 500 / 1e9))
    assert cost.all_reduce_seconds(1000, [0, 1, 2, 3]) == pytest.approx(6 * (1e-5 + 250 * 4 / 1e8))


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_gradients_in_bf16_travel_as_half_the_bytes_and_are_converted(size: int, *, scattered: bool) -> None:
    """Narrowing reads 4 bytes of an element and writes 2; widening does the reverse with what the replica gets."""
    wide, devices, count = described(), range(size), 24_000
    narrow = dataclasses.replace(wide, reduction_type=ReductionType.BF16)
    of_bytes = wide.reduce_scatter_seconds if scattered else wide.all_reduce_seconds
    assert wide.gradient_sum_seconds(4 * count, devices, scattered=scattered) == of_bytes(4 * count, devices)
    moved = 6 * count + 6 * (count // size if scattered else count)
    expected = of_bytes(2 * count, devices) + moved / wide.cluster.device.memory_bandwidth
    assert narrow.gradient_sum_seconds(4 * count, devices, scattered=scattered) == pytest.approx(expected)
    assert narrow.gradient_sum_seconds(4 * count, [0], scattered=scattered) == 0.0
    assert narrow.all_reduce_seconds(4 * count, devices) == wide.all_reduce_seconds(4 * count, devices)


def test_gradients_that_are_kept_in_bf16_are_not_converted() -> None:
    kept = dataclasses.replace(described().cluster, software=SoftwareSpec(gradient_type=GradientType.BF16))
    wide = dataclasses.replace(described(), cluster=kept, precision=Precision.BF16)
    narrow = dataclasses.replace(wide, reduction_type=ReductionType.BF16)
    assert narrow.gradient_sum_seconds(1000, [0, 1], scattered=False) == wide.all_reduce_seconds(1000, [0, 1])


def test_a_message_takes_the_link_between_its_nodes() -> None:
    cost = described(num_nodes=3, links=(slow_link(2, 0, 4), slow_link(0, 2, 9)))
    expected = {(0, 1): 1e-9, (0, 2): 1e-8, (0, 4): 4e-8, (5, 1): 4e-8, (2, 5): 1e-8, (3, 3): 1e-9}
    for (source, target), per_byte in expected.items():
        latency = INSIDE.latency_seconds if source // 2 == target // 2 else BETWEEN.latency_seconds
        assert cost.transfer(source, target) == pytest.approx((latency, per_byte))
    sources, targets = zip(*expected, strict=True)
    assert cost.transfer(sources, targets)[1] == pytest.approx(list(expected.values()))


def test_the_optimizer_moves_every_state_once() -> None:
    assert described().optimizer_seconds(1000) == pytest.approx(1000 * (16 + 12) / DEVICE.memory_bandwidth)
    narrow = dataclasses.replace(described(), precision=Precision.BF16)
    assert narrow.optimizer_seconds(1000) == pytest.approx(1000 * (16 + 12 + 2) / DEVICE.memory_bandwidth)


def test_only_the_head_needs_transient_memory() -> None:
    cost = described(tp=2, sequence_parallel=False)
    assert cost.transient_bytes(UnitKind.HEAD, Kind.F, 2, 8, 0) == 16 * 64 * 8 // 2
    assert cost.transient_bytes(UnitKind.HEAD, Kind.F, 8, 1024, 0) == HEAD_CHUNK_TOKENS * 64 * 8 // 2
    assert cost.transient_bytes(UnitKind.MLP, Kind.F, 2, 8, 0) == 0
    assert cost.slowdown(UnitKind.MLP, Kind.F) == 1.0


def test_gathered_hidden_states_and_scattered_addends_need_transient_memory() -> None:
    """15 tokens are 16 rows of 32 floats; I finds ``dy`` gathered in its slot."""
    cost, gathered = described(tp=2), 16 * 32 * 4
    for unit in (UnitKind.ATTENTION, UnitKind.MLP):
        assert [cost.transient_bytes(unit, kind, 3, 5, 0) // gathered for kind in PASSES] == [1, 1, 1]
    assert [cost.transient_bytes(UnitKind.EMBEDDING, kind, 3, 5, 0) // gathered for kind in PASSES] == [1, 0, 0]
    assert cost.transient_bytes(UnitKind.HEAD, Kind.F, 3, 5, 0) == 2 * gathered + 15 * 64 * 8 // 2


def test_a_shard_has_the_larger_part_of_a_vocabulary_that_does_not_divide() -> None:
    odd = dataclasses.replace(TINY_LLAMA, vocab=63)
    even, uneven = described(tp=2), described(tp=2, model=odd)
    work = Work.of(1, 16, 0)
    assert uneven.unit_seconds(UnitKind.HEAD, Kind.F, work) == even.unit_seconds(UnitKind.HEAD, Kind.F, work)
    assert uneven.transient_bytes(UnitKind.HEAD, Kind.F, 1, 16, 0) == even.transient_bytes(
        UnitKind.HEAD, Kind.F, 1, 16, 0
    )


@given(
    st.sampled_from(UnitKind),
    st.sampled_from(PASSES),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 64)), min_size=1, max_size=5),
)
def test_arrays_are_points_side_by_side(unit: UnitKind, kind: Kind, batch: int, points: list[tuple[int, int]]) -> None:
    cost = DescribedCost(model=TINY_GPT2, cluster=cluster(), precision=Precision.FP32)
    lengths, prefixes = np.array(points).T
    together = cost.unit_seconds(unit, kind, Work.of(batch, lengths, prefixes))
    each = [float(cost.unit_seconds(unit, kind, Work.of(batch, length, prefix))) for length, prefix in points]
    assert together.tolist() == pytest.approx(each)
    assert min(each) >= 0.0
