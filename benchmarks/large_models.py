"""What recomputation and a divided optimizer state are worth to large models on described H100s.

    ./dev bench large_models

Each model is planned with everything free; as practice trains it, with tp 8 and at most 16 pipeline ranks; and without
what saves memory, with ``recompute: none`` and ``zero: 0``. All steps are simulated on nodes of eight H100s from
penstock's own descriptions. Utilization is of the model's FLOPs: what is recomputed does not count.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.planning_speed import CASES, Case
from benchmarks.support import write_results

from penstock.core.devices import cluster_of, device_kind
from penstock.core.errors import UserError
from penstock.core.job import ParallelismSpec
from penstock.core.plan import Plan
from penstock.core.remaking import Recompute
from penstock.planner.decide import decide
from penstock.planner.problem import problem_from_cluster

MODELS = ("GPT-3 175B, 384 devices", "Llama 405B, 1,024 devices")
PRACTICE_TP = 8
PRACTICE_PP = (1, 2, 3, 4, 6, 8, 12, 16)

PINS: Mapping[str, tuple[ParallelismSpec, ...]] = {
    "everything free": (ParallelismSpec(),),
    "tp 8, pp at most 16": tuple(ParallelismSpec(tp=PRACTICE_TP, pp=pp) for pp in PRACTICE_PP),
    "without zero 1": (ParallelismSpec(zero=0),),
    "without recomputation": (ParallelismSpec(recompute=Recompute.NONE),),
    "without either": (ParallelismSpec(zero=0, recompute=Recompute.NONE),),
}


def best_plan(case: Case, choices: tuple[ParallelismSpec, ...]) -> Plan | None:
    """The fastest plan over all choices of pins, none where no choice fits."""
    plans = [plan for pins in choices if (plan := planned(case, pins)) is not None]
    return min(plans, key=seconds, default=None)


def planned(case: Case, pins: ParallelismSpec) -> Plan | None:
    """The plan with these pins, none if there is none that fits."""
    cluster = cluster_of(device_kind("h100"), case.devices // 8)
    try:
        return decide(problem_from_cluster(dataclasses.replace(case.job, parallelism=pins), cluster)).plan
    except UserError:
        return None


def seconds(plan: Plan) -> float:
    """The predicted step."""
    assert plan.prediction is not None, "a plan that was decided is predicted"
    return plan.prediction.step_seconds


def described(plan: Plan | None) -> dict[str, Any] | None:
    """The figures of a plan that the table shows."""
    if plan is None:
        return None
    assert plan.prediction is not None, "a plan that was decided is predicted"
    speed = plan.prediction.speed
    return {
        "mesh": f"dp {plan.dp} x tp {plan.tp} x pp {plan.pp}",
        "order": f"{plan.schedule.generator}, micro-batches of {plan.microbatch}, slices {len(plan.slices)}",
        "zero": plan.zero,
        "is_recomputing": any(plan.recompute),
        "seconds": seconds(plan),
        "gib": max(plan.prediction.peak_bytes) / 2**30,
        "utilization": None if speed is None else speed.model_flops_utilization,
    }


def main() -> int:
    """Plan all, and write the table."""
    rows = []
    for name in MODELS:
        for pins, choices in PINS.items():
            rows.append({"model": name, "pins": pins, "plan": described(best_plan(CASES[name], choices))})
            print(json.dumps(rows[-1]), flush=True)
    write_results("large_models", json.dumps({"rows": rows}), table)
    return 0


def table(results: dict[str, Any]) -> str:
    """The table as Markdown."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    yield from (
        "# Large models on described H100s with 80 GB",
        "",
        "Simulated, bf16, best found within the budget.",
        "",
    )
    yield "| model | pins | mesh | order | zero | recomputes | GiB | s | MFU | slower than free |"
    yield "|---|---|---|---|--:|---|--:|--:|--:|--:|"
    free = {row["model"]: row["plan"] for row in results["rows"] if row["pins"] == "everything free"}
    for row in results["rows"]:
        yield "| " + " | ".join([row["model"], row["pins"], *_cells(row["plan"], free[row["model"]])]) + " |"


def _cells(plan: dict[str, Any] | None, free: dict[str, Any] | None) -> list[str]:
    if plan is None or free is None:
        return ["nothing fits", *[""] * 7]
    utilization = plan["utilization"]
    return [
        plan["mesh"],
        plan["order"],
        str(plan["zero"]),
        "yes" if plan["is_recomputing"] else "no",
        f"{plan['gib']:.1f}",
        f"{plan['seconds']:.2f}",
        "" if utilization is None else f"{100 * utilization:.1f} %",
        f"{plan['seconds'] / free['seconds'] - 1:+.1%}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
