"""Compares published training steps with their simulation on described hardware: time, memory, TeraPipe's speed-ups.

    ./dev bench published

Rows come from `benchmarks/data/published` or from the folder that is given: A100 steps without recomputation (arXiv
2401.10241) and with full recomputation (arXiv 2104.04473), layers and steps with and without sequence parallelism
(`benchmarks.published_shards`), TeraPipe's ten settings on V100 with its uniform sweep of setting 9 (arXiv 2102.07988),
and shared heads (`benchmarks.published_heads`). Each kind of device has one description (`penstock.core.devices`), and
so has each software stack, from the paper's text and its public code. No parameter is fitted to a row. Rows with large
errors are printed with the reason. Published memory is taken to be in GiB.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import published_heads, published_shards
from benchmarks.published_rows import MEGATRON, Row, a100_cluster, even_stages, job, rows_of, summary
from benchmarks.support import write_results

from penstock.core.cluster import AttentionKernel, ClusterSpec, Fusion, GradientType, LinkSpec, SoftwareSpec, Transfers
from penstock.core.devices import cluster_of, device_kind
from penstock.core.job import ParallelismSpec
from penstock.core.model import Family, ModelSpec
from penstock.core.remaking import Recompute
from penstock.planner.candidate import Candidate
from penstock.planner.evaluate import Simulated
from penstock.planner.judge import Evaluation
from penstock.planner.moves import with_h1
from penstock.planner.outlines import outlines
from penstock.planner.pins import pinned_stages
from penstock.planner.problem import Mesh, Problem, problem_from_cluster
from penstock.planner.recompute import pinned_remakes
from penstock.planner.schedules.registry import find
from penstock.planner.schedules.seeds import depths, usual_depth
from penstock.planner.stagecost import equal_slices

DATA = Path(__file__).parent / "data" / "published"
FIGURES = frozenset({2, 4, 7})
"""Settings of TeraPipe whose times were read from figures."""

COUNTED = (5, 8, 9, 10)
"""Settings of TeraPipe whose speed-up has to meet the bound."""

BAR = {"paper mean": 0.04, "paper worst": 0.09, "mean": 0.06, "worst": 0.15, "memory": 0.10, "speed-up": 0.12}

ZERO_BUBBLE = dataclasses.replace(MEGATRON, transfers=Transfers.OVERLAPPED)
"""The same with the authors' own runtime, which sends while it computes."""

POST_VALIDATED = dataclasses.replace(ZERO_BUBBLE, optimizer_barrier=False)
"""The same with optimizer post-validation."""

TERAPIPE = SoftwareSpec(
    attention=AttentionKernel.UNFUSED,
    fusion=Fusion.NONE,
    fused_gradients=False,
    gradient_type=GradientType.BF16,
    launch_seconds=10e-6,
    transfers=Transfers.BLOCKING,
)
"""TeraPipe's own trainer (github.com/zhuohan123/terapipe): PyTorch modules in fp16 without dropout, softmax in fp32,
gradients in fp16 added by a kernel of their own, broadcasts that both sides wait for; neither embedding nor head."""

REASONS = {
    1: "eight replicas and one card per node: in which order ranks are put on nodes is not said, and decides what "
    "reductions cost; here a stage's replicas are neighbours",
    3: "the step is too long by a third, the ratio right: with 72 micro-batches the transfers that both sides wait for "
    "are most of it, and NCCL overlaps them more than that",
    5: "as 3: too long by a sixth, the ratio right",
    6: "the published time with slices is an outlier: 7.1 s for a step whose busiest rank works for less than one",
}
"""Reasons for the errors of TeraPipe's settings, in speed-up or in time."""

SCHEDULE_STACKS = {
    "gpipe": MEGATRON,
    "1f1b": MEGATRON,
    "interleaved": MEGATRON,
    "zb-h1": ZERO_BUBBLE,
    "zb": ZERO_BUBBLE,
    "zbv": ZERO_BUBBLE,
}
SCHEDULE_NAMES = {"interleaved": "interleaved-1f1b"}

UNLIMITED = 2**49


def p3_cluster(num_nodes: int) -> ClusterSpec:
    """AWS p3.16xlarge: eight V100-16 with NVLink, one card of 25 Gb/s.

    Neighbouring stages of four devices meet at devices 3 and 4, which no NVLink joins (NVIDIA DGX-1 white paper,
    figure 4): PCIe 3 x16 through both processors, 12 GB/s at 0.75.
    """
    return dataclasses.replace(
        cluster_of(device_kind("v100-16"), num_nodes),
        nics_per_node=1,
        inter_node=LinkSpec(latency_seconds=30e-6, bytes_per_second=0.9 * 25e9 / 8),
        intra_node_peer=LinkSpec(latency_seconds=10e-6, bytes_per_second=0.75 * 12e9),
        software=TERAPIPE,
    )


def layers_per_stage(layers: int, num_stages: int) -> tuple[float, ...]:
    """As the zero-bubble authors balance stages: the first and the last have a layer less, for embedding and head.

    Where that does not come out even, as near to equal as whole layers allow.
    """
    per_stage, rest = divmod(layers + 2, num_stages)
    if rest or num_stages < 2:
        return even_stages(layers, num_stages)
    return (per_stage - 1.0, *[float(per_stage)] * (num_stages - 2), per_stage - 1.0)


ZB_2P = 1 + depths(8).index(2 * usual_depth(8))
"""Number of the `zb` variant with the activations of ZB-2p, twice those of 1F1B. Other variants hold fewer."""


def allowed_bytes(problem: Problem, candidate: Candidate) -> int:
    """Memory that the paper grants a schedule: ZB-V that of 1F1B, `zb` (ZB-2p) twice its activations, others all."""
    if candidate.schedule not in ("zb", "zbv"):
        return problem.memory_limit_bytes
    stages = pinned_stages(layers_per_stage(problem.model.layers, candidate.mesh.pp), problem.model.num_units)
    plain = Simulated(problem).evaluate(dataclasses.replace(candidate, stages=stages, schedule="1f1b"))
    times = 2 if candidate.schedule == "zb" else 1
    needed = (peak + (times - 1) * held for peak, held in zip(plain.peak_bytes, plain.slot_bytes, strict=True))
    return min(max(needed), problem.memory_limit_bytes)


def best_order(problem: Problem, candidate: Candidate) -> Evaluation:
    """The candidate with the fastest order of its schedule that fits, which is also the result of a search."""
    judge = Simulated(problem)
    quick = judge.evaluate(candidate, in_full=True)
    others = {with_h1(quick.candidate), judge.best_variant(quick.candidate)} - {quick.candidate}
    every = [quick, *(judge.evaluate(other, in_full=True) for other in others)]
    fitting = [evaluation for evaluation in every if max(evaluation.peak_bytes) <= problem.memory_limit_bytes]
    return min(fitting or every, key=lambda evaluation: evaluation.step_ns)


def a100_rows(folder: Path) -> Iterator[Row]:
    """Rows with no and with full recomputation, for the schedules that penstock has."""
    for row in rows_of(folder / "a100_steps.csv"):
        if row["recompute"] in set(Recompute) and row["schedule"] in SCHEDULE_STACKS:
            yield a100_row(row)


def a100_row(row: Mapping[str, str]) -> Row:
    """Simulate a row."""
    dp, tp, pp = (int(row[name]) for name in ("dp", "tp", "pp"))
    microbatch, count, length = (int(row[name]) for name in ("microbatch", "num_microbatches", "sequence_length"))
    schedule, layers = row["schedule"], int(row["layers"])
    model = ModelSpec(
        family=Family.GPT2,
        layers=layers,
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        vocab=-(-int(row["vocab"]) // (128 * tp)) * 128 * tp,
        positions=length,
    )
    schedule, again = SCHEDULE_NAMES.get(schedule, schedule), Recompute(row["recompute"])
    stages = layers_per_stage(layers, pp * find(schedule).stages_per_rank)
    software = POST_VALIDATED if "no optimizer barrier" in row["remark"] else SCHEDULE_STACKS[row["schedule"]]
    num_gpus = int(row["num_gpus"])
    pinned = {
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "micro_batch": microbatch,
        "slices": 1,
        "stages": stages,
        "recompute": again,
    }
    wanted = job(model, length, dp * microbatch * count, num_gpus, 80 * 10**9, **pinned, schedule=schedule)
    problem = problem_from_cluster(wanted, a100_cluster(-(-num_gpus // 8), software))
    candidate = Candidate(
        mesh=Mesh(dp=dp, tp=tp, pp=pp, microbatch=microbatch, num_microbatches=count),
        stages=pinned_stages(stages, model.num_units),
        slices=(length,),
        schedule=schedule,
        recompute=pinned_remakes(problem, pinned_stages(stages, model.num_units)),
    )
    problem = dataclasses.replace(problem, memory_limit_bytes=allowed_bytes(problem, candidate))
    if schedule == "zb":
        candidate = dataclasses.replace(candidate, variant=ZB_2P)
    evaluation = Simulated(problem).evaluate(candidate, in_full=True)
    remark = f", {row['remark']}" if row["remark"] else ""
    return Row(
        paper=row["name"].split()[0],
        name=f"{row['name']} p{pp} m{count} b{microbatch} {schedule}{', recomputes' * bool(again.operations)}{remark}",
        published=float(row["step_seconds"]),
        predicted=evaluation.step_ns / 1e9,
        published_gib=float(row["peak_gb"]) if row["peak_gb"] else None,
        predicted_gib=max(evaluation.peak_bytes) / 2**30,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting of TeraPipe: published and predicted seconds, and slicings."""

    number: int
    model: str
    published: tuple[float, float]
    predicted: tuple[float, float]
    published_slices: str
    slices: tuple[int, ...]
    rivals: Mapping[str, float]

    @property
    def speedup_error(self) -> float:
        """Signed relative error of the predicted speed-up."""
        (plain, sliced), (known_plain, known_sliced) = self.predicted, self.published
        return (plain / sliced) / (known_plain / known_sliced) - 1


def terapipe_problem(row: Mapping[str, str]) -> Problem:
    """The planning problem of a setting. Memory is not limited, since the paper does not state it."""
    dp, tp, pp = (int(row[name]) for name in ("dp", "tp", "pp"))
    model = ModelSpec(
        family=Family.GPT2,
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        heads=int(row["heads"]),
        vocab=64,
        positions=2048,
    )
    gpus = int(row["num_gpus"])
    wanted = job(model, 2048, int(row["global_batch"]), gpus, UNLIMITED, dp=dp, tp=tp, pp=pp, schedule="gpipe")
    cluster = p3_cluster(gpus // 8)
    cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory_bytes=UNLIMITED))
    return problem_from_cluster(wanted, cluster)


def terapipe_mesh(problem: Problem, microbatch: int) -> Mesh:
    """The pinned mesh with ``microbatch`` sequences."""
    dp, tp, pp = (problem.pinned.dp or 1, problem.pinned.tp or 1, problem.pinned.pp or 1)
    count = problem.global_batch // dp // microbatch
    return Mesh(dp=dp, tp=tp, pp=pp, microbatch=microbatch, num_microbatches=count)


def rivals(problem: Problem, slices: tuple[int, ...]) -> dict[str, float]:
    """Seconds of the same slices under other schedules, within the memory of TeraPipe's own schedule."""
    limit = max(terapipe_evaluation(problem, 1, slices).peak_bytes)
    alike = dataclasses.replace(problem, memory_limit_bytes=limit)
    evaluations = {schedule: terapipe_evaluation(alike, 1, slices, schedule) for schedule in ("1f1b", "zb")}
    return {
        schedule: evaluation.step_ns / 1e9
        for schedule, evaluation in evaluations.items()
        if max(evaluation.peak_bytes) <= limit
    }


def terapipe_step(problem: Problem, microbatch: int, slices: tuple[int, ...]) -> float:
    """Seconds of one step with this micro-batch and these slices."""
    return terapipe_evaluation(problem, microbatch, slices).step_ns / 1e9


def terapipe_evaluation(
    problem: Problem, microbatch: int, slices: tuple[int, ...], schedule: str = "gpipe"
) -> Evaluation:
    """Evaluation of one step with this micro-batch, these slices and this schedule."""
    mesh = terapipe_mesh(problem, microbatch)
    stages = pinned_stages(even_stages(problem.model.layers, mesh.pp), problem.model.num_units)
    candidate = Candidate(mesh=mesh, stages=stages, slices=slices, schedule=schedule)
    return best_order(problem, candidate) if schedule == "zb" else Simulated(problem).evaluate(candidate, in_full=True)


def best_slicing(problem: Problem) -> tuple[float, tuple[int, ...]]:
    """The fastest of the planner's slicings of single sequences under a flush."""
    mesh = terapipe_mesh(problem, 1)
    pins = ParallelismSpec(dp=mesh.dp, tp=mesh.tp, pp=mesh.pp, micro_batch=1, schedule="gpipe")
    pinned = dataclasses.replace(problem, pinned=pins)
    proposer = Simulated(pinned).proposer
    slicings = {slices for outline in outlines(pinned) for slices in proposer.slicings(outline)}
    return min((terapipe_step(problem, 1, slices), slices) for slices in slicings)


def terapipe_settings(folder: Path) -> Iterator[Setting]:
    """All settings of TeraPipe, simulated without slices and with the planner's slices."""
    for row in rows_of(folder / "terapipe_v100.csv"):
        problem = terapipe_problem(row)
        share = problem.global_batch // int(row["dp"])
        whole = (problem.sequence_length,)
        plain = min(terapipe_step(problem, size, whole) for size in range(1, share + 1) if share % size == 0)
        sliced, slices = best_slicing(problem)
        yield Setting(
            number=int(row["setting"]),
            model=row["model"],
            published=(float(row["seconds_without"]), float(row["seconds_with"])),
            predicted=(plain, sliced),
            published_slices=row["slices_with"],
            slices=slices,
            rivals=rivals(problem, slices),
        )


def sweep(folder: Path) -> Iterator[Row]:
    """Setting 9 with equal slices."""
    row = next(row for row in rows_of(folder / "terapipe_v100.csv") if row["setting"] == "9")
    problem = terapipe_problem(row)
    for point in rows_of(folder / "terapipe_setting9_uniform.csv"):
        count = int(point["num_slices"])
        yield Row(
            paper="terapipe",
            name=f"setting 9, {count} equal slices",
            published=float(point["step_seconds"]),
            predicted=terapipe_step(problem, 1, equal_slices(2048, count)),
        )


def measure(folder: Path) -> dict[str, Any]:
    """All results, as data."""
    steps = list(a100_rows(folder))
    papers = {
        paper: summary([row for row in steps if row.paper == paper]) for paper in dict.fromkeys(r.paper for r in steps)
    }
    memory = [abs(row.memory_error) for row in steps if row.memory_error is not None]
    return {
        "steps": [{**dataclasses.asdict(row), "error": row.error, "memory_error": row.memory_error} for row in steps],
        "papers": papers,
        "overall": summary(steps),
        "worst_memory_error": max(memory),
        "mean_memory_error": statistics.fmean(memory),
        "sweep": [{**dataclasses.asdict(row), "error": row.error} for row in sweep(folder)],
        "settings": [
            {**dataclasses.asdict(setting), "speedup_error": setting.speedup_error}
            for setting in terapipe_settings(folder)
        ],
        **published_shards.measure(folder),
        **published_heads.measure(folder),
    }


PAPERS = {
    "Without recomputation (arXiv 2401.10241)": "zero-bubble",
    "Everything recomputed (arXiv 2104.04473)": "narayanan",
}
STEP_HEADER = (
    "| step | published s | simulated s | off | published GB | simulated GiB | off |",
    "|---|---:|---:|---:|---:|---:|---:|",
)


def markdown(results: Mapping[str, Any]) -> str:
    """The tables as Markdown."""
    lines = ["# Published steps against their simulation on described hardware", "", results["machine"]]
    for title, paper in PAPERS.items():
        rows = [row for row in results["steps"] if row["paper"] == paper]
        lines += ["", f"{title}:", ""] if rows else []
        lines += [*STEP_HEADER, *map(_step_line, rows)] if rows else []
    lines += ["", "| paper | mean | worst | bias | bar |", "|---|---:|---:|---:|---|"]
    for paper, errors in results["papers"].items():
        lines.append(_summary_line(paper, errors, "paper mean", "paper worst"))
    lines.append(_summary_line("all", results["overall"], "mean", "worst"))
    lines += [
        "",
        f"Memory: mean {results['mean_memory_error']:.1%}, worst {results['worst_memory_error']:.1%} "
        f"(bar {BAR['memory']:.0%}).",
    ]
    lines += ["", *published_shards.markdown(results)]
    lines += ["", "| | mean | worst | bias | bar |", "|---|---:|---:|---:|---|"]
    lines.append(_summary_line("layers", results["layers_summary"], "paper mean", "paper worst"))
    if results["sharded_steps_summary"]:
        lines.append(_summary_line("steps", results["sharded_steps_summary"], "paper mean", "paper worst"))
    lines += [
        "",
        "TeraPipe, setting 9 with equal slices:",
        "",
        "| slices | published s | simulated s | off |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row['name'].split(', ')[1]} | {row['published']} | {row['predicted']:.3f} | {row['error']:+.1%} |"
        for row in results["sweep"]
    ]
    lines += [
        "",
        "| setting | published s | simulated s | speed-up | simulated | off | slices | simulated | same memory |",
        "|---|---|---|---:|---:|---:|---|---|---:|",
    ]
    lines += [_setting_line(setting) for setting in results["settings"]]
    lines += ["", *(f"- {number}: {reason}." for number, reason in REASONS.items())]
    lines += [
        f"- Held to the bar of {BAR['speed-up']:.0%}: {', '.join(map(str, COUNTED))}. "
        f"Read off figures: {', '.join(map(str, sorted(FIGURES)))}."
    ]
    return "\n".join([*lines, *published_heads.markdown(results), ""])


def _step_line(row: Mapping[str, Any]) -> str:
    memory = "| | | |"
    if row["memory_error"] is not None:
        memory = f"| {row['published_gib']:.0f} | {row['predicted_gib']:.1f} | {row['memory_error']:+.1%} |"
    return f"| {row['name']} | {row['published']:.3f} | {row['predicted']:.3f} | {row['error']:+.1%} {memory}"


def _summary_line(name: str, errors: Mapping[str, float], mean: str, worst: str) -> str:
    met = errors["mean"] <= BAR[mean] and errors["worst"] <= BAR[worst]
    bar = f"{BAR[mean]:.0%} and {BAR[worst]:.0%}, {'met' if met else 'missed'}"
    return f"| {name} | {errors['mean']:.1%} | {errors['worst']:.1%} | {errors['bias']:+.1%} | {bar} |"


def _setting_line(setting: Mapping[str, Any]) -> str:
    (plain, sliced), (known_plain, known_sliced) = setting["predicted"], setting["published"]
    slices = setting["slices"]
    shape = f"{len(slices)} ({slices[0]} to {slices[-1]})"
    others = ", ".join(f"{name} {seconds:.3f}" for name, seconds in setting["rivals"].items())
    return (
        f"| {setting['number']} ({setting['model']}) | {known_plain} / {known_sliced} | {plain:.3f} / {sliced:.3f} "
        f"| {known_plain / known_sliced:.2f} | {plain / sliced:.2f} | {setting['speedup_error']:+.0%} "
        f"| {setting['published_slices'] or '-'} | {shape} | {others} |"
    )


def main(arguments: Sequence[str] = ()) -> None:
    """Simulate, and write both files."""
    folder = Path(arguments[0]) if arguments else DATA
    write_results("published", json.dumps(measure(folder)), markdown)


if __name__ == "__main__":
    main(sys.argv[1:])
