"""Braided schedules compared with the best plan without pairs, at 8 shards per rank, and rehearsed on real ranks.

    ./dev bench braided

The first table is simulated. A model of the size of those in arXiv 2510.27257 is planned on described nodes of H100 and
A100 with 80 GB: once with each schedule that the planner compares without pairs, and once freely. The degrees of
parallelism are pinned, and the planner chooses the rest. The second table has plans with pairs. Their devices are
described so that an action takes about 10 ms, a fifth of it for collectives. They are rehearsed (`penstock rehearse`)
with one process per rank of the pipeline, which acts for 8 shards. The latency of messages is measured on this machine,
as in `benchmarks.rehearsal`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.rehearsal import latency_on
from benchmarks.support import write_results

from penstock.cli.local.rehearsing import rehearsed
from penstock.core.cluster import ClusterSpec, DeviceSpec, LinkSpec
from penstock.core.devices import cluster_of, device_kind
from penstock.core.job import DataSpec, JobSpec, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.planner.decide import decide
from penstock.planner.problem import problem_from_cluster
from penstock.planner.schedules.braided import BRAIDED

TP = 8
PLAIN = ("1f1b", "zb-h1", "zb", "zbv", "interleaved-zb")
"""Schedules that the planner compares without pairs."""

MODEL = ModelSpec(
    family=Family.LLAMA, layers=30, hidden=5120, heads=40, kv_heads=8, ffn_hidden=13824, vocab=151936, positions=8192
)
"""12 billion parameters."""

SMALL = ModelSpec(family=Family.LLAMA, layers=16, hidden=128, heads=8, ffn_hidden=512, vocab=128)
SMALL_TOKENS = 256
SMALL_DEVICE = DeviceSpec(name="slow", peak_flops=1.2e10, memory_bytes=80 * 2**30, efficiency=((1, 0.5), (4096, 0.5)))
SMALL_LINK = LinkSpec(latency_seconds=20e-6, bytes_per_second=0.25e9)

CASES = [(device, pp, 128) for device in ("h100", "a100-80") for pp in (2, 4)]
REHEARSED = [(4, 12), (8, 20)]
"""Ranks and micro-batches."""

VISITS = 3


def job(model: ModelSpec, length: int, sequences: int, pp: int, **pins: Any) -> JobSpec:
    """One replica of ``pp`` ranks of 8 shards."""
    return JobSpec(
        model=model,
        data=DataSpec(source="corpus", sequence_length=length),
        training=TrainingSpec(global_batch=sequences, steps=1, precision=Precision.BF16),
        resources=ResourcesSpec(ranks=TP * pp, memory_per_rank=80 * 2**30),
        parallelism=ParallelismSpec(dp=1, tp=TP, pp=pp, **pins),
    )


def seconds(plan: Plan) -> float:
    """Predicted seconds of a step."""
    assert plan.prediction is not None, "a plan that was decided is predicted"
    return plan.prediction.step_seconds


def compared(device: str, pp: int, sequences: int) -> dict[str, Any]:
    """Compare the best plan with the best one without pairs."""
    cluster = cluster_of(device_kind(device), pp)
    best = decide(problem_from_cluster(job(MODEL, 6144, sequences, pp), cluster)).plan
    plans = [
        decide(problem_from_cluster(job(MODEL, 6144, sequences, pp, schedule=name), cluster)).plan for name in PLAIN
    ]
    plain = min(plans, key=seconds)
    return {
        "device": device,
        "pp": pp,
        "sequences": sequences,
        "best": _described(best),
        "plain": _described(plain),
    }


def _described(plan: Plan) -> dict[str, Any]:
    assert plan.prediction is not None, "a plan that was decided is predicted"
    return {
        "schedule": plan.schedule.generator,
        "microbatch": plan.microbatch,
        "slices": len(plan.slices),
        "seconds": seconds(plan),
        "gib": max(plan.prediction.peak_bytes) / 2**30,
    }


def rehearsal(pp: int, sequences: int, latency_seconds: float) -> dict[str, Any]:
    """Simulate and rehearse a step of a braided plan."""
    cluster = ClusterSpec(
        name="slow",
        device=SMALL_DEVICE,
        num_nodes=pp,
        devices_per_node=TP,
        intra_node=SMALL_LINK,
        inter_node=LinkSpec(latency_seconds=latency_seconds, bytes_per_second=10e9),
    )
    spec = job(SMALL, SMALL_TOKENS, sequences, pp, micro_batch=1, slices=1, schedule=BRAIDED)
    plan = decide(problem_from_cluster(spec, cluster)).plan
    apart = decide(problem_from_cluster(dataclasses.replace(spec, parallelism=_plain(spec.parallelism)), cluster)).plan
    steps = [rehearsed(plan, cluster).step_ns / 1e9 for _ in range(VISITS)]
    return {
        "pp": pp,
        "sequences": sequences,
        "serial_seconds": seconds(apart),
        "simulated_seconds": seconds(plan),
        "rehearsed_seconds": steps,
    }


def _plain(pins: ParallelismSpec) -> ParallelismSpec:
    return dataclasses.replace(pins, schedule="eager-1f1b")


def main() -> int:
    """Plan, rehearse, and write both tables."""
    latency = latency_on(8)
    results = {
        "cases": [compared(*case) for case in CASES],
        "rehearsed": [rehearsal(pp, sequences, latency) for pp, sequences in REHEARSED],
    }
    write_results("braided", json.dumps(results), table)
    return 0


def table(results: dict[str, Any]) -> str:
    """Both tables as Markdown."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    yield from ("# Braided against the best without pairs", "", f"{results['machine']}. tp {TP}, dp 1, simulated.", "")
    yield "| device | pp | sequences | best | s | GiB | best without | s | GiB | faster |"
    yield "|---|--:|--:|---|--:|--:|---|--:|--:|--:|"
    for case in results["cases"]:
        best, plain = case["best"], case["plain"]
        gain = plain["seconds"] / best["seconds"] - 1
        cells = [
            *(case["device"], case["pp"], case["sequences"]),
            *(_name(best), f"{best['seconds']:.3f}", f"{best['gib']:.1f}"),
            *(_name(plain), f"{plain['seconds']:.3f}", f"{plain['gib']:.1f}", f"{gain:+.1%}"),
        ]
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield from ("", "# Braided, rehearsed", "")
    yield "| ranks | micro-batches | serial s | simulated s | rehearsed s | error |"
    yield "|--:|--:|--:|--:|--:|--:|"
    for case in results["rehearsed"]:
        steps = case["rehearsed_seconds"]
        error = case["simulated_seconds"] / median(steps) - 1
        cells = [
            *(case["pp"], case["sequences"], f"{case['serial_seconds']:.3f}", f"{case['simulated_seconds']:.3f}"),
            *(f"{median(steps):.3f}", f"{error:+.1%}"),
        ]
        yield "| " + " | ".join(map(str, cells)) + " |"


def _name(plan: dict[str, Any]) -> str:
    return f"{plan['schedule']}, micro-batches of {plan['microbatch']}, slices {plan['slices']}"


if __name__ == "__main__":
    raise SystemExit(main())
