"""The in-process transport: first-in first-out, rendezvous, sums, and its refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from penstock.core.errors import RunError
from penstock.core.mesh import Mesh
from penstock.core.model import Family
from penstock.core.program import Channel, Program
from penstock.core.schedule import Group
from penstock.planner.compile import program_of
from penstock.trainer.local_transport import Fabric, LocalTransport
from tests.support.small_plans import small_plan

CHANNEL = Channel(0, 1, "F")


def make_fabric(*, dp: int = 1, pp: int = 2, timeout_seconds: float = 10.0) -> Fabric:
    program: Program = program_of(small_plan(family=Family.GPT2, dp=dp, pp=pp))
    return Fabric(program, Mesh(dp=dp, pp=pp), timeout_seconds)


def test_messages_arrive_in_the_order_sent() -> None:
    fabric = make_fabric()
    sender, receiver = fabric.transport(0), fabric.transport(1)
    received = [torch.zeros(2) for _ in range(3)]
    sends = [sender.send(CHANNEL, torch.full((2,), float(number))) for number in range(3)]
    receives = [receiver.post_recv(CHANNEL, tensor) for tensor in received]
    for work in (*receives, *sends):
        work.wait()
    assert [tensor.tolist() for tensor in received] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_nothing_is_buffered() -> None:
    fabric = make_fabric(timeout_seconds=0.05)
    work = fabric.transport(0).send(CHANNEL, torch.zeros(1))
    with pytest.raises(RunError, match=r"0->1F carried nothing for 0\.05 s"):
        work.wait()
    fabric.transport(1).post_recv(CHANNEL, torch.zeros(1)).wait()
    work.wait()


def test_a_posted_receive_lets_the_sender_continue() -> None:
    fabric = make_fabric(timeout_seconds=0.05)
    fabric.transport(1).post_recv(CHANNEL, torch.zeros(1))
    fabric.transport(0).send(CHANNEL, torch.ones(1)).wait()


def test_another_size_is_refused_on_both_sides() -> None:
    fabric = make_fabric()
    send = fabric.transport(0).send(CHANNEL, torch.zeros(3))
    receive = fabric.transport(1).post_recv(CHANNEL, torch.zeros(2))
    for work in (send, receive):
        with pytest.raises(RunError, match=r"0->1F brings \[3\] where \[2\] is expected"):
            work.wait()


def test_replicas_have_separate_channels() -> None:
    fabric = make_fabric(dp=2)
    here, there = torch.zeros(1), torch.zeros(1)
    works = [fabric.transport(1).post_recv(CHANNEL, here), fabric.transport(3).post_recv(CHANNEL, there)]
    works += [fabric.transport(2).send(CHANNEL, torch.ones(1)), fabric.transport(0).send(CHANNEL, -torch.ones(1))]
    for work in works:
        work.wait()
    assert (here.item(), there.item()) == (-1.0, 1.0)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Group.DP, [10.0, 101.0, 10.0, 101.0]),
        (Group.NORM, [111.0, 111.0, 111.0, 111.0]),
    ],
)
def test_sums_over_groups(group: Group, expected: list[float]) -> None:
    """With dp 2 and pp 2 the replicas are ranks 0, 1 and 2, 3."""
    fabric = make_fabric(dp=2)
    values = [torch.tensor([value], dtype=torch.float64) for value in (1e-9, 1.0, 10.0, 100.0)]
    on_every_rank(fabric, lambda transport, rank: transport.all_reduce(group, values[rank]).wait())
    assert [value.item() for value in values] == pytest.approx(expected)


def test_rows_of_a_tied_matrix_are_summed_over_two_ranks_of_a_replica() -> None:
    fabric = make_fabric(dp=2)
    values = [torch.tensor([value], dtype=torch.float64) for value in (1e-9, 1.0, 10.0, 100.0)]
    on_every_rank(fabric, lambda transport, rank: transport.sum_tied(1 - rank % 2, values[rank]).wait())
    assert [value.item() for value in values] == [1.0 + 1e-9, 1.0 + 1e-9, 110.0, 110.0]


def test_a_sum_is_the_same_on_every_rank_and_every_time() -> None:
    fabric = make_fabric(pp=4)
    found = set()
    for _ in range(10):
        values = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 3.0)]
        on_every_rank(fabric, lambda transport, rank, v=values: transport.all_reduce(Group.NORM, v[rank]).wait())  # type: ignore[misc]
        found |= {value.item() for value in values}
    assert len(found) == 1


def test_a_sum_that_not_all_join_ends() -> None:
    fabric = make_fabric(timeout_seconds=0.05)
    with pytest.raises(RunError, match=r"not all of ranks \[0, 1\] came to a collective"):
        fabric.transport(0).all_reduce(Group.NORM, torch.zeros(1)).wait()


def on_every_rank(fabric: Fabric, act: Callable[[LocalTransport, int], None]) -> None:
    threads = [
        threading.Thread(target=act, args=(fabric.transport(rank), rank)) for rank in range(fabric.mesh.num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
