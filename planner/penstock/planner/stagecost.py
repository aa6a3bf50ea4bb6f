"""Costs of stages: units' seconds summed into integer nanoseconds per kind, stage and slice.

A stage is a count of units of each kind, so all stages are priced by one product:
counts [stages, unit kinds] @ nanoseconds [unit kinds, slices].

On CUDA the host launches while the device computes, so an action without a graph takes as long as the slower of both:
the sum of its units' seconds, or the sum of their launches. Of the actions of a slice only a share may lack a graph
(`penstock.planner.launches`). They are priced alike, at the mean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.model import ModelSpec, UnitKind
from penstock.core.schedule import Kind
from penstock.core.units import NANOSECONDS_PER_SECOND
from penstock.planner.cost import CostModel
from penstock.planner.nanoseconds import require_countable, whole_nanoseconds
from penstock.planner.work import Floats, Lengths, Work

Integers = npt.NDArray[np.int64]
Stages = tuple[tuple[int, int], ...]
Slices = tuple[int, ...]
"""Lengths in tokens, first to last."""

UNIT_KINDS = tuple(UnitKind)
PASSES = (Kind.F, Kind.I, Kind.W)


def equal_slices(sequence_length: int, count: int) -> Slices:
    """``count`` lengths that differ by at most one token, longest first."""
    short, longer = divmod(sequence_length, count)
    return (short + 1,) * longer + (short,) * (count - longer)


def prefixes(slices: Sequence[int]) -> Integers:
    """Tokens before each slice."""
    return np.cumsum([0, *slices[:-1]], dtype=np.int64)


@functools.lru_cache(maxsize=16)
def _kind_numbers(model: ModelSpec) -> Integers:
    return np.array([UNIT_KINDS.index(unit.kind) for unit in model.units])


@functools.lru_cache(maxsize=16)
def _running_counts(model: ModelSpec) -> Integers:
    """[units + 1, unit kinds]: how many units of each kind come before each unit."""
    ones = np.eye(len(UNIT_KINDS), dtype=np.int64)[_kind_numbers(model)]
    return np.concatenate([np.zeros_like(ones[:1]), ones.cumsum(axis=0)])


@functools.lru_cache(maxsize=256)
def unit_counts(model: ModelSpec, stages: Stages) -> Integers:
    """[stages, unit kinds]: how many units of each kind every stage owns; read-only, since it is cached."""
    running = _running_counts(model)
    first, stop = np.array(stages).T
    counts: Integers = running[stop] - running[first]
    counts.setflags(write=False)
    return counts


def first_like(model: ModelSpec, stage: tuple[int, int]) -> tuple[int, int]:
    """The first stage with units of the same kinds, if it has only layers; results for it hold for all such stages."""
    first, stop = stage
    before = (first - 1) // 2 * 2 if first and stop <= model.first_head_unit else 0
    return first - before, stop - before


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageCosts:
    """Nanoseconds [pass, stage, slice] of F, I and W, alone; and the factor (parts per million) by which
    each takes longer while all ranks of its host compute. Every action with any work carries the fixed overhead once.

    ``launch_factor`` [stage, slice] is how many times as long as on the device alone an F takes with its launches.
    ``saved_ns`` [stage, slice] is by how much a B takes less than an I and a W, except for an overhead: the device may
    be the slower one in the one, and the host in the other.
    """

    alone_ns: Integers
    slowdown_ppm: Integers
    launch_factor: Floats
    saved_ns: Integers

    @property
    def concurrent_ns(self) -> Integers:
        """Nanoseconds while all ranks of the host compute."""
        return self.alone_ns * self.slowdown_ppm // 1_000_000

    @property
    def slice_ns(self) -> Integers:
        """[stage, slice]: the sum of F, I and W."""
        total: Integers = self.concurrent_ns.sum(axis=0)
        return total


def pass_seconds(cost: CostModel, batch: int, lengths: Lengths, before: Lengths) -> Floats:
    """[F I W, unit kinds, points]: seconds of each pass of each unit kind."""
    work = Work.of(batch, lengths, before)
    return np.stack([np.stack([cost.unit_seconds(unit, kind, work) for unit in UNIT_KINDS]) for kind in PASSES])


def launch_seconds(cost: CostModel, batch: int, lengths: Lengths, before: Lengths) -> Floats:
    """[F I W, unit kinds, points]: seconds of the host to launch each pass of each unit kind kernel by kernel."""
    work = Work.of(batch, lengths, before)
    return np.stack([np.stack([cost.launch_seconds(unit, kind, work) for unit in UNIT_KINDS]) for kind in PASSES])


def slower_seconds(cost: CostModel, batch: int, lengths: Lengths, before: Lengths) -> Floats:
    """`pass_seconds`, of each pass at least those of its launches if no action of ``cost`` has a graph. Their sum is at
    least the time of an action, whose device and host may each be the slower one in some of its units.
    """
    seconds = pass_seconds(cost, batch, lengths, before)
    if cost.most_graph_bytes is not None:
        return seconds
    return np.maximum(seconds, launch_seconds(cost, batch, lengths, before))


def collective_seconds(cost: CostModel, batch: int, lengths: Lengths, before: Lengths) -> Floats:
    """[F I W, unit kinds, points]: the part of `pass_seconds` in which a rank only waits for its shards."""
    work = Work.of(batch, lengths, before)
    return np.stack([np.stack([cost.collective_seconds(unit, kind, work) for unit in UNIT_KINDS]) for kind in PASSES])


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitTable:
    """Costs of one unit of each kind for every slice of a micro-batch of ``batch`` sequences; the costs of stages are
    sums of these.

    ``seconds`` [F I W, unit kinds, slices] are those of a unit alone; they are ``slowdown`` [F I W, unit kinds, 1]
    times as many while all ranks of the host compute. ``launching``, of the same shape, are those of the host to launch
    the unit's pass kernel by kernel.
    """

    cost: CostModel
    batch: int
    slices: Slices
    seconds: Floats
    slowdown: Floats
    launching: Floats

    @classmethod
    def of(cls, cost: CostModel, batch: int, slices: Slices) -> UnitTable:
        """The table for micro-batches of ``batch`` sequences, each cut into ``slices`` in tokens."""
        points = np.asarray(slices, dtype=np.float64), prefixes(slices).astype(float)
        return cls(
            cost=cost,
            batch=batch,
            slices=slices,
            seconds=pass_seconds(cost, batch, *points),
            launching=launch_seconds(cost, batch, *points),
            slowdown=np.array([[[cost.slowdown(unit, kind)] for unit in UNIT_KINDS] for kind in PASSES]),
        )

    @property
    def overhead_seconds(self) -> float:
        """Fixed cost of starting any action."""
        return self.cost.action_overhead_seconds

    @functools.cached_property
    def may_wait_for_launches(self) -> bool:
        """Whether any pass takes the host any time to launch."""
        return bool(self.launching.any())

    @functools.cached_property
    def transient_bytes(self) -> Integers:
        """[unit kinds, F I W, slices]: bytes needed beyond the slots. Stages that are only timed do not need them."""
        return self._bytes(self.cost.transient_bytes)

    @functools.cached_property
    def graph_bytes(self) -> Integers:
        """[unit kinds, F I W, slices]: bytes of the graph of each pass."""
        return self._bytes(self.cost.graph_bytes)

    def _bytes(self, bytes_of: Callable[[UnitKind, Kind, int, int, int], int]) -> Integers:
        points = list(zip(self.slices, prefixes(self.slices).tolist(), strict=True))
        sizes = [
            [[bytes_of(unit, kind, self.batch, *point) for point in points] for kind in PASSES] for unit in UNIT_KINDS
        ]
        return np.array(sizes, dtype=np.int64)


def stage_costs(units: UnitTable, model: ModelSpec, stages: Stages, launched: Floats | None = None) -> StageCosts:
    """The costs of every pass of every stage over the table's slices. ``launched`` [stages, slices] is the share of the
    actions that have no graph; by default that is all or none of them.
    """
    counts = unit_counts(model, stages)
    device, concurrent = counts @ units.seconds, counts @ (units.seconds * units.slowdown)
    base, saved = device, np.zeros(device.shape[1:])
    if units.may_wait_for_launches:
        launching = counts @ units.launching
        share = float(units.cost.most_graph_bytes is None) if launched is None else launched
        base, concurrent = (own + share * np.maximum(launching - own, 0.0) for own in (device, concurrent))
        late = share * np.maximum((launching - device)[1:].sum(axis=0), 0.0)
        saved = np.maximum((base - device)[1:].sum(axis=0) - late, 0.0)
    factor = _ratio(base[0], device[0])
    base, concurrent = base + units.overhead_seconds, concurrent + units.overhead_seconds
    return StageCosts(
        alone_ns=whole_nanoseconds(base),
        slowdown_ppm=np.rint(1_000_000 * _ratio(concurrent, base)).astype(np.int64),
        launch_factor=factor,
        saved_ns=whole_nanoseconds(saved),
    )


def _ratio(longer: Floats, shorter: Floats) -> Floats:
    """Elementwise; 1 where there is no time."""
    return np.divide(longer, shorter, out=np.ones_like(shorter), where=shorter > 0)


def joined(tables: Sequence[StageCosts]) -> StageCosts:
    """The slices of all tables, one table after the other."""
    if len(tables) == 1:
        return tables[0]
    return StageCosts(
        alone_ns=np.concatenate([table.alone_ns for table in tables], axis=2),
        slowdown_ppm=np.concatenate([table.slowdown_ppm for table in tables], axis=2),
        launch_factor=np.concatenate([table.launch_factor for table in tables], axis=1),
        saved_ns=np.concatenate([table.saved_ns for table in tables], axis=1),
    )


def unit_totals(units: UnitTable, model: ModelSpec) -> Integers:
    """[units]: nanoseconds of F + I + W of each unit over all slices of one micro-batch, while all ranks compute; of
    each pass at least those of its launches if no action has a graph.
    """
    seconds = units.seconds
    if units.may_wait_for_launches and units.cost.most_graph_bytes is None:
        seconds = np.maximum(seconds, units.launching)
    total = (seconds.sum(axis=2) * units.slowdown[:, :, 0]).sum(axis=0)
    numbers = _kind_numbers(model)
    require_countable(NANOSECONDS_PER_SECOND * float(total[numbers].sum()))
    totals: Integers = whole_nanoseconds(total)[numbers]
    return totals


def stage_slice_ns(cost: CostModel, counts: Integers, seconds: Floats) -> Integers:
    """[points]: F + I + W of a stage of ``counts`` units of each kind, including three overheads, while all ranks of
    the host compute; ``seconds`` are those of `slower_seconds`.
    """
    total: Floats = np.full(seconds.shape[2], len(PASSES) * cost.action_overhead_seconds)
    for kind, of_units in zip(PASSES, seconds, strict=True):
        slowed = np.array([cost.slowdown(unit, kind) for unit in UNIT_KINDS]) * counts
        total = total + slowed @ of_units
    return whole_nanoseconds(total)
