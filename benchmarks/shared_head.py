"""Compares a head that two CPU ranks share with an undivided one: measured and predicted step time.

    ./dev bench shared_head

The demonstration's job with a model whose head is 70 % of the work, on a pipeline of two ranks. It is planned with only
the pipeline pinned, and with ``headParts: 1`` as well. An undivided head keeps one rank busy for 70 % of the work. By
FLOPs a shared one makes the step at most 1.4 times as fast. Both plans run in turn, a block of steps at a time, as in
`benchmarks.prediction`.
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.prediction import (
    COMPARED,
    STEPS_PER_PLAN,
    Bench,
    Contender,
    compared,
    compared_line,
    described,
    example_job,
)
from benchmarks.quiet import MOST_DRIFT
from benchmarks.support import write_results

from penstock.core.job import ParallelismSpec, PipelineJob
from penstock.core.model import ModelSpec, UnitKind, linear_flops_per_token, step_flops

LAYERS, WIDTH, SHARE = 4, 256, 0.7
SHARED, WHOLE = "shared head", "whole head"
PLANS = {SHARED: ParallelismSpec(pp=2), WHOLE: ParallelismSpec(pp=2, head_parts=1)}


def head_share(model: ModelSpec, length: int) -> float:
    """Share of the head in the model's FLOPs."""
    return 3 * length * linear_flops_per_token(model, UnitKind.HEAD) / step_flops(model, 1, length)


def job() -> PipelineJob:
    """The demonstration's job with few layers, and a vocabulary with which the head is ``SHARE`` of the work."""
    example = example_job()
    length = example.spec.data.sequence_length
    model = replace(example.spec.model, layers=LAYERS, hidden=WIDTH, ffn_hidden=0)
    vocab = 256
    while head_share(model.with_vocab(vocab), length) < SHARE:
        vocab += 256
    return example.with_spec(model=model.with_vocab(vocab))


def measured(folder: Path) -> dict[str, Any]:
    """Steps of both plans."""
    bench = Bench(folder, job())
    bench.measure()
    contenders = bench.pinned(PLANS)
    rejected = bench.fill(contenders)
    bench.predict(contenders)
    bench.weigh(contenders)
    plan = contenders[0].plan
    share = head_share(plan.model.whole, plan.sequence_length)
    rows = {contender.name: _row(contender) for contender in contenders}
    return {"model": described(plan), "head_share": share, "rejected": rejected, "rows": rows}


def _row(contender: Contender) -> dict[str, Any]:
    plan = contender.plan
    text = f"{plan.microbatches_text}, {len(plan.slices)} slices, {plan.schedule.generator}{plan.head_text}"
    return compared(contender, text)


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    rows = results["rows"]
    yield from (
        "# A shared head against a whole one",
        "",
        f"{results['model']}, the head {results['head_share']:.0%} of the FLOPs; 2 CPU ranks, one thread each; "
        f"{results['machine']}. The medians of at least {STEPS_PER_PLAN} steps of each plan; "
        f"{results['rejected']} more did not count, because a reference kernel took over {MOST_DRIFT:.0%} more or less "
        "time after such a step than before it.",
        "",
        "| pipeline of 2 | plan | predicted s | measured s | error | predicted MiB | measured MiB |",
        "|---|---|---:|---:|---:|---:|---:|",
    )
    yield from itertools.starmap(compared_line, rows.items())
    faster = {what: rows[WHOLE][f"{what}_seconds"] / rows[SHARED][f"{what}_seconds"] for what in COMPARED}
    yield from (
        "",
        f"The shared head is {faster['measured']:.2f} times as fast (target 1.25; 1.4 by FLOPs), predicted "
        f"{faster['predicted']:.2f} (target: steps within 6 %).",
    )


def main() -> int:
    """Measure, and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        write_results("shared_head", json.dumps(measured(Path(folder))), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
