"""The fastest order below a memory cap: a fixed set of orders, each with a memory target, and the best that fits.

**Why a fixed set.** A heuristic that uses the cap itself is not monotone: with a little more memory it takes another
path and may end up slower, and a search over memory limits then contradicts itself. So the cap only selects. Every
pipeline has a list of *depths*, memory targets that depend only on its shape. The order at a depth is made for that
depth's caps, independently of the caller's. Of the orders within the caller's cap the fastest is chosen, by simulation
over the true number of micro-batches. A larger cap only adds orders to the comparison, so it cannot make the step
slower. A cap that holds one micro-batch allows at least depth 0, so every pipeline has an order. And no order exceeds
its cap, since such orders are not compared.

**Depths.** A rank's least memory is that of one micro-batch (`base_caps`). A depth is the memory beyond that, in units
of the rank's mean slice: 1F1B over slices holds K - 1 more on rank 0 than the base, V-Half about half, V-Min about a
third of that. `depths` are fractions of these K - 1; `fine_depths` adds the steps between them.

**The order at a depth** (`_Shape.fastest`) is the best of several seeds after `refine`, by the length of its step:
repeated building blocks, those that fill the memory best (`blocks`: good for many successive micro-batches), and list
schedules (`greedy`: good for few micro-batches and irregular costs). Each is refined with several patiences. On 658
random pipelines (2 to 24 ranks, 1 to 4 stages each, 1 to 64 micro-batches, 1 to 4 slices, depths from 15 to 250 percent
of 1F1B's) the best of 162 combinations was 0.3 % better on average than the fullest block and one list schedule with
three patiences, which is a part of `LEAN`, and 0.1 % better than the four fullest blocks and two list schedules. Blocks
alone lose 0.8 %, list schedules alone 1.3 %.

Tried and rejected: ranking seeds by their first pass alone (0.1 % worse, and a sixth of the time saved), and refining a
depth's order under the caller's caps (not monotone).

**Many micro-batches**: orders of few micro-batches are made and their middle is repeated (`repeat`), so that the work
does not grow with the number. Steps of such orders are compared by simulating one and two more rounds, and
extrapolating linearly.

**Cost**: everything is linear in the number of actions, or in that of the short step. `Variants.best` takes about 80 ms
per 1,000 actions, an order of a named variant 5 ms, `Variants.frontier` 0.3 to 0.6 s; long pipelines take less.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from penstock.core.errors import UserError
from penstock.planner.order import Order
from penstock.planner.schedules.blocks import Block, word_of
from penstock.planner.schedules.effort import FULL, LEAN, LEAN_ACTIONS, QUICK, Effort, affordable
from penstock.planner.schedules.greedy_order import makespan_ns, peak_stash
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.pipeline import Ints, Pipeline, pipeline_of, stages_by_rank
from penstock.planner.schedules.refine import Word, dated, refine
from penstock.planner.schedules.repeat import Round, rounds, start_times
from penstock.planner.schedules.seeds import (
    NAMED_BLOCKS,
    NUM_DEPTHS,
    ONE_BY_ONE,
    Seeds,
    fine_depths,
    usual_depth,
)
from penstock.planner.simulate.periodic import enough_to_repeat

CAPLESS = 0
"""The variant without a cap, which can always be made."""

CAPLESS_DEPTH = -1
"""The depth that stands for variant 0."""

QUICK_FROM = 64
"""Variant n + QUICK_FROM has the depth of variant n, made with less effort for long pipelines: for a search."""

LONG_VARIANTS = (1, 3, 5, 7, 10, 12, 14, 15, 16)
"""V-Min, V-Half, 1F1B's memory and a few on either side."""

NUM_TIMED = 3
"""Rounds that are run to measure the length of one."""

TIGHT = 1.001
"""A round this close to its work is not improved further."""

NEARLY_TIGHT = 1.02
"""If repeated orders take longer than their work times this factor, longer rounds are also tried."""

MOST_ACTIONS_IN_FULL = 30_000
"""Steps of more actions are made by repeating rounds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Point:
    """An order on the frontier of time and memory; ``peaks`` is the largest stash of each rank."""

    depth: int
    makespan_ns: int
    peaks: tuple[int, ...]
    generate: Callable[[], Order]

    @property
    def order(self) -> Order:
        """The order itself."""
        return self.generate()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Growing:
    """Orders of ``first`` micro-batches and of ``first`` plus any multiple of ``period``: each has one more round than
    the one before. Without ``first``, every number has an order of its own. ``length_ns`` is the length of the
    requested order by itself, if known.
    """

    generate: Callable[[int], Order]
    first: int | None = None
    period: int = 1
    length_ns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Variants:
    """The orders that one generator chooses from.

    ``place`` gives the rank of every stage for numbers of ranks and stages per rank; ``capless`` makes variant 0;
    ``more_seeds`` are words in addition to the building blocks.
    """

    name: str
    place: Callable[[int, int], tuple[int, ...]]
    capless: Callable[[ScheduleInputs], Order] | None = None
    more_seeds: Callable[[Pipeline], list[Word]] | None = None

    @property
    def count(self) -> int:
        """Number of variants that `best` compares."""
        return 1 + NUM_DEPTHS + len(NAMED_BLOCKS)

    def order(self, inputs: ScheduleInputs) -> Order:
        """The order of the variant in ``inputs``; raises `UserError` for an invalid number."""
        if inputs.variant is None or not 0 <= inputs.variant % QUICK_FROM < self.count:
            raise UserError(what=f"{inputs.variant} is not a variant of {self.name}", where=f"schedule {self.name}")
        if inputs.variant == CAPLESS and self.capless is not None:
            return self.capless(inputs)
        return self._made(inputs).order

    def _made(self, inputs: ScheduleInputs) -> _Made:
        assert inputs.variant is not None, "callers name one"
        shape, number = self._shape(inputs), inputs.variant % QUICK_FROM
        usual = usual_depth(inputs.num_ranks)
        depth = usual if number == CAPLESS else shape.seeds.lean_depths()[number - 1]
        return shape.fastest(depth, LEAN if inputs.variant < QUICK_FROM else QUICK)[0]

    def growing(self, inputs: ScheduleInputs) -> Growing:
        """The order of the variant in ``inputs``, and those of fewer micro-batches that begin and end like it."""

        def made_for(count: int) -> Order:
            return self.order(replace(inputs, num_microbatches=count))

        if inputs.variant == CAPLESS and self.capless is not None:
            return Growing(generate=made_for)
        made, num_microbatches = self._made(inputs), inputs.num_microbatches
        if made.repetition is None:
            return Growing(
                generate=lambda count: made.order if count == num_microbatches else made_for(count),
                length_ns=made.length_ns,
            )
        period = made.repetition.num_microbatches
        first = num_microbatches - made.num_rounds * period
        return Growing(
            first=first,
            period=period,
            generate=lambda count: made.with_rounds((count - first) // period),
            length_ns=made.length_ns,
        )

    def best(self, inputs: ScheduleInputs) -> ScheduleInputs:
        """The inputs with the variant of the shortest simulated step (of equals the first).

        Raises `UserError` if a cap cannot hold one micro-batch.
        """
        if inputs.variant is not None:
            return inputs
        shape = self._shape(inputs)
        all_depths = shape.seeds.lean_depths()
        is_long = len(shape.seeds.pipeline.durations) > LEAN_ACTIONS
        depths_to_try = [all_depths[number - 1] for number in LONG_VARIANTS] if is_long else all_depths
        points = self._points(shape, depths_to_try, LEAN)
        candidates = {
            CAPLESS if point.depth == CAPLESS_DEPTH else 1 + all_depths.index(point.depth): point.makespan_ns
            for point in points
        }
        return replace(inputs, variant=min(candidates, key=lambda variant: candidates[variant]))

    def largest(self, inputs: ScheduleInputs) -> ScheduleInputs:
        """The inputs with the quick variant that has the largest memory target within the caps, a guess at `best` that
        makes no order; the leanest variant if none is within them.
        """
        if inputs.variant is not None or not inputs.caps:
            return self.best(inputs)
        seeds, limits = self._shape(inputs).seeds, np.array(inputs.caps, dtype=np.int64)
        all_depths = seeds.lean_depths()
        within = [depth for depth in all_depths if (seeds.caps(depth) <= limits).all()]
        return replace(inputs, variant=QUICK_FROM + 1 + all_depths.index(max(within, default=min(all_depths))))

    def frontier(self, inputs: ScheduleInputs) -> tuple[Point, ...]:
        """The orders within the caps for which no other is both faster and leaner, the leanest first."""
        shape = self._shape(inputs)
        depths_to_try = sorted({*fine_depths(shape.seeds.inputs), *shape.seeds.held_depths()})
        points = self._points(shape, depths_to_try, FULL)
        points.sort(key=lambda point: (sum(point.peaks), point.makespan_ns))
        frontier: list[Point] = []
        for point in points:
            if not frontier or point.makespan_ns < frontier[-1].makespan_ns:
                frontier.append(point)
        return tuple(frontier)

    def best_order(self, inputs: ScheduleInputs) -> Order:
        """The fastest order within the caps, with `FULL` effort; raises `UserError` if none holds one micro-batch."""
        return self.frontier(inputs)[-1].order

    def of_block(self, inputs: ScheduleInputs, block: Block) -> Order:
        """The repeated ``block``, refined within its own memory."""
        pipeline = self._pipeline(inputs)
        word = word_of(block, pipeline)
        base = pipeline.peaks(word_of(ONE_BY_ONE, pipeline))
        caps = (base * (pipeline.peaks(word) / np.maximum(base, 1)).max()).astype(np.int64)
        return pipeline.order(
            min((refine(pipeline, word, caps, patience) for patience in LEAN.patiences), key=lambda run: run[0])[1]
        )

    def _points(self, shape: _Shape, depths: Iterable[int], effort: Effort) -> list[Point]:
        """The orders within the caps at the ``depths``; equal caps are made once."""
        inputs, seeds = shape.inputs, shape.seeds
        usual = seeds.caps(usual_depth(inputs.num_ranks))
        points: list[Point] = []
        if self.capless is not None:
            point = shape.point_of(CAPLESS_DEPTH, self.capless)
            usual = np.maximum(usual, point.peaks)
            if not inputs.caps or (np.array(point.peaks) <= np.array(inputs.caps)).all():
                points.append(point)
        limits = np.array(inputs.caps or usual, dtype=np.int64)
        _require_one_microbatch(self.name, limits, seeds.base_caps)
        made: set[tuple[int, ...]] = set()
        for depth in depths:
            caps = seeds.caps(depth)
            key = tuple(caps.tolist())
            if key in made or not (caps <= limits).any():
                continue
            made.add(key)
            depth_points = [_point(inputs, depth, made_order) for made_order in shape.fastest(depth, effort)]
            point = min(depth_points, key=lambda point: point.makespan_ns)
            if (np.array(point.peaks) <= limits).all():
                points.append(point)
        return points

    def _shape(self, inputs: ScheduleInputs) -> _Shape:
        @functools.cache
        def seeds_of(num_microbatches: int) -> Seeds:
            shorter = replace(inputs, num_microbatches=num_microbatches)
            return Seeds(inputs=shorter, pipeline=self._pipeline(shorter), more=self.more_seeds)

        return _Shape(inputs=inputs, seeds_of=seeds_of)

    def _pipeline(self, inputs: ScheduleInputs) -> Pipeline:
        return _placed(inputs, self.place)


def one_by_one(inputs: ScheduleInputs, place: Callable[[int, int], tuple[int, ...]]) -> Order:
    """One micro-batch after the other, which needs the least memory; ``place`` is as for `Variants`."""
    pipeline = _placed(inputs, place)
    return pipeline.order(word_of(ONE_BY_ONE, pipeline))


def _placed(inputs: ScheduleInputs, place: Callable[[int, int], tuple[int, ...]]) -> Pipeline:
    return pipeline_of(inputs, stages_by_rank(place(inputs.num_ranks, inputs.stages_per_rank), inputs.num_ranks))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Made:
    """A word of few micro-batches, to be extended by ``num_rounds`` rounds. ``length_ns`` is the length of the refined
    whole, ``peaks`` [ranks] the largest stash.
    """

    pipeline: Pipeline
    word: Word
    length_ns: int
    peaks: Ints
    repetition: Round | None = None
    num_rounds: int = 0

    @property
    def order(self) -> Order:
        """The order with all rounds."""
        return self.with_rounds(self.num_rounds)

    def with_rounds(self, count: int) -> Order:
        """The order with ``count`` rounds."""
        return self.pipeline.order(self.repetition.repeated(self.word, count) if self.repetition else self.word)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Shape:
    """The orders of ``inputs``: of all micro-batches at once, or if there are many, of few that are repeated.
    ``seeds_of`` gives those of the same inputs with another number of micro-batches.
    """

    inputs: ScheduleInputs
    seeds_of: Callable[[int], Seeds]

    @property
    def seeds(self) -> Seeds:
        """Seeds of the shortest step that is made."""
        return self.seeds_of(self._short(1) if self._is_long else self.inputs.num_microbatches)

    @property
    def _is_long(self) -> bool:
        num_ranks, num_slices = self.inputs.num_ranks, self.inputs.num_slices
        num_actions = 3 * self.inputs.num_stages * self.inputs.num_units
        return num_actions > MOST_ACTIONS_IN_FULL and self.inputs.num_microbatches > 2 * enough_to_repeat(
            num_ranks, num_slices
        )

    def _short(self, period: int) -> int:
        """Micro-batches of the shortest step that grows to all of them by rounds of ``period``."""
        first = enough_to_repeat(self.inputs.num_ranks, self.inputs.num_slices)
        return first + (self.inputs.num_microbatches - first) % period

    def fastest(self, depth: int, effort: Effort) -> list[_Made]:
        """The shortest steps at a depth, the shortest first."""
        made: list[_Made] = []
        most_rounds = affordable(effort, len(self.seeds.pipeline.durations)).most_rounds
        for period in self._periods(most_rounds) if self._is_long else ():
            made += self._repeated(depth, effort, period)
            if made and min(map(_length, made)) <= NEARLY_TIGHT * self._work_ns:
                break
        if not made:
            seeds = self.seeds_of(self.inputs.num_microbatches)
            refined = seeds.refined(seeds.caps(depth), effort)
            made += [
                _Made(pipeline=seeds.pipeline, word=word, length_ns=length, peaks=seeds.pipeline.peaks(word))
                for length, word, _ in refined
            ]
        return sorted(made, key=_length)[: effort.num_simulated]

    def _periods(self, most: int) -> Iterable[int]:
        """Lengths of rounds: few micro-batches, and if groups of them fill a loop, as many as a group has."""
        group_size = -(-self.inputs.num_ranks // self.inputs.num_slices)
        has_groups = most > 1 and self.inputs.stages_per_rank > 1
        return sorted({*range(1, most + 1), *([group_size] if has_groups else [])})

    @property
    def _work_ns(self) -> float:
        """Nanoseconds of the busiest rank's work for all micro-batches."""
        seeds = self.seeds
        return float(seeds.pipeline.work_ns.max()) * self.inputs.num_microbatches / seeds.inputs.num_microbatches

    def _repeated(self, depth: int, effort: Effort, period: int) -> list[_Made]:
        """Orders that repeat rounds of ``period`` micro-batches, up to the first with a round without waits."""
        short = self._short(period)
        seeds, made = self.seeds_of(short), list[_Made]()
        caps = seeds.caps(depth)
        num_rounds = (self.inputs.num_microbatches - short) // period
        longer_pipeline = self.seeds_of(short + NUM_TIMED * period).pipeline
        busiest_ns = seeds.pipeline.work_ns.max() * period / short
        for run in seeds.refined(caps, effort)[: effort.num_repeated]:
            for repeated_round in itertools.islice(rounds(seeds.pipeline, run, period), effort.num_repeated):
                word = repeated_round.repeated(run[1], NUM_TIMED)
                peaks = longer_pipeline.peaks(word)
                if (peaks > caps).any():
                    continue
                round_ns = _last_round_ns(longer_pipeline, word, repeated_round)
                made.append(
                    _Made(
                        pipeline=seeds.pipeline,
                        word=run[1],
                        length_ns=run[0] + num_rounds * round_ns,
                        peaks=peaks,
                        repetition=repeated_round,
                        num_rounds=num_rounds,
                    )
                )
                if round_ns <= TIGHT * busiest_ns and len(made) >= effort.num_simulated:
                    return made
        return made

    def point_of(self, depth: int, generate: Callable[[ScheduleInputs], Order]) -> Point:
        """The order of a formula, as a point."""
        first = self.seeds.inputs
        peaks = tuple(peak_stash(first, generate(first)).tolist())

        def order(num_rounds: int) -> Order:
            return generate(replace(first, num_microbatches=first.num_microbatches + num_rounds))

        num_rounds = self.inputs.num_microbatches - first.num_microbatches
        length_ns = _continued_ns(first, order, 1, num_rounds)
        return Point(depth=depth, makespan_ns=length_ns, peaks=peaks, generate=lambda: generate(self.inputs))


def _last_round_ns(pipeline: Pipeline, word: Word, repeated_round: Round) -> int:
    """The length of a round: the time between the starts of the last two of `NUM_TIMED` rounds."""
    length = repeated_round.actions.shape[1]
    starts = start_times(pipeline, dated(pipeline, word))
    ranks, last = np.arange(len(word)), repeated_round.places + (NUM_TIMED - 1) * length
    return int((starts[ranks, last] - starts[ranks, last - length]).max())


def _continued_ns(first: ScheduleInputs, order: Callable[[int], Order], period: int, num_rounds: int) -> int:
    """The simulated step with ``num_rounds`` rounds of ``period`` micro-batches more than ``first``; many rounds are
    extrapolated from one and two.
    """

    def simulated(count: int) -> int:
        inputs = replace(first, num_microbatches=first.num_microbatches + count * period)
        return makespan_ns(inputs, order(count))

    if num_rounds <= 2:
        return simulated(num_rounds)
    one, two = simulated(1), simulated(2)
    return two + (num_rounds - 2) * (two - one)


def _point(inputs: ScheduleInputs, depth: int, made: _Made) -> Point:
    period = made.repetition.num_microbatches if made.repetition else 0
    first = replace(inputs, num_microbatches=inputs.num_microbatches - made.num_rounds * period)
    length_ns = _continued_ns(first, made.with_rounds, period, made.num_rounds)
    return Point(depth=depth, makespan_ns=length_ns, peaks=tuple(made.peaks.tolist()), generate=lambda: made.order)


def _length(made: _Made) -> int:
    return made.length_ns


def _require_one_microbatch(name: str, caps: Ints, needed: Ints) -> None:
    for rank in np.flatnonzero(caps < needed).tolist():
        raise UserError(
            what=f"a stash of {caps[rank]} cannot hold one micro-batch, which needs {needed[rank]}",
            where=f"schedule {name}, rank {rank}",
            remedy="give more memory per rank, smaller micro-batches or fewer layers per stage",
        )
