"""The parts of network cards that messages take, by links that are known, and what reductions carry."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from penstock.core.cluster import SoftwareSpec
from penstock.core.schedule import Group
from penstock.planner.candidate import Candidate
from penstock.planner.evaluate import Simulated
from penstock.planner.problem import Mesh
from penstock.planner.simulate.costs import MILLION, TO_NEXT, TO_PREVIOUS
from penstock.planner.tables import card_table, resident_bytes, stage_memory, transfer_table
from tests.support.planning import BETWEEN, INSIDE, TINY_LLAMA, cluster, problem, slow_link

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


TWO_STAGES = ((0, 6), (6, 10))
"""Two stages of four llama blocks: embedding, three attentions, two MLPs; then an attention, two MLPs, head."""


def shards_ns(kv_heads: int, tp: int = 4, **pinned: Any) -> tuple[int, ...]:
    """The sums over shards at the end of a step, on nodes of four devices."""
    model = dataclasses.replace(TINY_LLAMA, kv_heads=kv_heads)
    judge = Simulated(problem(cluster(num_nodes=2, devices_per_node=4), model=model, ranks=8, **pinned))
    mesh = Mesh(dp=1, tp=tp, pp=2, microbatch=2, num_microbatches=1)
    candidate = Candidate(mesh=mesh, stages=TWO_STAGES, slices=(16,), schedule="1f1b")
    return judge.costs(candidate, (0, 1)).reduce_ns.get(Group.TP, ())


def ring_ns(size: int, num_bytes: int) -> float:
    return 2 * (size - 1) * (1e-6 + num_bytes / size / 1e9) * 1e9


def test_gradients_of_copied_key_value_heads_are_summed_by_those_that_hold_them() -> None:
    """Over the two devices that hold the same of two heads of width 8, for each of the stage's attentions."""
    num_bytes = 2 * 8 * TINY_LLAMA.hidden * 4
    assert shards_ns(4, sequence_parallel=False) == (0, 0)
    assert shards_ns(2, sequence_parallel=False) == pytest.approx(
        [ring_ns(2, count * num_bytes) for count in (3, 1)], abs=1
    )


def test_gradients_of_norms_are_summed_over_shards_with_sequence_parallelism() -> None:
    norms = [ring_ns(4, count * TINY_LLAMA.hidden * 4) for count in (5, 4)]
    copies = [ring_ns(2, count * 2 * 8 * TINY_LLAMA.hidden * 4) for count in (3, 1)]
    assert shards_ns(4) == pytest.approx(norms, abs=1)
    assert shards_ns(2) == pytest.approx(np.add(norms, copies), abs=1)


def packed_bytes(stage_ranks: tuple[int, ...], kv_heads: int, **pinned: Any) -> list[int]:
    """Bytes of ranks in addition to the process, the parameters and the optimizer state."""
    model = dataclasses.replace(TINY_LLAMA, kv_heads=kv_heads)
    found = problem(cluster(num_nodes=2, devices_per_node=4), model=model, ranks=8, **pinned)
    mesh = Mesh(dp=1, tp=4, pp=max(stage_ranks) + 1, microbatch=2, num_microbatches=1)
    candidate = Candidate(mesh=mesh, stages=TWO_STAGES, slices=(16,), schedule="1f1b")
    state = np.zeros(mesh.pp, dtype=np.int64)
    np.add.at(state, list(stage_ranks), stage_memory(found, candidate).state_bytes)
    constant = found.cost_of(4).constant_bytes
    return [int(each) for each in resident_bytes(found, candidate, stage_ranks) - state - constant]


def test_the_buffer_in_which_shards_sum_gradients_is_held_once_by_each_rank() -> None:
    """The buffer has the size of the norms or of the copied key/value heads of a stage; stages share it in turn."""
    norms = [count * TINY_LLAMA.hidden * 4 for count in (5, 4)]
    copies = [count * 2 * 8 * TINY_LLAMA.hidden * 4 for count in (3, 1)]
    assert packed_bytes((0, 1), kv_heads=4) == norms
    assert packed_bytes((0, 1), kv_heads=2) == copies == [max(pair) for pair in zip(norms, copies, strict=True)]
    assert packed_bytes((0, 0), kv_heads=2) == [copies[0]]
    assert packed_bytes((0, 1), kv_heads=4, sequence_parallel=False) == [0, 0]


def test_one_device_per_rank_sums_over_no_shards() -> None:
    assert shards_ns(4, tp=1) == ()


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize(
    ("per_node", "cards", "at_once"), [(4, None, 1), (2, None, 2), (2, 2, 1), (2, 1, 2), (1, None, 1)]
)
def test_shards_send_their_rows_and_share_the_cards_of_their_node(
    per_node: int, cards: int | None, at_once: int, sequence_parallel: bool
) -> None:
    """Two stages of two shards; 15 tokens are 8 rows each. Inside a node every device has a card of its own."""
    shape: dict[str, Any] = {"num_nodes": 8 // per_node, "devices_per_node": per_node, "nics_per_node": cards}
    found = problem(cluster(**shape), ranks=4, sequence_length=15, sequence_parallel=sequence_parallel)
    mesh = Mesh(dp=1, tp=2, pp=2, microbatch=1, num_microbatches=1)
    candidate = Candidate(mesh=mesh, stages=TWO_STAGES, slices=(15,), schedule="1f1b")
    table = transfer_table(found, candidate, (0, 1), (0, 2))
    link = INSIDE if per_node == 4 else BETWEEN
    num_bytes = (8 if sequence_parallel else 15) * TINY_LLAMA.hidden * 4
    expected = 1e9 * (link.latency_seconds + at_once * num_bytes / link.bytes_per_second)
    assert table[TO_NEXT, 0, 0] == table[TO_PREVIOUS, 1, 0] == pytest.approx(expected, abs=1)


def test_other_stacks_send_a_hidden_state_once_from_all_shards_together() -> None:
    megatron = cluster(devices_per_node=2, software=SoftwareSpec(dropout=True))
    found = problem(megatron, ranks=4, sequence_parallel=False)
    mesh = Mesh(dp=1, tp=2, pp=2, microbatch=1, num_microbatches=1)
    candidate = Candidate(mesh=mesh, stages=TWO_STAGES, slices=(16,), schedule="1f1b")
    table = transfer_table(found, candidate, (0, 1), (0, 2))
    expected = 1e9 * (BETWEEN.latency_seconds + 16 * TINY_LLAMA.hidden * 4 / BETWEEN.bytes_per_second)
    assert table[TO_NEXT, 0, 0] == pytest.approx(expected, abs=1)
