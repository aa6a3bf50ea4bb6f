"""Candidates of an outline: the lengths of its slices, and stages that fit.

An outline with several ranks and slices has two slicings with its number of slices, unless they are pinned: the one
whose largest slice is cheapest for the bottleneck stage (if there are at most `MOST_BALANCED_SLICES`), and equal
slices, which hold less where the first slices are the longest. A flush also gets the slicing of TeraPipe's dynamic
programme. The search moves boundaries later, where that shortens the simulated step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from penstock.planner.balancing import time_balanced_stages
from penstock.planner.candidate import Candidate
from penstock.planner.memory_fit import MemoryFit, Shortage
from penstock.planner.outlines import NUM_SLICES, Outline, owners_of_stages, slice_counts
from penstock.planner.problem import MOST_BALANCED_SLICES, Mesh, Problem
from penstock.planner.recompute import pinned_remakes
from penstock.planner.remainder import remainder_slices
from penstock.planner.schedules.braided import BRAIDED
from penstock.planner.slicing import BalancedSlicings, IntArray, Slicing, SlicingProblem, summable_unit_ns, tabulate
from penstock.planner.slicing_flush import best_flush_slicing
from penstock.planner.stagecost import (
    Integers,
    Stages,
    equal_slices,
    slower_seconds,
    stage_costs,
    stage_slice_ns,
    unit_counts,
)
from penstock.planner.work import Floats

FLUSH_TOLERANCE = 1000
"""The largest slice of a flush is known up to 1 / `FLUSH_TOLERANCE` of a whole sequence's time."""

MOST_GRIDS = 8
"""Number of combinations of tensor parallelism, micro-batch and parts of the head for which tables of seconds of all
slices are kept; each takes 3 MB.
"""

Lengths = tuple[int, ...]
Fitted = list[Candidate | Shortage]


@dataclass(frozen=True, slots=True)
class Proposer:
    """Makes the candidates of each outline of one problem; tables are shared between outlines."""

    problem: Problem
    memory_fit: MemoryFit
    _grids: dict[tuple[int, int, int], Floats] = field(default_factory=dict)
    _tables: dict[tuple[object, ...], SlicingProblem] = field(default_factory=dict)
    _slicings: dict[tuple[object, ...], BalancedSlicings] = field(default_factory=dict)
    _flushes: dict[tuple[object, ...], Slicing | None] = field(default_factory=dict)

    def limited(self, problem: Problem) -> Proposer:
        """The proposer of the same problem with another limit; it shares all tables."""
        return replace(self, problem=problem, memory_fit=replace(self.memory_fit, problem=problem))

    def candidates(
        self,
        outline: Outline,
        is_worth_it: Callable[[Candidate], bool] = lambda balanced: True,
        most_ns: Callable[[Mesh], float] = lambda mesh: math.inf,
    ) -> Iterator[Candidate | Shortage]:
        """The outline's candidates, and a shortage for each slicing without stages that fit.

        A slicing is skipped if its time-balanced stages are not ``is_worth_it``. Stages that recompute are skipped if
        they take longer than ``most_ns`` of the mesh for all micro-batches. A whole sequence that does not fit on one
        rank is cut into the fewest slices that fit, because their transients are smaller.
        """
        for slices in dict.fromkeys(self.slicings(outline)):
            balanced = self._balanced(outline, slices)
            if not is_worth_it(balanced):
                continue
            if outline.recomputes:
                hides_collectives = outline.schedule == BRAIDED  # such stages take longer alone than in pairs
                longest_ns = math.inf if hides_collectives else most_ns(outline.mesh) / outline.mesh.num_by_work
                yield from self._recomputing(outline, balanced, longest_ns)
            else:
                fitted = list(self.memory_fit.fitted(balanced))
                if outline.mesh.pp == 1 and self.problem.pinned.slices is None:
                    fitted = self._cut(outline, fitted)
                yield from fitted

    def _recomputing(self, outline: Outline, balanced: Candidate, most_ns: float) -> Fitted:
        """Candidates whose ranks recompute what exceeds the limit, and take at most ``most_ns`` for a micro-batch. On
        one rank also those with more slices, which recompute less, up to the first without recomputation.
        """
        fitted = list(self.memory_fit.recomputing(balanced, most_ns))
        fitting, least = [candidate for candidate in fitted if isinstance(candidate, Candidate)], fitted
        is_free = outline.mesh.pp == 1 and self.problem.pinned.slices is None
        for count in NUM_SLICES[1:] if is_free else ():
            needs_no_recomputation = fitting and not fitting[-1].recompute
            if needs_no_recomputation or count > self.problem.sequence_length // self.problem.quantum:
                break
            slices = equal_slices(self.problem.sequence_length, count)
            fitted = list(self.memory_fit.recomputing(self._balanced(outline, slices), most_ns))
            fitting += [candidate for candidate in fitted if isinstance(candidate, Candidate)]
            least = min(filter(None, (least, fitted)), key=_missing_bytes, default=[])
        return [*fitting] or least

    def _cut(self, outline: Outline, whole: Fitted) -> Fitted:
        """``whole`` sequences on one rank, or equal slices if those do not fit: the fewest that fit, or else those that
        exceed the limit least.
        """
        least = whole
        for count in NUM_SLICES:
            if not isinstance(least[0], Shortage) or count > self.problem.sequence_length // self.problem.quantum:
                break
            slices = equal_slices(self.problem.sequence_length, count)
            least = min(least, list(self.memory_fit.fitted(self._balanced(outline, slices))), key=_missing_bytes)
        return least

    def _balanced(self, outline: Outline, slices: Lengths) -> Candidate:
        stages = self.balanced_stages(outline, slices)
        return Candidate(
            mesh=outline.mesh,
            stages=stages,
            slices=slices,
            schedule=outline.schedule,
            remainder_slices=remainder_slices(self.problem, outline.mesh, slices),
            head_parts=outline.head_parts,
            recompute=pinned_remakes(self.problem.divided(outline.head_parts), stages),
            recompute_inside=outline.recomputes_inside,
            zero=outline.zero,
        )

    def balanced_stages(self, outline: Outline, slices: Lengths) -> Stages:
        """Stages that are balanced by time over these slices."""
        mesh, problem = outline.mesh, self.problem.divided(outline.head_parts)
        return time_balanced_stages(problem, mesh, slices, owners_of_stages(problem, mesh, outline.schedule))

    def slicings(self, outline: Outline) -> Iterator[Lengths]:
        """The outline's slicings: the pinned one, else lengths that suit the bottleneck stage, and equal lengths."""
        pinned, count = self.problem.pinned.slices, outline.num_slices
        if isinstance(pinned, tuple):
            yield pinned
            return
        equal = equal_slices(self.problem.sequence_length, count)
        if count > 1 and outline.mesh.pp > 1:
            table = self._table(outline, self.balanced_stages(outline, equal))
            best = self._best_slicings(table).get(count)
            if best is not None:
                yield best.lengths
            if outline.schedule == "gpipe":
                yield from self._flushed(outline, table)
        yield equal

    def _table(self, outline: Outline, stages: Stages) -> tuple[object, ...]:
        """The key of the bottleneck stage's table in ``_tables``, which is filled if missing."""
        problem, mesh = self.problem.divided(outline.head_parts), outline.mesh
        units = problem.units(mesh.tp, mesh.microbatch, (problem.sequence_length,))
        whole = stage_costs(units, problem.model, stages)
        counts = unit_counts(problem.model, stages)[int(whole.slice_ns[:, 0].argmax())]
        key = (mesh.tp, mesh.microbatch, outline.head_parts, *counts.tolist())
        if key not in self._tables:
            cost_ns = self._slice_table(problem, mesh, counts)
            self._tables[key] = SlicingProblem(
                cost_ns=cost_ns // summable_unit_ns(cost_ns, problem.global_batch + problem.model.num_units),
                sequence_length=problem.sequence_length,
                quantum=problem.quantum,
                max_slices=MOST_BALANCED_SLICES,
            )
        return key

    def _slice_table(self, problem: Problem, mesh: Mesh, counts: Integers) -> IntArray:
        """The costs of all slices, as for `SlicingProblem`, for a stage with ``counts`` units of each kind."""
        cost, key = problem.cost_of(mesh.tp), (mesh.tp, mesh.microbatch, problem.model.head_parts)

        def cost_of(lengths: Integers, prefixes: Integers) -> Integers:
            if key not in self._grids:
                if len(self._grids) == MOST_GRIDS:
                    del self._grids[next(iter(self._grids))]
                self._grids[key] = slower_seconds(cost, mesh.microbatch, lengths, prefixes)
            return stage_slice_ns(cost, counts, self._grids[key])

        return tabulate(cost_of, sequence_length=problem.sequence_length, quantum=problem.quantum)

    def _best_slicings(self, table: tuple[object, ...]) -> BalancedSlicings:
        """The slicings whose largest slice is cheapest, by their number of slices."""
        if table not in self._slicings:
            self._slicings[table] = BalancedSlicings(self._tables[table])
        return self._slicings[table]

    def _flushed(self, outline: Outline, table: tuple[object, ...]) -> Iterator[Lengths]:
        """TeraPipe's slicing, for the outline with the largest tried number of slices that does not exceed that
        slicing's.
        """
        mesh = outline.mesh
        key = (table, mesh.num_microbatches, mesh.pp)
        if key not in self._flushes:
            problem = self._tables[table]
            self._flushes[key] = best_flush_slicing(
                problem,
                num_microbatches=mesh.num_microbatches,
                num_stages=mesh.pp,
                eps_ns=max(1, int(problem.cost_ns.max()) // FLUSH_TOLERANCE),
            )
        slicing = self._flushes[key]
        if slicing is None or (self.problem.pinned.slices is not None and slicing.num_slices != outline.num_slices):
            return
        if outline.num_slices == max(n for n in slice_counts(self.problem, mesh.pp) if n <= slicing.num_slices):
            yield slicing.lengths


def _missing_bytes(fitted: Fitted) -> int:
    return fitted[0].missing_bytes if isinstance(fitted[0], Shortage) else 0
