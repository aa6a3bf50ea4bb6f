"""A hand-made run: plan, profile, timelines and metrics that look like a real one, from a seed and a tiny clock.

Nothing here is measured. The clock knows just enough (dependencies between stages and slices, a time for each
transfer) to give pictures a plausible shape.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable

from penstock.core.bubble import Lost
from penstock.core.comparison import FitPoint, RankMemory
from penstock.core.explanation import Explanation, Method, SearchEnd, StepParts, Trial, Variation
from penstock.core.layout import Precision, stage_parameters
from penstock.core.model import Family, ModelSpec, UnitKind
from penstock.core.plan import Alternative, Plan, Prediction
from penstock.core.profile import (
    CollectiveRecord,
    LinkRecord,
    MachineKey,
    MemoryRecord,
    OptimizerRecord,
    Profile,
    UnitRecord,
)
from penstock.core.records import StepMetrics
from penstock.core.schedule import Action, Kind, Schedule, ScheduleSpec
from penstock.core.speed import Speed
from penstock.core.timeline import Activity, Event, Source, Timeline

UNIT_NS = 3_890_000
SLICES = (320, 264, 232, 208)
MIB = 2**20


def sample_model(layers: int = 8) -> ModelSpec:
    return ModelSpec(family=Family.LLAMA, layers=layers, hidden=256, heads=8, kv_heads=4, vocab=4096)


def sample_schedule(num_ranks: int, num_microbatches: int, num_slices: int, *, split: bool = True) -> Schedule:
    """Slice-level 1F1B, one stage per rank: fill, alternate, drain; a split backward runs each W right after its I."""
    rows = []
    units = [(m, s) for m in range(num_microbatches) for s in range(num_slices)]
    reverse = [(m, s) for m in range(num_microbatches) for s in reversed(range(num_slices))]
    for rank in range(num_ranks):
        ahead = min(len(units), num_slices + num_ranks - 1 - rank)
        row = [Action(Kind.F, rank, *unit) for unit in units[:ahead]]
        for i, unit in enumerate(reverse):
            row.extend(Action(kind, rank, *unit) for kind in ((Kind.I, Kind.W) if split else (Kind.B,)))
            if ahead + i < len(units):
                row.append(Action(Kind.F, rank, *units[ahead + i]))
        rows.append(tuple(row))
    return Schedule(ranks=tuple(rows), num_stages=num_ranks, num_microbatches=num_microbatches, num_slices=num_slices)


def sample_timeline(
    schedule: Schedule,
    *,
    source: Source = Source.SIMULATED,
    seed: int = 0,
    noise: float = 0.0,
    unit_ns: int = 4_000_000,
    transfer_ns: int = 900_000,
    peak_bytes: tuple[int, ...] = (),
) -> Timeline:
    """``schedule`` played against a clock; ``noise`` is the standard deviation of every duration, as a share."""
    clock = _Clock(schedule, random.Random(seed), noise, unit_ns, transfer_ns)
    events = clock.play()
    stop = max(event.stop_ns for event in events)
    for rank in range(len(schedule.ranks)):
        reached = max(event.stop_ns for event in events if event.rank == rank)
        events.append(Event(rank, Activity.WAIT, f"{rank}WAIT_REDUCE(norm)", reached, stop))
        events.append(Event(rank, Activity.STEP, f"{rank}STEP", stop, stop + unit_ns * 2))
    return Timeline(
        source=source,
        num_ranks=len(schedule.ranks),
        step_ns=stop + unit_ns * 2,
        events=tuple(events),
        peak_bytes=peak_bytes or tuple((612 - 41 * r % 200) * MIB for r in range(len(schedule.ranks))),
        step=None if source is Source.SIMULATED else 120,
    )


class _Clock:
    def __init__(self, schedule: Schedule, rng: random.Random, noise: float, unit_ns: int, transfer_ns: int) -> None:
        self.schedule, self.rng, self.noise = schedule, rng, noise
        self.unit_ns, self.transfer_ns = unit_ns, transfer_ns
        self.arrived: dict[tuple[str, int, int | None, int | None], int] = {}
        self.now = [0] * len(schedule.ranks)
        self.events: list[Event] = []

    def play(self) -> list[Event]:
        places = [0] * len(self.schedule.ranks)
        while any(place < len(row) for place, row in zip(places, self.schedule.ranks, strict=True)):
            moved = False
            for rank, row in enumerate(self.schedule.ranks):
                while places[rank] < len(row) and self._run(rank, row[places[rank]]):
                    places[rank] += 1
                    moved = True
            assert moved, "the schedule cannot run"
        return self.events

    def _run(self, rank: int, action: Action) -> bool:
        ready = self._ready(action)
        if ready is None:
            return False
        start = max(ready, self.now[rank])
        if start > self.now[rank]:
            direction = "F" if action.kind is Kind.F else "B"
            name = f"{action.stage}WAIT_RECV_{direction}{action.microbatch}.{action.slice}"
            self.events.append(Event(rank, Activity.WAIT, name, self.now[rank], start))
        stop = start + self._duration(action)
        self.events.append(Event(rank, Activity.COMPUTE, str(action), start, stop))
        self.now[rank] = stop
        self._send(rank, action, stop)
        return True

    def _ready(self, action: Action) -> int | None:
        if action.kind is Kind.F and action.stage > 0:
            return self.arrived.get(("F", action.stage, action.microbatch, action.slice))
        is_last = action.stage == self.schedule.num_stages - 1
        if action.kind in (Kind.B, Kind.I) and not is_last:
            return self.arrived.get(("B", action.stage, action.microbatch, action.slice))
        return 0

    def _send(self, rank: int, action: Action, now: int) -> None:
        direction, target = ("F", action.stage + 1) if action.kind is Kind.F else ("B", action.stage - 1)
        if action.kind is Kind.W or not 0 <= target < self.schedule.num_stages:
            return
        stop = now + self._noisy(self.transfer_ns)
        name = f"{action.stage}SEND_{direction}{action.microbatch}.{action.slice}"
        self.events.append(Event(rank, Activity.TRANSFER, name, now, stop))
        self.arrived[direction, target, action.microbatch, action.slice] = stop

    def _duration(self, action: Action) -> int:
        prefix = 1 + 0.07 * (action.slice or 0)
        factor = {Kind.F: 1.0 * prefix, Kind.B: 2.0 * prefix, Kind.I: 1.15 * prefix, Kind.W: 0.85, Kind.R: 1.0}
        is_last = action.stage == self.schedule.num_stages - 1
        return self._noisy(self.unit_ns * factor[action.kind] * (1.06 if is_last else 1.0))

    def _noisy(self, nanoseconds: float) -> int:
        return max(1, round(nanoseconds * (1 + abs(self.rng.gauss(0, self.noise)))))


def confident_plan() -> Plan:
    """The sample plan as measurements give one: with an interval and a warning."""
    plan = sample_plan()
    assert plan.prediction is not None
    more = {"low_seconds": 0.21, "high_seconds": 0.25, "warnings": ("the machine was busy",)}
    return dataclasses.replace(plan, prediction=dataclasses.replace(plan.prediction, **more))  # type: ignore[arg-type]


def explained_plan() -> Plan:
    """The sample plan with everything that a plan says of itself: parts, trials, what would help, a known peak."""
    plan = sample_plan()
    assert plan.prediction is not None
    lost = [Lost(mean=mean, worst=worst, rank=1) for mean, worst in SHARES]
    parts = StepParts(
        **dict(zip(("compute", "waiting", "communication", "reductions", "optimizer"), lost, strict=True))
    )
    explanation = Explanation(
        parts=parts,
        limits=("limited by compute: rank 1 computes for 89.4 % of the step",),
        pinned=("pp 2",),
        search=SearchEnd(
            ending="every outline that could fit was opened", candidates=46, outlines=206, floor_seconds=0.19
        ),
        variations=(
            Variation(
                change="one node more, 4 devices",
                method=Method.NEW_SEARCH,
                step_seconds=0.112,
                tokens_per_second_per_device=9143.0,
                model_flops_utilization=0.41,
                gain=0.029,
                plan="dp 1 x tp 1 x pp 4, 4 micro-batches of 1, 4 slices, zb",
            ),
            Variation(
                change="links 10 % faster",
                method=Method.SAME_PLAN,
                step_seconds=0.2301,
                tokens_per_second_per_device=8900.0,
                model_flops_utilization=0.4,
                gain=0.002,
            ),
            Variation(change="sequences twice as long", method=Method.NEW_SEARCH, refusal="nothing fits in 4 GiB"),
        ),
        trials=(
            Trial(plan="zbv, 4 slices", predicted_seconds=0.2306, failure="rank 1 was killed"),
            Trial(
                plan="zb, 4 slices",
                predicted_seconds=0.24,
                measured_seconds=0.25,
                spread=0.04,
                steps=5,
                chosen=True,
                measured_speed=Speed(tokens_per_second_per_device=8192.0, model_flops_utilization=0.37),
            ),
        ),
    )
    prediction = dataclasses.replace(plan.prediction, peak_flops=1e12, explanation=explanation)
    fast = dataclasses.replace(plan, prediction=prediction)
    alternatives = (
        dataclasses.replace(each, speed=None if each.step_seconds is None else fast.speed(each.step_seconds))
        for each in plan.alternatives
    )
    return dataclasses.replace(fast, alternatives=tuple(alternatives))


SHARES = ((0.86, 0.894), (0.07, 0.09), (0.02, 0.025), (0.012, 0.012), (0.038, 0.038))
"""Mean and largest share of each part of the sample plan's step."""


def sample_plan() -> Plan:
    return Plan(
        model=sample_model(),
        precision=Precision.FP32,
        pp=2,
        microbatch=1,
        num_microbatches=4,
        slices=SLICES,
        stages=((0, 10), (10, 18)),
        schedule=ScheduleSpec(generator="1f1b"),
        placement=(0, 1),
        program_digest="9c1f02ab" * 8,
        profile_digest="41d07e65" * 8,
        prediction=Prediction(
            step_seconds=0.2306,
            compute_seconds=0.2061,
            bubble_seconds=0.0099,
            communication_seconds=0.0036,
            reduction_seconds=0.0028,
            optimizer_seconds=0.0082,
            peak_bytes=(485 * MIB, 478 * MIB),
            slot_bytes=(96 * MIB, 81 * MIB),
        ),
        reasons=(
            "2 stages of 10 and 8 units: the head costs as much as 1.9 MLPs, so the last stage owns one block less.",
            "4 slices of 320 to 208 tokens: later slices attend to more tokens, so equal time needs shorter ones.",
            "zb with a cap of 5 weight gradients: they fill 71 % of the waits that 1f1b leaves.",
            "Peak memory 485 MiB of 4 GiB per rank: memory does not bind, so nothing is recomputed.",
        ),
        alternatives=_alternatives(),
    )


def _alternatives() -> tuple[Alternative, ...]:
    def alternative(label: str, milliseconds: float | None, mebibytes: int | None, reason: str) -> Alternative:
        seconds = None if milliseconds is None else milliseconds / 1e3
        peak = None if mebibytes is None else mebibytes * MIB
        return Alternative(label=label, step_seconds=seconds, peak_bytes=peak, reason=reason)

    return (
        alternative("zb, 3 slices, stages 10+8", 233.4, 507, "1.2 % slower: longer fill and drain"),
        alternative("zb, 5 slices, stages 10+8", 235.2, 475, "2.0 % slower: fixed cost of 40 more actions"),
        alternative("1f1b, 4 slices, stages 10+8", 241.2, 471, "4.6 % slower: waits stay empty"),
        alternative("zb, 4 equal slices of 256", 241.7, 496, "4.8 % slower: the last slice is the longest"),
        alternative("zb, 4 slices, stages 11+7", 247.2, 514, "7.2 % slower: rank 0 is the bottleneck"),
        alternative("gpipe, 4 slices, stages 10+8", 248.6, 1210, "7.8 % slower: every activation is kept"),
        alternative("zb, 1 slice, micro-batch 2", 265.0, 829, "14.9 % slower: fill of a whole sequence"),
        alternative("gpipe, 1 slice, micro-batch 4", None, 4820 * 1, "needs 4.71 GiB of 4 GiB on rank 0"),
        alternative("dp 2 x pp 1, micro-batch 2", None, None, "the lower bound of 301 ms is above the best plan"),
    )


def sample_machine() -> MachineKey:
    return MachineKey(
        host="build-7",
        device="Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz",
        num_cores=2,
        memory_bytes=8 * 2**30,
        threads_per_rank=1,
        torch_version="2.14.1+cpu",
        backend="gloo",
        trainer="5a3b1c8d9e2f",
    )


def sample_profile() -> Profile:
    rng = random.Random(3)
    return Profile(
        key=sample_machine(),
        model_digest="77aa" * 16,
        precision=Precision.FP32,
        measured_at=1_760_000_000.0,
        num_ranks=2,
        units=tuple(_unit_records(rng)),
        links=tuple(_links(2, rng)),
        collectives=(CollectiveRecord(num_ranks=2, num_bytes=4 * MIB, seconds=0.0031, spread=0.06),),
        optimizer=(OptimizerRecord(num_parameters=6_000_000, seconds=0.0078, spread=0.03),),
        memory=MemoryRecord(constant_bytes=301 * MIB),
        action_overhead_seconds=31e-6,
        load=0.12,
        method="whole actions through the runtime, median of 15, other rank active",
    )


def _unit_records(rng: random.Random) -> Iterable[UnitRecord]:
    slope = {UnitKind.EMBEDDING: 3e-8, UnitKind.ATTENTION: 1.6e-6, UnitKind.MLP: 2.9e-6, UnitKind.HEAD: 8.2e-6}
    share = {Kind.F: 1.0, Kind.I: 1.2, Kind.W: 0.9}
    for unit in UnitKind:
        for kind in (Kind.F, Kind.I, Kind.W):
            if unit in (UnitKind.EMBEDDING, UnitKind.HEAD) and kind is Kind.I:
                continue
            for i, length in enumerate((32, 64, 96, 128, 256, 384, 512, 1024)):
                grows = unit is UnitKind.ATTENTION and kind is not Kind.W
                for prefix in (0, 256, 512) if grows else (0,):
                    exact = slope[unit] * share[kind] * (length + 9) + 2.1e-9 * length * prefix
                    seconds = exact * math.exp(rng.gauss(0, 0.022))
                    yield UnitRecord(
                        unit=unit,
                        kind=kind,
                        batch=1,
                        length=length,
                        prefix=prefix,
                        alone_seconds=seconds * 0.93,
                        together_seconds=seconds,
                        spread=abs(rng.gauss(0.02, 0.01)),
                        samples=15,
                        held_out=i % 4 == 2,
                    )


def sample_fit(profile: Profile) -> tuple[FitPoint, ...]:
    rng = random.Random(5)
    return tuple(
        FitPoint(record=r, predicted_seconds=r.together_seconds * math.exp(rng.gauss(0, 0.03 if r.held_out else 0.018)))
        for r in profile.units
    )


def _links(num_ranks: int, rng: random.Random) -> Iterable[LinkRecord]:
    for source in range(num_ranks):
        for target in range(num_ranks):
            if source != target:
                is_near = source // 4 == target // 4
                speed = (1.7e9 if is_near else 0.62e9) * (1 + rng.gauss(0, 0.05))
                yield LinkRecord(source=source, target=target, latency_seconds=7e-5, bytes_per_second=speed, error=0.04)


def sample_links(num_ranks: int) -> tuple[LinkRecord, ...]:
    return tuple(_links(num_ranks, random.Random(9)))


def sample_metrics(num_steps: int = 200, step_seconds: float = 0.2352) -> tuple[StepMetrics, ...]:
    rng = random.Random(1)
    found = []
    for step in range(1, num_steps + 1):
        loss = 3.05 + 5.4 * math.exp(-step / 38) + rng.gauss(0, 0.07)
        seconds = step_seconds * (1 + abs(rng.gauss(0, 0.018)) + (0.35 if step == 1 else 0))
        found.append(
            StepMetrics(
                step=step,
                loss=loss,
                step_seconds=seconds,
                tokens_per_second=4 * 1024 / seconds,
                learning_rate=1e-3 * min(1, step / 20) * (0.5 + 0.5 * math.cos(math.pi * step / num_steps)),
                gradient_norm=0.6 + 2.4 * math.exp(-step / 15) + abs(rng.gauss(0, 0.09)),
                peak_bytes=618 * MIB,
                validation_loss=loss + 0.11 + rng.gauss(0, 0.02) if step % 25 == 0 else None,
            )
        )
    return tuple(found)


def sample_memory(plan: Plan) -> tuple[RankMemory, ...]:
    found = []
    for rank, (first, stop) in enumerate(plan.stages):
        parameters = stage_parameters(plan.model, first, stop) * 16
        found.append(
            RankMemory(
                constant_bytes=301 * MIB,
                state_bytes=parameters,
                slot_bytes=(96 - 15 * rank) * MIB,
                transient_bytes=(24 + 14 * rank) * MIB,
                measured_bytes=301 * MIB + parameters + (96 - 15 * rank + 24 + 14 * rank + 7) * MIB,
            )
        )
    return tuple(found)
