"""Predicted and measured steps of two CPU ranks of which one has half a core.

    ./dev bench unequal_ranks

The job is that of the demonstration, with few sequences. The second rank's process runs for half of every 4 ms, in
profiles and in training. First the benchmark checks that a process gets the share of a core to which it is limited.
Then it plans the job twice with the same profiles: with the measured slowness of the second rank, and as if both ranks
were equally fast. Needs root, for control groups.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.prediction import (
    FIRST_PROFILES,
    STEPS_PER_PLAN,
    Bench,
    Contender,
    compared,
    compared_line,
    described,
    example_job,
)
from benchmarks.quiet import MOST_DRIFT
from benchmarks.support import measured_under_quota, write_results

from penstock.agent.launch import Ranks
from penstock.core.job import PipelineJob
from penstock.planner.decide import decide
from penstock.planner.evaluate import Simulated
from penstock.planner.measured import problem_from_profile
from penstock.planner.replay import candidate_of, placement_of
from tools.cpu_quota import PERIOD_MICROSECONDS, CpuQuota, cpu_quota, effective_shares

SLOW_RANK, SHARE = 1, 0.5
CHECKED, MOST_DEVIATION = (0.3, 0.6, 1.0), 0.03
"""Limits that are tested first, and the largest relative deviation of the measured share from a limit."""
LEAST_GAIN, MOST_ERROR = 1.25, 0.06
AWARE, UNAWARE = "by their speeds", "as if equally fast"


class UnequalBench(Bench):
    """A `Bench` whose second rank is limited to a share of its core."""

    def __init__(self, root: Path, job: PipelineJob, quota: CpuQuota) -> None:
        self._quota = quota
        super().__init__(root, job)

    def _launched(self, ranks: Ranks) -> None:
        while (status := ranks.statuses()[SLOW_RANK]) is None:
            if ranks.poll() is not None:
                return
            time.sleep(0.01)
        self._quota.add(status.pid)


def contenders(bench: Bench) -> list[Contender]:
    """The plan with the measured slowness of ranks, and the plan for ranks of equal speed."""
    problem = problem_from_profile(bench.job.spec, bench.profile)
    planned = []
    for name, known in {AWARE: problem, UNAWARE: dataclasses.replace(problem, slowness=())}.items():
        plan = decide(known).plan
        assert plan.prediction is not None
        planned.append(Contender(name, plan, plan.prediction))
    return planned


def predict(bench: Bench, of: Contender) -> None:
    """Predict the step again, from all profiles until now."""
    judge = Simulated(problem_from_profile(bench.job.spec, bench.profile), of.plan.receive_ahead, placement_of(of.plan))
    step_seconds = judge.evaluate(candidate_of(of.plan)).step_ns / 1e9
    of.prediction = dataclasses.replace(of.prediction, step_seconds=step_seconds)


def measured(folder: Path) -> dict[str, Any]:
    """Steps of both plans."""
    with cpu_quota("penstock-unequal", 1.0) as quota:
        shares = effective_shares(quota, CHECKED)
        if any(abs(share / wanted - 1) > MOST_DEVIATION for share, wanted in zip(shares, CHECKED, strict=True)):
            raise SystemExit(
                f"processes limited to {CHECKED} of a core got {shares}: stop other processes, and run it again"
            )
        quota.set(SHARE)
        bench = UnequalBench(folder, example_job(), quota)
        for _ in range(FIRST_PROFILES):
            bench.measure()
        compared_plans = contenders(bench)
        rejected = bench.fill(compared_plans)
        for contender in compared_plans:
            predict(bench, contender)
        bench.weigh(compared_plans)
        slowness = bench.profile.slowness
    return {
        "model": described(compared_plans[0].plan),
        "shares": shares,
        "slowness": slowness,
        "rejected": rejected,
        "rows": {contender.name: compared(contender, _plan_text(contender)) for contender in compared_plans},
    }


def _plan_text(contender: Contender) -> str:
    plan = contender.plan
    stages = " and ".join(f"{stop - first}" for first, stop in plan.stages)
    return (
        f"dp {plan.dp} x pp {plan.pp}, {len(plan.slices)} slices, {plan.schedule.generator}, stages of {stages} units"
    )


def gain(results: dict[str, Any]) -> float:
    """Time of the step with the plan for equally fast ranks, divided by that with the plan by speeds."""
    rows = results["rows"]
    ratio: float = rows[UNAWARE]["measured_seconds"] / rows[AWARE]["measured_seconds"]
    return ratio


def error(results: dict[str, Any]) -> float:
    """Error of the prediction for the plan by speeds."""
    row = results["rows"][AWARE]
    relative: float = row["predicted_seconds"] / row["measured_seconds"] - 1
    return relative


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    shares, slowness = ", ".join(f"{share:.3f}" for share in results["shares"]), results["slowness"][SLOW_RANK]
    yield from (
        "# Two ranks, one with half a core",
        "",
        f"{results['model']}; 2 CPU ranks, one thread each, of which the second runs for {SHARE:.0%} of every "
        f"{PERIOD_MICROSECONDS / 1000:g} ms; {results['machine']}. Limits of {', '.join(map(str, CHECKED))} of a core "
        f"gave {shares} of its time. Profiles say that passes take {slowness:.2f} times as long on the second rank. "
        f"The medians of at least {STEPS_PER_PLAN} steps; {results['rejected']} more did not count, "
        f"because a reference kernel took over {MOST_DRIFT:.0%} more or less time after such a step than before it.",
        "",
        "| planned | plan | predicted s | measured s | error | predicted MiB | measured MiB |",
        "|---|---|---:|---:|---:|---:|---:|",
    )
    for name, row in results["rows"].items():
        yield compared_line(name, row)
    yield from ("", f"Planned by their speeds, a step is {gain(results):.2f} times as fast.")


def main() -> int:
    """Measure and write the table; 1 if the gain or the error misses its target, 2 if limits cannot be set here."""
    results = measured_under_quota(measured)
    if results is None:
        return 2
    write_results("unequal_ranks", json.dumps(results), table)
    return int(gain(results) < LEAST_GAIN or abs(error(results)) > MOST_ERROR)
