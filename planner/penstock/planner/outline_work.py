"""Inputs of the estimates of outlines (`penstock.planner.outlines`): seconds and bytes of units, and of ranks that
share layers evenly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.core.layout import Operation
from penstock.core.model import UnitKind
from penstock.core.remaking import pinned_operations
from penstock.core.schedule import ScheduleSpec
from penstock.core.units import NANOSECONDS_PER_SECOND
from penstock.planner.candidate import optimizer_shards
from penstock.planner.cost import CostModel
from penstock.planner.memory import optimizer_bytes_per_parameter, whole_bytes_per_parameter
from penstock.planner.problem import Mesh, Problem
from penstock.planner.recompute import Savings, may_recompute, savings_inside, savings_of
from penstock.planner.schedules.registry import BUILT_IN, LIKE_1F1B, find
from penstock.planner.stagecost import (
    PASSES,
    UNIT_KINDS,
    Integers,
    Slices,
    collective_seconds,
    launch_seconds,
    pass_seconds,
    prefixes,
)
from penstock.planner.unit_memory import gradient_slot_bytes, optimizer_bytes, unit_bytes
from penstock.planner.work import Floats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnitWork:
    """Seconds and bytes of units for one micro-batch at a degree of tensor parallelism, for every slicing.

    ``sums`` and ``largest`` [F I W, unit kinds, slicings] are the seconds of all slices, and of the longest one.
    ``waits`` and ``longest_waits`` are the parts of them in which a rank only waits for its shards. These take no
    longer on a slow device; they are 0 if devices are equally fast. ``launches`` and ``longest_launches`` are the
    seconds of the host to launch the passes, and ``graph_bytes`` [unit kinds, slicings] what all their graphs take.
    """

    cost: CostModel
    slicings: tuple[tuple[int, ...], ...]
    sums: Floats
    largest: Floats
    waits: Floats
    longest_waits: Floats
    launches: Floats
    longest_launches: Floats
    graph_bytes: Callable[[], Integers]
    state_bytes: Integers
    optimizer_bytes: Integers
    """The part of ``state_bytes`` that replicas may divide."""
    held_bytes: Integers
    savings: Callable[[], Savings]
    passing: Callable[[], tuple[Floats, Floats]]
    """[unit kinds, slicings]: bytes of the output gradients of one slice, and transients."""

    @property
    def counts(self) -> Integers:
        """Number of slices of each slicing."""
        return np.array([len(slices) for slices in self.slicings])

    @classmethod
    def of(cls, problem: Problem, tp: int, batch: int, slicings: Sequence[Slices]) -> UnitWork:
        """Compute from the problem's costs and the layout's bytes. The savings of recomputation are those of the middle
        slicing, from which others differ little.
        """
        cost, counts = problem.cost_of(tp), [len(slices) for slices in slicings]
        lengths = np.concatenate(slicings).astype(np.float64)
        before = np.concatenate([prefixes(slices) for slices in slicings]).astype(np.float64)
        slowdown = np.array([[[cost.slowdown(unit, kind)] for unit in UNIT_KINDS] for kind in PASSES])
        seconds = pass_seconds(cost, batch, lengths, before) * slowdown
        waits = np.zeros_like(seconds)
        if problem.slowness:
            waits = np.minimum(collective_seconds(cost, batch, lengths, before), seconds)
        launches = launch_seconds(cost, batch, lengths, before)
        state, held = unit_bytes(problem, tp, batch)
        starts = np.cumsum([0, *counts[:-1]])
        return cls(
            cost=cost,
            slicings=tuple(map(tuple, slicings)),
            sums=np.add.reduceat(seconds, starts, axis=2),
            largest=np.maximum.reduceat(seconds, starts, axis=2),
            waits=np.add.reduceat(waits, starts, axis=2),
            longest_waits=np.maximum.reduceat(waits, starts, axis=2),
            launches=np.add.reduceat(launches, starts, axis=2),
            longest_launches=np.maximum.reduceat(launches, starts, axis=2),
            graph_bytes=functools.lru_cache(lambda: _graph_bytes(cost, batch, slicings)),
            state_bytes=state,
            optimizer_bytes=optimizer_bytes(problem, tp),
            held_bytes=held,
            savings=functools.lru_cache(lambda: savings_of(problem, tp, batch, slicings[len(slicings) // 2])),
            passing=functools.lru_cache(lambda: _passing_bytes(problem, tp, batch, slicings)),
        )

    def state_of(self, optimizer_shards: int) -> Floats:
        """[unit kinds]: bytes of the state if ``optimizer_shards`` replicas divide the optimizer state."""
        state: Floats = self.state_bytes - self.optimizer_bytes * (1 - 1 / optimizer_shards)
        return state

    def recompute_ns(self, shares: Floats, *, is_inside: bool = False) -> Floats:
        """Nanoseconds, elementwise, in which a layer recomputes the given shares of the buffers of a micro-batch that
        it can recompute.
        """
        savings = savings_inside(self.savings()) if is_inside else self.savings()
        total = sum(saving.num_bytes for saving in savings)
        missing_bytes, recompute_ns = shares * total, np.zeros_like(shares)
        for saving in savings:
            recompute_ns += saving.duration_ns * np.clip(missing_bytes / saving.num_bytes, 0, 1)
            missing_bytes = missing_bytes - saving.num_bytes
        return recompute_ns

    def dropped_bytes(self, operations: Iterable[Operation] = tuple(Operation)) -> int:
        """Bytes of a micro-batch that a layer does not hold if it recomputes these operations."""
        recomputed = frozenset(operations)
        return sum(saving.num_bytes for saving in self.savings() if saving.operation in recomputed)

    @property
    def dropped_inside_bytes(self) -> int:
        """Bytes of a micro-batch that a layer does not hold if it recomputes everything inside its backward."""
        return sum(saving.num_bytes for saving in savings_inside(self.savings()))


def _graph_bytes(cost: CostModel, batch: int, slicings: Sequence[Slices]) -> Integers:
    """[unit kinds, slicings]: bytes of the graphs of F, I and W of all slices, as if each were like the longest."""
    longest = [(max(slices), sum(slices) - max(slices), len(slices)) for slices in slicings]
    sizes = [
        [
            count * sum(cost.graph_bytes(unit, kind, batch, length, prefix) for kind in PASSES)
            for length, prefix, count in longest
        ]
        for unit in UNIT_KINDS
    ]
    return np.array(sizes, dtype=np.int64)


def _passing_bytes(problem: Problem, tp: int, batch: int, slicings: Sequence[Slices]) -> tuple[Floats, Floats]:
    """`UnitWork.passing`, for each slicing's longest slice."""
    cost, longest = problem.cost_of(tp), [max(slices) for slices in slicings]
    transients = [
        [max(cost.transient_bytes(unit, kind, batch, length, 0) for kind in PASSES) for length in longest]
        for unit in UNIT_KINDS
    ]
    return gradient_slot_bytes(problem, tp, batch, longest).astype(np.float64), np.array(transients, dtype=np.float64)


NEARLY_FULL = 0.75
"""Ranks that hold at least this fraction of the limit by an outline may exceed it: outlines ignore messages, and divide
units. If they fit after all, nothing is recomputed.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Relief:
    """The effect of recomputing what exceeds the limit: a step takes ``recompute_ns`` longer, and a rank that
    recomputes everything needs at least ``least_bytes``.
    """

    recompute_ns: int
    least_bytes: int


def microbatch_capacity(problem: Problem, work: UnitWork, mesh: Mesh, zero: int) -> Floats:
    """[ranks, 1]: the micro-batches that fit on a rank at this degree of ZeRO, if all ranks have equally many units,
    and equally many parts of a divided head.
    """
    embedding, head = UNIT_KINDS.index(UnitKind.EMBEDDING), UNIT_KINDS.index(UnitKind.HEAD)
    inner = [UNIT_KINDS.index(UnitKind.ATTENTION), UNIT_KINDS.index(UnitKind.MLP)]
    share, parts = 2 * problem.model.layers / mesh.pp, problem.model.head_parts
    of_kinds = work.state_of(optimizer_shards(mesh, zero))
    state = np.full((mesh.pp, 1), share * of_kinds[inner].mean() + work.cost.constant_bytes)
    held = np.full((mesh.pp, 1), share * work.held_bytes[inner].mean())
    head_ranks = slice(-1, None) if parts == 1 else slice(None)
    for ranks, kind, count in ((slice(1), embedding, 1.0), (head_ranks, head, 1.0 if parts == 1 else parts / mesh.pp)):
        state[ranks] += count * of_kinds[kind]
        held[ranks] += count * work.held_bytes[kind]
    capacity: Floats = np.maximum((problem.memory_limit_bytes - state) / held, 1.0)
    return capacity


def in_flight(mesh: Mesh, slices: Integers, schedule: str) -> Floats:
    """[ranks, slicings]: the least number of micro-batches whose activations a rank holds at once.

    All of them under ``gpipe``; under 1F1B one micro-batch, and one slice more for every later rank (Seq1F1B, arXiv
    2406.03488, section 3.2). Orders that adapt to the free memory hold at least one micro-batch.
    """
    if schedule == "gpipe":
        return np.full((mesh.pp, len(slices)), mesh.num_by_work)
    held = np.ones((mesh.pp, len(slices)))
    if schedule in LIKE_1F1B:
        held += np.arange(mesh.pp)[::-1, None] / slices
    return np.minimum(held, mesh.num_by_work)


def holding_alike(problem: Problem, mesh: Mesh, schedule: str) -> tuple[str, bool]:
    """A key that is the same for all schedules whose outlines have the same `OutlineMemory`."""
    if schedule not in BUILT_IN:
        return schedule, False
    is_virtual = stages_per_rank(problem, mesh, schedule) > 1
    if schedule in LIKE_1F1B:
        schedule = "1f1b"
    elif schedule != "gpipe":
        schedule = "zb"
    return schedule, is_virtual


def stages_per_rank(problem: Problem, mesh: Mesh, schedule: str | ScheduleSpec) -> int:
    """Stages per rank, by the schedule and the pinned number of stages; 1 for imported schedules."""
    if not isinstance(schedule, str):
        return 1
    pinned = problem.pinned.stages
    return find(schedule).per_rank(mesh.pp, None if pinned is None else len(pinned))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AtOnce:
    """[slicings]: the parts of a rank's micro-batch whose recomputed buffers exist at once: a slice in all layers of a
    stage, if an R recomputes them, or in one layer, if a backward does.
    """

    of_stage: Floats
    of_layer: Floats


def _shares_at_once(problem: Problem, work: UnitWork, mesh: Mesh, schedule: str) -> AtOnce:
    """One rank with one slice may be given more, which need less memory (`penstock.planner.candidates`), so there the
    shortest counts. Of several stages on a rank the one that is recomputed while most is held may be small: it counts
    as nothing.
    """
    slices: Floats = 1 / work.counts
    if mesh.pp == 1 and problem.pinned.slices is None:
        slices = np.full(len(work.counts), problem.quantum / problem.sequence_length)
    of_layer = slices * min(mesh.pp / problem.model.layers, 1.0)
    of_stage = slices if stages_per_rank(problem, mesh, schedule) == 1 else np.zeros_like(slices)
    return AtOnce(of_stage=of_stage, of_layer=of_layer)


def _most_units(problem: Problem, mesh: Mesh, num_units: Floats) -> Floats:
    """[slicings]: units of the rank with most, assuming that all its stages are as long as the longest pinned one."""
    pinned = problem.pinned.stages or ()
    return np.maximum(num_units, 2.0 * max(pinned, default=0.0) * len(pinned)) / mesh.pp


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OutlineMemory:
    """Bytes of the ranks of a mesh that share layers evenly, [ranks, slicings] unless said otherwise.

    ``always`` is independent of a rank's layers: the process, embedding and head. ``per_unit`` are the bytes of a unit
    of mean size. Full recomputation saves its bytes of the micro-batches ``in_flight``, except of the part whose
    buffers exist ``at_once``. ``num_units`` [slicings] are the divided units.
    """

    always: Floats
    per_unit: Floats
    in_flight: Floats
    at_once: AtOnce
    num_units: Floats

    @classmethod
    def of(cls, problem: Problem, work: UnitWork, mesh: Mesh, schedule: str, zero: int) -> OutlineMemory:
        """With this schedule and degree of ZeRO. A schedule that is not built in may hold anything: its bound is 0."""
        shape = (mesh.pp, len(work.counts))
        if schedule not in BUILT_IN:
            nothing = np.zeros(shape)
            at_once = AtOnce(of_stage=nothing[0], of_layer=nothing[0])
            return cls(always=nothing, per_unit=1 + nothing, in_flight=nothing, at_once=at_once, num_units=nothing[0])
        held_by, pinned = in_flight(mesh, work.counts, schedule), problem.pinned.recompute
        embedding, head = UNIT_KINDS.index(UnitKind.EMBEDDING), UNIT_KINDS.index(UnitKind.HEAD)
        inner = [UNIT_KINDS.index(UnitKind.ATTENTION), UNIT_KINDS.index(UnitKind.MLP)]
        at_once = _shares_at_once(problem, work, mesh, schedule)
        shards, is_of_layer = optimizer_shards(mesh, zero), problem.software.recomputes_on_demand
        state = work.state_of(shards)
        per_unit = state[inner].mean() + held_by * work.held_bytes[inner].mean()
        if pinned is not None:
            elsewhere = held_by - (at_once.of_layer if is_of_layer else at_once.of_stage)
            per_unit = per_unit - elsewhere * work.dropped_bytes(pinned_operations(pinned)) / len(inner)
        always = np.full(shape, float(work.cost.constant_bytes))
        always[0] += state[embedding] + held_by[0] * work.held_bytes[embedding]
        of_head, parts = state[head] + held_by * work.held_bytes[head], problem.model.head_parts
        if parts == 1:
            always[-1] += of_head[-1]
        if problem.model.tied and mesh.pp == 1:
            shared = problem.sharding(mesh.tp).vocab(problem.model) * problem.model.hidden
            whole = whole_bytes_per_parameter(problem.precision, problem.software.gradient_type)
            always -= shared * (whole + optimizer_bytes_per_parameter(problem.precision, problem.moment_type) / shards)
        num_units = np.full(shape[1], 2.0 * problem.model.layers)
        if parts > 1:
            num_units += parts * (of_head / per_unit).min(axis=0)
        return cls(always=always, per_unit=per_unit, in_flight=held_by, at_once=at_once, num_units=num_units)

    @property
    def least_bytes(self) -> Floats:
        """[slicings]: lower bound of the fullest rank's bytes, for any assignment of units."""
        return self._dealt(self.per_unit)

    def _dealt(self, per_unit: Floats) -> Floats:
        balanced = (self.num_units + (self.always / per_unit).sum(axis=0)) / (1 / per_unit).sum(axis=0)
        least: Floats = np.maximum(balanced, self.always.max(axis=0))
        return least

    def reliefs(self, problem: Problem, work: UnitWork, mesh: Mesh, *, is_inside: bool) -> list[Relief | None]:
        """[slicings]: the effect of recomputing what exceeds the limit, by an R or inside backwards, with the time as
        the mean over ranks; None if ranks fit without, or may not recompute.
        """
        units_per_rank, limit = self.num_units / mesh.pp, problem.memory_limit_bytes
        most_units = _most_units(problem, mesh, self.num_units)
        if not may_recompute(problem) or (self.always + most_units * self.per_unit <= limit / 2).all():
            return [None] * len(units_per_rank)
        dropped = self._dropped_bytes(work, is_inside=is_inside)
        if not dropped.any():
            return [None] * len(units_per_rank)
        always, per_unit = self._with_passing(problem, work)
        held = always + units_per_rank * per_unit
        shares = np.clip((held - limit) / np.maximum(units_per_rank * dropped, 1), 0, 1)
        of_layer = work.recompute_ns(shares, is_inside=is_inside).mean(axis=0)
        added_ns = mesh.num_by_work * problem.model.layers / mesh.pp * of_layer
        least_bytes = self._dealt(self.per_unit - dropped)
        most_bytes = always + most_units * per_unit
        is_nearly_full = np.any(most_bytes > NEARLY_FULL * limit, axis=0)
        return [
            Relief(recompute_ns=round(recompute_ns), least_bytes=int(num_bytes)) if nearly_full else None
            for recompute_ns, num_bytes, nearly_full in zip(
                added_ns.tolist(), least_bytes.tolist(), is_nearly_full.tolist(), strict=True
            )
        ]

    def _dropped_bytes(self, work: UnitWork, *, is_inside: bool) -> Floats:
        """Bytes that a unit of mean size gives up; an attention and an MLP give up together."""
        if not is_inside:
            return (self.in_flight - self.at_once.of_stage) * work.dropped_bytes() / 2
        return (self.in_flight - self.at_once.of_layer) * work.dropped_inside_bytes / 2

    def _with_passing(self, problem: Problem, work: UnitWork) -> tuple[Floats, Floats]:
        """``always`` and ``per_unit`` including the output gradients of a slice, and the largest transient."""
        gradients, transients = work.passing()
        inner = [UNIT_KINDS.index(UnitKind.ATTENTION), UNIT_KINDS.index(UnitKind.MLP)]
        largest = np.broadcast_to(transients[inner].max(axis=0), self.always.shape).copy()
        heads = slice(-1, None) if problem.model.head_parts == 1 else slice(None)
        largest[heads] = np.maximum(largest[heads], transients[UNIT_KINDS.index(UnitKind.HEAD)])
        return self.always + largest, self.per_unit + gradients[inner].mean(axis=0)


@dataclass(frozen=True, slots=True, eq=False)
class OutlineMemories:
    """The memory of a mesh's outlines, computed once for all schedules whose ranks hold the same. Reliefs are computed
    when they are needed, since few outlines are relieved where something fits.
    """

    problem: Problem
    work: UnitWork
    mesh: Mesh
    _bytes_cache: dict[tuple[tuple[str, bool], int], Floats] = field(default_factory=dict)
    _relief_cache: dict[tuple[tuple[str, bool], int, bool], list[Relief | None]] = field(default_factory=dict)

    def least_bytes(self, schedule: str, zero: int) -> Floats:
        """`OutlineMemory.least_bytes`."""
        key = holding_alike(self.problem, self.mesh, schedule), zero
        if key not in self._bytes_cache:
            self._bytes_cache[key] = self._memory(schedule, zero).least_bytes
        return self._bytes_cache[key]

    def relief(self, schedule: str, zero: int, place: int, is_inside: bool) -> Relief | None:
        """The relief of slicing number ``place``, from `OutlineMemory.reliefs`."""
        key = holding_alike(self.problem, self.mesh, schedule), zero, is_inside
        if key not in self._relief_cache:
            memory = self._memory(schedule, zero)
            self._relief_cache[key] = memory.reliefs(self.problem, self.work, self.mesh, is_inside=is_inside)
        return self._relief_cache[key][place]

    def _memory(self, schedule: str, zero: int) -> OutlineMemory:
        return OutlineMemory.of(self.problem, self.work, self.mesh, schedule, zero)

    @property
    def pinned_seconds(self) -> float:
        """Seconds of a step in which the pinned operations are recomputed."""
        operations = pinned_operations(self.problem.pinned.recompute)
        if not operations:
            return 0.0
        duration_ns = sum(saving.duration_ns for saving in self.work.savings() if saving.operation in operations)
        mesh = self.mesh
        return mesh.num_by_work * self.problem.model.layers / mesh.pp * duration_ns / NANOSECONDS_PER_SECOND
