"""A job whose activations do not fit, on two CPU ranks: what recomputation costs, predicted and measured.

    ./dev bench tight_memory

The demonstration's job with few long sequences, so that activations are most of the memory. Planned without a limit,
then with 60 % of the least memory that any plan without recomputation needs: by the planner's own choice, and with
``recompute: full`` pinned, which makes every layer again. All are visited in turn, a block of steps at a time, as in
`benchmarks.prediction`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.prediction import Bench, Contender, described, example_job
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
    """The demonstration's, longer and narrower."""
    example = example_job()
    model = dataclasses.replace(example.spec.model, layers=LAYERS, hidden=WIDTH, ffn_hidden=0, positions=LENGTH)
    data = dataclasses.replace(example.spec.data, sequence_length=LENGTH)
    training = dataclasses.replace(example.spec.training, global_batch=SEQUENCES)
    return example.with_spec(model=model, data=data, training=training)


def limited(of: PipelineJob, num_bytes: int) -> PipelineJob:
    """The job with this much memory for a rank."""
    return of.with_spec(resources=dataclasses.replace(of.spec.resources, memory_per_rank=num_bytes))


def least_bytes(of: PipelineJob, profile: Profile) -> int:
    """The least limit, to a hundredth, for which there is a plan without recomputation."""
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


class TightBench(Bench):
    """One whose plans have limits of their own."""

    def __init__(self, root: Path, of: PipelineJob) -> None:
        super().__init__(root, of)
        self.limits: Mapping[str, int] = {}

    def plans(self) -> list[Contender]:
        """By the profiles so far."""
        found = []
        for name, pins in PLANS.items():
            wanted = limited(self.job.with_spec(parallelism=pins), self.limits[name])
            plan = decide(problem_from_profile(wanted.spec, self.profile)).plan
            assert plan.prediction is not None
            found.append(Contender(name, plan, plan.prediction))
        return found


def measured(folder: Path) -> dict[str, Any]:
    """All plans' steps and memory."""
    bench = TightBench(folder, job())
    for _ in range(2):
        bench.measure()
    roomy = bench.job.spec.resources.memory_per_rank
    least = least_bytes(bench.job, bench.profile)
    limit = int(SHARE * least) // MEBIBYTE * MEBIBYTE
    bench.limits = {ROOMY: roomy, TIGHT: limit, FULL: limit}
    contenders = bench.plans()
    rejected = bench.fill(contenders, STEPS)
    bench.weigh(contenders)
    return {
        "model": described(contenders[0].plan),
        "least_bytes": least,
        "limit_bytes": limit,
        "constant_bytes": bench.profile.memory.constant_bytes,
        "rejected": rejected,
        "rows": {each.name: _row(each) for each in contenders},
    }


def _row(contender: Contender) -> dict[str, Any]:
    plan, prediction = contender.plan, contender.prediction
    return {
        "plan": f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp}, {plan.microbatches_text}, {len(plan.slices)} slices, "
        f"{plan.schedule.generator}",
        "recompute": [[each.to_manifest() for each in stage] for stage in plan.recompute],
        "predicted_seconds": prediction.step_seconds,
        "measured_seconds": contender.measured_seconds,
        "step_seconds": contender.step_seconds,
        "predicted_bytes": prediction.peak_bytes,
        "measured_bytes": contender.peak_bytes,
    }


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
        "time after their block than before it.",
        "",
        "| memory | plan | predicted s | measured s | error | predicted MiB | measured MiB |",
        "|---|---|---:|---:|---:|---:|---:|",
    )
    for name, row in rows.items():
        sizes = (" and ".join(f"{each / MEBIBYTE:.0f}" for each in row[f"{what}_bytes"]) for what in _WHAT)
        error = row["predicted_seconds"] / row["measured_seconds"] - 1
        times = f"{row['predicted_seconds']:.3f} | {row['measured_seconds']:.3f} | {error:+.1%}"
        yield f"| {name} | {row['plan']} | {times} | {' | '.join(sizes)} |"
    seconds = {name: row["measured_seconds"] for name, row in rows.items()}
    yield from (
        "",
        f"With the limit a step takes {seconds[TIGHT] / seconds[ROOMY] - 1:+.1%} (target at most +12 %); full "
        f"recomputation takes {seconds[FULL] / seconds[TIGHT]:.2f} times as long (target 1.15).",
    )


_WHAT = ("predicted", "measured")


def main() -> int:
    """Measure, and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        write_results("tight_memory", json.dumps(measured(Path(folder))), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
