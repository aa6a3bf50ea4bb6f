"""Seeds of orders: the building blocks of a pipeline, and its memory targets.

Blocks are selected by their memory and by their steps' length (`penstock.planner.schedules.variants`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.planner.schedules.blocks import MOST_WHOLE_SLICES, SEQUENTIAL, Block, word_of
from penstock.planner.schedules.effort import MOST_TRIALS, Effort, affordable
from penstock.planner.schedules.greedy_order import UNLIMITED, Limits, greedy_word, least_caps
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.pipeline import Ints, Pipeline
from penstock.planner.schedules.refine import UNKNOWN, Run, Word, improve, refine

PARTS_OF_SLICE = 12
"""Depths are counted in fractions of a slice: twelfths."""

NUM_DEPTHS = 14
"""Number of memory targets by formula that `Variants.best` compares; variant n has ``depths(num_ranks)[n - 1]``."""

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

FEW_BLOCKS = tuple(block for block in BLOCKS if block.in_slots and (not block.is_fused or block.stretch == SEQUENTIAL))
"""A quarter as many, for orders of which only the fullest block is refined. On 250 pipelines of searches their steps
were equal on average to those with all blocks, and 1.2 % longer at worst.
"""

WHOLE_BLOCKS = tuple(
    Block(False, down, up, is_fused, stretch, is_whole=True)
    for is_fused in (False, True)
    for down, up, stretch in (
        *((*slack, 100) for slack in ((0, 0), (50, 0), (0, 50), (100, 0), (0, 100), (100, 100), (200, 200))),
        *((0, 0, stretch) for stretch in (125, 150, 200)),
    )
)
"""Blocks of all slices of a micro-batch, if there are few slices."""

NAMED_BLOCKS = (Block(True, 0, 0, False), Block(True, 100, 0, False))
"""V-Min and V-Half: their memory is that of the last two targets that `Variants.best` compares."""

ONE_BY_ONE = Block(True, 0, 0, True, SEQUENTIAL)
"""One micro-batch after the other: the least memory of all."""


def depths(num_ranks: int) -> tuple[int, ...]:
    """The `NUM_DEPTHS` memory targets, including those of V-Half (K / 2), V-Min ((K - 1) / 3) and 1F1B (K - 1)."""
    shares_of_ranks = ((0, 1), (1, 8), (1, 4), (5, 12), (1, 2), (7, 12), (2, 3), (5, 6))
    multiples_of_usual = ((1, 3), (1, 1), (5, 4), (3, 2), (2, 1), (3, 1))
    usual = usual_depth(num_ranks)
    return (
        *(min(-(-PARTS_OF_SLICE * num_ranks * a // b), usual) for a, b in shares_of_ranks),
        *(-(-usual * a // b) for a, b in multiples_of_usual),
    )


def usual_depth(num_ranks: int) -> int:
    """1F1B's memory: the largest depth without caps."""
    return PARTS_OF_SLICE * (num_ranks - 1)


FINE_ACTIONS = 20_000
"""Maximum number of actions of all steps between depth 0 and 1F1B's: short pipelines are compared at more depths."""


def fine_depths(inputs: ScheduleInputs) -> tuple[int, ...]:
    """`depths`, and steps in between up to 1.5 times 1F1B's, of a twelfth of a slice in short pipelines."""
    actions, usual = 3 * inputs.num_stages * inputs.num_units, usual_depth(inputs.num_ranks)
    step = max(1, usual // max(FINE_ACTIONS // actions, 4))
    return tuple(sorted({*depths(inputs.num_ranks), *range(0, 3 * usual // 2 + 1, step)}))


@dataclass(frozen=True, kw_only=True, eq=False)
class Seeds:
    """The repeated blocks of one pipeline and their memory, computed on first access.

    ``more`` makes words in addition to the blocks.
    """

    inputs: ScheduleInputs
    pipeline: Pipeline
    more: Callable[[Pipeline], list[Word]] | None = None

    @functools.cached_property
    def words(self) -> list[Word]:
        """The words of all seeds, those of `BLOCKS` first."""
        blocks = BLOCKS + WHOLE_BLOCKS if 1 < self.inputs.num_slices <= MOST_WHOLE_SLICES else BLOCKS
        return [word_of(block, self.pipeline) for block in blocks] + (self.more(self.pipeline) if self.more else [])

    @functools.cached_property
    def peaks(self) -> Ints:
        """[words, ranks]: the largest stash that each holds."""
        return np.array([self.pipeline.peaks(word) for word in self.words])

    @functools.cached_property
    def few(self) -> tuple[list[Word], Ints]:
        """The words of `FEW_BLOCKS` and their peaks."""
        words = [word_of(block, self.pipeline) for block in FEW_BLOCKS]
        return words, np.array([self.pipeline.peaks(word) for word in words])

    @functools.cached_property
    def base_caps(self) -> Ints:
        """[ranks]: the stash of one micro-batch after the other, the least possible."""
        return self.pipeline.peaks(word_of(ONE_BY_ONE, self.pipeline))

    @functools.cached_property
    def all_caps(self) -> Ints:
        """[ranks]: caps that suffice for any order."""
        return np.bincount(self.pipeline.ranks, weights=np.maximum(self.pipeline.stash, 0)).astype(np.int64)

    def caps(self, depth: int) -> Ints:
        """[ranks]: the memory target of a depth, in the stash's unit."""
        beyond = (self._slices * depth / PARTS_OF_SLICE).astype(np.int64)
        caps: Ints = np.minimum(self.base_caps + beyond, self.all_caps)
        return caps

    @functools.cached_property
    def makespans(self) -> Ints:
        """The lengths of the seeds' steps within their own memory, after one pass."""
        pairs = zip(self.words, self.peaks, strict=True)
        return np.array([refine(self.pipeline, word, peaks, 0, 0)[0] for word, peaks in pairs], dtype=np.int64)

    @functools.cached_property
    def _slices(self) -> npt.NDArray[np.float64]:
        """[ranks]: the stash of a mean slice on all stages of a rank."""
        stash = self.pipeline.stash[: len(self.pipeline.stash) // 3]
        ranks = self.pipeline.ranks[: len(stash)]
        rank_stash = np.bincount(ranks, weights=stash, minlength=self.pipeline.num_ranks)
        return rank_stash.astype(np.float64) / self.pipeline.num_units

    def lean_depths(self) -> tuple[int, ...]:
        """The depths of all variants but `CAPLESS`."""
        named = np.array([self.pipeline.peaks(word_of(block, self.pipeline)) for block in NAMED_BLOCKS])
        return (*depths(self.pipeline.num_ranks), *self._least_depths(named))

    def held_depths(self) -> tuple[int, ...]:
        """The smallest depths that fit the blocks without fusion and stretch, such as V-Half, and other seeds."""
        is_plain = [block.stretch == 100 and not block.is_fused and block.in_slots for block in BLOCKS]
        return self._least_depths(self.peaks[[*np.flatnonzero(is_plain), *range(len(BLOCKS), len(self.words))]])

    def _least_depths(self, peaks: Ints) -> tuple[int, ...]:
        beyond = (peaks - self.base_caps) * PARTS_OF_SLICE / np.maximum(self._slices, 1)
        return tuple(np.ceil(beyond.max(axis=1)).astype(np.int64).tolist())

    def refined(self, caps: Ints, effort: Effort) -> list[Run]:
        """Steps within these caps, which are one of the targets, the shortest first."""
        effort = affordable(effort, len(self.pipeline.durations))
        refined, is_first_enough = list[Run](), max(effort.num_simulated, effort.num_repeated) == 1
        for word in (*self._blocks(caps, effort), *self._greedy(caps, effort.greedy)):
            for patience in effort.patiences:
                most_ns = min(map(_step, refined), default=UNKNOWN) if is_first_enough else UNKNOWN
                refined.append(refine(self.pipeline, word, caps, patience, most_ns=most_ns))
        refined.sort(key=_step)
        num_trials = min(effort.trial_actions // len(self.pipeline.durations), MOST_TRIALS)
        if num_trials > 0 and refined[0][0] > self.pipeline.work_ns.max():
            refined.insert(0, improve(self.pipeline, refined[0], caps, num_trials))
        return refined

    def _blocks(self, caps: Ints, effort: Effort) -> list[Word]:
        """V-Min, whose order is by micro-batch, the blocks that use most of the memory, and the fastest ones."""
        words, peaks = self.few if effort.has_few_blocks else (self.words, self.peaks)
        fitting = np.flatnonzero((peaks <= caps).all(axis=1))
        fullest = fitting[np.argsort(-peaks[fitting].sum(axis=1), kind="stable")]
        fastest = fitting[np.argsort(self.makespans[fitting], kind="stable")] if effort.is_ranking else fullest
        count = effort.num_blocks
        leanest = fitting[fitting == 0] if effort.has_leanest else fitting[:0]
        return [words[number] for number in dict.fromkeys([*leanest, *fullest[:count], *fastest[:count]])]

    def _greedy(self, caps: Ints, patiences: tuple[int, ...]) -> list[Word]:
        lag = np.full(self.inputs.num_stages, UNLIMITED)
        depth = lag.copy()
        depth[-1] = self.inputs.num_slices
        inputs, owned = self.inputs, self.pipeline.owned
        if (caps < least_caps(inputs, owned)).any():
            return []
        all_limits = [Limits(depth=depth, lag=lag, caps=caps, patience=patience) for patience in patiences]
        return [greedy_word(inputs, owned, limits) for limits in all_limits]


def _step(refined: Run) -> int:
    return refined[0]
