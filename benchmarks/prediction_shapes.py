"""Compares predicted and measured step time and memory with tensor parallelism and replicas, for several model shapes.

    ./dev bench prediction_shapes

It works like `benchmarks.prediction`. Each shape is measured separately, with its own job and a profile before and
after every block of steps.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.prediction import Bench, Contender, described, example_job
from benchmarks.quiet import MOST_DRIFT
from benchmarks.support import write_results

from penstock.core.job import ParallelismSpec, PipelineJob
from penstock.core.model import Family

STEPS, MOST_ROUNDS = 10, 8

SHARDS = ParallelismSpec(tp=2)
REPLICAS = ParallelismSpec(dp=2, tp=1, pp=1)
STAGES = ParallelismSpec(tp=1, pp=2, slices=4, schedule="1f1b")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, its batch, and the plans to measure."""

    model: Mapping[str, Any]
    sequence_length: int
    global_batch: int
    plans: Mapping[str, ParallelismSpec] = field(default_factory=lambda: {"tp 2": SHARDS, "dp 2": REPLICAS})

    @property
    def job(self) -> PipelineJob:
        """The demonstration's job in this shape. Its profile covers all degrees of tensor parallelism."""
        job = example_job()
        is_divided = all(pins.is_sequence_parallel for pins in self.plans.values())
        return replace(
            job,
            spec=replace(
                job.spec,
                model=replace(job.spec.model, **self.model),
                data=replace(job.spec.data, sequence_length=self.sequence_length),
                training=replace(job.spec.training, global_batch=self.global_batch),
                parallelism=ParallelismSpec(sequence_parallel=None if is_divided else False),
            ),
        )


WITHOUT = replace(SHARDS, sequence_parallel=False)

SHAPES = {
    "width 256": Shape(model={}, sequence_length=1024, global_batch=2, plans={"tp 2": SHARDS, "pp 2": STAGES}),
    "width 512": Shape(model={"hidden": 512, "kv_heads": 8, "ffn_hidden": 0}, sequence_length=1024, global_batch=4),
    "short sequences": Shape(model={"layers": 6, "hidden": 512, "ffn_hidden": 0}, sequence_length=128, global_batch=16),
    "long sequences": Shape(model={"layers": 4}, sequence_length=4096, global_batch=1, plans={"tp 2": SHARDS}),
    "gpt2": Shape(
        model={"family": Family.GPT2, "layers": 6, "hidden": 384, "heads": 6, "kv_heads": 0, "ffn_hidden": 0},
        sequence_length=512,
        global_batch=4,
    ),
    "whole hidden states": Shape(
        model={"layers": 4, "hidden": 384, "heads": 6, "kv_heads": 0, "ffn_hidden": 0},
        sequence_length=512,
        global_batch=4,
        plans={"tp 2": WITHOUT},
    ),
}


def measured(name: str, shape: Shape, folder: Path) -> dict[str, Any]:
    """Predictions and measurements of a shape's plans."""
    sys.stderr.write(f"{name}:\n")
    bench = Bench(folder, shape.job)
    bench.measure()
    contenders = bench.pinned(shape.plans)
    rejected = bench.fill(contenders, STEPS, MOST_ROUNDS)
    bench.predict(contenders)
    bench.weigh(contenders)
    rows = [_row(plan_name, contender) for plan_name, contender in zip(shape.plans, contenders, strict=True)]
    return {"name": name, "model": described(contenders[0].plan), "rejected": rejected, "rows": rows}


def _row(name: str, contender: Contender) -> dict[str, Any]:
    prediction = contender.prediction
    pairs = zip(prediction.peak_bytes, contender.peak_bytes, strict=True)
    furthest = max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))
    return {
        "plan": name,
        "predicted_seconds": prediction.step_seconds,
        "measured_seconds": contender.measured_seconds,
        "step_seconds": contender.step_seconds,
        "predicted_bytes": furthest[0],
        "measured_bytes": furthest[1],
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    shapes = results["shapes"]
    yield from (
        "# Predicted against measured, by shape",
        "",
        f"2 CPU ranks, one thread each; {results['machine']}. The medians of the profiles before and after every block "
        f"of steps, and of at least {STEPS} steps of each plan; {sum(shape['rejected'] for shape in shapes)} more did "
        f"not count, because a reference kernel took over {MOST_DRIFT:.0%} more or less time after such a step than "
        "before it.",
        "",
        "| model | plan | predicted s | measured s | error | predicted MiB | measured MiB | error |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    )
    errors = []
    for shape in shapes:
        for row in shape["rows"]:
            seconds, num_bytes = ((row[f"predicted_{what}"], row[f"measured_{what}"]) for what in ("seconds", "bytes"))
            errors.append([predicted / measured_value - 1 for predicted, measured_value in (seconds, num_bytes)])
            cells = (
                f"{shape['name']}: {shape['model']}",
                row["plan"],
                *(f"{value:.3f}" for value in seconds),
                f"{errors[-1][0]:+.1%}",
                *(f"{value / 2**20:.0f}" for value in num_bytes),
                f"{errors[-1][1]:+.1%}",
            )
            yield f"| {' | '.join(cells)} |"
    times, sizes = zip(*errors, strict=True)
    yield from (
        "",
        f"Step time between {min(times):+.1%} and {max(times):+.1%} (target 6 %), on average "
        f"{statistics.mean(map(abs, times)):.1%} off. Memory between {min(sizes):+.1%} and {max(sizes):+.1%} "
        "(target 2 %).",
    )


def main() -> int:
    """Measure every shape, and write the table."""
    shapes = []
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            shapes.append(measured(name, shape, Path(folder)))
    write_results("prediction_shapes", json.dumps({"shapes": shapes}), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
