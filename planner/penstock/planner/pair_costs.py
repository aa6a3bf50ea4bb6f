"""Costs of pairs of actions: the segments of every pass, and the collectives of recomputation.

A pass is walked as the trainer runs it (`penstock.trainer.stage`), unit by unit: forward from the first, I from the
last, W from the first, B as I and W of each unit from the last. The cost model gives the seconds of each unit's compute
and of its collectives, which are equally long. The places of collectives in the unit follow from their kinds
(`penstock.core.sharding`): a gather comes first, a sum or scatter last. Between the two of a block's unit the pass
yields to the other one once, here assumed to be half-way (`penstock.trainer.units.division.Division.turn`). A gather
per chunk of the head's tokens counts as compute.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from penstock.core.model import UnitKind
from penstock.core.remaking import remade_of
from penstock.core.schedule import Kind
from penstock.core.sharding import Collective, unit_collectives
from penstock.planner.candidate import Candidate
from penstock.planner.cost import COLLECTIVES_OF, CostModel
from penstock.planner.nanoseconds import whole_nanoseconds
from penstock.planner.order import KINDS
from penstock.planner.problem import Problem
from penstock.planner.simulate.pairs import Collectives, Nanoseconds, Place
from penstock.planner.work import Work

_BLOCKS = frozenset({UnitKind.ATTENTION, UnitKind.MLP})

Segment = tuple[int, int]
"""Nanoseconds of compute, and of the collective that follows it."""

UnitPass = tuple[UnitKind, int, Kind]
"""A unit's kind, the number of its part, and its pass: F, I or W."""


def collectives_of(problem: Problem, candidate: Candidate) -> Collectives | None:
    """The segments of the candidate's actions; None for ranks of one shard."""
    tp = candidate.mesh.tp
    if tp == 1:
        return None
    divided = problem.divided(candidate.head_parts)
    model, sharding = divided.model, divided.sharding(tp)
    unit_ns = functools.cache(functools.partial(_unit_ns, divided.cost_of(tp)))
    work_of = functools.cache(functools.partial(_work_of_column, candidate))

    def waits_of_recomputation(stage: int, of_slice: Work) -> Nanoseconds:
        """Only the collectives of an R, which is in no pair: those of the operations that it runs again."""
        units = model.units[slice(*candidate.stages[stage])]
        remakes = candidate.recompute[stage] if candidate.recompute else ()
        waited_ns = 0
        for unit, operations in zip(units, remade_of(model, candidate.stages[stage], remakes), strict=False):
            declared = unit_collectives(unit.kind, Kind.F, sharding, head_parts=model.head_parts, part=unit.part)
            num_repeated = sum(
                any(collective in COLLECTIVES_OF.get(operation, ()) for operation in operations)
                for collective in declared
            )
            waited_ns += num_repeated * unit_ns(len(declared), unit.kind, Kind.F, of_slice)[1]
        return np.array([(0, waited_ns)], dtype=np.int64)

    @functools.cache
    def units_of(stage: int) -> Sequence[tuple[UnitKind, int]]:
        return tuple((unit.kind, unit.part) for unit in model.units[slice(*candidate.stages[stage])])

    @functools.cache
    def segments_of_units(units: Sequence[tuple[UnitKind, int]], kind: Kind, column: int) -> Nanoseconds:
        passes, of_slice = tuple(_passes(units, kind)), work_of(column)
        steps: dict[UnitPass, tuple[tuple[int, int | None], ...]] = {}
        for unit, part, pass_kind in dict.fromkeys(passes):
            declared = unit_collectives(unit, pass_kind, sharding, head_parts=model.head_parts, part=part)
            times = unit_ns(len(declared), unit, pass_kind, of_slice)
            steps[unit, part, pass_kind] = tuple(_steps(unit, declared, *times))
        return _segments(itertools.chain.from_iterable(steps[unit_pass] for unit_pass in passes))

    def segments_of(place: Place) -> Nanoseconds:
        kind, stage, column = KINDS[place[0]], place[1], place[2]
        if kind is Kind.R:
            return waits_of_recomputation(stage, work_of(column))
        return segments_of_units(units_of(stage), kind, column)

    return Collectives(segments_of)


def _work_of_column(candidate: Candidate, column: int) -> Work:
    mesh, slices, place = candidate.mesh, candidate.slices, column
    batch = mesh.microbatch
    if column >= len(slices):
        batch, slices, place = mesh.remainder, candidate.remainder_slices, column - len(slices)
    return Work.of(batch, slices[place], sum(slices[:place]))


def _unit_ns(cost: CostModel, num_collectives: int, unit: UnitKind, kind: Kind, work: Work) -> Segment:
    """Nanoseconds of a unit's compute, and of one of its collectives; without collectives all of it is compute. The
    host does not launch a pair any faster than both actions, so of a collective at most the time beyond the launches
    can be hidden.
    """
    seconds = cost.unit_seconds(unit, kind, work)
    if not num_collectives:
        return int(whole_nanoseconds(seconds)), 0
    beyond_launches = np.maximum(seconds - cost.launch_seconds(unit, kind, work), 0.0)
    exposed = np.minimum(cost.collective_seconds(unit, kind, work), beyond_launches)
    return int(whole_nanoseconds(seconds - exposed)), int(whole_nanoseconds(exposed / num_collectives))


def _passes(units: Sequence[tuple[UnitKind, int]], kind: Kind) -> Iterator[UnitPass]:
    """The passes of the units, each given by its kind and the number of its part, in the order in which an action runs
    them.
    """
    pass_kinds = (Kind.I, Kind.W) if kind is Kind.B else (kind,)
    in_order = reversed(units) if kind in (Kind.B, Kind.I) else units
    return ((unit, part, pass_kind) for unit, part in in_order for pass_kind in pass_kinds)


def _segments(steps: Iterable[tuple[int, int | None]]) -> Nanoseconds:
    """Steps as segments: compute without a collective is added to that of the next step."""
    segments: list[Segment] = []
    carried = 0
    for before, after in steps:
        if after is None:
            carried += before
        else:
            segments.append((carried + before, after))
            carried = 0
    return np.array([*segments, (carried, 0)], dtype=np.int64)


def _steps(
    unit: UnitKind, declared: tuple[Collective, ...], compute: int, collective: int
) -> Iterator[tuple[int, int | None]]:
    """Compute, and the collective after it (0: a turn, None: nothing)."""
    begins = declared[:1] == (Collective.GATHER,)
    ends = declared[-1:] in ((Collective.SCATTER,), (Collective.SUM,))
    if begins:
        yield 0, collective
    if begins and ends and unit in _BLOCKS:
        yield compute // 2, 0
        compute -= compute // 2
    yield compute, collective if ends else None
