"""Stages that fit on every rank: balanced by time, then moved as far as the bytes that the simulator counts require.

Problem. Stages with equal times rarely have equal memory: early ranks hold more micro-batches, the last one has the
head. How many slots a rank holds at once depends on the order of actions. So an estimate of bytes rejects stages that
fit, or accepts some that do not.

Idea. Under an order that does not depend on the stages, a rank's bytes follow from its own units and grow with them. So
there are three steps, each slower than the one before; every result is checked by the walk through the order:

1. Stages balanced by time alone. If they fit on every rank, nothing else is tried, and more memory changes nothing.
2. The walk through the order gives the number of micro-batches of its units that a rank holds. With that the units are
   partitioned again within the limit (`penstock.planner.stages`). The walk with the new stages corrects it.
3. For every rank the most units that fit, found by bisection, once for ranges that begin with an attention and once for
   those with an MLP. The partition under these limits is the fastest that fits; if there is none, none fits.

Example: 1F1B on two ranks, an embedding, four layers of two units, and a head. The units of layers take 1, the head 2,
the embedding 0. Each unit has 4 bytes of state and 3 bytes per micro-batch that is held: rank 0 holds two, rank 1 one.

    balanced             6 and 4 units    times 5 and 5    bytes 6 (4 + 2 * 3) = 60 and 4 (4 + 3) = 28
    limit of 50 bytes    5 and 5 units    times 4 and 6    bytes 5 (4 + 2 * 3) = 50 and 5 (4 + 3) = 35

Complexity. A walk is linear in the actions of the few micro-batches after which memory no longer grows
(`enough_microbatches`), and is shared by all candidates with the same order. The second step takes at most
`MOST_CORRECTIONS` partitions. The third one bisects all ranks at once, with 2 log2(units) countings of bytes.

Rejected (ADR 0036): a filter of partitions that were proposed by time alone, which found no plan where others fit; a
frontier of time and bytes on a grid of limits, since few jobs have one of these limits, and the memory between a job's
limit and the next smaller one would be wasted.

The last step is for one stage per rank and a whole head. It is left out for long walks if the second step is far above
the limit; then the second step's result counts, which may be wrong. It is also left out for several stages per rank,
each of which is assumed to take an equal share of the memory, and for a divided head, whose units do not alternate
between attention and MLP.

If the stages of the first step do not fit, ranks may also recompute what exceeds the limit, with stages that are cut
for that (`penstock.planner.recompute`). The simulator decides which of the two is faster.

An order that adapts to the free memory stays within it down to one micro-batch. Its stages are cut for that. For `zb`
they are also cut for the memory of ZB-H1, if stages fit then: with more free memory `zb` waits less.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.planner.candidate import Candidate
from penstock.planner.device_order import slowness_in_order
from penstock.planner.problem import Problem
from penstock.planner.recompute import (
    Cut,
    Savings,
    fully_recomputed,
    keeps_links,
    may_recompute,
    own_remakes,
    pinned_remakes,
    savings_inside,
    savings_of,
)
from penstock.planner.schedules.braided import BRAIDED
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.registry import ADAPTIVE, BUILT_IN, USUAL, find, stage_ranks
from penstock.planner.schedules.variants import one_by_one
from penstock.planner.simulate.memory import Walk
from penstock.planner.stagecost import UNIT_KINDS, Integers, Stages, unit_counts, unit_totals
from penstock.planner.stages import MemoryShortage, StagesProblem, best_partitions
from penstock.planner.tables import remade_bytes, remainder_shape, stage_memory, static_bytes
from penstock.planner.unit_memory import unit_bytes
from penstock.planner.work import Floats

MOST_CORRECTIONS = 4

FURTHER = 2
"""More recomputation inside a backward takes memory itself. So corrections after the first are multiplied by this."""

NEARLY, SHORT_WALK = 1.1, 4_000
"""Walks of more than `SHORT_WALK` actions take milliseconds: there the third step only follows if the second came below
`NEARLY` times the limit.
"""

DEPTHS = (0.25, 0.5, 1.0, 1.5)
"""For adaptive schedules, recomputation is also chosen for orders that hold more and so wait less: one micro-batch, and
these multiples of the K - 1 slices that 1F1B holds beyond it.
"""

MOST_WALKED, FEWEST_WALKS = 5_000_000, 8
"""Limit of the actions in walks that are kept, which take some 100 bytes each, and walks that are always kept."""

MOST_CACHED = 256
"""Limit of cached byte counts, which are reused with other margins and for candidates with more recomputation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortage:
    """No stages fit: those that came closest exceed the limit by ``missing_bytes`` on their fullest rank."""

    candidate: Candidate
    missing_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryFit:
    """Cuts the stages of one problem's candidates; walks through orders are shared between candidates."""

    problem: Problem
    receive_ahead: int
    _walks: dict[tuple[object, ...], Walk] = field(default_factory=dict)
    _savings_cache: dict[tuple[object, ...], Savings] = field(default_factory=dict)
    _bytes_cache: dict[tuple[Candidate, Walk], tuple[Integers, Integers]] = field(default_factory=dict)

    def fitted(self, balanced: Candidate) -> Iterator[Candidate | Shortage]:
        """The time-balanced candidate with stages that fit; several for an order that adapts to the free memory. If
        that does not fit with one micro-batch at a time, no stages are sought for orders that hold more.
        """
        if balanced.schedule not in BUILT_IN:
            yield balanced  # its bytes are known after its simulation
            return
        offered = set[Stages]()
        for offer in self._fitted_orders(balanced):
            if isinstance(offer, Shortage):
                yield offer
            elif offer.stages not in offered:
                offered.add(offer.stages)
                yield offer

    def recomputing(
        self, shape: Candidate, most_ns: float = math.inf, exposed: Sequence[float] = ()
    ) -> Iterator[Candidate | Shortage]:
        """The candidate with stages and recomputation that fit on every rank; several for an order that adapts to the
        free memory, since it waits less with more of it. If there are none, it is fitted with everything recomputed.
        Nothing if all stages take longer than ``most_ns`` for a micro-batch. ``exposed`` is the share of each rank's
        recomputation that takes time, by default all of it.
        """
        walks = list(self._walks_of(shape))
        fit = functools.partial(self._recomputing, shape, most_ns=most_ns, exposed=exposed)
        results = [fit(*plain_and_recomputed) for plain_and_recomputed in walks]
        if shape.schedule in ADAPTIVE and results[0] is not None:
            usual = (shape.mesh.pp - 1) / len(shape.slices)
            results += [fit(*walks[-1], num_held=1 + depth * usual) for depth in DEPTHS]
        fitting = [result for result in results if isinstance(result, Candidate)]
        if None in results and not fitting:
            return
        if not fitting:
            full = list(self._fitted_orders(fully_recomputed(self.problem.divided(shape.head_parts), shape)))
            fitting = [self.leaner(offer) or offer for offer in full if isinstance(offer, Candidate)]
            results += full
        yield from dict.fromkeys(fitting)
        if not fitting:
            yield min(
                (shortage for shortage in results if isinstance(shortage, Shortage)),
                key=lambda shortage: shortage.missing_bytes,
            )

    def leaner(self, candidate: Candidate, lacking_bytes: Sequence[int] = ()) -> Candidate | None:
        """The candidate with the least recomputation that fits on every rank and saves ``lacking_bytes`` more; None if
        ranks do not fit.
        """
        margin = np.maximum(lacking_bytes, 0) if lacking_bytes else None
        for kept_walk, remade_walk in reversed(list(self._walks_of(candidate))):
            leaner = self._recomputing(candidate, kept_walk, remade_walk, keeps_stages=True, margin=margin)
            if isinstance(leaner, Candidate):
                return leaner
        return None

    def moved(self, candidate: Candidate) -> Candidate | None:
        """The moved candidate with the recomputation of its new boundaries; None if it does not fit."""
        if not candidate.recompute:
            return candidate
        if not may_recompute(self.problem):
            return self._with_stages(candidate, candidate.stages)
        if candidate.schedule not in BUILT_IN:
            return candidate  # a recorded order, whose bytes are known after its simulation
        if candidate.schedule in ADAPTIVE:
            kept = own_remakes(self.problem.divided(candidate.head_parts), candidate)
            *_, (_, remade_walk) = self._walks_of(kept)
            if (np.add(*self._bytes(kept, remade_walk)) <= self.problem.memory_limit_bytes).all():
                return kept
        return self.leaner(candidate)

    def _recomputing(
        self,
        shape: Candidate,
        kept_walk: Walk,
        remade_walk: Walk,
        *,
        keeps_stages: bool = False,
        margin: Integers | None = None,
        num_held: float = 1.0,
        most_ns: float = math.inf,
        exposed: Sequence[float] = (),
    ) -> Candidate | Shortage | None:
        """The candidate with stages and recomputation that fit on every rank with ``margin`` bytes to spare. Bytes
        are those of two walks, with everything kept and with everything recomputed, and slots count ``num_held`` times.
        None if stages take longer than ``most_ns``.
        """
        keeps_stages = keeps_stages or self.problem.pinned.stages is not None
        problem, limit = self.problem.divided(shape.head_parts), self.problem.memory_limit_bytes
        owners = list(stage_ranks(str(shape.schedule), shape.mesh.pp, len(shape.stages)))
        margin = np.zeros(shape.mesh.pp, dtype=np.int64) if margin is None else margin
        trial, missing, target_bytes = dataclasses.replace(shape, recompute=()), 1, limit - margin
        for number in range(1 + MOST_CORRECTIONS):
            always, kept = self._held_bytes(dataclasses.replace(trial, recompute=()), kept_walk, num_held)
            if not trial.recompute and (always + kept <= target_bytes).all():
                return trial
            _, lean = self._held_bytes(fully_recomputed(problem, trial), remade_walk, num_held)
            cut = self._cut_of(trial, owners, always, kept, lean, limit - margin, exposed)
            if not keeps_stages and not cut.can_take(most_ns):
                return None
            bounds = None if keeps_stages else cut.best()
            stages = trial.stages if bounds is None else tuple(itertools.pairwise(bounds))
            remakes = cut.remakes_of_ranks(stages, owners)
            if remakes is None:
                missing = int((always + lean - limit).max())
                break
            trial = dataclasses.replace(shape, stages=stages, recompute=remakes)
            lacking = np.add(*self._held_bytes(trial, remade_walk, num_held)) - target_bytes
            if lacking.max() <= 0:
                return trial
            factor = FURTHER if number and shape.recompute_inside else 1
            missing, margin = int(lacking.max()), margin + factor * np.maximum(lacking, 0)
        full = fully_recomputed(problem, trial)
        if shape.recompute_inside and (np.add(*self._held_bytes(full, remade_walk, num_held)) <= target_bytes).all():
            return full
        return Shortage(candidate=trial, missing_bytes=max(missing, 1))

    def _walks_of(self, shape: Candidate) -> Iterator[tuple[Walk, Walk]]:
        """Pairs of walks with the order's bytes: with everything kept, and with everything recomputed, without an R if
        that is inside backwards. For an order that adapts to the free memory, first those of its usual order, then
        with one micro-batch at a time.
        """
        name, num_remainder_slices = str(shape.schedule), len(shape.remainder_slices)
        num_microbatches = enough_microbatches(shape, self.receive_ahead)
        shapes = [(schedule, num_microbatches, num_remainder_slices) for schedule in _orders_in_full(name)]
        for shape_key in shapes + ([(name, 1, 0)] if name in ADAPTIVE else []):
            yield self._walk(shape, *shape_key), self._walk(shape, *shape_key, recomputes=not shape.recompute_inside)

    def _cut_of(
        self,
        shape: Candidate,
        owners: list[int],
        always: Integers,
        kept: Integers,
        lean: Integers,
        limit_bytes: Integers,
        exposed: Sequence[float],
    ) -> Cut:
        problem, mesh = self.problem.divided(shape.head_parts), shape.mesh
        state, held = unit_bytes(problem, mesh.tp, mesh.microbatch, shape.optimizer_shards)
        savings = savings_inside(self._savings(shape)) if keeps_links(problem, shape) else self._savings(shape)
        of_kinds = np.array([sum(s.num_bytes for s in savings if s.unit is kind) for kind in UNIT_KINDS])
        kinds = [unit.kind for unit in problem.model.units]
        numbers = [UNIT_KINDS.index(kind) for kind in kinds]
        free_bytes = (limit_bytes - (always - self._per_rank(shape, state))) // (len(owners) // mesh.pp)
        units = problem.units(mesh.tp, mesh.microbatch, shape.slices)
        return Cut(
            savings=savings,
            unit_ns=unit_totals(units, problem.model),
            state_bytes=state[numbers],
            held_bytes=held[numbers],
            kinds=kinds,
            in_flight=(kept / np.maximum(self._per_rank(shape, held), 1))[owners],
            regained=(np.maximum(kept - lean, 0) / np.maximum(self._per_rank(shape, of_kinds), 1))[owners],
            limit_bytes=free_bytes[owners],
            exposed=np.array(exposed or [1.0] * mesh.pp)[owners],
            slowness=slowness_in_order(problem, mesh)[owners],
        )

    def _savings(self, shape: Candidate) -> Savings:
        mesh = shape.mesh
        key = (mesh.tp, mesh.microbatch, shape.slices)
        if key not in self._savings_cache:
            self._savings_cache[key] = savings_of(self.problem, *key)
        return self._savings_cache[key]

    def _fitted_orders(self, balanced: Candidate) -> Iterator[Candidate | Shortage]:
        name, num_remainder_slices = str(balanced.schedule), len(balanced.remainder_slices)
        num_microbatches = enough_microbatches(balanced, self.receive_ahead)
        recomputes = bool(balanced.recompute) and not balanced.recompute_inside
        if name not in ADAPTIVE:
            yield self._fitted(
                balanced, self._walk(balanced, name, num_microbatches, num_remainder_slices, recomputes=recomputes)
            )
            return
        leanest = self._fitted(balanced, self._walk(balanced, name, 1, 0, recomputes=recomputes))
        for schedule in _orders_in_full(name):
            if isinstance(leanest, Shortage):  # orders that hold more do not fit either
                yield leanest
            else:
                walk = self._walk(balanced, schedule, num_microbatches, num_remainder_slices, recomputes=recomputes)
                yield self._fitted(balanced, walk)
        yield leanest

    def _walk(
        self,
        shape: Candidate,
        name: str,
        num_microbatches: int,
        num_remainder_slices: int,
        *,
        recomputes: bool = False,
    ) -> Walk:
        joins = name == BRAIDED and shape.mesh.tp > 1
        counts = (num_microbatches, len(shape.slices), len(shape.stages), num_remainder_slices)
        key = (name, joins, shape.mesh.pp, *counts, recomputes)
        if key not in self._walks:
            generator = find(name)
            inputs = ScheduleInputs(
                num_ranks=shape.mesh.pp,
                num_microbatches=num_microbatches,
                num_slices=len(shape.slices),
                stages_per_rank=generator.per_rank(shape.mesh.pp, len(shape.stages)),
            )
            order = one_by_one(inputs, generator.place) if name in ADAPTIVE else generator.generate(inputs)
            order = order if joins else order.unpaired()
            order, late = order.with_remainder(num_remainder_slices), self.problem.late_receives
            order = order.with_recomputation(set(range(len(shape.stages)) if recomputes else ()))
            self._keep(key, Walk.of(order, self.receive_ahead, late_receives=late))
        return self._walks[key]

    def _keep(self, key: tuple[object, ...], walk: Walk) -> None:
        """Keep the walk, instead of older ones if they are long."""
        self._walks[key] = walk
        num_actions = sum(kept.order.num_actions for kept in self._walks.values())
        while num_actions > MOST_WALKED and len(self._walks) > FEWEST_WALKS:
            oldest = self._walks.pop(next(iter(self._walks)))
            num_actions -= oldest.order.num_actions
            for cached in [cached for cached in self._bytes_cache if cached[1] is oldest]:
                del self._bytes_cache[cached]

    def _fitted(self, balanced: Candidate, walk: Walk) -> Candidate | Shortage:
        problem = self.problem.divided(balanced.head_parts)
        limit, is_pinned = problem.memory_limit_bytes, problem.pinned.stages is not None
        state, held = unit_bytes(problem, balanced.mesh.tp, balanced.mesh.microbatch, balanced.optimizer_shards)
        trial, needed = balanced, list[int]()
        slope = np.zeros(balanced.mesh.pp)
        for _ in range(1 + MOST_CORRECTIONS):
            always, slots = self._bytes(trial, walk)
            needed.append(int((always + slots).max()))
            if needed[-1] <= limit:
                return trial
            if is_pinned:
                break
            slope = np.maximum(slope, slots / np.maximum(self._per_rank(trial, held), 1))
            partition = self._partition(trial, always - self._per_rank(trial, state), slope)
            if isinstance(partition, MemoryShortage):
                needed.append(limit + max(partition.missing_bytes))
                break
            trial = partition
        if (
            not is_pinned
            and len(balanced.stages) == balanced.mesh.pp > 1
            and balanced.head_parts == 1
            and (walk.order.num_actions <= SHORT_WALK or min(needed) <= NEARLY * limit)
        ):
            exact = self._exact(balanced, walk)
            if isinstance(exact, Candidate):
                return exact
        return Shortage(candidate=balanced, missing_bytes=max(min(needed) - limit, 1))

    def _held_bytes(self, candidate: Candidate, walk: Walk, num_held: float) -> tuple[Integers, Integers]:
        """The bytes if a rank holds its micro-batches ``num_held`` times; the buffers that an R makes count once."""
        always, slots = self._bytes(candidate, walk)
        if num_held == 1:
            return always, slots
        problem, remade = self.problem.divided(candidate.head_parts), np.zeros_like(slots)
        owners = list(stage_ranks(str(candidate.schedule), candidate.mesh.pp, len(candidate.stages)))
        if not candidate.recompute_inside:
            np.maximum.at(remade, owners, remade_bytes(problem, candidate).max(axis=1))
        return always, slots + ((num_held - 1) * np.maximum(slots - remade, 0)).astype(np.int64)

    def _bytes(self, candidate: Candidate, walk: Walk) -> tuple[Integers, Integers]:
        """[ranks]: bytes always held, and the slots at their peak; recent results are cached."""
        key = (candidate, walk)
        if key not in self._bytes_cache:
            if len(self._bytes_cache) == MOST_CACHED:
                del self._bytes_cache[next(iter(self._bytes_cache))]
            self._bytes_cache[key] = self._counted_bytes(candidate, walk)
        return self._bytes_cache[key]

    def _counted_bytes(self, candidate: Candidate, walk: Walk) -> tuple[Integers, Integers]:
        owners = stage_ranks(str(candidate.schedule), candidate.mesh.pp, len(candidate.stages))
        problem = self.problem.divided(candidate.head_parts)
        sizes = stage_memory(problem, candidate).slot_bytes
        always = np.array(static_bytes(problem, candidate, owners, walk.order))
        remainder = remainder_shape(problem, candidate) if walk.order.num_remainder_slices else None
        by_slice = problem.prefix_by_slice(candidate.slices)
        return always, walk.high_water_bytes(sizes, candidate.slices, remainder=remainder, prefix_by_slice=by_slice)

    def _per_rank(self, candidate: Candidate, of_kinds: Integers) -> Integers:
        """[ranks]: the sum of ``of_kinds`` [unit kinds] over all units of the rank."""
        sums = np.zeros(candidate.mesh.pp, dtype=np.int64)
        owners = list(stage_ranks(str(candidate.schedule), candidate.mesh.pp, len(candidate.stages)))
        model = self.problem.divided(candidate.head_parts).model
        np.add.at(sums, owners, unit_counts(model, candidate.stages) @ of_kinds)
        return sums

    def _partition(self, shape: Candidate, always: Integers, slope: Floats) -> Candidate | MemoryShortage:
        """The fastest stages if a rank holds ``slope`` micro-batches of its units, and ``always`` bytes in addition."""
        owners = list(stage_ranks(str(shape.schedule), shape.mesh.pp, len(shape.stages)))
        problem = self.problem.divided(shape.head_parts)
        state, held = unit_bytes(problem, shape.mesh.tp, shape.mesh.microbatch, shape.optimizer_shards)
        kinds = [UNIT_KINDS.index(unit.kind) for unit in problem.model.units]
        free_bytes = (self.problem.memory_limit_bytes - always) // (len(owners) // shape.mesh.pp)
        return self._best(
            shape,
            resident_bytes=state[kinds].tolist(),
            in_flight_bytes=held[kinds].tolist(),
            in_flight=slope[owners].tolist(),
            limit_bytes=free_bytes[owners].tolist(),
        )

    def _exact(self, shape: Candidate, walk: Walk) -> Candidate | MemoryShortage:
        """The fastest stages among those in which every rank can hold its own."""
        num_units, num_ranks = self.problem.model.num_units, shape.mesh.pp
        no_bytes = [0] * num_units
        return self._best(
            shape,
            resident_bytes=no_bytes,
            in_flight_bytes=no_bytes,
            in_flight=[0.0] * num_ranks,
            limit_bytes=[0] * num_ranks,
            most_units=self._most_units(shape, walk),
        )

    def _best(self, shape: Candidate, **memory: Any) -> Candidate | MemoryShortage:
        problem = self.problem.divided(shape.head_parts)
        units = problem.units(shape.mesh.tp, shape.mesh.microbatch, shape.slices)
        unit_ns = unit_totals(units, problem.model).tolist()
        if problem.slowness:
            of_ranks = slowness_in_order(problem, shape.mesh)
            owners = stage_ranks(str(shape.schedule), shape.mesh.pp, len(shape.stages))
            memory["slowdown"] = of_ranks[list(owners)].tolist()
        partitions = best_partitions(StagesProblem(unit_ns=unit_ns, **memory))
        if isinstance(partitions, MemoryShortage):
            return partitions
        return self._with_stages(shape, tuple(itertools.pairwise(partitions[0].bounds)))

    def _with_stages(self, shape: Candidate, stages: Stages) -> Candidate:
        """The candidate with other stages and the pinned recomputation; everything is recomputed if none is pinned."""
        problem, moved = self.problem.divided(shape.head_parts), dataclasses.replace(shape, stages=stages)
        if shape.recompute and may_recompute(self.problem):
            return fully_recomputed(problem, moved)
        remakes = pinned_remakes(problem, stages) if shape.recompute else ()
        return dataclasses.replace(moved, recompute=remakes)

    def _most_units(self, shape: Candidate, walk: Walk) -> list[tuple[int, int]]:
        """For each rank, the most units that it can hold, from an even unit number and from an odd one on; the first
        rank has the embedding, the last one the head. 0 if not even one fits.
        """
        num_units, num_ranks = self.problem.model.num_units, shape.mesh.pp
        by_parity = []
        for parity in range(2):
            low, high = np.zeros(num_ranks, dtype=np.int64), np.full(num_ranks, num_units - num_ranks + 1)
            high[1:-1] = np.minimum(high[1:-1], num_units - 3)
            while (low < high).any():
                middle = (low + high + 1) // 2
                trial = self._with_stages(shape, _ranges(middle, parity, num_units))
                always, slots = self._bytes(trial, walk)
                holds = always + slots <= self.problem.memory_limit_bytes
                low, high = np.where(holds, middle, low), np.where(holds, high, middle - 1)
            by_parity.append(low.tolist())
        return list(zip(*by_parity, strict=True))


def _ranges(lengths: Integers, parity: int, num_units: int) -> Stages:
    """Stages of the given lengths in units, from each rank's first possible unit on; they need not be adjacent."""
    first = np.full(len(lengths), 2 - parity)
    first[0], first[-1] = 0, num_units - lengths[-1]
    return tuple(zip(first.tolist(), (first + lengths).tolist(), strict=True))


def _orders_in_full(schedule: str) -> tuple[str, ...]:
    """The schedule itself, if its order does not adapt to the free memory; else the one it has with enough memory, if
    that is known.
    """
    if schedule not in ADAPTIVE:
        return (schedule,)
    return (USUAL[schedule],) if schedule in USUAL else ()


def enough_microbatches(shape: Candidate, receive_ahead: int) -> int:
    """Number of micro-batches that need as much memory as any larger number: by then 1F1B's warm-up and ZB-H1's late
    weight gradients are over, and as many receives are posted as ever. A smaller last one is added.
    """
    if shape.schedule == "gpipe":
        return shape.mesh.num_microbatches
    enough = (2 * len(shape.stages) + receive_ahead) // len(shape.slices) + 3
    return min(shape.mesh.num_microbatches, enough + (shape.mesh.remainder > 0))
