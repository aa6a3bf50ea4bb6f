"""Building blocks: the passes of one slice through all stages, placed in time and repeated, for any shape.

**The idea** of "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362): schedule the passes of one
micro-batch, and start the next micro-batch a fixed *period* later, with the same pattern. If no two passes of a rank
fall on the same place modulo the period, the repeated pattern is a schedule. Its memory follows from the block alone: a
pass is held from its F to its W, so a rank holds the sum of these lifespans divided by the period, for any number of
micro-batches. Short lifespans mean little memory, long ones leave slack for passes of unequal length.

**The block** is made here by modulo scheduling instead of from a table of offsets, so that it exists for every
placement of stages, any number of them per rank, and passes of any length. Passes are placed in the order of their
dependencies, F down the stages and I back up, each at the earliest time that is free modulo the period on its rank. A
hop may have *slack*, a time that passes before the next stage begins. W takes the first free place after its I, or the
place directly after it (``fused``). With all passes one slot long, two stages per rank along a V and no slack, that is
V-Min (1/3 of 1F1B's memory and a bit). With one slot of slack in the forward of the first half and in the backward of
the second, it is V-Half; with more it is ZB-V. With one stage per rank and one slot of slack it is ZB-H1.

**Slices** are new here. A period is that of one slice: F of slice j starts j periods after slice 0, and the gradients
follow with the same period in descending order, so the steady state of S slices is that of S times as many
micro-batches of a shorter sequence. Slice S - 1 is the last forward and the first gradient, so I starts S - 1 periods
later than with one slice. Memory in slices grows by S - 1 (as under 1F1B over slices), while the bubble shrinks to 1/S.
Keys and values of a micro-batch live across its slices, from its first F to its last I, which no order over slices can
avoid. A *whole* block has the slices of a micro-batch follow each other as closely as possible, in a period as long as
all of them. A slice then waits for S - 1 passes instead of S - 1 periods, so less is held, but the uneven pace leaves
fewer waits that W fits into. After refinement either form is ahead by up to 3 % at some memory, the even one more
often.

**Tight memory**: below V-Min no block with a full period exists. ``stretch`` starts micro-batches (not slices) less
often, in percent of the full period; `SEQUENTIAL` runs them one after another, which fits whenever one micro-batch
does. `refine` lets later ones start early if memory allows.

Example: 4 ranks along a V, slots F = I = W = 1, period 6, no slack. F of stages 0 to 7 lie at 0 to 7: rank 3 runs
stages 3 and 4 at 3 and 4, rank 0 stages 0 and 7 at 0 and 7 (1 modulo 6). I starts with stage 7 at 8 (2 modulo 6), and
so on. Lifespans on rank 0 are 16 and 2 slots plus W's wait: about 20 / 6 of 8 stages of activations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from penstock.planner.compiled import compiled
from penstock.planner.schedules.pipeline import MOST_KEPT_ACTIONS, Ints, Pipeline, Shape

MOST_WHOLE_SLICES = 6
"""With more slices, whole blocks are made as if they were not whole: the time to place them grows with the cube of the
number.
"""

KEPT_WORDS = 1024
"""Number of cached words of blocks in slots, for recent shapes with few actions: at most 20 MB."""

SEQUENTIAL = 0
"""The ``stretch`` with which a micro-batch starts when the one before has ended on all ranks."""


@dataclass(frozen=True, slots=True)
class Block:
    """Parameters of a building block, as in the module's description.

    ``in_slots`` counts every pass as one slot and transfers as 0. ``down`` is the slack of a hop, in percent of a mean
    pass, in the forwards of even rounds of stages (K stages each) and in the gradients of odd ones; ``up`` is that of
    the others. ``is_whole`` makes the block of a micro-batch with all its slices.
    """

    in_slots: bool
    down: int
    up: int
    is_fused: bool
    stretch: int = 100
    is_whole: bool = False


def word_of(block: Block, pipeline: Pipeline) -> npt.NDArray[np.int8]:
    """The repeated block as a word; read-only, since those of recent shapes are cached."""
    shape = pipeline.shape
    if block.in_slots:
        return (_word_in_slots if shape.num_actions <= MOST_KEPT_ACTIONS else _word_in_slots.__wrapped__)(block, shape)
    owners, num_stages, num_slices = shape.owners, shape.num_stages, shape.num_slices
    durations = pipeline.durations.reshape(3, num_stages, -1)[:, :, :num_slices]
    durations = durations if _num_placed(block, shape) > 1 else pipeline.mean_ns[:3, :, None]
    times = np.maximum(100 * durations, 1)  # so that no pass begins together with the pass that it follows
    hops = np.zeros((2, num_stages), dtype=np.int64)
    crosses = owners[1:] != owners[:-1]
    hops[0, :-1], hops[1, 1:] = 100 * pipeline.mean_ns[3, :-1] * crosses, 100 * pipeline.mean_ns[4, 1:] * crosses
    return _word(block, shape, times, hops)


@functools.lru_cache(maxsize=KEPT_WORDS)
def _word_in_slots(block: Block, shape: Shape) -> npt.NDArray[np.int8]:
    """The word of a block whose passes take one slot each, whatever they cost."""
    times = np.full((3, shape.num_stages, _num_placed(block, shape)), 100)
    return _word(block, shape, times, np.zeros((2, shape.num_stages), dtype=np.int64))


def _num_placed(block: Block, shape: Shape) -> int:
    """Number of slices that the block places, one by one; 1 if it places the passes of one slice."""
    is_whole = block.is_whole and shape.num_slices <= MOST_WHOLE_SLICES
    return shape.num_slices if is_whole else 1


def _word(block: Block, shape: Shape, times: Ints, hops: Ints) -> npt.NDArray[np.int8]:
    """The word for passes that take ``times`` [F I W, stage, placed slice], in percent of nanoseconds or of slots, and
    messages that take ``hops`` [direction, stage].
    """
    num_slices, owners, owned = shape.num_slices, shape.owners, np.array(shape.owned)
    num_ranks, per_rank = owned.shape
    num_placed = times.shape[2]
    is_whole = block.is_whole and num_slices <= MOST_WHOLE_SLICES
    work = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(work, owners, times.sum(axis=(0, 2)))
    period = max(int(work.max()), 1)
    is_odd = (np.arange(shape.num_stages) // num_ranks) % 2
    slack = np.where(np.stack([is_odd, 1 - is_odd]) == 1, block.up, block.down)
    hops = hops + slack * (period // (3 * per_rank * num_placed)) // 100
    between = period if is_whole else 0
    turn = 0 if is_whole else (num_slices - 1) * period
    offsets = np.zeros((3, shape.num_stages, num_placed), dtype=np.int64)
    _place(owners, per_rank, times, hops, period, turn, block.is_fused, offsets)
    if not is_whole:
        offsets = offsets + period * np.arange(num_slices)
        between = num_slices * period
    between = between * block.stretch // 100
    if block.stretch == SEQUENTIAL:
        between = int(offsets.max() + times.max())
    keys = offsets[:, owned].transpose(1, 0, 2, 3).reshape(num_ranks, -1, num_slices)
    word = np.empty((num_ranks, keys.shape[1] * shape.num_units), dtype=np.int8)
    _merge(np.ascontiguousarray(keys), between, shape.num_units, word)
    return word


@numba.njit(cache=True, nogil=True)
def _place(
    owners: Ints, per_rank: int, times: Ints, hops: Ints, period: int, turn: int, is_fused: bool, offsets: Ints
) -> None:
    """Fill ``offsets`` [F I W, stage, slice in turn] with the start times of the passes."""
    num_stages, num_slices = len(owners), times.shape[2]
    taken = np.zeros((num_stages // per_rank, 3 * per_rank * num_slices, 2), dtype=np.int64)
    counts = np.zeros(num_stages // per_rank, dtype=np.int64)
    for part in range(num_slices):
        time = 0
        for stage in range(num_stages):
            if part > 0:
                time = max(time, offsets[0, stage, part - 1] + times[0, stage, part - 1])
            time = _reserve(taken, counts, owners[stage], time, times[0, stage, part], period)
            offsets[0, stage, part] = time
            time += times[0, stage, part] + hops[0, stage]
    turned = offsets[0, num_stages - 1, num_slices - 1] + times[0, num_stages - 1, num_slices - 1] + turn
    for part in range(num_slices):
        time = turned
        for stage in range(num_stages - 1, -1, -1):
            if part > 0:
                time = max(time, offsets[1, stage, part - 1] + times[1, stage, part - 1])
            length = times[1, stage, part] + (times[2, stage, part] if is_fused else 0)
            time = _reserve(taken, counts, owners[stage], time, length, period)
            offsets[1, stage, part] = time
            time += times[1, stage, part]
            offsets[2, stage, part] = time
            time += hops[1, stage]
    if not is_fused:
        for part in range(num_slices):
            for stage in range(num_stages - 1, -1, -1):
                time, length = offsets[2, stage, part], times[2, stage, part]
                offsets[2, stage, part] = _reserve(taken, counts, owners[stage], time, length, period)


@compiled
def _reserve(taken: Ints, counts: Ints, rank: int, time: int, length: int, period: int) -> int:
    """Reserve the earliest time from ``time`` on that is free on ``rank`` modulo the period, and return it; ``time`` if
    none is.
    """
    count = counts[rank]
    best = time + 2 * period
    for number in range(-1, count):
        start = time
        if number >= 0:
            start += (taken[rank, number, 0] + taken[rank, number, 1] - time) % period
        if start < best and _is_free(taken, count, rank, start % period, length, period):
            best = start
    if best == time + 2 * period:
        best = time
    taken[rank, count, 0], taken[rank, count, 1] = best % period, length
    counts[rank] += 1
    return best


@compiled
def _is_free(taken: Ints, count: int, rank: int, start: int, length: int, period: int) -> bool:
    for number in range(count):
        first, taken_length = taken[rank, number, 0], taken[rank, number, 1]
        if (
            taken_length > 0
            and length > 0
            and ((first - start) % period < length or (start - first) % period < taken_length)
        ):
            return False
    return True


@numba.njit(cache=True, nogil=True)
def _merge(keys: Ints, between: int, num_units: int, word: npt.NDArray[np.int8]) -> None:
    """Sort every rank's actions by time: queue q's unit u comes at ``keys[rank, q, u mod S]`` of its micro-batch.

    Units of a queue stay in order, even if W of a later slice was placed before that of an earlier one.
    """
    num_ranks, num_queues, num_slices = keys.shape
    due = np.empty(num_queues, dtype=np.int64)
    units = np.empty(num_queues, dtype=np.int64)
    for rank in range(num_ranks):
        due[:], units[:] = keys[rank, :, 0], 0
        for step in range(word.shape[1]):
            queue = 0
            for other in range(1, num_queues):
                if due[other] < due[queue]:
                    queue = other
            word[rank, step] = queue
            units[queue] += 1
            unit = units[queue]
            due[queue] = max(due[queue], keys[rank, queue, unit % num_slices] + unit // num_slices * between)
            if unit == num_units:
                due[queue] = 1 << 62
