"""Predicted and measured cost of recomputation, for a job on two CPU ranks whose activations do not fit.

    ./dev bench tight_memory

The demonstration's job with few long sequences, so that activations are most of the memory. It is planned without a
limit, and with 60 % of the least memory of any plan without recomputation: once freely, and once with
``recompute: full`` pinned, which recomputes every layer. The plans run in turn, a block of steps at a time, as in
`benchmarks.prediction`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.prediction import (
    FIRST_PROFILES,
    Bench,
    Contender,
    compared,
    compared_line,
    described,
    example_job,
)
from benchmarks.quiet import MOST_DRIFT
from benchmarks.support import write_results

from penstock.core.errors import UserError
from penstock.core.job import ParallelismSpec, PipelineJob
from penstock.core.profile import Profile
from penstock.core.remaking import Recompute
from penstock.core.units import MEBIBYTE
from penstock.planner.decide import decide
from penstock.planner.measured import problem_from_profile

LAYERS, WIDTH, LENGTH, SEQUENCES = 24, 256, 4096, 2
SHARE, STEPS = 0.6, 10
ROOMY, TIGHT, FULL = "unlimited", "limited", "limited, full recomputation"


def job() -> PipelineJob:
    """The demonstration's job with longer sequences and a narrower model."""
    example = example_job()
    model = dataclasses.replace(example.spec.model, layers=LAYERS, hidden=WIDTH, ffn_hidden=0, positions=LENGTH)
    data = dataclasses.replace(example.spec.data, sequence_length=LENGTH)
    training = dataclasses.replace(example.spec.training, global_batch=SEQUENCES)
    return example.with_spec(model=model, data=data, training=training)


def limited(of: PipelineJob, num_bytes: int) -> PipelineJob:
    """The job with this much memory for a rank."""
    return of.with_spec(resources=dataclasses.replace(of.spec.resources, memory_per_rank=num_bytes))


def least_bytes(of: PipelineJob, profile: Profile) -> int:
    """Least limit, to 1 %, for which there is a plan without recomputation."""
    kept = of.with_spec(parallelism=ParallelismSpec(recompute=Recompute.NONE))
    low, high = 1, of.spec.resources.memory_per_rank
    while high - low > high // 100:
        middle = (low + high) // 2
        try:
            decide(problem_from_profile(limited(kept, middle).spec, profile))
            high = middle
        except UserError:
            low = middle
    return high


PLANS = {ROOMY: ParallelismSpec(), TIGHT: ParallelismSpec(), FULL: ParallelismSpec(recompute=Recompute.FULL)}


def plans(bench: Bench, limit_bytes: int) -> list[Contender]:
    """Plans by the profiles so far. All but the first respect the limit."""
    contenders = []
    for name, pins in PLANS.items():
        wanted = bench.job.with_spec(parallelism=pins)
        wanted = wanted if name == ROOMY else limited(wanted, limit_bytes)
        plan = decide(problem_from_profile(wanted.spec, bench.profile)).plan
        assert plan.prediction is not None
        contenders.append(Contender(name, plan, plan.prediction))
    return contenders


def measured(folder: Path) -> dict[str, Any]:
    """Steps and memory of all plans."""
    bench = Bench(folder, job())
    for _ in range(FIRST_PROFILES):
        bench.measure()
    least = least_bytes(bench.job, bench.profile)
    limit = int(SHARE * least) // MEBIBYTE * MEBIBYTE
    contenders = plans(bench, limit)
    rejected = bench.fill(contenders, STEPS)
    bench.weigh(contenders)
    return {
        "model": described(contenders[0].plan),
        "least_bytes": least,
        "limit_bytes": limit,
        "constant_bytes": bench.profile.memory.constant_bytes,
        "rejected": rejected,
        "rows": {contender.name: _row(contender) for contender in contenders},
    }


def _row(contender: Contender) -> dict[str, Any]:
    plan = contender.plan
    mesh = f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp}"
    text = f"{mesh}, {plan.microbatches_text}, {len(plan.slices)} slices, {plan.schedule.generator}"
    recompute = [[remake.to_manifest() for remake in stage] for stage in plan.recompute]
    return {**compared(contender, text), "recompute": recompute}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    rows = results["rows"]
    least, limit = (results[name] / MEBIBYTE for name in ("least_bytes", "limit_bytes"))
    yield from (
        "# Memory for 60 % of a step",
        "",
        f"{results['model']}; 2 CPU ranks, one thread each; {results['machine']}. Without recomputation a rank needs "
        f"{least:.0f} MiB at least; the limit is {limit:.0f} MiB. The medians of at least {STEPS} steps of each plan; "
        f"{results['rejected']} more did not count, because a reference kernel took over {MOST_DRIFT:.0%} more or less "
        "time after such a step than before it.",
        "",
        "| memory | plan | predicted s | measured s | error | predicted MiB | measured MiB |",
        "|---|---|---:|---:|---:|---:|---:|",
    )
    yield from itertools.starmap(compared_line, rows.items())
    seconds = {name: row["measured_seconds"] for name, row in rows.items()}
    yield from (
        "",
        f"With the limit a step takes {seconds[TIGHT] / seconds[ROOMY] - 1:+.1%} (target at most +12 %); full "
        f"recomputation takes {seconds[FULL] / seconds[TIGHT]:.2f} times as long (target 1.15).",
    )


def main() -> int:
    """Measure, and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        write_results("tight_memory", json.dumps(measured(Path(folder))), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
