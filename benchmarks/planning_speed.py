"""Times and memory of plans and refusals for described jobs: warm, and once cold (numba compiles).

Every figure is that of a whole process: start, imports, and everything that `penstock plan` does except for reading and
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import write_results

from penstock.core.cluster import ClusterSpec, DeviceSpec, LinkSpec
from penstock.core.errors import UserError
from penstock.core.job import DataSpec, Device, JobSpec, ResourcesSpec, TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec

ROOT = Path(__file__).parents[1]
REPEATS = 3
TARGET_SECONDS = {64: 3.0, 1024: 10.0, 16384: 30.0}
"""Target of processor time by number of devices: the key is the largest number that it applies to."""
TARGET_BYTES = 2**30

GPT_6B = ModelSpec(family=Family.GPT2, layers=30, hidden=4096, heads=32, vocab=50257, positions=1024)
GPT_175B = ModelSpec(family=Family.GPT2, layers=96, hidden=12288, heads=96, vocab=50257, positions=2048)
GPT_1T = ModelSpec(family=Family.GPT2, layers=128, hidden=25600, heads=160, vocab=51200, positions=2048)
LLAMA_8B = ModelSpec(family=Family.LLAMA, layers=32, hidden=4096, heads=32, kv_heads=8, ffn_hidden=14336, vocab=128256)
LLAMA_70B = ModelSpec(family=Family.LLAMA, layers=80, hidden=8192, heads=64, kv_heads=8, ffn_hidden=28672, vocab=128256)
LLAMA_405B = ModelSpec(
    family=Family.LLAMA, layers=126, hidden=16384, heads=128, kv_heads=8, ffn_hidden=53248, vocab=128256
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A job on described devices with ``gigabytes`` of memory each."""

    name: str
    model: ModelSpec
    devices: int
    batch: int
    tokens: int
    gigabytes: int = 80

    @property
    def target_seconds(self) -> float:
        """Target for the next larger number of devices in `TARGET_SECONDS`."""
        return next(seconds for most, seconds in TARGET_SECONDS.items() if self.devices <= most)

    @property
    def job(self) -> JobSpec:
        """The job, in bf16."""
        return JobSpec(
            model=self.model,
            data=DataSpec(source="", sequence_length=self.tokens),
            training=TrainingSpec(global_batch=self.batch, steps=1, precision=Precision.BF16),
            resources=ResourcesSpec(device=Device.CUDA, ranks=self.devices, memory_per_rank=self.gigabytes * 10**9),
        )

    @property
    def cluster(self) -> ClusterSpec:
        """Nodes of eight H100s that share one network card."""
        return ClusterSpec(
            name=f"{self.devices // 8} nodes of 8",
            device=DeviceSpec(
                name="80 GB",
                peak_flops=989e12,
                memory_bytes=80 * 10**9,
                memory_bandwidth=3.35e12,
                constant_bytes=2 * 2**30,
                action_overhead_seconds=30e-6,
            ),
            num_nodes=self.devices // 8,
            devices_per_node=8,
            intra_node=LinkSpec(latency_seconds=5e-6, bytes_per_second=370e9),
            inter_node=LinkSpec(latency_seconds=1e-5, bytes_per_second=45e9),
        )


CASES = {
    case.name: case
    for case in (
        Case(name="GPT 6B, 16 devices", model=GPT_6B, devices=16, batch=288, tokens=1024),
        Case(name="Llama 8B, 64 devices", model=LLAMA_8B, devices=64, batch=256, tokens=8192),
        Case(name="GPT-3 175B, 384 devices, batch 2", model=GPT_175B, devices=384, batch=2, tokens=2048),
        Case(name="GPT-3 175B, 384 devices", model=GPT_175B, devices=384, batch=1536, tokens=2048),
        Case(name="Llama 70B, 131,072 tokens, 384 devices", model=LLAMA_70B, devices=384, batch=512, tokens=131072),
        Case(name="GPT-3 175B, 1,024 devices", model=GPT_175B, devices=1024, batch=2048, tokens=2048),
        Case(name="Llama 405B, 1,024 devices", model=LLAMA_405B, devices=1024, batch=2048, tokens=8192),
        Case(name="GPT 1T, 16,384 devices", model=GPT_1T, devices=16384, batch=6144, tokens=2048),
        Case(name="Llama 405B, 16,384 devices", model=LLAMA_405B, devices=16384, batch=2048, tokens=8192),
        Case(name="GPT 6B, 16 devices of 8 GB", model=GPT_6B, devices=16, batch=288, tokens=1024, gigabytes=8),
        Case(name="Llama 405B, 64 devices", model=LLAMA_405B, devices=64, batch=256, tokens=8192),
        Case(name="GPT 1T, 1,024 devices of 16 GB", model=GPT_1T, devices=1024, batch=1024, tokens=2048, gigabytes=16),
    )
}
COLD = "GPT-3 175B, 384 devices"
"""Case that is also measured cold."""


def plan_once(case: Case) -> None:
    """Main function of the measured process: plan, then print the plan and the process's times and memory."""
    from penstock.planner.decide import decide
    from penstock.planner.problem import problem_from_cluster
    from penstock.planner.worker.__main__ import collect_garbage_seldom

    collect_garbage_seldom()
    try:
        decision = decide(problem_from_cluster(case.job, case.cluster))
    except UserError as error:
        print(json.dumps({"plan": f"refused: {error.what}", "digest": str(error), "num_judged": 0}))
        return
    outcome = {
        "plan": decision.plan.reasons[0],
        "digest": decision.plan.digest,
        "num_judged": decision.result.num_judged,
    }
    print(json.dumps(outcome))


def measure(case: Case, cache: Path) -> dict[str, Any]:
    """Run one process. Returns wall and processor seconds, peak resident bytes, and the plan."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "benchmarks.planning_speed", case.name]
    begin = time.perf_counter()
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    output = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    wall = time.perf_counter() - begin
    if status:
        raise SystemExit(f"planning {case.name} failed")
    used = {"processor_seconds": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * 1024}
    return {"wall_seconds": wall, **used, **json.loads(output)}


def measurements() -> Iterator[dict[str, Any]]:
    """For each case the warm process of median processor time, and for `COLD` also a cold process."""
    with tempfile.TemporaryDirectory() as folder:
        cold = measure(CASES[COLD], Path(folder))
        yield {"name": COLD, "state": "cold", **cold}
        for name, case in CASES.items():
            measure(case, Path(folder))
            warm = [measure(case, Path(folder)) for _ in range(REPEATS)]
            if len({result["digest"] for result in warm}) != 1:
                raise SystemExit(f"equal inputs gave different plans: {name}")
            warm.sort(key=lambda result: result["processor_seconds"])
            yield {"name": name, "state": "warm", "target_seconds": case.target_seconds, **warm[REPEATS // 2]}


def markdown(results: dict[str, Any]) -> str:
    """The table as Markdown."""
    rows = results["rows"]
    warm = [row for row in rows if row["state"] == "warm"]
    slow = [row["name"] for row in warm if row["processor_seconds"] > row["target_seconds"]]
    large = [row["name"] for row in warm if row["peak_bytes"] > TARGET_BYTES]
    return "\n".join(
        [
            "# Planning speed: described H100s with 80 GB",
            "",
            f"{results['machine']}, load {results['load_before']:.1f} before. Whole processes, imports included; cold "
            f"compiles numba's functions, warm is the median of {REPEATS}.",
            "",
            "| job | | wall s | processor s | target s | peak MiB | candidates | plan |",
            "|---|---|---:|---:|---:|---:|---:|---|",
            *map(_row, rows),
            "",
            f"Above the target of time: {'; '.join(slow) or 'none'}. Above 1 GiB: {'; '.join(large) or 'none'}.",
            "",
        ]
    )


def _row(row: dict[str, Any]) -> str:
    return (
        f"| {row['name']} | {row['state']} | {row['wall_seconds']:.2f} | {row['processor_seconds']:.2f} "
        f"| {row.get('target_seconds', '')} | {row['peak_bytes'] / 2**20:.0f} | {row['num_judged']} | {row['plan']} |"
    )


def main() -> None:
    """Measure and write both files."""
    load = os.getloadavg()[0]
    write_results("planning_speed", json.dumps({"load_before": load, "rows": list(measurements())}), markdown)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        plan_once(CASES[sys.argv[1]])
    else:
        main()
