"""Compares simulated and rehearsed steps of every schedule on 8 and 16 real ranks, with and without slices.

    ./dev bench rehearsal

A rehearsal (`penstock rehearse`) runs a plan in as many processes as it has ranks, with real messages of the real sizes
over gloo, and waits instead of computing. So 16 ranks fit on two cores, as long as an action, ``ACTION_SECONDS``, takes
much longer than the cores' work for it: waking a rank, starting and receiving a message. The last table makes actions
shorter until that no longer holds.

The hardware is described: a device on which F, I and W of a block take that long on average, and links with the latency
of this machine, from the end of the action that made a message to the start of the action that waited for it. A message
passes through two processes that sleep, so it takes longer than consecutive messages in a measurement of links. A first
rehearsal of 1F1B without slices, on as many ranks, measures that latency, and all other plans are predicted with it.
Attention takes longer with a longer prefix, so slices have unequal lengths. The planner makes every plan with mesh,
slices and schedule pinned, and its program is checked before it runs. The plans are visited in turn. A visit takes the
median step of three, and does not count if other processes used the machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.support import write_results

from penstock.cli.local.rehearsing import rehearsed
from penstock.core.cluster import ClusterSpec, DeviceSpec, LinkSpec
from penstock.core.cost_table import CostRow, Pass
from penstock.core.job import DataSpec, JobSpec, ParallelismSpec, ResourcesSpec, TrainingSpec
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.plan import Plan
from penstock.core.schedule import Kind, flatten, parse_action
from penstock.core.timeline import Timeline
from penstock.planner.decide import decide
from penstock.planner.problem import problem_from_cluster
from penstock.planner.replay import simulated

LENGTH = 256
BYTES_PER_SECOND = 10e9
"""Bandwidth of links. Messages have at most 64 KiB, so latency dominates."""

MEMORY = 80 * 2**30

ACTION_SECONDS = 10e-3
SHORTER_SECONDS = (5e-3, 2e-3, 1e-3, 0.5e-3)
VISITS = 3
UNSTEADY = "other processes keep using the machine: end what else runs on it, and try again"
MOST_ROUNDS = 12
MOST_ERROR = 0.03
MOST_FOREIGN_CORES = 0.2
"""Largest number of cores that other processes and interrupts may use during a valid visit."""

SCHEDULES = {
    "1f1b": 1,
    "eager-1f1b": 1,
    "zb": 1,
    "zbv": 2,
    "v-half": 2,
    "v-min": 2,
    "interleaved-1f1b": 2,
    "interleaved-zb": 2,
}
"""Stages per rank, one block each."""

SHARES = {Pass.F: 1.0, Pass.I: 1.2, Pass.W: 0.8}
"""Time of each pass, relative to the mean action."""

SHORTENED = "zbv"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A case to rehearse: a schedule on a pipeline, and the mean duration of its actions."""

    schedule: str
    ranks: int
    slices: int
    microbatches: int
    action_seconds: float = ACTION_SECONDS

    def cluster(self, latency_seconds: float) -> ClusterSpec:
        """One node whose devices take `action_seconds` for a pass of a block over one slice."""
        link = LinkSpec(latency_seconds=latency_seconds, bytes_per_second=BYTES_PER_SECOND)
        return ClusterSpec(
            name="waiting",
            device=DeviceSpec(name="waiting", peak_flops=1e12, memory_bytes=MEMORY, action_overhead_seconds=0.0),
            num_nodes=1,
            devices_per_node=self.ranks,
            intra_node=link,
            inter_node=link,
            costs=tuple(_costs(self.slices * self.action_seconds)),
        )

    @property
    def job(self) -> JobSpec:
        """One block per stage, everything pinned but the lengths of the slices."""
        num_stages = self.ranks * SCHEDULES[self.schedule]
        return JobSpec(
            model=ModelSpec(family=Family.LLAMA, layers=num_stages, hidden=64, heads=4, vocab=128),
            data=DataSpec(source="python-stdlib", sequence_length=LENGTH),
            training=TrainingSpec(global_batch=self.microbatches, steps=1),
            resources=ResourcesSpec(ranks=self.ranks, memory_per_rank=MEMORY),
            parallelism=ParallelismSpec(
                dp=1,
                tp=1,
                pp=self.ranks,
                micro_batch=1,
                slices=self.slices,
                schedule=self.schedule,
                stages=(1.0,) * num_stages,
            ),
        )

    def plan(self, cluster: ClusterSpec) -> Plan:
        """The planner's plan for the case."""
        return decide(problem_from_cluster(self.job, cluster)).plan


def _costs(sequence_seconds: float) -> Iterator[CostRow]:
    """Costs of a block: ``sequence_seconds`` for an average pass over a sequence, a quarter for attended pairs."""
    pairs = LENGTH * (LENGTH + 1) // 2
    for pass_, unit, tokens in itertools.product(Pass, UnitKind, (1, LENGTH)):
        seconds = SHARES[pass_] * sequence_seconds * tokens / LENGTH
        if unit is UnitKind.ATTENTION:
            yield CostRow(unit=unit, pass_=pass_, tokens=tokens, pairs=0, seconds=seconds / 4)
            attended = pairs * tokens // LENGTH
            yield CostRow(unit=unit, pass_=pass_, tokens=tokens, pairs=attended, seconds=seconds / 2)
        else:
            yield CostRow(
                unit=unit, pass_=pass_, tokens=tokens, pairs=0, seconds=seconds / 2 if unit is UnitKind.MLP else 0.0
            )


SHAPES = ((8, 1, 8), (8, 4, 4), (16, 1, 16), (16, 4, 4))
"""Ranks, slices and micro-batches."""

CASES = [
    Case(schedule=schedule, ranks=ranks, slices=slices, microbatches=microbatches)
    for (ranks, slices, microbatches), schedule in itertools.product(SHAPES, SCHEDULES)
]
SHORTER = [
    Case(schedule=SHORTENED, ranks=16, slices=4, microbatches=4, action_seconds=seconds) for seconds in SHORTER_SECONDS
]


@dataclasses.dataclass
class Contender:
    """A case with its plan and the seconds of every visit."""

    case: Case
    plan: Plan
    cluster: ClusterSpec
    step_seconds: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, case: Case, latency_seconds: float) -> Contender:
        """Plan a case for links with this latency."""
        cluster = case.cluster(latency_seconds)
        return cls(case, case.plan(cluster), cluster)

    def visit(self) -> Timeline | None:
        """Rehearse the plan once more. Returns None if other processes used the machine."""
        timeline = rehearsed_quietly(self.plan, self.cluster)
        if timeline is not None:
            self.step_seconds.append(timeline.step_ns / 1e9)
        return timeline

    @property
    def line(self) -> str:
        """Line with the results so far."""
        case, visits = self.case, len(self.step_seconds)
        error = f"{_error(self.result):+.1%}" if visits else "not quiet"
        name = f"{case.schedule}, {case.ranks} ranks, {case.slices} slices, {1000 * case.action_seconds:g} ms"
        return f"{name}: {error} after {visits} visits\n"

    @property
    def result(self) -> dict[str, Any]:
        """Results for the tables."""
        return {
            **dataclasses.asdict(self.case),
            "slice_tokens": self.plan.slices,
            "simulated_seconds": simulated(self.plan, self.cluster).makespan_ns / 1e9,
            "rehearsed_seconds": self.step_seconds,
        }


def main() -> int:
    """Measure messages, plan, rehearse the plans in turn, and write the tables."""
    latencies = {ranks: latency_on(ranks) for ranks in sorted({case.ranks for case in CASES})}
    contenders = [Contender.of(case, latencies[case.ranks]) for case in (*CASES, *SHORTER)]
    rejected = 0
    for _, contender in itertools.product(range(MOST_ROUNDS), contenders):
        if len(contender.step_seconds) < VISITS:
            rejected += contender.visit() is None
            sys.stderr.write(contender.line)
    if any(len(contender.step_seconds) < VISITS for contender in contenders):
        raise SystemExit(UNSTEADY)
    results = {
        "rejected": rejected,
        "latency_seconds": list(latencies.items()),
        "cases": [contender.result for contender in contenders],
    }
    write_results("rehearsal", json.dumps(results), table)
    return 0


def rehearsed_quietly(plan: Plan, cluster: ClusterSpec) -> Timeline | None:
    """Rehearse a step of the plan. Returns None if other processes used the machine."""
    begin, busy, own = time.monotonic(), _busy_seconds(), _own_seconds()
    timeline = rehearsed(plan, cluster)
    foreign = (_busy_seconds() - busy) - (_own_seconds() - own)
    return timeline if foreign < MOST_FOREIGN_CORES * (time.monotonic() - begin) else None


def latency_on(num_ranks: int) -> float:
    """Mean seconds of a message whose receiver already waits for it, with ``num_ranks`` ranks."""
    case = next(case for case in CASES if case.ranks == num_ranks and case.slices == 1)
    contender = Contender.of(case, latency_seconds=0.0)
    timelines = [timeline for _ in range(VISITS) if (timeline := contender.visit()) is not None]
    if not timelines:
        raise SystemExit(UNSTEADY)
    return mean(itertools.chain.from_iterable(map(message_seconds, timelines)))


def _busy_seconds() -> float:
    """Busy seconds of all cores since boot."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[_IDLE] - ticks[_WAITING]) / os.sysconf("SC_CLK_TCK")


_IDLE, _WAITING = 3, 4


def _own_seconds() -> float:
    """Processor seconds of this process and of its ended descendants."""
    return sum(os.times()[:4])


def message_seconds(timeline: Timeline) -> Iterator[float]:
    """Seconds from an action's end to the end of the wait for its message, for waits that began before that."""
    made_at: dict[tuple[str, int, int | None, int | None], int] = {}
    for event in timeline.events:
        for action in flatten((parse_action(event.action),)):
            if action.kind in _MAKERS:
                direction, step = _MAKERS[action.kind]
                cell = (direction, action.stage + step, action.microbatch, action.slice)
                made_at[cell] = event.stop_ns
    for event in timeline.events:
        action = parse_action(event.action)
        if action.kind in _WAITS:
            made_ns = made_at[_WAITS[action.kind], action.stage, action.microbatch, action.slice]
            if event.start_ns < made_ns:
                yield (event.stop_ns - made_ns) / 1e9


_MAKERS = {Kind.F: ("F", 1), Kind.B: ("B", -1), Kind.I: ("B", -1)}
_WAITS = {Kind.WAIT_RECV_F: "F", Kind.WAIT_RECV_B: "B"}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: dict[str, Any]) -> Iterator[str]:
    usual = [case for case in results["cases"] if case["action_seconds"] == ACTION_SECONDS]
    visits = min(len(case["rehearsed_seconds"]) for case in results["cases"])
    worst = max(usual, key=lambda case: abs(_error(case)))
    yield from (
        "# Simulated against rehearsed",
        "",
        f"Ranks are processes on {results['machine']}, which send real messages over gloo and wait instead of "
        f"computing, {1000 * ACTION_SECONDS:g} ms for an action on average. Medians of at least {visits} visits by "
        f"turns, each the step of median length of three; {results['rejected']} more did not count, because something "
        "else used the machine. Every order passed the proof. Messages are predicted with what they took in a first "
        f"rehearsal: {_latencies(results)}.",
        "",
        "| schedule | ranks | micro-batches | slices | simulated s | rehearsed s | from | to | error |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(f"| {case['schedule']} | {_shape(case)} | {_times(case)} |" for case in usual),
        "",
        f"At worst {_error(worst):+.1%} (target {MOST_ERROR:.0%}): {worst['schedule']} on {worst['ranks']} ranks.",
        "",
        f"The same with shorter actions, {SHORTENED}: what the cores do for each rank no longer fits between its "
        "actions in the end.",
        "",
        "| action ms | ranks | micro-batches | slices | simulated s | rehearsed s | from | to | error |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    )
    shortened = [case for case in results["cases"] if case["schedule"] == SHORTENED and case["slices"] > 1]
    for case in sorted(shortened, key=lambda case: (case["ranks"], -case["action_seconds"])):
        yield f"| {1000 * case['action_seconds']:g} | {_shape(case)} | {_times(case)} |"


def _latencies(results: dict[str, Any]) -> str:
    return ", ".join(f"{1000 * seconds:.2f} ms on {ranks} ranks" for ranks, seconds in results["latency_seconds"])


def _error(case: dict[str, Any]) -> float:
    return float(case["simulated_seconds"] / median(case["rehearsed_seconds"]) - 1)


def _shape(case: dict[str, Any]) -> str:
    return f"{case['ranks']} | {case['microbatches']} | {case['slices']}"


def _times(case: dict[str, Any]) -> str:
    seconds = case["rehearsed_seconds"]
    ends = f"{min(seconds):.3f} | {max(seconds):.3f}"
    return f"{case['simulated_seconds']:.3f} | {median(seconds):.3f} | {ends} | {_error(case):+.1%}"


if __name__ == "__main__":
    sys.exit(main())
