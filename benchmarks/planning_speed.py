"""How long planning GPT-3 175B for 384 devices takes, and how much memory: cold (numba compiles) and warm.

Every figure is of one whole process: its start, imports, and everything that `penstock plan` does but for reading and
writing files. Run as ``python -m benchmarks.planning_speed``; writes ``benchmarks/results/planning_speed.{md,json}``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.support import write_results

from penstock.core.cluster import ClusterSpec, DeviceSpec, LinkSpec
from penstock.core.job import DataSpec, Device, JobSpec, ResourcesSpec, TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec

ROOT = Path(__file__).parents[1]
BATCHES = (2, 1536)
REPEATS = 3
TARGET_SECONDS, TARGET_BYTES = 10.0, 2**30

MODEL = ModelSpec(family=Family.GPT2, layers=96, hidden=12288, heads=96, vocab=50257, positions=2048)
CLUSTER = ClusterSpec(
    name="48 nodes of 8",
    device=DeviceSpec(name="80 GB", peak_flops=312e12, memory_bytes=80 * 2**30, memory_bandwidth=2e12),
    num_nodes=48,
    devices_per_node=8,
    intra_node=LinkSpec(latency_seconds=3e-6, bytes_per_second=250e9),
    inter_node=LinkSpec(latency_seconds=8e-6, bytes_per_second=20e9),
)


def gpt3_job(global_batch: int) -> JobSpec:
    """GPT-3 175B (arXiv 2005.14165, table 2.1) at sequences of 2,048 tokens in bf16 on 384 devices."""
    return JobSpec(
        model=MODEL,
        data=DataSpec(source="", sequence_length=2048),
        training=TrainingSpec(global_batch=global_batch, steps=1, precision=Precision.BF16),
        resources=ResourcesSpec(device=Device.CUDA, ranks=384, memory_per_rank=80 * 2**30),
    )


def plan_once(global_batch: int) -> None:
    """What the measured process does: plan, and print what was found and what it took of the process."""
    from penstock.planner.decide import decide
    from penstock.planner.problem import problem_from_cluster

    decision = decide(problem_from_cluster(gpt3_job(global_batch), CLUSTER))
    prediction = decision.plan.prediction
    assert prediction is not None
    found = {
        "plan": decision.plan.reasons[0],
        "step_seconds": prediction.step_seconds,
        "digest": decision.plan.digest,
        "num_judged": decision.result.num_judged,
        "num_outlines": decision.result.num_outlines,
    }
    print(json.dumps(found))


def measure(global_batch: int, cache: Path) -> dict[str, Any]:
    """One process: wall and processor seconds, peak resident bytes, and the plan it found."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "benchmarks.planning_speed", str(global_batch)]
    begin = time.perf_counter()
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - begin
    if status:
        raise SystemExit(f"planning at batch {global_batch} failed")
    used = {"processor_seconds": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * 1024}
    return {"wall_seconds": wall, **used, **json.loads(output)}


def measurements() -> Iterator[dict[str, Any]]:
    """Per batch a cold process, then warm ones, of which the median by wall time counts."""
    for batch in BATCHES:
        with tempfile.TemporaryDirectory() as folder:
            cold = measure(batch, Path(folder))
            warm = sorted((measure(batch, Path(folder)) for _ in range(REPEATS)), key=lambda each: each["wall_seconds"])
        if len({each["digest"] for each in (cold, *warm)}) != 1:
            raise SystemExit(f"equal inputs gave different plans at batch {batch}")
        yield {"global_batch": batch, "state": "cold", **cold}
        yield {"global_batch": batch, "state": "warm", **warm[REPEATS // 2]}


def markdown(results: dict[str, Any]) -> str:
    """The table for people."""
    rows = results["rows"]
    warm = [row for row in rows if row["state"] == "warm"]
    met = all(row["wall_seconds"] < TARGET_SECONDS and row["peak_bytes"] < TARGET_BYTES for row in warm)
    return "\n".join(
        [
            "# Planning speed: GPT-3 175B on 384 devices of 80 GB",
            "",
            f"{results['machine']}, load {results['load_before']:.1f} before. Whole processes, imports included; cold "
            f"compiles numba's functions, warm is the median of {REPEATS}.",
            "",
            "| global batch | | wall s | processor s | peak MiB | candidates | plan |",
            "|---:|---|---:|---:|---:|---:|---|",
            *map(_row, rows),
            "",
            f"Target: warm under 10 s, as for up to 1,024 devices, and 1 GiB; {'met' if met else 'not met'}.",
            "",
        ]
    )


def _row(row: dict[str, Any]) -> str:
    return (
        f"| {row['global_batch']} | {row['state']} | {row['wall_seconds']:.2f} | {row['processor_seconds']:.2f} "
        f"| {row['peak_bytes'] / 2**20:.0f} | {row['num_judged']} | {row['plan']} |"
    )


def main() -> None:
    """Measure and write both files."""
    load = os.getloadavg()[0]
    write_results("planning_speed", json.dumps({"load_before": load, "rows": list(measurements())}), markdown)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        plan_once(int(sys.argv[1]))
    else:
        main()
