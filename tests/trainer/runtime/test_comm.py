"""Process groups over gloo: one per channel, made in one order, and what they carry."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.core.mesh import Mesh
from penstock.core.model import Family
from penstock.core.plan import Plan
from penstock.core.program import Channel, Program
from penstock.core.schedule import Group
from penstock.planner.compile import program_of
from penstock.trainer.comm import GroupName, ProcessGroupTransport, group_names
from tests.support.small_plans import looped_schedule, small_plan
from tests.support.worker_pool import PoolRank, WorkerPool

POOLED = pytest.mark.xdist_group("worker-pool")


def test_mesh_is_replica_major() -> None:
    mesh = Mesh(dp=2, pp=3)
    assert mesh.num_ranks == 6
    assert [(mesh.replica(rank), mesh.pipeline_rank(rank)) for rank in range(6)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    assert mesh.peers(2) == (2, 5)
    assert mesh.ranks(1, (0, 2)) == (3, 5)


def test_shards_are_neighbours() -> None:
    mesh = Mesh(dp=2, tp=4, pp=3, kv_copies=2)
    assert mesh.num_ranks == 24
    places = [(mesh.replica(rank), mesh.pipeline_rank(rank), mesh.shard(rank)) for rank in range(24)]
    assert places == [(replica, stage, shard) for replica in range(2) for stage in range(3) for shard in range(4)]
    assert [mesh.rank(*place) for place in places] == list(range(24))
    assert mesh.shards(1, 2) == (20, 21, 22, 23)
    assert mesh.peers(2, 3) == (11, 23)
    assert mesh.ranks(1, (0, 2), 1) == (13, 21)
    assert mesh.copies(20) == mesh.copies(21) == (20, 21)
    assert mesh.copies(23) == (22, 23)


def test_shards_have_separate_groups() -> None:
    """Two replicas of two ranks of two shards; rank = 4 replica + 2 stage + shard."""
    plan = replace(small_plan(family=Family.GPT2, dp=2, pp=2), tp=2)
    mesh = plan.mesh
    assert mesh == Mesh(dp=2, tp=2, pp=2, kv_copies=1)
    names = list(group_names(program_of(plan), mesh))
    assert list(dict.fromkeys(names)) == [
        *(GroupName("tp", (first, first + 1)) for first in (0, 2, 4, 6)),
        *(GroupName("F" if a < b else "B", (a, b)) for a, b in [(0, 2), (2, 0), (1, 3), (3, 1)]),
        *(GroupName("F" if a < b else "B", (a, b)) for a, b in [(4, 6), (6, 4), (5, 7), (7, 5)]),
        *(GroupName("tie", (first, first + 2)) for first in (0, 1, 4, 5)),
        *(GroupName("dp", (first, first + 4)) for first in range(4)),
        GroupName("norm", tuple(range(8))),
    ]


@pytest.mark.parametrize(("kv_heads", "copies"), [(1, [(0, 1, 2, 3)]), (2, [(0, 1), (2, 3)]), (4, [])])
def test_shards_with_copied_heads_have_additional_groups(kv_heads: int, copies: list[tuple[int, ...]]) -> None:
    plan = small_plan(pp=1)
    plan = replace(plan, tp=4, model=replace(plan.model, kv_heads=kv_heads))
    names = dict.fromkeys(name for name in group_names(program_of(plan), plan.mesh) if name.purpose == "tp")
    assert list(names) == list(dict.fromkeys([GroupName("tp", (0, 1, 2, 3)), *(GroupName("tp", c) for c in copies)]))


def test_every_channel_has_a_group_in_every_replica() -> None:
    program = program_of(small_plan(family=Family.GPT2, dp=2, pp=3))
    names = list(group_names(program, Mesh(dp=2, pp=3)))
    assert names == [
        *(GroupName("F" if a < b else "B", (a, b)) for a, b in [(0, 1), (1, 0), (1, 2), (2, 1)]),
        *(GroupName("F" if a < b else "B", (a, b)) for a, b in [(3, 4), (4, 3), (4, 5), (5, 4)]),
        GroupName("tie", (0, 2)),
        GroupName("tie", (3, 5)),
        *(GroupName("dp", (rank, rank + 3)) for rank in range(3)),
        GroupName("norm", (0, 1, 2, 3, 4, 5)),
    ]


def test_both_kinds_of_message_between_two_ranks_have_separate_groups() -> None:
    schedule = looped_schedule(num_ranks=2, num_stages=4, num_microbatches=1, num_slices=3)
    program = program_of(small_plan(pp=2, num_stages=4, schedule=schedule))
    names = [name for name in group_names(program, Mesh(dp=1, pp=2)) if name.purpose in ("F", "B")]
    assert {(name.purpose, name.ranks) for name in names} == {
        ("F", (0, 1)),
        ("F", (1, 0)),
        ("B", (0, 1)),
        ("B", (1, 0)),
    }


def exchange(me: PoolRank, plan: Plan, program: Program) -> list[list[float]]:
    """Rank 0 sends three messages of different sizes to rank 1, which answers with one."""
    transport = ProcessGroupTransport(me.groups, program, plan.mesh, me.rank)
    there, back = Channel(0, 1, "F"), Channel(1, 0, "B")
    sizes, answer = (1, 100_000, 3), torch.zeros(2)
    if me.rank == 0:
        receive = transport.post_recv(back, answer)
        works = [transport.send(there, torch.full((size,), float(size))) for size in sizes]
        for work in (*works, receive):
            work.wait()
        return [answer.tolist()]
    received = [torch.zeros(size) for size in sizes]
    works = [transport.post_recv(there, tensor) for tensor in received]
    transport.send(back, torch.tensor([7.0, 8.0])).wait()
    for work in works:
        work.wait()
    return [[tensor.min().item(), tensor.max().item()] for tensor in received]


@POOLED
def test_messages_over_gloo(worker_pool: WorkerPool) -> None:
    plan = small_plan(pp=2)
    program = program_of(plan)
    worker_pool.connect(plan, program)
    first, second = worker_pool.run(exchange, plan, program, num_ranks=2)
    assert first == [[7.0, 8.0]]
    assert second == [[1.0, 1.0], [100_000.0, 100_000.0], [3.0, 3.0]]


def sum_over(me: PoolRank, plan: Plan, program: Program, group: Group) -> float:
    transport = ProcessGroupTransport(me.groups, program, plan.mesh, me.rank)
    value = torch.tensor([10.0**me.rank])
    if group is Group.TIE:
        transport.sum_tied(1 - plan.mesh.pipeline_rank(me.rank), value).wait()
    else:
        transport.all_reduce(group, value).wait()
    return value.item()


@POOLED
@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Group.DP, [101.0, 1010.0, 101.0, 1010.0]),
        (Group.TIE, [11.0, 11.0, 1100.0, 1100.0]),
        (Group.NORM, [1111.0] * 4),
    ],
)
def test_sums_over_gloo(worker_pool: WorkerPool, group: Group, expected: list[float]) -> None:
    plan = small_plan(family=Family.GPT2, dp=2, pp=2)
    program = program_of(plan)
    worker_pool.connect(plan, program)
    assert worker_pool.run(sum_over, plan, program, group, num_ranks=4) == expected


@POOLED
@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Group.TP, [11, 11, 1100, 1100, 110_000, 110_000, 11_000_000, 11_000_000]),
        (Group.DP, [10_001, 100_010, 1_000_100, 10_001_000, 10_001, 100_010, 1_000_100, 10_001_000]),
        (Group.TIE, [101, 1010, 101, 1010, 1_010_000, 10_100_000, 1_010_000, 10_100_000]),
        (Group.NORM, [11_111_111] * 8),
    ],
)
def test_sums_of_shards_over_gloo(worker_pool: WorkerPool, group: Group, expected: list[int]) -> None:
    plan = replace(small_plan(family=Family.GPT2, dp=2, pp=2), tp=2)
    program = program_of(plan)
    worker_pool.connect(plan, program)
    assert worker_pool.run(sum_over, plan, program, group, num_ranks=8) == expected


def sum_copies(me: PoolRank, plan: Plan, program: Program) -> float:
    value = torch.tensor([10.0**me.rank])
    ProcessGroupTransport(me.groups, program, plan.mesh, me.rank).sum_copies(value).wait()
    return value.item()


@POOLED
@pytest.mark.parametrize(("kv_heads", "expected"), [(1, [1111.0] * 4), (2, [11.0, 11.0, 1100.0, 1100.0])])
def test_sums_of_copies_over_gloo(worker_pool: WorkerPool, kv_heads: int, expected: list[float]) -> None:
    plan = small_plan(pp=1)
    plan = replace(plan, tp=4, model=replace(plan.model, kv_heads=kv_heads))
    program = program_of(plan)
    worker_pool.connect(plan, program)
    assert worker_pool.run(sum_copies, plan, program, num_ranks=4) == expected


def exchange_with_like(me: PoolRank, plan: Plan, program: Program) -> float:
    """The first rank's shards each send to their like."""
    mesh = plan.mesh
    transport = ProcessGroupTransport(me.groups, program, mesh, me.rank)
    value = torch.tensor([float(me.rank)])
    channel = Channel(0, 1, "F")
    if mesh.pipeline_rank(me.rank) == 0:
        transport.send(channel, value).wait()
    else:
        transport.post_recv(channel, value).wait()
    return value.item()


@POOLED
def test_messages_join_shards_with_their_like(worker_pool: WorkerPool) -> None:
    plan = replace(small_plan(dp=2, pp=2), tp=2)
    program = program_of(plan)
    worker_pool.connect(plan, program)
    found = worker_pool.run(exchange_with_like, plan, program, num_ranks=8)
    assert found == [0.0, 1.0, 0.0, 1.0, 4.0, 5.0, 4.0, 5.0]


@POOLED
def test_groups_are_made_once(worker_pool: WorkerPool) -> None:
    """Other plans, with other ranks, between two uses of the same groups."""
    for pp in (2, 3, 2):
        plan = small_plan(pp=pp)
        program = program_of(plan)
        worker_pool.connect(plan, program)
        sums = worker_pool.run(sum_over, plan, program, Group.NORM, num_ranks=pp)
        assert sums == [float("1" * pp)] * pp
