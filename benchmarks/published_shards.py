"""Published figures of 8 shards with and without sequence parallelism (arXiv 2205.05198), and their simulation on A100.

Table 4 times a layer without recomputation. Table 5 times whole steps of four models: the paper's baseline, with full
recomputation and whole hidden states, and its proposal (sections 4.2.2 and 5), which divides hidden states by tokens
and recomputes only the attention core. Models and degrees are those of table 3. 175B and 530B have three stages per
rank. The paper's attention core is not what `recompute: selective` recomputes, so the simulator gets the paper's
operations directly.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.published_rows import MEGATRON, Row, a100_cluster, even_stages, job, rows_of, summary

from penstock.core.layout import Operation
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.remaking import uniform_remakes
from penstock.core.schedule import Kind
from penstock.planner.candidate import Candidate
from penstock.planner.evaluate import Simulated
from penstock.planner.pins import pinned_stages
from penstock.planner.problem import Mesh, Problem, problem_from_cluster
from penstock.planner.work import Work

SHARDED = dataclasses.replace(MEGATRON, overlapped_collectives=True)
"""The same with the backward's collectives next to its products, which the paper on sequence parallelism has (section
6.2)."""

RECOMPUTED = {"attention": (Operation.ATTEND,), "full": tuple(Operation)}
"""Operations that layers recompute, by their name in the table."""


def step_rows(folder: Path) -> Iterator[Row]:
    """Rows of whole steps; none if the folder has no such file."""
    path = folder / "a100_shards.csv"
    return map(step_row, rows_of(path) if path.exists() else ())


def step_row(row: Mapping[str, str]) -> Row:
    """Simulate a row."""
    tp, pp, per_rank = (int(row[name]) for name in ("tp", "pp", "stages_per_rank"))
    microbatch, count, length = (int(row[name]) for name in ("microbatch", "num_microbatches", "sequence_length"))
    problem = problem_of(row, pp, microbatch * count)
    model = problem.model
    stages = pinned_stages(even_stages(model.layers, pp * per_rank), model.num_units)
    candidate = Candidate(
        mesh=Mesh(dp=1, tp=tp, pp=pp, microbatch=microbatch, num_microbatches=count),
        stages=stages,
        slices=(length,),
        schedule="interleaved-1f1b" if per_rank > 1 else "1f1b",
        recompute=tuple(uniform_remakes(model, stage, RECOMPUTED[row["recompute"]]) for stage in stages),
    )
    evaluation = Simulated(problem).evaluate(candidate, in_full=True)
    return Row(
        paper="sequence parallelism",
        name=f"{row['name']}, {shards_of(row)}, pp {pp}, {row['recompute']} recomputed",
        published=float(row["step_seconds"]),
        predicted=evaluation.step_ns / 1e9,
        predicted_gib=max(evaluation.peak_bytes) / 2**30,
    )


def problem_of(row: Mapping[str, str], pp: int, batch: int) -> Problem:
    """The row's model on ``pp`` ranks of its shards."""
    tp, length = int(row["tp"]), int(row["sequence_length"])
    sizes = {name: int(row[name]) for name in ("layers", "hidden", "heads", "vocab")}
    model = ModelSpec(family=Family.GPT2, positions=length, **sizes)
    wanted = job(model, length, batch, tp * pp, 80 * 10**9, dp=1, tp=tp, pp=pp)
    pinned = dataclasses.replace(wanted.parallelism, sequence_parallel=row["sequence_parallel"] == "yes")
    return problem_from_cluster(
        dataclasses.replace(wanted, parallelism=pinned), a100_cluster(-(-tp * pp // 8), SHARDED)
    )


def shards_of(row: Mapping[str, str]) -> str:
    """Description of a row's shards."""
    return f"tp {row['tp']}, {'by tokens' if row['sequence_parallel'] == 'yes' else 'whole'}"


def layer_rows(folder: Path) -> Iterator[Row]:
    """F and B of one layer on the tensor-parallel A100s of a node."""
    for row in rows_of(folder / "a100_layers.csv"):
        batch = int(row["microbatch"])
        cost = problem_of(row, 1, batch).cost_of(int(row["tp"]))
        work = Work.of(batch, int(row["sequence_length"]), 0)
        for passes, published in (((Kind.F,), "forward_ms"), ((Kind.I, Kind.W), "backward_ms")):
            units = itertools.product((UnitKind.ATTENTION, UnitKind.MLP), passes)
            yield Row(
                paper="sequence parallelism",
                name=f"{row['name']} layer, {shards_of(row)}, {published.removesuffix('_ms')}",
                published=float(row[published]) / 1e3,
                predicted=sum(float(cost.unit_seconds(unit, kind, work)) for unit, kind in units),
            )


def measure(folder: Path) -> dict[str, Any]:
    """Both tables, as data."""
    layers, steps = list(layer_rows(folder)), list(step_rows(folder))
    return {
        "layers": [{**dataclasses.asdict(row), "error": row.error} for row in layers],
        "layers_summary": summary(layers),
        "sharded_steps": [{**dataclasses.asdict(row), "error": row.error} for row in steps],
        "sharded_steps_summary": summary(steps) if steps else None,
    }


def markdown(results: Mapping[str, Any]) -> list[str]:
    """Lines of both tables."""
    lines = ["One layer, in milliseconds (arXiv 2205.05198, table 4):", ""]
    lines += ["| pass | published | simulated | off |", "|---|---:|---:|---:|"]
    lines += [
        f"| {row['name']} | {1e3 * row['published']:.1f} | {1e3 * row['predicted']:.2f} | {row['error']:+.1%} |"
        for row in results["layers"]
    ]
    if results["sharded_steps"]:
        lines += ["", "Whole steps (the same paper, table 5):", ""]
        lines += ["| step | published s | simulated s | off | simulated GiB |", "|---|---:|---:|---:|---:|"]
        lines += [
            f"| {row['name']} | {row['published']:.2f} | {row['predicted']:.2f} | {row['error']:+.1%} "
            f"| {row['predicted_gib']:.1f} |"
            for row in results["sharded_steps"]
        ]
    return lines
