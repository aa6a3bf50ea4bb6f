"""Sums of gradients that travel in bf16: bits of a reference, over gloo and between threads, and memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.core.plan import Plan
from penstock.core.program import Program
from penstock.core.replicas import narrowing_bytes
from penstock.planner.compile import program_of
from penstock.trainer.comm import ProcessGroupTransport, Transport
from penstock.trainer.local_transport import Fabric
from penstock.trainer.memory import held_bytes, peak_bytes, reset_peak
from penstock.trainer.narrow import add_narrow, narrow, parts_of, widen
from tests.support.small_plans import small_plan
from tests.support.worker_pool import CPU, PoolRank, WorkerPool

POOLED = pytest.mark.xdist_group("worker-pool")

Result = npt.NDArray[np.float64]

NUM_ELEMENTS = 2 * 3 * 4 * 25
"""Divisible by every number of replicas of these tests."""
SMALL = {False: 16, True: 16}
"""Elements that are converted at once, for which a part takes several turns."""
SMALL_ROUND_BYTES = 128
THREAD_BYTES = 4 * 2**20


def values(size: int, seed: int) -> Tensor:
    """Numbers of several magnitudes, with both infinities and NaN among many."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(size, generator=generator) * 10.0 ** torch.randint(-30, 30, (size,), generator=generator)
    if size > 100:
        flat[-3:] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    return flat


def same(first: Tensor, second: Tensor) -> bool:
    """Whether both are equal, NaN to NaN."""
    return torch.equal(torch.nan_to_num(first, nan=0.5), torch.nan_to_num(second, nan=0.5))


@given(st.integers(1, 200), st.integers(1, 40), st.data())
def test_narrowed_in_place_and_widened_again(size: int, at_once: int, data: st.DataObject) -> None:
    """Every part of the elements, whose own memory overlaps that of their narrow form."""
    start = data.draw(st.integers(0, size - 1))
    part = slice(start, data.draw(st.integers(start, size)))
    flat = values(size, size)
    rounded = flat.to(torch.bfloat16)
    with mock.patch("penstock.trainer.narrow.NARROWED_ELEMENTS", {False: at_once}):
        narrowed = narrow(flat)
        assert narrowed.data_ptr() == flat.data_ptr()
        assert same(narrowed.float(), rounded.float())
        widen(flat, part)
    assert same(flat[part], rounded[part].float())


@given(st.integers(0, 100), st.integers(1, 9))
def test_parts_cover_all_elements_evenly(size: int, num_replicas: int) -> None:
    parts = parts_of(size, num_replicas)
    lengths = [part.stop - part.start for part in parts]
    assert [index for part in parts for index in range(size)[part]] == list(range(size))
    assert max(lengths) - min(lengths) <= 1
    assert lengths[0] == max(lengths)


def test_addends_are_added_in_fp32_and_rounded_once() -> None:
    """The second and the third addend each change nothing in bf16, where the first one's last bit is 1 / 128."""
    first, second, third = (torch.full((3,), value, dtype=torch.bfloat16) for value in (1.0, 1 / 512, 1 / 256))
    assert (first + second + third).tolist() == [1.0] * 3
    add_narrow([first, second, third], second)
    assert second.tolist() == [1.0 + 1 / 128] * 3


def addend(replica: int, number: int, size: int) -> Tensor:
    """Gradients whose sum depends on the order of addends."""
    generator = torch.Generator().manual_seed(100 * number + replica)
    return torch.randn(size, generator=generator) * 10.0 ** (replica % 2)


def expected(dp: int, number: int, size: int) -> Result:
    """Every addend rounded, all added in fp32 in the order of replicas, and the sum rounded."""
    total = addend(0, number, size).bfloat16().float()
    for replica in range(1, dp):
        total = total + addend(replica, number, size).bfloat16().float()
    return total.bfloat16().double().numpy()


def summed(transport: Transport, replica: int, dp: int, sizes: Sequence[int]) -> list[tuple[Result, Result]]:
    """Of tensors of all sizes, whole sums, and parts of sums that are then gathered; all under way together."""
    whole = [addend(replica, number, size) for number, size in enumerate(sizes)]
    divided = [addend(replica, number, size) for number, size in enumerate(sizes)]
    works = [transport.sum_narrow(flat, scattered=False) for flat in whole]
    works += [transport.sum_narrow(flat, scattered=True) for flat in divided if len(flat) % dp == 0]
    for work in works:
        work.wait()
    for flat in divided:
        if len(flat) % dp == 0:
            transport.all_gather(flat).wait()
    return [(one.double().numpy(), other.double().numpy()) for one, other in zip(whole, divided, strict=True)]


SIZES = (1, 5, 24, NUM_ELEMENTS, NUM_ELEMENTS + 1)
"""Some of which replicas cannot divide evenly, and one with less than one element for each."""


def over_gloo(me: PoolRank, plan: Plan, program: Program) -> list[tuple[Result, Result]]:
    """Ranks of the pool outlive the test, so that sizes have to be put back."""
    mesh = plan.mesh
    transport = ProcessGroupTransport(me.groups, program, mesh, me.rank)
    with (
        mock.patch("penstock.trainer.reduce_scatter.ROUND_BYTES", SMALL_ROUND_BYTES),
        mock.patch("penstock.trainer.narrow.NARROWED_ELEMENTS", SMALL),
    ):
        return summed(transport, mesh.replica(me.rank), mesh.dp, SIZES)


def check(results: Sequence[list[tuple[Result, Result]]], sizes: Sequence[int]) -> None:
    dp = len(results)
    for own in results:
        for number, (size, (whole, divided)) in enumerate(zip(sizes, own, strict=True)):
            np.testing.assert_array_equal(whole, expected(dp, number, size))
            if size % dp == 0:
                np.testing.assert_array_equal(divided, expected(dp, number, size))


@POOLED
@pytest.mark.parametrize(("dp", "pp"), [(2, 1), (2, 2), (3, 1), (4, 2)])
@pytest.mark.parametrize("zero", [0, 1])
def test_over_gloo(worker_pool: WorkerPool, dp: int, pp: int, zero: int) -> None:
    plan = small_plan(dp=dp, pp=pp, zero=zero)
    program, mesh = program_of(plan), plan.mesh
    worker_pool.connect(plan, program)
    results = worker_pool.run(over_gloo, plan, program, num_ranks=mesh.num_ranks)
    for pipeline_rank in range(pp):
        check([results[rank] for rank in mesh.peers(pipeline_rank)], SIZES)


def test_between_threads() -> None:
    """Of two replicas; for more the sum is rounded after every addend, as on NCCL."""
    plan = small_plan(dp=2, pp=1, zero=1)
    fabric = Fabric(program_of(plan), plan.mesh, 10.0)
    sizes = (24, NUM_ELEMENTS)
    results: dict[int, list[tuple[Result, Result]]] = {}

    def run(rank: int) -> None:
        results[rank] = summed(fabric.transport(rank), rank, 2, sizes)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check([results[rank] for rank in range(2)], sizes)


def bytes_of_a_sum(me: PoolRank, plan: Plan, program: Program) -> list[int]:
    """The bytes that a sum of 64 MiB takes, whole and scattered."""
    transport = ProcessGroupTransport(me.groups, program, plan.mesh, me.rank)
    transport.sum_narrow(torch.ones(2**20), scattered=False).wait()  # loads the code, which counts, too
    taken = []
    for scattered in (False, True):
        flat = torch.randn(16 * 2**20)
        reset_peak(CPU)
        before = held_bytes(CPU)
        transport.sum_narrow(flat, scattered=scattered).wait()
        taken.append(peak_bytes(CPU) - before)
    return taken


@POOLED
def test_a_sum_takes_no_copy(worker_pool: WorkerPool) -> None:
    plan = small_plan(dp=2, pp=1, zero=1)
    program = program_of(plan)
    worker_pool.connect(plan, program)
    counted = narrowing_bytes(8 * 2**20, 2, is_cuda=False)
    for taken in worker_pool.run(bytes_of_a_sum, plan, program, num_ranks=2):
        assert max(taken) < counted + THREAD_BYTES
