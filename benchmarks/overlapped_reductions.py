"""What buckets hide of the exchanges of replicas, simulated and rehearsed: sums as long as a micro-batch's backward.

    ./dev bench overlapped_reductions

The links are described, so that the sum of a stage's gradients over two replicas takes as long as the backward of one
micro-batch. If replicas divide the optimizer's state (zero 1), that is a reduce-scatter, and the gather of the stage's
parameters takes as long, too. Each case is run in three ways on real ranks, which send real messages and wait instead
of computing (`penstock rehearse`): *serial*, with every reduction after all compute and every gather before it (as
plans for CUDA have them), *overlapped*, in buckets, and with *none*, one replica alone. A step is as long as that of
the worst rank. Hidden is (serial - overlapped) / (serial - none), of which at least half has to be.

All are visited in turn, and a visit is the step of median length of three. A visit during which anything else used the
machine does not count.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.rehearsal import MOST_ROUNDS, UNSTEADY, VISITS, rehearsed_quietly
from benchmarks.support import write_results

from penstock.core.cluster import ClusterSpec, DeviceSpec, LinkSpec
from penstock.core.cost_table import CostRow, Pass
from penstock.core.job import DataSpec, JobSpec, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.plan import Plan
from penstock.core.schedule import Kind, parse_action
from penstock.core.timeline import Activity, Timeline
from penstock.planner.decide import decide
from penstock.planner.problem import problem_from_cluster
from penstock.planner.replay import simulated

LENGTH = 256
BLOCKS_PER_STAGE = 4
PASS_SECONDS = 10e-3
"""Of a block, in each of F, I and W."""

LATENCY_SECONDS = 0.4e-3
MEMORY = 80 * 2**30
DP = 2
LEAST_HIDDEN = 0.5
WAYS = ("serial", "overlapped", "none")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A pipeline with two replicas."""

    schedule: str
    pp: int
    microbatches: int
    zero: int

    @property
    def job(self) -> JobSpec:
        """With everything pinned."""
        num_blocks = BLOCKS_PER_STAGE * self.pp
        return JobSpec(
            model=ModelSpec(family=Family.LLAMA, layers=num_blocks, hidden=256, heads=4, vocab=256),
            data=DataSpec(source="python-stdlib", sequence_length=LENGTH),
            training=TrainingSpec(global_batch=DP * self.microbatches, steps=1),
            resources=ResourcesSpec(ranks=DP * self.pp, memory_per_rank=MEMORY),
            parallelism=ParallelismSpec(
                dp=DP, tp=1, pp=self.pp, micro_batch=1, slices=1, schedule=self.schedule, zero=self.zero
            ),
        )

    def cluster(self, bytes_per_second: float) -> ClusterSpec:
        """A node for every rank."""
        link = LinkSpec(latency_seconds=LATENCY_SECONDS, bytes_per_second=bytes_per_second)
        return ClusterSpec(
            name="shaped",
            device=DeviceSpec(name="waiting", peak_flops=1e12, memory_bytes=MEMORY, action_overhead_seconds=0.0),
            num_nodes=DP * self.pp,
            devices_per_node=1,
            intra_node=link,
            inter_node=link,
            costs=tuple(_costs()),
        )

    def shaped(self) -> ClusterSpec:
        """The cluster whose slowest sum over replicas is as long as the longest backward."""
        rate = 1e9
        for _ in range(3):  # latency is a small part of the sum
            cluster = self.cluster(rate)
            serial = simulated(self.plan("serial", cluster), cluster).timeline
            rate *= _longest_ns(serial, "START_REDUCE(dp)") / backward_ns(serial)
        return self.cluster(rate)

    def plan(self, way: str, cluster: ClusterSpec) -> Plan:
        """The planner's, or the same with nothing next to compute, or one replica of it."""
        plan = decide(problem_from_cluster(self.job, cluster)).plan
        if way == "serial":
            return dataclasses.replace(plan, late_receives=True, program_digest="", prediction=None)
        if way == "none":
            return dataclasses.replace(plan, dp=1, zero=0, placement=(), program_digest="", prediction=None)
        return plan


def _costs() -> Iterator[CostRow]:
    """Every unit of a block has half of its passes; embedding and head take nothing."""
    for pass_, unit, tokens in itertools.product(Pass, UnitKind, (1, LENGTH)):
        share = 0.5 if unit in (UnitKind.ATTENTION, UnitKind.MLP) else 0.0
        pairs = (0, LENGTH * (LENGTH + 1) // 2 * tokens // LENGTH) if unit is UnitKind.ATTENTION else (0,)
        for count in pairs:
            seconds = share * PASS_SECONDS * tokens / LENGTH
            yield CostRow(unit=unit, pass_=pass_, tokens=tokens, pairs=count, seconds=seconds)


def _longest_ns(timeline: Timeline, name: str) -> int:
    return max(event.duration_ns for event in timeline.events if name in event.action)


def backward_ns(timeline: Timeline) -> int:
    """The longest backward of a micro-batch, B."""
    computed = [event for event in timeline.events if event.activity is Activity.COMPUTE]
    return max(event.duration_ns for event in computed if parse_action(event.action).kind is Kind.B)


CASES = [
    Case(schedule=schedule, pp=pp, microbatches=microbatches, zero=zero)
    for zero, (schedule, pp, microbatches) in itertools.product(
        (0, 1),
        (("1f1b", 1, 1), ("1f1b", 1, 4), ("1f1b", 2, 4), ("1f1b", 4, 8), ("interleaved-1f1b", 2, 4)),
    )
]


@dataclasses.dataclass
class Contender:
    """A way to run a case, and the seconds of every visit."""

    case: Case
    way: str
    cluster: ClusterSpec
    plan: Plan
    step_seconds: list[float] = dataclasses.field(default_factory=list)

    def visit(self) -> None:
        """Rehearse it once more, if the machine does nothing else."""
        timeline = rehearsed_quietly(self.plan, self.cluster)
        if timeline is not None:
            self.step_seconds.append(timeline.step_ns / 1e9)

    @property
    def result(self) -> dict[str, Any]:
        """For the table."""
        return {
            **dataclasses.asdict(self.case),
            "way": self.way,
            "simulated_seconds": simulated(self.plan, self.cluster).makespan_ns / 1e9,
            "rehearsed_seconds": self.step_seconds,
        }


def contenders() -> Iterator[Contender]:
    """Every case in every way, on its links."""
    for case in CASES:
        cluster = case.shaped()
        for way in WAYS:
            yield Contender(case, way, cluster, case.plan(way, cluster))


def main() -> int:
    """Rehearse by turns, and write the table."""
    every = list(contenders())
    for _, contender in itertools.product(range(MOST_ROUNDS), every):
        if len(contender.step_seconds) < VISITS:
            contender.visit()
            sys.stderr.write(f"{contender.case} {contender.way}: {contender.step_seconds}\n")
    if any(len(contender.step_seconds) < VISITS for contender in every):
        raise SystemExit(UNSTEADY)
    results = {"cases": [contender.result for contender in every]}
    write_results("overlapped_reductions", json.dumps(results), table)
    return 0


def hidden(steps: dict[str, float]) -> float:
    """The share of the serial exchanges that the overlapped ones hide."""
    return (steps["serial"] - steps["overlapped"]) / (steps["serial"] - steps["none"])


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    yield from (
        "# Reductions next to backward, gathers next to forward",
        "",
        f"Two replicas of a pipeline with {BLOCKS_PER_STAGE} blocks per rank on {results['machine']}; links are such "
        "that the longest sum of a stage's gradients takes as long as the backward of a micro-batch, and with zero 1 "
        "the gather of its parameters, too. Seconds of a "
        f"step; medians of {VISITS} visits by turns. Hidden is (serial - overlapped) / (serial - none), at least "
        f"{LEAST_HIDDEN:.0%}.",
        "",
        "| zero | schedule | ranks | micro-batches | serial | overlapped | none | hidden | simulated: serial | "
        "overlapped | none | hidden |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    )
    for _, group in itertools.groupby(
        results["cases"], key=lambda case: (case["zero"], case["schedule"], case["pp"], case["microbatches"])
    ):
        ways = {case["way"]: case for case in group}
        of_case = ways["serial"]
        columns = []
        for steps in (
            {way: median(case["rehearsed_seconds"]) for way, case in ways.items()},
            {way: case["simulated_seconds"] for way, case in ways.items()},
        ):
            columns += [*(f"{steps[way]:.3f}" for way in WAYS), f"{hidden(steps):.0%}"]
        shape = f"{of_case['zero']} | {of_case['schedule']} | {DP * of_case['pp']} | {of_case['microbatches']}"
        yield f"| {shape} | {' | '.join(columns)} |"


if __name__ == "__main__":
    sys.exit(main())
