"""What one mesh offers: partitions and slicings seeded by the dynamic programmes, times the schedules to run them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.core.layout import SlotKind
from penstock.core.model import UnitKind
from penstock.core.schedule import ScheduleSpec
from penstock.planner.memory import StageMemory
from penstock.planner.pins import pinned_stages
from penstock.planner.problem import Mesh, Problem, imported_schedule
from penstock.planner.schedules.registry import BUILT_IN, find
from penstock.planner.slicing import Slicing, SlicingProblem, balanced_slicings, rank_one_f_one_b, tabulate
from penstock.planner.slicing_flush import best_flush_slicing
from penstock.planner.stagecost import SliceCost, Stages, stage_costs, unit_counts, unit_totals
from penstock.planner.stages import MemoryShortage, StagesProblem, best_partitions

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb")
V_SHAPED = "zbv"
CAPPED = frozenset({V_SHAPED, "v-half", "v-min", "interleaved-1f1b", "interleaved-zb"})
"""Schedules that hold little, or more than other bounds say, by their placement or their caps."""
V_FILLS = 2
"""Beyond so many micro-batches per rank the pipeline fills too rarely for two stages per rank to matter much."""
V_ACTIONS = 30_000
"""Longer steps of them are not looked at, since they are simulated in full."""

MOST_SLICES = 64
SEEDS_PER_MESH = 4
FIRST_GUESS_SLICES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Everything a simulation needs to know; the planner varies nothing else."""

    mesh: Mesh
    stages: Stages
    slices: tuple[int, ...]
    schedule: str | ScheduleSpec
    variant: int | None = None
    """Which of its orders a generator of several makes; the best of them if none is named."""

    @property
    def label(self) -> str:
        """For explanations."""
        name = self.schedule if isinstance(self.schedule, str) else self.schedule.generator
        return f"{self.mesh.label}, {len(self.slices)} slices, {name}"

    @property
    def num_actions(self) -> int:
        """F, I and W of every slice on every stage."""
        return 3 * len(self.stages) * self.mesh.num_microbatches * len(self.slices)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """No stage partition of the mesh fits: the stage that lacks most, and how many bytes."""

    mesh: Mesh
    stage: int
    missing_bytes: int


_HELD = (SlotKind.ACTIVATIONS, SlotKind.LINEAR_INPUTS, SlotKind.KEYS_VALUES)


def equal_slices(sequence_length: int, count: int) -> tuple[int, ...]:
    """``count`` lengths that differ by at most one token, longest first."""
    short, longer = divmod(sequence_length, count)
    return (short + 1,) * longer + (short,) * (count - longer)


def in_flight_slices(mesh: Mesh, num_slices: int, schedule: str) -> list[int]:
    """Per rank, the slices whose activations are held at once: all of them under ``gpipe``, else those of one
    micro-batch and one more for every later rank (Seq1F1B, arXiv 2406.03488, section 3.2).

    No order holds fewer without waiting more; ``zb`` could where room is short, but such plans are not looked for.
    The others keep within their caps down to one micro-batch.
    """
    most = mesh.num_microbatches * num_slices
    if schedule == "gpipe":
        return [most] * mesh.pp
    if schedule in CAPPED:
        return [num_slices] * mesh.pp
    return [min(most, num_slices + mesh.pp - 1 - stage) for stage in range(mesh.pp)]


def schedules_for(problem: Problem, mesh: Mesh, num_slices: int) -> tuple[str | ScheduleSpec, ...]:
    """The schedules worth trying on the mesh with so many slices under what is pinned."""
    pinned = problem.pinned
    if pinned.schedule is not None:
        return (pinned.schedule,)
    if mesh.pp == 1:
        return ("gpipe",)
    if pinned.stages is not None:
        return SCHEDULES if len(pinned.stages) == mesh.pp else (V_SHAPED,)
    num_stages = 2 * mesh.pp
    fills_often = mesh.num_microbatches <= V_FILLS * mesh.pp
    is_short = 3 * num_stages * mesh.num_microbatches * num_slices <= V_ACTIONS
    return (*SCHEDULES, V_SHAPED) if fills_often and is_short and num_stages <= problem.model.num_units else SCHEDULES


def most_stages_per_rank(problem: Problem, mesh: Mesh, num_slices: int) -> int:
    """Of the schedules worth trying."""
    return max(stages_per_rank(schedule, problem, mesh) for schedule in schedules_for(problem, mesh, num_slices))


def stages_per_rank(schedule: str | ScheduleSpec, problem: Problem, mesh: Mesh) -> int:
    """By name, and by the number of stages that is pinned; one is enough to tell imported ones from these, since their
    number of stages is their own.
    """
    if not isinstance(schedule, str):
        return 1
    stages = problem.pinned.stages
    return find(schedule).per_rank(mesh.pp, None if stages is None else len(stages))


@dataclass(frozen=True, slots=True)
class Proposer:
    """Makes the candidates of each mesh of one problem; slicing tables are shared between meshes."""

    problem: Problem
    _balanced: dict[tuple[object, ...], tuple[SlicingProblem, tuple[Slicing, ...]]] = field(default_factory=dict)

    def candidates(self, mesh: Mesh) -> list[Candidate] | Shortage:
        """The candidates of one mesh, or why none can fit."""
        shortage = self.static_shortage(mesh)
        if shortage is not None:
            return shortage
        schedules = schedules_for(self.problem, mesh, 1)
        by_stages = itertools.groupby(schedules, key=lambda schedule: stages_per_rank(schedule, self.problem, mesh))
        offers = [self._offers(mesh, per_rank, tuple(schedules)) for per_rank, schedules in by_stages]
        found = [candidate for offer in offers if not isinstance(offer, Shortage) for candidate in offer]
        return found or offers[0]

    def _offers(
        self, mesh: Mesh, per_rank: int, schedules: tuple[str | ScheduleSpec, ...]
    ) -> list[Candidate] | Shortage:
        """The candidates with so many stages per rank."""
        slicings = self._slicings(mesh, per_rank)
        if isinstance(slicings, Shortage):
            return slicings
        stages = self.partitions(mesh, slicings[0], per_rank)
        if isinstance(stages, Shortage):
            return stages
        return [
            Candidate(mesh=mesh, stages=stages[0], slices=slices, schedule=schedule)
            for slices in slicings
            for schedule in schedules
            if schedule in schedules_for(self.problem, mesh, len(slices))
        ]

    def static_shortage(self, mesh: Mesh) -> Shortage | None:
        """The memory filter that comes first: what all stages must hold at least, spread perfectly."""
        model, pp = self.problem.model, mesh.pp
        sizes = self._unit_sizes(mesh)
        state = sum(sizes[unit.kind][0] for unit in model.units)
        held = sum(sizes[unit.kind][1] for unit in model.units)
        limit = self.problem.memory_limit_bytes - self.problem.cost_of(mesh.tp).constant_bytes
        missing = (state + held) // pp - limit
        return Shortage(mesh=mesh, stage=0, missing_bytes=missing) if missing > 0 else None

    def partitions(
        self, mesh: Mesh, slices: Sequence[int], per_rank: int = 1, count: int = 1
    ) -> list[Stages] | Shortage:
        """The stages pinned by the user, or the best partitions by bottleneck that fit in memory.

        Stages of one rank share its memory evenly here; the simulation counts what they take together.
        """
        pinned = self.problem.pinned.stages
        if pinned is not None:
            return [pinned_stages(pinned, self.problem.model.num_units)]
        found = best_partitions(self._stages_problem(mesh, slices, per_rank), count=count)
        if isinstance(found, MemoryShortage):
            return Shortage(mesh=mesh, stage=found.stage, missing_bytes=max(found.missing_bytes))
        return [tuple(itertools.pairwise(each.bounds)) for each in found]

    def _stages_problem(self, mesh: Mesh, slices: Sequence[int], per_rank: int) -> StagesProblem:
        model, cost = self.problem.model, self.problem.cost_of(mesh.tp)
        sizes = self._unit_sizes(mesh)
        units = [sizes[unit.kind] for unit in model.units]
        limit = (self.problem.memory_limit_bytes - cost.constant_bytes) // per_rank
        return StagesProblem(
            unit_ns=unit_totals(cost, model, slices, mesh.microbatch).tolist(),
            resident_bytes=[state for state, _ in units],
            in_flight_bytes=[held for _, held in units],
            in_flight=self._in_flight(mesh, len(slices), per_rank),
            limit_bytes=[max(limit, 0)] * self._num_stages(mesh, per_rank),
        )

    def _num_stages(self, mesh: Mesh, per_rank: int) -> int:
        imported = imported_schedule(self.problem.pinned)
        return mesh.pp * per_rank if imported is None else imported.num_stages

    def _in_flight(self, mesh: Mesh, num_slices: int, per_rank: int) -> list[float]:
        """Per stage the micro-batches held at least; of orders that are not built in only their simulation tells."""
        schedule = self.problem.pinned.schedule or "1f1b"
        if schedule not in BUILT_IN:
            return [0.0] * self._num_stages(mesh, per_rank)
        if per_rank > 1:
            return [1.0] * self._num_stages(mesh, per_rank)
        return [held / num_slices for held in in_flight_slices(mesh, num_slices, str(schedule))]

    def _unit_sizes(self, mesh: Mesh) -> dict[UnitKind, tuple[int, int]]:
        """Bytes of one unit of each kind: its state with its keys' and values' gradients, and what it holds of one
        micro-batch.
        """
        problem, length = self.problem, [self.problem.sequence_length]
        units = (*problem.model.units[:3], problem.model.units[-1])
        memory = StageMemory(
            model=problem.model,
            precision=problem.precision,
            stages=tuple((unit.index, unit.index + 1) for unit in units),
            batch=mesh.microbatch,
            tp=mesh.tp,
        )
        resident = memory.state_bytes + memory.slot_bytes(SlotKind.KEYS_VALUES_GRADIENTS, length)[:, 0]
        held = memory.together_bytes(_HELD, length)[:, 0]
        return {unit.kind: (int(a), int(b)) for unit, a, b in zip(units, resident, held, strict=True)}

    def _slicings(self, mesh: Mesh, per_rank: int) -> list[tuple[int, ...]] | Shortage:
        """Slicings worth trying: pinned lengths alone, else the best few of both objectives, and none at all.

        Partition and slicing depend on each other: the caller partitions again for the first of these.
        """
        pinned, length = self.problem.pinned.slices, self.problem.sequence_length
        imported = imported_schedule(self.problem.pinned)
        if isinstance(pinned, tuple):
            return [pinned]
        if imported is not None:
            pinned = imported.num_slices
        if mesh.pp == 1:
            return [equal_slices(length, pinned or 1)]
        seeds = [equal_slices(length, min(pinned or FIRST_GUESS_SLICES, length))]
        stages = self.partitions(mesh, seeds[0], per_rank)
        if isinstance(stages, Shortage):
            return stages
        seeds = [seed.lengths for seed in self._seeds(mesh, stages[0], per_rank, pinned)] or seeds
        return list(dict.fromkeys([*seeds, *([] if pinned else [(length,)])]))

    def _seeds(self, mesh: Mesh, stages: Stages, per_rank: int, count: int | None) -> list[Slicing]:
        """The best slicings for the bottleneck stage, by the 1F1B objective and the flush objective.

        With several stages per rank a slice passes each in turn, as that many micro-batches would.
        """
        table, balanced = self._slicing_table(mesh, stages)
        shape = {"num_microbatches": mesh.num_microbatches * per_rank, "num_stages": mesh.pp}
        if count is not None:
            return [seed for seed in balanced if seed.num_slices == count]
        ranked = list(rank_one_f_one_b(balanced, **shape))[:SEEDS_PER_MESH]
        if not ranked:
            return []
        if mesh.num_microbatches > mesh.pp:
            return ranked  # the pipeline fills once in many micro-batches; to flush it would only take more memory
        flush = best_flush_slicing(table, **shape, eps_ns=max(1, ranked[0].largest_ns // 50))
        return ranked if flush is None or flush in ranked else [*ranked, flush]

    def _slicing_table(self, mesh: Mesh, stages: Stages) -> tuple[SlicingProblem, tuple[Slicing, ...]]:
        problem, cost = self.problem, self.problem.cost_of(mesh.tp)
        whole = stage_costs(cost, problem.model, stages, (problem.sequence_length,), mesh.microbatch)
        counts = unit_counts(problem.model, stages)[int(whole.slice_ns[:, 0].argmax())]
        key = (mesh.tp, mesh.microbatch, *counts.tolist())
        if key not in self._balanced:
            cost_of = SliceCost(cost=cost, counts=counts, batch=mesh.microbatch)
            table = SlicingProblem(
                cost_ns=tabulate(cost_of, sequence_length=problem.sequence_length, quantum=problem.quantum),
                sequence_length=problem.sequence_length,
                quantum=problem.quantum,
                max_slices=MOST_SLICES,
            )
            self._balanced[key] = (table, balanced_slicings(table))
        return self._balanced[key]
