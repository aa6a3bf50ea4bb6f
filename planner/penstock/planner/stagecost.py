"""Costs of stages: units' seconds summed into integer nanoseconds per kind, stage and slice.

A stage is a count of units of each kind, so all stages are priced by one product:
counts [stages, unit kinds] @ nanoseconds [unit kinds, slices].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
    """

    alone_ns: Integers
    slowdown_ppm: Integers

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


def collective_seconds(cost: CostModel, batch: int, lengths: Lengths, before: Lengths) -> Floats:
    """[F I W, unit kinds, points]: the part of `pass_seconds` in which a rank only waits for its shards."""
    work = Work.of(batch, lengths, before)
    return np.stack([np.stack([cost.collective_seconds(unit, kind, work) for unit in UNIT_KINDS]) for kind in PASSES])


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitTable:
    """Costs of one unit of each kind for every slice of a micro-batch of ``batch`` sequences; the costs of stages are
    sums of these.

    ``seconds`` [F I W, unit kinds, slices] are those of a unit alone; they are ``slowdown`` [F I W, unit kinds, 1]
    times as many while all ranks of the host compute.
    """

    cost: CostModel
    batch: int
    slices: Slices
    seconds: Floats
    slowdown: Floats

    @classmethod
    def of(cls, cost: CostModel, batch: int, slices: Slices) -> UnitTable:
        """The table for micro-batches of ``batch`` sequences, each cut into ``slices`` in tokens."""
        lengths, before = np.asarray(slices, dtype=np.float64), prefixes(slices)
        return cls(
            cost=cost,
            batch=batch,
            slices=slices,
            seconds=pass_seconds(cost, batch, lengths, before.astype(float)),
            slowdown=np.array([[[cost.slowdown(unit, kind)] for unit in UNIT_KINDS] for kind in PASSES]),
        )

    @property
    def overhead_seconds(self) -> float:
        """Fixed cost of starting any action."""
        return self.cost.action_overhead_seconds

    @functools.cached_property
    def transient_bytes(self) -> Integers:
        """[unit kinds, F I W, slices]: bytes needed beyond the slots. Stages that are only timed do not need them."""
        points = list(zip(self.slices, prefixes(self.slices).tolist(), strict=True))
        sizes = [
            [[self.cost.transient_bytes(unit, kind, self.batch, *point) for point in points] for kind in PASSES]
            for unit in UNIT_KINDS
        ]
        return np.array(sizes, dtype=np.int64)


def stage_costs(units: UnitTable, model: ModelSpec, stages: Stages) -> StageCosts:
    """The costs of every pass of every stage over the table's slices."""
    counts = unit_counts(model, stages)
    base = counts @ units.seconds + units.overhead_seconds
    concurrent = counts @ (units.seconds * units.slowdown) + units.overhead_seconds
    factor = np.divide(concurrent, base, out=np.ones_like(base), where=base > 0)
    return StageCosts(alone_ns=whole_nanoseconds(base), slowdown_ppm=np.rint(1_000_000 * factor).astype(np.int64))


def joined(tables: Sequence[StageCosts]) -> StageCosts:
    """The slices of all tables, one table after the other."""
    if len(tables) == 1:
        return tables[0]
    return StageCosts(
        alone_ns=np.concatenate([table.alone_ns for table in tables], axis=2),
        slowdown_ppm=np.concatenate([table.slowdown_ppm for table in tables], axis=2),
    )


def unit_totals(units: UnitTable, model: ModelSpec) -> Integers:
    """[units]: nanoseconds of F + I + W of each unit over all slices of one micro-batch, while all ranks compute."""
    total = (units.seconds.sum(axis=2) * units.slowdown[:, :, 0]).sum(axis=0)
    numbers = _kind_numbers(model)
    require_countable(NANOSECONDS_PER_SECOND * float(total[numbers].sum()))
    totals: Integers = whole_nanoseconds(total)[numbers]
    return totals


def stage_slice_ns(cost: CostModel, counts: Integers, seconds: Floats) -> Integers:
    """[points]: F + I + W of a stage of ``counts`` units of each kind, including three overheads, while all ranks of
    the host compute; ``seconds`` are those of `pass_seconds`.
    """
    total: Floats = np.full(seconds.shape[2], len(PASSES) * cost.action_overhead_seconds)
    for kind, of_units in zip(PASSES, seconds, strict=True):
        slowed = np.array([cost.slowdown(unit, kind) for unit in UNIT_KINDS]) * counts
        total = total + slowed @ of_units
    return whole_nanoseconds(total)
