"""What pairs of actions cost: the segments of every pass, and the bytes that the second of two needs next to the first.

A pass is walked as the trainer runs it (`penstock.trainer.stage`), unit by unit: forward from the first, I from the
last, W from the first, B as I and W of each unit from the last. Of each unit the cost model gives the seconds of its
compute and of its collectives, which are equally long. Where these lie in the unit follows from what they are
(`penstock.core.sharding`): a gather comes first, a sum or scatter last. Between the two of a block's unit the pass lets
the other one go on once, here taken to be half-way (`penstock.trainer.units.division.Division.turn`). A gather for each
chunk of the head's tokens counts as compute.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.core.model import Unit, UnitKind
from penstock.core.schedule import Kind
from penstock.core.sharding import Collective, unit_collectives
from penstock.planner.candidate import Candidate
from penstock.planner.nanoseconds import whole_nanoseconds
from penstock.planner.order import KINDS
from penstock.planner.problem import Problem
from penstock.planner.simulate.pairs import Collectives, Nanoseconds, Place
from penstock.planner.stagecost import prefixes
from penstock.planner.work import Work

_BLOCKS = frozenset({UnitKind.ATTENTION, UnitKind.MLP})

Segment = tuple[int, int]
"""Nanoseconds of compute, and of the collective that follows it."""


def collectives_of(problem: Problem, candidate: Candidate) -> Collectives | None:
    """The segments of the candidate's actions; none for ranks of one shard."""
    if candidate.mesh.tp == 1:
        return None
    work = list(_work_of_columns(candidate))
    unit_ns = functools.cache(functools.partial(_unit_ns, problem, candidate.mesh.tp))

    def segments_of(place: Place) -> Nanoseconds:
        kind, stage, column = KINDS[place[0]], place[1], place[2]
        units = problem.model.units[slice(*candidate.stages[stage])]
        found: list[Segment] = []
        carried = 0
        for unit, each in _passes(units, kind):
            compute, collective = unit_ns(unit.kind, each, work[column])
            declared = unit_collectives(unit.kind, each, problem.sharding(candidate.mesh.tp))
            for before, after in _steps(unit.kind, declared, compute, collective):
                if after is None:
                    carried += before
                else:
                    found.append((carried + before, after))
                    carried = 0
        return np.array([*found, (carried, 0)], dtype=np.int64)

    return Collectives(segments_of)


def _work_of_columns(candidate: Candidate) -> Iterator[Work]:
    mesh = candidate.mesh
    for batch, slices in ((mesh.microbatch, candidate.slices), (mesh.remainder, candidate.remainder_slices)):
        for length, before in zip(
            slices, prefixes(slices).tolist(), strict=False
        ):  # one prefix where there is no slice
            yield Work.of(batch, length, before)


def _unit_ns(problem: Problem, tp: int, unit: UnitKind, kind: Kind, work: Work) -> Segment:
    """A unit's compute, and one of its collectives."""
    cost = problem.cost_of(tp)
    count = max(len(unit_collectives(unit, kind, problem.sharding(tp))), 1)
    seconds, of_collectives = cost.unit_seconds(unit, kind, work), cost.collective_seconds(unit, kind, work)
    exposed = np.minimum(of_collectives, seconds)
    return int(whole_nanoseconds(seconds - exposed)), int(whole_nanoseconds(exposed / count))


def _passes(units: Sequence[Unit], kind: Kind) -> Iterator[tuple[Unit, Kind]]:
    """The units' passes in the order in which an action runs them; R does what F did, but for the head."""
    if kind is Kind.B:
        yield from ((unit, each) for unit in reversed(units) for each in (Kind.I, Kind.W))
    if kind is Kind.I:
        yield from ((unit, kind) for unit in reversed(units))
    if kind is Kind.W:
        yield from ((unit, kind) for unit in units)
    if kind in (Kind.F, Kind.R):
        yield from ((unit, Kind.F) for unit in units if kind is Kind.F or unit.kind is not UnitKind.HEAD)


def _steps(
    unit: UnitKind, declared: tuple[Collective, ...], compute: int, collective: int
) -> Iterator[tuple[int, int | None]]:
    """Compute, and the collective after it (0: a turn, none: nothing)."""
    begins = declared[:1] == (Collective.GATHER,)
    ends = declared[-1:] in ((Collective.SCATTER,), (Collective.SUM,))
    if begins:
        yield 0, collective
    if begins and ends and unit in _BLOCKS:
        yield compute // 2, 0
        compute -= compute // 2
    yield compute, collective if ends else None
