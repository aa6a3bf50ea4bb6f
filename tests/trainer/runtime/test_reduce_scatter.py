"""Reduce-scatter and all-gather over replicas: sums in the order of replicas, to the last bit, and little memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.core.schedule import Group
from penstock.planner.compile import program_of
from penstock.trainer import reduce_scatter
from penstock.trainer.comm import ProcessGroupTransport, Transport
from penstock.trainer.local_transport import Fabric
from penstock.trainer.memory import held_bytes, peak_bytes, reset_peak
from tests.support.small_plans import small_plan
from tests.support.worker_pool import CPU, PoolRank, WorkerPool

POOLED = pytest.mark.xdist_group("worker-pool")

Result = npt.NDArray[np.float64]

PART_SIZES = (1, 7, 16, 100, 1000)
"""Elements of one replica's part."""
SMALL_ROUND_BYTES = 128
"""Size of a round, for which a part takes one round, or several with a shorter last one."""
DTYPES = (torch.float32, torch.float64)


def addend(size: int, replica: int, dp: int) -> Tensor:
    """Return the addend of a replica; the sum depends on the order of addends."""
    generator = torch.Generator().manual_seed(100 * size + replica)
    flat = torch.randn(dp * size, generator=generator) * 10.0 ** (3 * replica)
    return flat.to(DTYPES[size % len(DTYPES)])


def exchanged(transport: Transport, replica: int, dp: int) -> list[Result]:
    """Sums that are under way together, each then gathered."""
    flats = [addend(size, replica, dp) for size in PART_SIZES]
    for work in [transport.reduce_scatter(flat) for flat in flats]:
        work.wait()
    for flat in flats:
        transport.all_gather(flat).wait()
    return [flat.double().numpy() for flat in flats]


def check(results: Sequence[Sequence[Result]]) -> None:
    dp = len(results)
    for own in results:
        for size, result in zip(PART_SIZES, own, strict=True):
            total = addend(size, 0, dp)
            for replica in range(1, dp):
                total = total + addend(size, replica, dp)
            np.testing.assert_array_equal(result, total.double().numpy())


def over_gloo(me: PoolRank, plan: Plan, program: Program) -> list[Result]:
    """Ranks of the pool outlive the test, so that the size of rounds has to be put back."""
    mesh = plan.mesh
    with mock.patch("penstock.trainer.reduce_scatter.ROUND_BYTES", SMALL_ROUND_BYTES):
        return exchanged(ProcessGroupTransport(me.groups, program, mesh, me.rank), mesh.replica(me.rank), mesh.dp)


@POOLED
@pytest.mark.parametrize(("dp", "pp"), [(2, 1), (2, 2), (3, 1), (4, 2)])
def test_over_gloo(worker_pool: WorkerPool, dp: int, pp: int) -> None:
    plan = small_plan(dp=dp, pp=pp, zero=1)
    program, mesh = program_of(plan), plan.mesh
    worker_pool.connect(plan, program)
    results = worker_pool.run(over_gloo, plan, program, num_ranks=mesh.num_ranks)
    for pipeline_rank in range(pp):
        check([results[rank] for rank in mesh.peers(pipeline_rank)])


@pytest.mark.parametrize("dp", [2, 4])
def test_between_threads(dp: int) -> None:
    plan = small_plan(dp=dp, pp=1, zero=1)
    fabric = Fabric(program_of(plan), plan.mesh, 10.0)
    results: dict[int, list[Result]] = {}

    def run(rank: int) -> None:
        results[rank] = exchanged(fabric.transport(rank), rank, dp)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(dp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check([results[rank] for rank in range(dp)])


def compared_with_an_all_reduce(me: PoolRank, plan: Plan, program: Program) -> tuple[bool, int]:
    """Whether this replica's part is that of an all-reduce, and the bytes that it took."""
    transport, dp = ProcessGroupTransport(me.groups, program, plan.mesh, me.rank), plan.dp
    flat = torch.randn(16 * 2**20, generator=torch.Generator().manual_seed(me.rank))
    total = flat.clone()
    transport.all_reduce(Group.DP, total).wait()
    reset_peak(CPU)
    before = held_bytes(CPU)
    transport.reduce_scatter(flat).wait()
    taken = peak_bytes(CPU) - before
    return torch.equal(flat.chunk(dp)[me.rank], total.chunk(dp)[me.rank]), taken


@POOLED
def test_two_replicas_have_the_bits_of_an_all_reduce_and_no_copy_of_it(worker_pool: WorkerPool) -> None:
    """Of 64 MiB: two rounds and a thread, where gloo's reduce-scatter would take another 64 MiB."""
    plan = small_plan(dp=2, pp=1, zero=1)
    program = program_of(plan)
    worker_pool.connect(plan, program)
    for is_equal, taken in worker_pool.run(compared_with_an_all_reduce, plan, program, num_ranks=2):
        assert is_equal
        assert taken < 2 * reduce_scatter.ROUND_BYTES + 4 * 2**20


def with_a_failing_peer(me: PoolRank, plan: Plan, program: Program) -> str:
    """Return the error of the waiting rank after a failure in the adding thread."""
    transport = ProcessGroupTransport(me.groups, program, plan.mesh, me.rank)

    def fail(tensor: Tensor, peer: int, group: object) -> None:
        raise RuntimeError(f"connection to rank {peer} closed")

    try:
        with mock.patch("penstock.trainer.reduce_scatter.irecv", fail):
            transport.reduce_scatter(torch.ones(8)).wait()
    except RuntimeError as error:
        return str(error)
    return ""


@POOLED
def test_a_failure_of_the_collective_is_raised_by_the_wait(worker_pool: WorkerPool) -> None:
    plan = small_plan(dp=2, pp=1, zero=1)
    program = program_of(plan)
    worker_pool.connect(plan, program)
    messages = worker_pool.run(with_a_failing_peer, plan, program, num_ranks=2)
    assert messages == ["connection to rank 1 closed", "connection to rank 0 closed"]
