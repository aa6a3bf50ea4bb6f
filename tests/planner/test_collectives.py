"""Collectives by topology: closed forms, bounds of any algorithm, and what more hardware must not make slower."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.sharding import Collective
from penstock.planner.collectives import GroupTopology, Link
from tests.planner.test_cost import described
from tests.support.planning import BETWEEN, INSIDE

IN, OUT = Link(latency=1e-6, per_byte=1e-11), Link(latency=1e-5, per_byte=1e-10)
GROUPS = st.lists(st.integers(1, 8), min_size=1, max_size=6).map(tuple)
BYTES = st.integers(1, 10**10)


def topology(*group_sizes: int, between: Link = OUT) -> GroupTopology:
    return GroupTopology(inside=IN, between=between, group_sizes=group_sizes)


def test_one_device_has_no_collectives() -> None:
    assert topology(1).all_reduce_seconds(1e9) == 0.0


def test_inside_a_node_it_is_a_ring() -> None:
    assert topology(4).all_reduce_seconds(1e9) == pytest.approx(2 * 3 * (1e-6 + 0.25e9 * 1e-11))
    assert topology(4).all_gather_seconds(1e9) == pytest.approx(3 * (1e-6 + 0.25e9 * 1e-11))


def test_the_example_of_the_module_head() -> None:
    inside = Link(latency=0.0, per_byte=1 / 235e9)
    many = GroupTopology(inside=inside, between=Link(latency=0.0, per_byte=1 / 22e9), group_sizes=(8, 8))
    one = GroupTopology(inside=inside, between=Link(latency=0.0, per_byte=8 / 22e9), group_sizes=(8, 8))
    assert many.all_reduce_seconds(1e9) == pytest.approx(1.875e9 / (8 * 22e9))
    assert one.all_reduce_seconds(1e9) == pytest.approx(2 * 7 / 8 * 1e9 / 235e9 + 1e9 / 22e9)


@given(GROUPS, BYTES)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(sizes: tuple[int, ...], num_bytes: int) -> None:
    group = topology(*sizes)
    parts = group.reduce_scatter_seconds(num_bytes) + group.all_gather_seconds(num_bytes)
    assert group.all_reduce_seconds(num_bytes) == pytest.approx(float(parts))


@given(GROUPS, BYTES, st.lists(st.sampled_from(Collective), max_size=4))
def test_one_after_the_other_takes_the_sum_of_all(
    sizes: tuple[int, ...], num_bytes: int, collectives: list[Collective]
) -> None:
    group = topology(*sizes)
    alone = {
        Collective.SUM: group.all_reduce_seconds,
        Collective.SCATTER: group.reduce_scatter_seconds,
        Collective.GATHER: group.all_gather_seconds,
    }
    expected = sum(float(alone[each](num_bytes)) for each in collectives)
    assert group.seconds(collectives, num_bytes) == pytest.approx(expected)


@given(GROUPS, BYTES)
def test_no_algorithm_moves_less_than_a_nodes_part(sizes: tuple[int, ...], num_bytes: int) -> None:
    """Every node must send and get 2 (N - 1) / N of the bytes, whatever the algorithm."""
    nodes = len(sizes)
    if nodes > 1:
        least = 2 * (nodes - 1) / nodes * num_bytes * OUT.per_byte / max(sizes)
        assert topology(*sizes).all_reduce_seconds(num_bytes) >= least * (1 - 1e-12)


@given(GROUPS, st.lists(BYTES, min_size=2, max_size=5))
def test_more_bytes_never_take_less(sizes: tuple[int, ...], counts: list[int]) -> None:
    assert (np.diff(topology(*sizes).all_reduce_seconds(np.sort(counts))) >= 0).all()


@given(GROUPS, BYTES, st.floats(1.0, 8.0))
def test_faster_cards_never_take_longer(sizes: tuple[int, ...], num_bytes: int, factor: float) -> None:
    faster = topology(*sizes, between=Link(latency=OUT.latency, per_byte=OUT.per_byte / factor))
    assert faster.all_reduce_seconds(num_bytes) <= topology(*sizes).all_reduce_seconds(num_bytes) * (1 + 1e-12)


def test_without_network_cards_a_description_means_what_it_did() -> None:
    cost = described(num_nodes=2, devices_per_node=2)
    assert cost.all_reduce_seconds(1000, [0, 1, 2, 3]) == pytest.approx(6 * (1e-5 + 250 / 1e8))


def test_devices_share_their_nodes_cards_evenly() -> None:
    two, one = (described(num_nodes=2, devices_per_node=4, nics_per_node=count) for count in (2, 1))
    pair = [0, 4]
    half = 2 / BETWEEN.bytes_per_second
    assert two.all_reduce_seconds(10**6, pair) == pytest.approx(2 * (BETWEEN.latency_seconds + 10**6 / 2 * half))
    assert one.all_reduce_seconds(10**6, pair) == pytest.approx(2 * (BETWEEN.latency_seconds + 10**6 / 2 * 2 * half))


def test_tensor_parallelism_over_nodes_uses_all_cards() -> None:
    cost = described(tp=8, num_nodes=2, devices_per_node=4, nics_per_node=4)
    group = cost.topology(range(8))
    assert group.group_sizes == (4, 4)
    assert group.inside.per_byte == 1 / INSIDE.bytes_per_second
    assert group.between.per_byte == 1 / BETWEEN.bytes_per_second
