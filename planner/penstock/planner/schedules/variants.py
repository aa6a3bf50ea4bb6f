"""The fastest order below a memory cap: a fixed set of orders, each with a memory target, and the best that fits.

**Why a fixed set.** A heuristic that is given the cap itself is not monotone: with a little more memory it takes
another path and may end up slower, and a search over memory limits then contradicts itself. So the cap only selects.
Every pipeline has a list of *depths*, memory targets that depend on its shape alone. The order at a depth is made for
that depth's caps and knows nothing of the caller's. Under a cap, the orders that keep within it are compared by the
simulator, over the true number of micro-batches, and the fastest is taken. A more generous cap only adds orders to the
comparison, so it cannot make the step slower; a cap that holds one micro-batch leaves at least depth 0, so no pipeline
starves; and no order exceeds its cap, since one that does is not compared.

**Depths.** What a rank needs at least, it needs for one micro-batch (`base_caps`). A depth is what it may hold beyond
that, in units of its mean slice: 1F1B over slices holds K - 1 more on rank 0 than the base, V-Half about half, V-Min
about a third of that. `DEPTHS` are percentages of these K - 1; `fine_depths` adds the steps between them.

**The order at a depth** (`Family.order_at`) is the best of several seeds after `refine`, by the length of its step:
repeated building blocks, those that fill the memory best (`blocks`: they are good where many micro-batches follow each
other), and list schedules (`greedy`: good for few micro-batches and odd costs). Each is refined with several patiences.
On 658 random pipelines (2 to 24 ranks, 1 to 4 stages each, 1 to 64 micro-batches, 1 to 4 slices, depths from 15 to 250
percent of 1F1B's) the best of 162 combinations was 0.3 % better in the mean than the fullest block and one list
schedule with three patiences, which is a part of `LEAN`, and 0.1 % better than the four fullest blocks and two list
schedules. Blocks alone lose 0.8 %, list schedules alone 1.3 %.

Tried and rejected: ranking seeds by their first pass alone (0.1 % behind, and a sixth of the time saved), and refining
a depth's order under the caller's caps (not monotone).

**Cost**: all is linear in the number of actions. `Variants.best` takes about 80 ms per 1,000 actions, an order of a
named variant 5 ms, `Variants.frontier` 0.3 to 0.6 s; long pipelines take less.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.core.errors import UserError
from penstock.planner.order import Order
from penstock.planner.schedules.blocks import MOST_WHOLE_SLICES, SEQUENTIAL, Block, word_of
from penstock.planner.schedules.greedy_order import (
    UNLIMITED,
    Limits,
    greedy_word,
    least_caps,
    makespan_ns,
    peak_stash,
)
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.pipeline import Ints, Pipeline, pipeline_of
from penstock.planner.schedules.refine import Word, improve, refine

CAPLESS = 0
"""The variant that minds no cap, so it always can be made."""

PARTS_OF_SLICE = 12
"""Depths are counted in twelfths of a slice."""

NUM_DEPTHS = 14
"""Memory targets by formula that `Variants.best` compares; variant n is that of ``depths(num_ranks)[n - 1]``."""

CAPLESS_DEPTH = -1
"""Stands for variant 0 among depths."""

SLACKS: tuple[tuple[int, int], ...] = (
    (0, 0), (100, 0), (0, 100), (100, 100), (200, 0), (0, 200), (200, 100), (100, 200), (200, 200), (300, 0), (0, 300),
    (300, 300), (400, 400),
)  # fmt: skip
HALF_SLACKS = ((50, 0), (0, 50))
STRETCHES = (125, 150, 200, 300, SEQUENTIAL)

BLOCKS = tuple(
    Block(in_slots, down, up, is_fused, stretch)
    for in_slots in (True, False)
    for is_fused in (False, True)
    for down, up, stretch in (
        *((*slack, 100) for slack in SLACKS),
        *((*slack, 100) for slack in HALF_SLACKS if not in_slots),
        *((0, 0, stretch) for stretch in STRETCHES),
    )
)
"""The building blocks to choose from."""

WHOLE_BLOCKS = tuple(
    Block(False, down, up, is_fused, stretch, is_whole=True)
    for is_fused in (False, True)
    for down, up, stretch in (
        *((*slack, 100) for slack in ((0, 0), (50, 0), (0, 50), (100, 0), (0, 100), (100, 100), (200, 200))),
        *((0, 0, stretch) for stretch in (125, 150, 200)),
    )
)
"""Those of all slices of a micro-batch, for a few slices."""

NAMED_BLOCKS = (Block(True, 0, 0, False), Block(True, 100, 0, False))
"""V-Min and V-Half: what they hold are the last two targets that `Variants.best` compares."""

ONE_BY_ONE = Block(True, 0, 0, True, SEQUENTIAL)
"""One micro-batch after the other: the least memory of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How many seeds are refined at a depth.

    They are V-Min, the ``num_blocks`` fullest blocks, as many that are the fastest with what they hold by themselves
    (if ``is_ranking``), and list schedules that fill a wait with W from each of ``greedy`` percent of its time on; all
    with every one of ``patiences``. Then the best is improved by as many trials as ``trial_actions`` allow, at most
    `MOST_TRIALS`. Of the fastest, ``num_simulated`` are simulated.
    """

    num_blocks: int
    greedy: tuple[int, ...]
    patiences: tuple[int, ...]
    is_ranking: bool = True
    num_simulated: int = 1
    trial_actions: int = 0


LEAN = Effort(num_blocks=1, greedy=(0,), patiences=(0, 50, 100))
FULL = Effort(num_blocks=3, greedy=(0, 50), patiences=(0, 50, 100), num_simulated=3, trial_actions=40_000)

LONG = Effort(num_blocks=1, greedy=(0,), patiences=(0, 50), is_ranking=False)

LEAN_ACTIONS, FULL_ACTIONS = 3_000, 10_000
"""Pipelines with more actions are treated with `LONG` effort in place of `LEAN` and of `FULL`, and `Variants.best`
compares only `LONG_VARIANTS` of them.
"""

LONG_VARIANTS = (1, 3, 5, 7, 10, 12, 14, 15, 16)
"""V-Min, V-Half, 1F1B's memory and a few on either side."""

MOST_TRIALS = 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Point:
    """An order on the frontier of time and memory; ``peaks`` is the most stash that each rank holds."""

    depth: int
    makespan_ns: int
    peaks: tuple[int, ...]
    order: Order


@dataclass(frozen=True, kw_only=True, slots=True)
class Variants:
    """The orders that one generator chooses from.

    ``place`` gives the rank of every stage for so many ranks and stages per rank; ``capless`` makes variant 0;
    ``more_seeds`` are words besides the building blocks.
    """

    name: str
    place: Callable[[int, int], tuple[int, ...]]
    capless: Callable[[ScheduleInputs], Order] | None = None
    more_seeds: Callable[[Pipeline], list[Word]] | None = None

    @property
    def count(self) -> int:
        """Variants that `best` compares."""
        return 1 + NUM_DEPTHS + len(NAMED_BLOCKS)

    def order(self, inputs: ScheduleInputs) -> Order:
        """The order of the variant that ``inputs`` names; raises `UserError` for a number that is none."""
        if inputs.variant is None or not 0 <= inputs.variant < self.count:
            raise UserError(what=f"{inputs.variant} is not a variant of {self.name}", where=f"schedule {self.name}")
        if inputs.variant == CAPLESS and self.capless is not None:
            return self.capless(inputs)
        seeds = self._seeds(inputs)
        usual = usual_depth(inputs.num_ranks)
        depth = usual if inputs.variant == CAPLESS else seeds.lean_depths()[inputs.variant - 1]
        return seeds.pipeline.order(seeds.fastest(seeds.caps(depth), LEAN)[0])

    def best(self, inputs: ScheduleInputs) -> ScheduleInputs:
        """The same inputs with the variant of the shortest simulated step named (of equals the first).

        Raises `UserError` if a cap cannot hold one micro-batch.
        """
        if inputs.variant is not None:
            return inputs
        seeds = self._seeds(inputs)
        every = seeds.lean_depths()
        is_long = len(seeds.pipeline.durations) > LEAN_ACTIONS
        wanted = [every[number - 1] for number in LONG_VARIANTS] if is_long else every
        points = self._points(seeds, wanted, LEAN)
        candidates = {
            CAPLESS if point.depth == CAPLESS_DEPTH else 1 + every.index(point.depth): point.makespan_ns
            for point in points
        }
        return replace(inputs, variant=min(candidates, key=lambda variant: candidates[variant]))

    def roomiest(self, inputs: ScheduleInputs) -> ScheduleInputs:
        """The same inputs with the variant named that has the largest memory target within the caps, a guess at `best`
        that makes no order; the leanest where none is within them.
        """
        if inputs.variant is not None or not inputs.caps:
            return self.best(inputs)
        seeds, limits = self._seeds(inputs), np.array(inputs.caps, dtype=np.int64)
        every = seeds.lean_depths()
        within = [depth for depth in every if (seeds.caps(depth) <= limits).all()]
        return replace(inputs, variant=1 + every.index(max(within, default=min(every))))

    def frontier(self, inputs: ScheduleInputs) -> tuple[Point, ...]:
        """The orders within the caps of which none is both faster and leaner than another, the leanest first."""
        seeds = self._seeds(inputs)
        wanted = sorted({*fine_depths(inputs), *seeds.held_depths()})
        points = self._points(seeds, wanted, FULL)
        points.sort(key=lambda point: (sum(point.peaks), point.makespan_ns))
        kept: list[Point] = []
        for point in points:
            if not kept or point.makespan_ns < kept[-1].makespan_ns:
                kept.append(point)
        return tuple(kept)

    def best_order(self, inputs: ScheduleInputs) -> Order:
        """The fastest order within the caps, by `FULL` effort; raises `UserError` if none holds one micro-batch."""
        return self.frontier(inputs)[-1].order

    def of_block(self, inputs: ScheduleInputs, block: Block) -> Order:
        """The repeated ``block``, refined within the memory that it holds by itself."""
        pipeline = self._pipeline(inputs)
        word = word_of(block, pipeline)
        base = pipeline.peaks(word_of(ONE_BY_ONE, pipeline))
        caps = (base * (pipeline.peaks(word) / np.maximum(base, 1)).max()).astype(np.int64)
        return pipeline.order(min((refine(pipeline, word, caps, each) for each in LEAN.patiences), key=_step)[1])

    def _points(self, seeds: _Seeds, wanted: Iterable[int], effort: Effort) -> list[Point]:
        """The simulated orders that keep within the caps, at the ``wanted`` depths; equal caps are made once."""
        inputs = seeds.inputs
        usual = seeds.caps(usual_depth(inputs.num_ranks))
        points: list[Point] = []
        if self.capless is not None:
            order = self.capless(inputs)
            peaks = peak_stash(inputs, order)
            usual = np.maximum(usual, peaks)
            if not inputs.caps or (peaks <= np.array(inputs.caps)).all():
                points.append(_point(inputs, CAPLESS_DEPTH, peaks, order))
        limits = np.array(inputs.caps or usual, dtype=np.int64)
        _require_one_microbatch(self.name, limits, seeds.base_caps)
        made: set[tuple[int, ...]] = set()
        for depth in wanted:
            caps = seeds.caps(depth)
            key = tuple(caps.tolist())
            if key in made or not (caps <= limits).any():
                continue
            made.add(key)
            words = seeds.fastest(caps, effort)
            every = [_point(inputs, depth, seeds.pipeline.peaks(word), seeds.pipeline.order(word)) for word in words]
            point = min(every, key=lambda point: point.makespan_ns)
            if (np.array(point.peaks) <= limits).all():
                points.append(point)
        return points

    def _seeds(self, inputs: ScheduleInputs) -> _Seeds:
        pipeline = self._pipeline(inputs)
        blocks = BLOCKS + WHOLE_BLOCKS if 1 < inputs.num_slices <= MOST_WHOLE_SLICES else BLOCKS
        words = [word_of(block, pipeline) for block in blocks]
        words += self.more_seeds(pipeline) if self.more_seeds else []
        peaks = np.array([pipeline.peaks(word) for word in words])
        return _Seeds(
            inputs=inputs,
            pipeline=pipeline,
            words=words,
            peaks=peaks,
            base_caps=pipeline.peaks(word_of(ONE_BY_ONE, pipeline)),
            all_caps=np.bincount(pipeline.ranks, weights=np.maximum(pipeline.stash, 0)).astype(np.int64),
        )

    def _pipeline(self, inputs: ScheduleInputs) -> Pipeline:
        owners = self.place(inputs.num_ranks, inputs.stages_per_rank)
        return pipeline_of(inputs, np.argsort(owners, kind="stable").reshape(inputs.num_ranks, -1))


def depths(num_ranks: int) -> tuple[int, ...]:
    """`NUM_DEPTHS` memory targets, among them those of V-Half (K / 2), V-Min ((K - 1) / 3) and 1F1B (K - 1)."""
    of_ranks = ((0, 1), (1, 8), (1, 4), (5, 12), (1, 2), (7, 12), (2, 3), (5, 6))
    of_warm_up = ((1, 3), (1, 1), (5, 4), (3, 2), (2, 1), (3, 1))
    usual = usual_depth(num_ranks)
    return (
        *(min(-(-PARTS_OF_SLICE * num_ranks * a // b), usual) for a, b in of_ranks),
        *(-(-usual * a // b) for a, b in of_warm_up),
    )


def usual_depth(num_ranks: int) -> int:
    """1F1B's memory: the largest depth where no caps are given."""
    return PARTS_OF_SLICE * (num_ranks - 1)


FINE_ACTIONS = 20_000
"""Actions over the steps between depth 0 and 1F1B's, at most: short pipelines are compared at more depths."""


def fine_depths(inputs: ScheduleInputs) -> tuple[int, ...]:
    """`depths`, and steps in between up to 1.5 times 1F1B's, of a twelfth of a slice in short pipelines."""
    actions, usual = 3 * inputs.num_stages * inputs.num_units, usual_depth(inputs.num_ranks)
    step = max(1, usual // max(FINE_ACTIONS // actions, 4))
    return tuple(sorted({*depths(inputs.num_ranks), *range(0, 3 * usual // 2 + 1, step)}))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Seeds:
    """The repeated blocks of one pipeline and what they hold; ``all_caps`` suffice for any order."""

    inputs: ScheduleInputs
    pipeline: Pipeline
    words: list[Word]
    peaks: Ints
    base_caps: Ints
    all_caps: Ints

    def caps(self, depth: int) -> Ints:
        """[ranks]: the memory target of a depth, in bytes or whatever the stash is counted in."""
        beyond = (self._slices * depth / PARTS_OF_SLICE).astype(np.int64)
        caps: Ints = np.minimum(self.base_caps + beyond, self.all_caps)
        return caps

    @functools.cached_property
    def makespans(self) -> Ints:
        """How long the seeds take with what they hold by themselves, after one pass."""
        pairs = zip(self.words, self.peaks, strict=True)
        return np.array([refine(self.pipeline, word, peaks, 0, 0)[0] for word, peaks in pairs], dtype=np.int64)

    @property
    def _slices(self) -> npt.NDArray[np.float64]:
        """[ranks]: the stash of a mean slice on all stages of a rank."""
        stash = self.pipeline.stash[: len(self.pipeline.stash) // 3]
        ranks = self.pipeline.ranks[: len(stash)]
        of_ranks = np.bincount(ranks, weights=stash, minlength=self.pipeline.num_ranks)
        return of_ranks.astype(np.float64) / self.pipeline.num_units

    def lean_depths(self) -> tuple[int, ...]:
        """The depths of all variants but `CAPLESS`."""
        named = [BLOCKS.index(block) for block in NAMED_BLOCKS]
        return (*depths(self.pipeline.num_ranks), *self._least_depths(named))

    def held_depths(self) -> tuple[int, ...]:
        """The least depths that hold the blocks without fusion and stretch, such as V-Half, and other seeds."""
        is_plain = [block.stretch == 100 and not block.is_fused and block.in_slots for block in BLOCKS]
        return self._least_depths([*np.flatnonzero(is_plain), *range(len(BLOCKS), len(self.words))])

    def _least_depths(self, numbers: list[int]) -> tuple[int, ...]:
        beyond = (self.peaks[numbers] - self.base_caps) * PARTS_OF_SLICE / np.maximum(self._slices, 1)
        return tuple(np.ceil(beyond.max(axis=1)).astype(np.int64).tolist())

    def fastest(self, caps: Ints, effort: Effort) -> list[Word]:
        """The words of the shortest steps at these caps, which are one of the targets, the shortest first."""
        if len(self.pipeline.durations) > (LEAN_ACTIONS if effort == LEAN else FULL_ACTIONS):
            effort = LONG
        refined = [
            refine(self.pipeline, word, caps, patience)
            for word in (*self._blocks(caps, effort), *self._greedy(caps, effort.greedy))
            for patience in effort.patiences
        ]
        refined.sort(key=_step)
        num_trials = min(effort.trial_actions // len(self.pipeline.durations), MOST_TRIALS)
        if num_trials > 0 and refined[0][0] > self.pipeline.work_ns.max():
            refined.insert(0, improve(self.pipeline, refined[0], caps, num_trials))
        return [word for _, word in refined[: effort.num_simulated]]

    def _blocks(self, caps: Ints, effort: Effort) -> list[Word]:
        """V-Min, whose order is by micro-batch, the blocks that take most of the memory, and those that are fastest."""
        fitting = np.flatnonzero((self.peaks <= caps).all(axis=1))
        fullest = fitting[np.argsort(-self.peaks[fitting].sum(axis=1), kind="stable")]
        makespans = self.makespans[fitting] if effort.is_ranking else -self.peaks[fitting].sum(axis=1)
        fastest = fitting[np.argsort(makespans, kind="stable")]
        count = effort.num_blocks
        leanest = fitting[fitting == 0]
        return [self.words[number] for number in dict.fromkeys([*leanest, *fullest[:count], *fastest[:count]])]

    def _greedy(self, caps: Ints, patiences: tuple[int, ...]) -> list[Word]:
        lag = np.full(self.inputs.num_stages, UNLIMITED)
        depth = lag.copy()
        depth[-1] = self.inputs.num_slices
        inputs, owned = self.inputs, self.pipeline.owned
        if (caps < least_caps(inputs, owned)).any():
            return []
        every = [Limits(depth=depth, lag=lag, caps=caps, patience=patience) for patience in patiences]
        return [greedy_word(inputs, owned, limits) for limits in every]


def _point(inputs: ScheduleInputs, depth: int, peaks: Ints, order: Order) -> Point:
    return Point(depth=depth, makespan_ns=makespan_ns(inputs, order), peaks=tuple(peaks.tolist()), order=order)


def _step(refined: tuple[int, Word]) -> int:
    return refined[0]


def _require_one_microbatch(name: str, caps: Ints, needed: Ints) -> None:
    for rank in np.flatnonzero(caps < needed).tolist():
        raise UserError(
            what=f"a stash of {caps[rank]} cannot hold one micro-batch, which needs {needed[rank]}",
            where=f"schedule {name}, rank {rank}",
            remedy="give more memory per rank, smaller micro-batches or fewer layers per stage",
        )
