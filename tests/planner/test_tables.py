"""The parts of network cards that messages take, by links that are known, and what reductions carry."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from penstock.core.schedule import Group
from penstock.planner.candidate import Candidate
from penstock.planner.evaluate import Simulated
from penstock.planner.problem import Mesh
from penstock.planner.simulate.costs import MILLION, TO_NEXT, TO_PREVIOUS
from penstock.planner.tables import card_table
from tests.support.planning import TINY_LLAMA, cluster, problem, slow_link

ALONG = (0, 1, 2)
PIPELINE = Mesh(dp=1, tp=1, pp=3, microbatch=1, num_microbatches=1)


def test_alike_links_take_all_of_their_cards() -> None:
    described = problem(cluster(num_nodes=3, devices_per_node=1), ranks=3)
    assert (card_table(described, PIPELINE, ALONG, ALONG) == MILLION).all()


def test_a_slow_link_leaves_the_rest_of_a_faster_card() -> None:
    """Only nodes 0 and 1 are far apart; node 2 has the same cards and is near to both."""
    described = problem(cluster(num_nodes=3, devices_per_node=1, links=(slow_link(0, 1, 10),)), ranks=3)
    sender, receiver = card_table(described, PIPELINE, ALONG, ALONG)
    for table in (sender, receiver):
        assert table[TO_NEXT].tolist() == [MILLION // 10, MILLION, MILLION]
        assert table[TO_PREVIOUS].tolist() == [MILLION, MILLION // 10, MILLION]


def test_all_of_a_slow_card_and_little_of_those_it_talks_to() -> None:
    """Node 2 is slow to everybody, and in the middle of this pipeline: devices 0, 2 and 1."""
    links = (slow_link(0, 2, 10), slow_link(1, 2, 10))
    described = problem(cluster(num_nodes=3, devices_per_node=1, links=links), ranks=3)
    sender, receiver = card_table(described, PIPELINE, ALONG, (0, 2, 1))
    assert sender[TO_NEXT].tolist() == [MILLION // 10, MILLION, MILLION]
    assert receiver[TO_NEXT].tolist() == [MILLION, MILLION // 10, MILLION]
    assert sender[TO_PREVIOUS].tolist() == [MILLION, MILLION, MILLION // 10]
    assert receiver[TO_PREVIOUS].tolist() == [MILLION, MILLION // 10, MILLION]


def test_links_inside_a_host_are_none_of_its_network_card_s() -> None:
    """Four devices on two nodes: inside they are near, between them far, and each is all of its own card."""
    described = problem(cluster(num_nodes=2, devices_per_node=2), ranks=4)
    pipeline = Mesh(dp=1, tp=1, pp=4, microbatch=1, num_microbatches=1)
    for devices in itertools.permutations(range(4)):
        assert (card_table(described, pipeline, (0, 1, 2, 3), devices) == MILLION).all()


def test_a_rank_of_two_stages_has_one_card() -> None:
    described = problem(cluster(num_nodes=2, devices_per_node=1), ranks=2)
    pipeline = Mesh(dp=1, tp=1, pp=2, microbatch=1, num_microbatches=1)
    assert np.array_equal(card_table(described, pipeline, (0, 1, 1, 0), (0, 1)), np.full((2, 2, 4), MILLION))


def test_gradients_of_copied_key_value_heads_are_summed_before_the_norm() -> None:
    """Over the two devices that hold the same of two heads of width 8, for each of the rank's attentions."""
    slices, stages = (16,), ((0, 6), (6, 10))
    mesh = Mesh(dp=1, tp=4, pp=2, microbatch=2, num_microbatches=1)

    def norm_ns(kv_heads: int) -> tuple[int, ...]:
        model = dataclasses.replace(TINY_LLAMA, kv_heads=kv_heads)
        judge = Simulated(problem(cluster(num_nodes=2, devices_per_node=4), model=model, ranks=8))
        return judge.costs(Candidate(mesh=mesh, stages=stages, slices=slices, schedule="1f1b"), (0, 1)).reduce_ns[
            Group.NORM
        ]

    copies = [own - usual for own, usual in zip(norm_ns(2), norm_ns(4), strict=True)]
    num_bytes = 2 * 8 * TINY_LLAMA.hidden * 4
    expected = [2 * (1e-6 + count * num_bytes / 2 / 1e9) * 1e9 for count in (3, 1)]
    assert copies == pytest.approx(expected, abs=1)
