"""Heads that several stages share: published speed-ups, and speed-ups of plans on described hardware.

The paper (arXiv 2411.05288, table 5) divides the vocabulary over all ranks of a 1F1B pipeline, with separate passes
between broadcasts and all-reduces. Plans divide it into units that stages own like all others
(`penstock.core.model.DividedModel`). Both are compared with the best distribution of layers for an undivided head: the
paper's measurement, and a plan with ``headParts: 1``. Only ratios are compared, since the paper used another trainer.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.devices import cluster_of, device_kind
from penstock.core.job import DataSpec, Device, JobSpec, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.layout import Precision
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.planner.decide import decide
from penstock.planner.problem import problem_from_cluster

NUM_MICROBATCHES = 128
MEMORY = 75 * 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedHead:
    """One setting. Speed-ups of a shared head over the best cut into whole layers, published and planned, and over a
    plan with an undivided head.
    """

    name: str
    published: float
    planned: float
    over_whole_head: float
    parts: int
    schedule: str


def heads(folder: Path, schedule: str | None = None, most_gpus: int = 32) -> Iterator[SharedHead]:
    """Plan the settings with up to ``most_gpus`` GPUs, under ``schedule`` or the best schedule of each plan. Yields
    nothing if the folder has no such file.
    """
    if not (folder / "shared_heads.csv").exists():
        return
    with (folder / "shared_heads.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if int(row["num_gpus"]) <= most_gpus:
            yield shared_head(row, schedule)


def shared_head(row: Mapping[str, str], schedule: str | None) -> SharedHead:
    """Plan a setting."""
    free, whole = planned(row, schedule=schedule), planned(row, schedule=schedule, head_parts=1)
    moved = max(float(row["mfu_plain"]), float(row["mfu_layers_moved"]))
    by_layers = min(step_seconds(planned(row, schedule="1f1b", stages=stages)) for stages in layer_cuts(row))
    return SharedHead(
        name=f"{row['num_gpus']} GPUs, {int(row['sequence_length']):,} tokens, vocabulary {int(row['vocab']) // 1000}k",
        published=float(row["mfu_shared"]) / moved,
        planned=by_layers / step_seconds(free),
        over_whole_head=step_seconds(whole) / step_seconds(free),
        parts=free.head_parts,
        schedule=free.schedule.generator,
    )


def layer_cuts(row: Mapping[str, str]) -> Iterator[tuple[float, ...]]:
    """Whole layers per stage: fewer in the last stage, which has the head, and the others as even as possible."""
    layers, ranks = int(row["layers"]), int(row["num_gpus"])
    for last in range(layers // ranks + 1):
        num_layers, more = divmod(layers - last, ranks - 1)
        yield (*[num_layers + 1.0] * more, *[float(num_layers)] * (ranks - 1 - more), float(last))


def step_seconds(plan: Plan) -> float:
    """Predicted seconds of a step."""
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def planned(row: Mapping[str, str], **pinned: Any) -> Plan:
    """The plan of one pipeline with one sequence per micro-batch, as in the paper, and with these pins."""
    ranks, length = int(row["num_gpus"]), int(row["sequence_length"])
    spec = JobSpec(
        model=ModelSpec(
            family=Family.GPT2,
            layers=int(row["layers"]),
            hidden=int(row["hidden"]),
            heads=int(row["heads"]),
            vocab=int(row["vocab"]),
            positions=length,
        ),
        data=DataSpec(source="", sequence_length=length),
        training=TrainingSpec(global_batch=NUM_MICROBATCHES, steps=1, precision=Precision.BF16),
        resources=ResourcesSpec(device=Device.CUDA, ranks=ranks, memory_per_rank=MEMORY),
        parallelism=ParallelismSpec(dp=1, tp=1, pp=ranks, micro_batch=1, slices=1, **pinned),
    )
    return decide(problem_from_cluster(spec, cluster_of(device_kind("a100-80"), -(-ranks // 8)))).plan


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of Markdown."""
    lines = ["", title, "", "| setting | published | planned | over a whole head | parts | schedule |"]
    lines.append("|---|---:|---:|---:|---:|---|")
    lines += [
        f"| {row['name']} | {row['published']:.3f} | {row['planned']:.3f} | {row['over_whole_head']:.3f} "
        f"| {row['parts']} | {row['schedule']} |"
        for row in rows
    ]
    return lines


def measure(folder: Path) -> dict[str, Any]:
    """Results under 1F1B, as in the paper, and under any schedule, as data."""
    return {
        "heads_1f1b": [dataclasses.asdict(row) for row in heads(folder, "1f1b")],
        "heads": [dataclasses.asdict(row) for row in heads(folder, most_gpus=8)],
    }


def markdown(results: Mapping[str, Any]) -> list[str]:
    """Both tables as Markdown."""
    title = "A shared head, times as fast as the best cut of whole layers under 1F1B (arXiv 2411.05288, table 5)"
    return [
        *table(f"{title}, itself under 1F1B:", results["heads_1f1b"]),
        *table(f"{title}, itself with any schedule:", results["heads"]),
    ]
