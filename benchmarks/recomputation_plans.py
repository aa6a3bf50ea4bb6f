"""Simulated steps of plans that recompute, at equal memory: as existing systems do it, on demand, and in waits.

    ./dev bench recomputation_plans

GPT models on described A100 (80 GB, eight of a node), one stage or more per device. Limits are multiples of what a
rank's share of the parameters and their state takes. At each limit the planner makes these plans:

existing    ``full`` or ``selective`` recomputation of all layers alike, inside of the backward: the faster of both
on demand   recomputation inside of the backward, layer by layer; its policy, stages, slices and order are free
in waits    everything is free
kept        without recomputation, if that fits

Recomputation on demand begins when its gradient has come, and takes time wherever it is. So what recomputation in waits
can gain is bounded by the step of the plan on demand if its recomputation took no time ("free"). That needs idle time
in its place: slices and split backwards, which plans on demand have as well, leave little.

Two things count against plans in waits at equal memory: R makes the buffers of a whole stage and slice at once, where
recomputation inside of a backward holds those of one layer; and they have to fit as arenas (`penstock.core.lifetimes`),
where plans on demand are only counted by what lives at once.

A bound of the step in waits follows from its stages and policies alone: the rank with most work, after the first
forward came down to it, or the longest chain of dependent passes (`penstock.planner.simulate.bound`).

The second table has the models of Lynx (arXiv 2406.08756: GPT 1.3B to 23B, up to 1.37 times as fast as the best
existing recomputation). Existing are ``full`` and ``selective``, and Megatron-LM's full recomputation of n layers per
stage with the least n that fits, with 1F1B and the best slices.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.support import write_results

from penstock.core.cluster import ClusterSpec
from penstock.core.devices import cluster_of, device_kind
from penstock.core.errors import UserError
from penstock.core.job import DataSpec, JobSpec, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.layout import Operation, Precision, unit_parameters
from penstock.core.model import Family, ModelSpec
from penstock.core.plan import Plan
from penstock.core.remaking import Recompute, RecomputePin, uniform_remakes
from penstock.core.units import MEBIBYTE
from penstock.planner.decide import decide
from penstock.planner.evaluate import Simulated
from penstock.planner.memory import optimizer_bytes_per_parameter, whole_bytes_per_parameter
from penstock.planner.pins import pinned_stages
from penstock.planner.problem import Problem, problem_from_cluster
from penstock.planner.replay import candidate_of

DEVICE, LENGTH, VOCAB = "a100-80", 2048, 51_200
GIBIBYTE = 1024 * MEBIBYTE
MODELS = {
    "1.3B": (24, 2048, 16),
    "6.7B": (32, 4096, 32),
    "13B": (40, 5120, 40),
    "23B": (48, 6144, 48),
}
"""Layers, hidden elements and heads."""

STAGES = (("6.7B", 4), ("6.7B", 8), ("13B", 16))
PER_STAGE = 2
"""Sequences of a step for each stage."""

FACTORS = (1.12, 1.2)
"""Limits, as multiples of a rank's parameters and state."""

LYNX_STAGES, LYNX_FACTOR = 8, 1.12

TARGET, LYNX_GAIN = 0.87, 1.37


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model on so many devices, each a pipeline's rank, and the sequences of a step."""

    model: str
    stages: int
    sequences: int

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        layers, hidden, heads = MODELS[self.model]
        return ModelSpec(family=Family.GPT2, layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, positions=LENGTH)

    def cluster(self, *, on_demand: bool) -> ClusterSpec:
        """The devices, and what their software does."""
        kind = device_kind(DEVICE)
        described = cluster_of(kind, -(-self.stages // kind.devices_per_node))
        software = replace(described.software, recomputes_on_demand=on_demand)
        per_node = min(self.stages, kind.devices_per_node)
        return replace(described, devices_per_node=per_node, nics_per_node=per_node, software=software)

    def problem(self, limit_bytes: int, pins: ParallelismSpec, *, on_demand: bool) -> Problem:
        """The planning problem with a limit."""
        job = JobSpec(
            model=self.spec,
            data=DataSpec(source="corpus", sequence_length=LENGTH),
            training=TrainingSpec(global_batch=self.sequences, steps=1, precision=Precision.BF16),
            resources=ResourcesSpec(ranks=self.stages, memory_per_rank=limit_bytes),
            parallelism=replace(pins, dp=1, tp=1, pp=self.stages),
        )
        return problem_from_cluster(job, self.cluster(on_demand=on_demand))

    def plan(
        self, limit_bytes: int, recompute: RecomputePin | None = None, *, on_demand: bool = False, **pins: Any
    ) -> Plan | None:
        """The planner's best plan; None if nothing fits."""
        pinned = ParallelismSpec(recompute=recompute, **pins)
        try:
            plan = decide(self.problem(limit_bytes, pinned, on_demand=on_demand)).plan
        except UserError:
            return None
        sys.stderr.write(f"{self.model} on {self.stages}, {limit_bytes / GIBIBYTE:.1f} GiB: {text(plan)}\n")
        return plan

    def limit_bytes(self, factor: float) -> int:
        """So many times a rank's share of the parameters and their state, next to the process."""
        per_parameter = whole_bytes_per_parameter(Precision.BF16) + optimizer_bytes_per_parameter(Precision.BF16)
        num_parameters = sum(unit_parameters(self.spec, unit.kind) for unit in self.spec.units)
        state_bytes = num_parameters * per_parameter / self.stages
        return int(factor * (device_kind(DEVICE).device.constant_bytes + state_bytes))


def text(plan: Plan) -> str:
    """The plan in words."""
    slices = f"{len(plan.slices)} slices" if len(plan.slices) > 1 else "whole sequences"
    return f"{seconds(plan):.2f} s, {plan.schedule.generator}, {plan.microbatches_text}, {slices}"


def seconds(plan: Plan) -> float:
    """Its predicted step."""
    assert plan.prediction is not None
    return plan.prediction.step_seconds


def peak_bytes(plan: Plan) -> int:
    """Its predicted peak."""
    assert plan.prediction is not None
    return max(plan.prediction.peak_bytes)


def fastest(plans: Iterable[Plan | None]) -> Plan | None:
    """The plan with the shortest step."""
    return min((plan for plan in plans if plan is not None), key=seconds, default=None)


def existing(case: Case, limit_bytes: int, **pins: Any) -> Plan | None:
    """All layers alike, on demand."""
    return fastest(
        case.plan(limit_bytes, policy, on_demand=True, **pins) for policy in (Recompute.SELECTIVE, Recompute.FULL)
    )


def layers_of_stages(case: Case, limit_bytes: int) -> Plan | None:
    """Full recomputation of the least number of layers of every stage that fits, on demand and with 1F1B."""
    layers, model = case.spec.layers // case.stages, case.spec
    blocks = (float(layers),) * case.stages
    low, high, best = 0, layers, None
    while low <= high:
        count = (low + high) // 2
        remakes = [uniform_remakes(model, stage, tuple(Operation)) for stage in pinned_stages(blocks, model.num_units)]
        policy = tuple(tuple(replace(remake, count=count) for remake in stage if count) for stage in remakes)
        plan = case.plan(limit_bytes, policy, on_demand=True, schedule="1f1b", stages=blocks)
        low, high, best = (count + 1, high, best) if plan is None else (low, count - 1, plan)
    return best


def free_seconds(case: Case, limit_bytes: int, plan: Plan) -> float:
    """The step of the plan on demand if its recomputation took no time."""
    judge = Simulated(case.problem(limit_bytes, ParallelismSpec(), on_demand=True), plan.receive_ahead)
    kept = replace(candidate_of(plan), recompute=())
    return judge.evaluate(kept, in_full=True).step_ns / 1e9


def bound_seconds(case: Case, limit_bytes: int, plan: Plan) -> float:
    """The lower bound of the plan's step for its stages and policies."""
    judge = Simulated(case.problem(limit_bytes, ParallelismSpec(), on_demand=False), plan.receive_ahead)
    candidate = replace(candidate_of(plan), schedule=plan.schedule.generator)
    return judge.bound_ns(candidate) / 1e9


def limited_row(case: Case, factor: float) -> dict[str, Any]:
    """All plans at one limit."""
    limit_bytes = case.limit_bytes(factor)
    in_waits, on_demand = case.plan(limit_bytes), case.plan(limit_bytes, on_demand=True)
    alike = existing(case, limit_bytes)
    row = {
        "model": case.model,
        "stages": case.stages,
        "sequences": case.sequences,
        "limit_bytes": limit_bytes,
        "kept": _described(case.plan(limit_bytes, Recompute.NONE)),
        "existing": _described(alike),
        "on_demand": _described(on_demand),
        "in_waits": _described(in_waits),
    }
    if on_demand is not None:
        row["free_seconds"] = free_seconds(case, limit_bytes, on_demand)
    if in_waits is not None:
        row["bound_seconds"] = bound_seconds(case, limit_bytes, in_waits)
    return row


def _described(plan: Plan | None) -> dict[str, Any] | None:
    return None if plan is None else {"seconds": seconds(plan), "peak_bytes": peak_bytes(plan), "text": text(plan)}


def equal_memory_rows() -> Iterator[dict[str, Any]]:
    """All cases at all limits."""
    for model, stages in STAGES:
        case = Case(model=model, stages=stages, sequences=PER_STAGE * stages)
        yield from (limited_row(case, factor) for factor in FACTORS)


def lynx_rows() -> Iterator[dict[str, Any]]:
    """Lynx's models at one limit."""
    for model in MODELS:
        case = Case(model=model, stages=LYNX_STAGES, sequences=PER_STAGE * LYNX_STAGES)
        limit_bytes = case.limit_bytes(LYNX_FACTOR)
        plans = {
            "alike": existing(case, limit_bytes, schedule="1f1b"),
            "layers": layers_of_stages(case, limit_bytes),
            "in_waits_1f1b": case.plan(limit_bytes, schedule="1f1b"),
            "in_waits": case.plan(limit_bytes),
        }
        yield {
            "model": model,
            "stages": case.stages,
            "sequences": case.sequences,
            "limit_bytes": limit_bytes,
            **{name: _described(plan) for name, plan in plans.items()},
        }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    return "\n".join([*_equal_memory_lines(results["rows"]), "", *_lynx_lines(results["lynx"])]) + "\n"


def _equal_memory_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from (
        "# Recomputation on demand and in waits, at equal memory",
        "",
        f"Simulated steps of GPT models on described {DEVICE}, one rank per stage, {PER_STAGE} sequences of {LENGTH:,} "
        "tokens per stage. Kept: without recomputation. Existing: selective or full recomputation of all layers alike, "
        "inside of the backward; on demand: the planner's best plan with recomputation inside of the backward; in "
        "waits: everything free; free: the plan on demand if its recomputation took no time; bound: of the plan in "
        "waits, by its work and its longest chain of dependent passes.",
        "",
        "| model | stages | limit GiB | kept s | existing s | on demand s | in waits s | / existing | "
        "/ on demand | free / on demand | over its bound |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    )
    for row in rows:
        kept_s, existing_s, on_demand_s, in_waits_s = (
            row[name] and row[name]["seconds"] for name in ("kept", "existing", "on_demand", "in_waits")
        )
        cells = [
            row["model"],
            str(row["stages"]),
            f"{row['limit_bytes'] / GIBIBYTE:.1f}",
            *map(_seconds_text, (kept_s, existing_s, on_demand_s, in_waits_s)),
            _ratio(in_waits_s, existing_s),
            _ratio(in_waits_s, on_demand_s),
            _ratio(row.get("free_seconds"), on_demand_s),
            f"{in_waits_s / row['bound_seconds'] - 1:+.1%}" if in_waits_s else "",
        ]
        yield f"| {' | '.join(cells)} |"
    yield from ("", f"The target is {TARGET} of the best plan on demand.")


def _lynx_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from (
        "## Lynx's models",
        "",
        f"The same on {LYNX_STAGES} devices, with the lower limit. Existing recomputation, with 1F1B and "
        "the best slices: selective or full of all layers alike, or full of the least number of layers of each stage. "
        f"Lynx is up to {LYNX_GAIN} times as fast as the best existing recomputation that its authors ran.",
        "",
        "| model | limit GiB | all layers alike s | n layers per stage s | in waits, 1F1B s | in waits s "
        "| gain with 1F1B | gain |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    )
    for row in rows:
        alike, layers, same_schedule, free = (
            row[name] and row[name]["seconds"] for name in ("alike", "layers", "in_waits_1f1b", "in_waits")
        )
        best = min(filter(None, (alike, layers)), default=None)
        cells = [
            row["model"],
            f"{row['limit_bytes'] / GIBIBYTE:.1f}",
            *map(_seconds_text, (alike, layers, same_schedule, free)),
            _ratio(best, same_schedule),
            _ratio(best, free),
        ]
        yield f"| {' | '.join(cells)} |"


def _seconds_text(value: float | None) -> str:
    return "nothing fits" if value is None else f"{value:.2f}"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.3f}" if value and base else ""


def main() -> int:
    """Plan everything, and write the tables."""
    results = {"rows": list(equal_memory_rows()), "lynx": list(lynx_rows())}
    write_results("recomputation_plans", json.dumps(results), table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
