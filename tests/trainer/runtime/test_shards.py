"""Collectives of shards: what each is asked for comes out, to the last bit, over gloo and between threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from penstock.core.errors import RunError
from penstock.core.mesh import Mesh
from penstock.core.program import Program
from penstock.core.sharding import Collective, exchange_bytes
from penstock.planner.compile import program_of
from penstock.trainer.comm import ProcessGroupTransport, shard_group
from penstock.trainer.local_transport import Fabric
from penstock.trainer.shards import HostShards, NcclShards, Temporaries
from penstock.trainer.units.collectives import NO_SHARDS, Gather, Request, Scatter, Shards, Sum, run_pass
from tests.support.small_plans import small_plan
from tests.support.worker_pool import PoolRank, WorkerPool

POOLED = pytest.mark.xdist_group("worker-pool")

Result = npt.NDArray[np.float64]

ROUNDS = 12
HIDDEN = 5
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def rows_of(number: int) -> int:
    """Rows of one shard's part in a round."""
    return 1 + number % 3


def parts(number: int, num_shards: int, rows: int) -> list[Tensor]:
    """Return the addends of all shards in a round, [rows, HIDDEN]; the sum depends on their order."""
    generator = torch.Generator().manual_seed(number)
    drawn = [torch.randn((rows, HIDDEN), generator=generator) * 10.0 ** (3 * shard) for shard in range(num_shards)]
    return [part.to(DTYPES[number % len(DTYPES)]) for part in drawn]


def in_order(addends: Sequence[Tensor]) -> Tensor:
    total = addends[0].clone()
    for addend in addends[1:]:
        total = total + addend
    return total


def requests(number: int, shard: int, num_shards: int) -> tuple[Request, Tensor]:
    """A round's request of one shard, and where its result will be."""
    rows = rows_of(number)
    match number % 4:
        case 0:
            all_PH = parts(number, 1, num_shards * rows)[0].new_full((num_shards * rows, HIDDEN), float("nan"))
            all_PH.chunk(num_shards)[shard].copy_(parts(number, num_shards, rows)[shard])
            return Gather(all_PH), all_PH
        case 1:
            partial_PH = parts(number, num_shards, num_shards * rows)[shard]
            own_RH = torch.empty_like(partial_PH.chunk(num_shards)[shard])
            return Scatter(partial_PH, own_RH), own_RH
        case 2:
            partial_PH = parts(number, num_shards, num_shards * rows)[shard]
            own_RH = partial_PH.chunk(num_shards)[shard]
            return Scatter(partial_PH, own_RH), own_RH
        case _:
            tensor = parts(number, num_shards, rows)[shard]
            return Sum(tensor), tensor


def wanted(number: int, shard: int, num_shards: int) -> Tensor:
    rows = rows_of(number)
    match number % 4:
        case 0:
            return torch.cat(parts(number, num_shards, rows))
        case 1 | 2:
            return in_order([part.chunk(num_shards)[shard] for part in parts(number, num_shards, num_shards * rows)])
        case _:
            return in_order(parts(number, num_shards, rows))


def results(shards: Shards, shard: int, num_shards: int, *, at_once: bool) -> list[Result]:
    """Every round's result: each waited for, or all under way together."""
    rounds = [requests(number, shard, num_shards) for number in range(ROUNDS)]
    if at_once:
        for work in [shards.start(request) for request, _ in rounds]:
            work.wait()
    else:
        for request, _ in rounds:
            shards.start(request).wait()
    return [result.double().numpy() for _, result in rounds]


def check(found: Sequence[Sequence[Result]]) -> None:
    num_shards = len(found)
    for shard, own in enumerate(found):
        for number, result in enumerate(own):
            expected = wanted(number, shard, num_shards).double().numpy()
            np.testing.assert_array_equal(result, expected, f"round {number} on shard {shard}")


def over_gloo(me: PoolRank, mesh: Mesh, program: Program, at_once: bool) -> list[Result]:
    transport = ProcessGroupTransport(me.groups, program, mesh, me.rank)
    return results(transport.shards, mesh.shard(me.rank), mesh.tp, at_once=at_once)


@POOLED
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2), (3, 1), (4, 1)])
def test_over_gloo(worker_pool: WorkerPool, tp: int, pp: int, at_once: bool) -> None:
    program, mesh = program_of(small_plan(pp=pp)), Mesh(dp=1, tp=tp, pp=pp)
    worker_pool.open(program, mesh)
    found = worker_pool.run(over_gloo, mesh, program, at_once, num_ranks=mesh.num_ranks)
    for pipeline_rank in range(pp):
        check([found[rank] for rank in mesh.shards(0, pipeline_rank)])


def torchs_own(me: PoolRank, mesh: Mesh) -> list[list[float]]:
    """The calls for NCCL, made with gloo; small whole numbers have the same sum in any order."""
    shards = NcclShards(me.groups[shard_group(mesh, me.rank)])
    all_PH = torch.full((2 * mesh.tp, 1), -1.0)
    all_PH.chunk(mesh.tp)[me.rank].fill_(me.rank)
    partial_PH, own_RH = torch.arange(2.0 * mesh.tp)[:, None] * (me.rank + 1), torch.empty(2, 1)
    tensor = torch.tensor([10.0**me.rank])
    for work in [shards.start(request) for request in (Gather(all_PH), Scatter(partial_PH, own_RH), Sum(tensor))]:
        work.wait()
    return [each.flatten().tolist() for each in (all_PH, own_RH, tensor)]


@POOLED
@pytest.mark.parametrize("tp", [2, 4])
def test_the_collectives_of_torch_give_the_same_results(worker_pool: WorkerPool, tp: int) -> None:
    mesh = Mesh(dp=1, tp=tp, pp=1)
    worker_pool.open(program_of(small_plan(pp=1)), mesh)
    weight = sum(range(1, tp + 1))
    assert worker_pool.run(torchs_own, mesh, num_ranks=tp) == [
        [
            [float(each) for each in range(tp) for _ in range(2)],
            [weight * 2.0 * shard, weight * (2.0 * shard + 1)],
            [sum(10.0**each for each in range(tp))],
        ]
        for shard in range(tp)
    ]


def tiny_sums(me: PoolRank, mesh: Mesh) -> list[list[float]]:
    """Sums of fewer elements than there are shards, and of uneven parts."""
    shards = HostShards(me.groups[shard_group(mesh, me.rank)])
    tensors = [torch.full((size,), 10.0**me.rank) for size in (1, 2, 3, 7)]
    for tensor in tensors:
        shards.start(Sum(tensor)).wait()
    return [tensor.tolist() for tensor in tensors]


@POOLED
def test_sums_of_few_elements(worker_pool: WorkerPool) -> None:
    mesh = Mesh(dp=1, tp=4, pp=1)
    worker_pool.open(program_of(small_plan(pp=1)), mesh)
    expected = [[1111.0] * size for size in (1, 2, 3, 7)]
    assert worker_pool.run(tiny_sums, mesh, num_ranks=4) == [expected] * 4


def memory_taken(me: PoolRank, mesh: Mesh) -> list[int]:
    """Bytes that requests left behind, one kind after the other; the second round takes no more."""
    taken = []
    partial, own = torch.ones(8, 32), torch.empty(8 // mesh.tp, 32)
    for request in (Gather(partial), Scatter(partial, own), Sum(partial)):
        shards = HostShards(me.groups[shard_group(mesh, me.rank)])
        for _ in range(3):
            shards.start(request).wait()
        taken.append(sum(memory.numel() for memory in shards._temporaries._free))
    return taken


@POOLED
@pytest.mark.parametrize(("tp", "rows"), [(2, [0, 4, 8]), (4, [0, 3 * 2, 3 * 2])])
def test_temporaries_are_those_that_the_planner_counts(worker_pool: WorkerPool, tp: int, rows: list[int]) -> None:
    mesh = Mesh(dp=1, tp=tp, pp=1)
    worker_pool.open(program_of(small_plan(pp=1)), mesh)
    counted = [exchange_bytes(collective, 8 * 32 * 4, tp) for collective in Collective]
    assert counted == [number * 32 * 4 for number in rows]
    assert worker_pool.run(memory_taken, mesh, num_ranks=tp) == [counted] * tp


def test_temporary_buffers_grow_and_are_reused() -> None:
    temporaries = Temporaries()
    small = temporaries.take(8)
    temporaries.give_back(small)
    assert temporaries.take(4) is small
    large = temporaries.take(16)
    temporaries.give_back(small)
    temporaries.give_back(large)
    assert temporaries.take(12) is large


def on_threads(mesh: Mesh, act: Callable[[Shards, int], object], timeout_seconds: float = 10.0) -> list[object]:
    """Return the result or the error of ``act(shards, shard)`` on every shard of a rank."""
    fabric = Fabric(program_of(small_plan(pp=mesh.pp)), mesh, timeout_seconds)
    outcomes: list[object] = [None] * mesh.tp

    def run(shard: int) -> None:
        try:
            outcomes[shard] = act(fabric.transport(mesh.rank(0, 0, shard)).shards, shard)
        except RunError as error:
            outcomes[shard] = str(error)

    threads = [threading.Thread(target=run, args=(shard,)) for shard in range(mesh.tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_between_threads(tp: int, at_once: bool) -> None:
    found: list[list[Result]] = [[] for _ in range(tp)]

    def act(shards: Shards, shard: int) -> None:
        found[shard] = results(shards, shard, tp, at_once=at_once)

    assert on_threads(Mesh(dp=1, tp=tp, pp=1), act) == [None] * tp
    check(found)


def test_threads_that_ask_for_different_things_are_refused() -> None:
    tensor = torch.zeros(4, HIDDEN)
    by_shard: list[Request] = [Gather(tensor), Sum(tensor.clone())]
    outcomes = on_threads(Mesh(dp=1, tp=2, pp=1), lambda shards, shard: shards.start(by_shard[shard]).wait())
    assert outcomes == ["ranks [0, 1] ask for gather of [4, 5] and sum of [4, 5]"] * 2
    sizes = [torch.zeros(2), torch.zeros(3)]
    outcomes = on_threads(Mesh(dp=1, tp=2, pp=1), lambda shards, shard: shards.start(Sum(sizes[shard])).wait())
    assert outcomes == ["ranks [0, 1] ask for sum of [2] and sum of [3]"] * 2


def test_a_collective_that_not_all_join_ends() -> None:
    def act(shards: Shards, shard: int) -> None:
        if shard == 0:
            shards.start(Sum(torch.zeros(1))).wait()

    outcomes = on_threads(Mesh(dp=1, tp=2, pp=1), act, timeout_seconds=0.05)
    assert outcomes == ["not all of ranks [0, 1] came to a collective in 0.05 s", None]


def test_a_rank_without_shards_asks_for_nothing() -> None:
    fabric = Fabric(program_of(small_plan(pp=1)), Mesh(dp=1, pp=1))
    assert fabric.transport(0).shards is NO_SHARDS

    def steps() -> object:
        yield Sum(torch.zeros(1))

    with pytest.raises(RunError, match="a pass of a rank with one shard asks for a sum over shards"):
        run_pass(steps(), NO_SHARDS)  # type: ignore[arg-type]
