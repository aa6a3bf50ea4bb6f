"""Groups of ranks on CPU share one gloo device, so that a rank has one thread that waits for sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from penstock.trainer import gloo
from penstock.trainer.comm import GroupName
from tests.support.worker_pool import PoolRank, WorkerPool

pytestmark = pytest.mark.xdist_group("worker-pool")

LOOP = "gloo_tcp_loop"
"""The name of a gloo device's thread, cut as the kernel does."""


def sums_and_loops(me: PoolRank, names: list[GroupName]) -> tuple[list[float], int]:
    """A sum over each group, and how many devices this process has."""
    me.groups.open(iter(names))
    sums = []
    for name in names:
        number = torch.tensor([float(1 + me.rank)])
        if me.rank in name.ranks:
            dist.all_reduce(number, group=me.groups[name])
        sums.append(number.item())
    return sums, [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")].count(LOOP)


def test_groups_share_a_device_and_sum_apart(worker_pool: WorkerPool) -> None:
    names = [GroupName(f"sum {number}", ranks) for number in range(6) for ranks in ((0, 1), (1, 2, 3), (0, 3))]
    for rank, (sums, num_loops) in enumerate(worker_pool.run(sums_and_loops, names)):
        assert num_loops == 1
        assert sums == [sum(1 + each for each in name.ranks) if rank in name.ranks else 1 + rank for name in names]


@pytest.mark.parametrize(("interfaces", "count"), [("", 1), ("lo", 1), ("lo,lo", 2)])
def test_there_is_a_device_per_interface(monkeypatch: pytest.MonkeyPatch, interfaces: str, count: int) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    assert len(gloo._devices.__wrapped__()) == count
