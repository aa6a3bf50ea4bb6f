"""Microseconds of collectives of shards on the host: pairwise (`penstock.trainer.shards`) and by gloo.

The two ways alternate. A time counts from a barrier to the end of the last shard. The tenth percentile is shown, since
a machine with fewer cores than shards, or with other work, adds a time slice of the scheduler to most rounds.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmarks.support import write_results

from penstock.trainer import gloo
from penstock.trainer.shards import HostShards
from penstock.trainer.units.collectives import Gather, Scatter, Sum

SIZES = (2**16, 2**18, 2**20, 2**22, 2**24)
HIDDEN = 256
WARM_UP = 3


def ways(group: dist.ProcessGroup, num_bytes: int) -> dict[str, Callable[[], object]]:
    """Functions that run each collective of ``num_bytes``, pairwise and by gloo."""
    num_shards, shard = dist.get_world_size(group), dist.get_rank(group)
    shards, all_PH = HostShards(group), torch.ones(num_bytes // 4 // HIDDEN, HIDDEN)
    block = all_PH.chunk(num_shards)[shard]
    own_RH = torch.empty_like(block)
    return {
        "gather, pairwise": lambda: shards.start(Gather(all_PH)).wait(),
        "gather, gloo": lambda: dist.all_gather_into_tensor(all_PH, block, group=group),
        "scatter, pairwise": lambda: shards.start(Scatter(all_PH, own_RH)).wait(),
        "scatter, gloo": lambda: dist.reduce_scatter_tensor(own_RH, all_PH, group=group),
        "sum, pairwise": lambda: shards.start(Sum(all_PH)).wait(),
        "sum, gloo": lambda: dist.all_reduce(all_PH, group=group),
    }


def measure(rank: int, num_shards: int, port: int, answer: mp.SimpleQueue[Any]) -> None:
    """Measure rows (bytes, way, microseconds), which shard 0 puts into ``answer``."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, num_shards, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group(gloo.backend(), store=store, rank=rank, world_size=num_shards)
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    rows = []
    for num_bytes in SIZES:
        contenders = ways(group, num_bytes)
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(WARM_UP + max(15, min(150, 2**27 // num_bytes // num_shards))):
            for name, act in contenders.items():
                dist.barrier(group)
                begin = time.perf_counter()
                act()
                taken[name].append(time.perf_counter() - begin)
        slowest = torch.tensor([samples[WARM_UP:] for samples in taken.values()])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
        tenth = slowest.quantile(0.1, dim=1)
        rows += [(num_bytes, name, 1e6 * seconds) for name, seconds in zip(taken, tenth.tolist(), strict=True)]
    if rank == 0:
        answer.put(rows)
    dist.barrier(group)
    dist.destroy_process_group()


def measured(num_shards: int) -> list[tuple[int, str, float]]:
    """Run ``num_shards`` processes and return their rows."""
    context = mp.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    answer = context.SimpleQueue()
    arguments = (num_shards, store.port, answer)
    ranks = [context.Process(target=measure, args=(rank, *arguments)) for rank in range(num_shards)]
    for rank in ranks:
        rank.start()
    rows: list[tuple[int, str, float]] = answer.get()
    for rank in ranks:
        rank.join()
    return rows


def table(results: dict[str, Any]) -> str:
    """A table for each number of shards."""
    sizes = " | ".join(f"{num_bytes // 1024:,} KiB" for num_bytes in SIZES)
    lines = ["# Collectives of shards on the host", "", f"Microseconds, fp32, one thread each; {results['machine']}."]
    for num_shards, rows in results["rows"].items():
        lines += ["", f"| {num_shards} shards | {sizes} |", "|---|" + "--:|" * len(SIZES)]
        for name in dict.fromkeys(row[1] for row in rows):
            figures = " | ".join(f"{row[2]:,.0f}" for row in rows if row[1] == name)
            lines.append(f"| {name} | {figures} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure two and four shards."""
    rows = {str(num_shards): measured(num_shards) for num_shards in (2, 4)}
    write_results("shard_collectives", json.dumps({"rows": rows}), table)


if __name__ == "__main__":
    main()
