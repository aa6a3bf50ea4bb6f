"""Bytes of arenas above the peak of live bytes, with whole slots and with slots in extents (ADR 0055).

    ./dev bench arenas

Plans of a 6B model on 16 described H100: six schedules, four and eight stages, two and four slices are pinned. Each
is laid out twice, with and without ``splitSlots``; all else is equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from statistics import mean
from typing import Any

from benchmarks.planning_speed import CASES
from benchmarks.support import write_results

from penstock.core.invariants import prove
from penstock.core.job import ParallelismSpec
from penstock.planner.compile import lowered
from penstock.planner.decide import decide
from penstock.planner.problem import problem_from_cluster

CASE = CASES["GPT 6B, 16 devices"]
SCHEDULES = ("1f1b", "zb", "zbv", "v-half", "interleaved-1f1b", "interleaved-zb")
STAGES, SLICES = (4, 8), (2, 4)


def measurements() -> Iterator[dict[str, Any]]:
    """For every plan the arenas of its ranks over their peaks of live bytes, both ways."""
    for schedule, pp, slices in product(SCHEDULES, STAGES, SLICES):
        pinned = replace(CASE.job, parallelism=ParallelismSpec(schedule=schedule, pp=pp, slices=slices))
        plan = decide(problem_from_cluster(pinned, CASE.cluster)).plan
        ratios = {}
        for name, split in (("whole", False), ("extents", True)):
            proof = prove(lowered(replace(plan, split_slots=split, program_digest="")))
            pairs = zip(proof.arena_bytes, proof.live_bytes, strict=True)
            ratios[name] = [arena_bytes / live_bytes for arena_bytes, live_bytes in pairs]
        yield {"schedule": schedule, "pp": pp, "slices": slices, **ratios}


def markdown(results: dict[str, Any]) -> str:
    """The table as Markdown."""
    rows = results["rows"]
    ranks = {name: [ratio for row in rows for ratio in row[name]] for name in ("whole", "extents")}
    lines = [
        f"| {row['schedule']} | {row['pp']} | {row['slices']} | {_percent(mean(row['whole']))} "
        f"| {_percent(max(row['whole']))} | {_percent(mean(row['extents']))} | {_percent(max(row['extents']))} |"
        for row in rows
    ]
    totals = [_percent(summary(ranks[name])) for name in ranks for summary in (mean, max)]
    return "\n".join(
        [
            "# Arenas above the peak of live bytes",
            "",
            f"{CASE.name}, described H100 of 80 GB; mean and worst rank of each plan.",
            "",
            "| schedule | ranks | slices | whole: mean | worst | extents: mean | worst |",
            "|---|---:|---:|---:|---:|---:|---:|",
            *lines,
            f"| all {len(ranks['whole'])} ranks | | | {' | '.join(totals)} |",
            "",
        ]
    )


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):.1f} %"


def main() -> None:
    """Measure and write both files."""
    write_results("arenas", json.dumps({"rows": list(measurements())}), markdown)


if __name__ == "__main__":
    main()
