"""Interleaved orders by formula: several stages per rank in a loop, micro-batches in groups (arXiv 2104.04473).

Stage s is on rank s mod K. The forwards of every rank go by groups of micro-batches: the first of its V stages for the
whole group, then the second for the whole group, and so on; the backwards likewise from the last stage to the first. A
group needs K slices to fill the loop, so with S slices ceil(K / S) micro-batches suffice. Micro-batches are divided as
evenly as possible into as many groups as possible, which works for any number of them. A rank's warm-up has

    w = (V - 1) G + a (K - 1 - rank) + S - 1

forwards, where G is the number of slices of the largest group. Then a forward and a backward follow in turn.
Megatron has a = 2, which hides transfers; a = 1 suffices if backwards are split, and W fills the remaining waits.

No such order deadlocks: give forward n of rank r the potential n + a r / 2 and backward k the potential k + w + a r /
2, which is k - a r / 2 and a constant. Every action needs only actions of smaller potential, as long as each group has
K slices or there is only one group.

Example: 2 ranks, 2 stages each, 4 micro-batches of one slice make 2 groups. All ranks run forwards 0 1 of their first
stage, 0 1 of their second, 2 3 of the first, 2 3 of the second; the warm-up of rank 1 has w = 2 of them; then come
forward 2 and backward 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.planner.order import BACKWARD, FORWARD, Order, join_ranks
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.pipeline import Ints, Pipeline

HIDING, TIGHT = 2, 1
"""Slopes of the warm-up: a in the formula."""


def interleaved_1f1b(inputs: ScheduleInputs) -> Order:
    """Megatron's interleaved 1F1B over slices, for any number of micro-batches and stages per rank."""
    per_rank, num_ranks, num_slices = inputs.stages_per_rank, inputs.num_ranks, inputs.num_slices
    microbatches, numbers, parts, warm_up = _sequence(num_ranks, per_rank, inputs.num_microbatches, num_slices, HIDING)
    steps = np.arange(len(parts))
    forward = np.stack([np.full_like(parts, FORWARD), numbers, microbatches, parts], axis=1)
    last_first = per_rank - 1 - numbers
    backward = np.stack([np.full_like(parts, BACKWARD), last_first, microbatches, num_slices - 1 - parts], axis=1)
    both = np.concatenate([forward, backward]).astype(np.int32)
    rows = []
    for rank in range(num_ranks):
        keys = np.concatenate([2 * np.maximum(steps - warm_up[rank], 0), 2 * steps + 1])
        row = both[np.argsort(keys, kind="stable")]
        row[:, 1] = row[:, 1] * num_ranks + rank
        rows.append(row)
    return join_ranks(
        rows,
        num_stages=inputs.num_stages,
        num_microbatches=inputs.num_microbatches,
        num_slices=num_slices,
    )


def grouped_words(pipeline: Pipeline) -> list[npt.NDArray[np.int8]]:
    """The orders with split backwards, as words: for both slopes, W directly after I or as late as under ZB-H1."""
    per_rank = pipeline.stages_per_rank
    words = []
    for slope, latest in ((TIGHT, 0), (TIGHT, 1), (HIDING, 0), (HIDING, 1)):
        _, numbers, parts, warm_up = _sequence(
            pipeline.num_ranks, per_rank, pipeline.num_microbatches, pipeline.num_slices, slope
        )
        steps, last_first = np.arange(len(parts)), per_rank - 1 - numbers
        queues = np.concatenate([numbers, per_rank + last_first, 2 * per_rank + last_first]).astype(np.int8)
        rows = []
        for rank in range(pipeline.num_ranks):
            forward = 3 * np.maximum(steps - warm_up[rank], 0)
            keys = np.concatenate([forward, 3 * steps + 1, 3 * (steps + latest * rank) + 2])
            rows.append(queues[np.argsort(keys, kind="stable")])
        words.append(np.stack(rows))
    return words


def _sequence(
    num_ranks: int, per_rank: int, num_microbatches: int, num_slices: int, slope: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """Micro-batch, index of the stage on the rank, and slice of a rank's forwards in order; and the
    warm-up [ranks].
    """
    least = -(-num_ranks // num_slices)
    groups = np.array_split(np.arange(num_microbatches), max(1, num_microbatches // least))
    shapes = [(per_rank, len(group), num_slices) for group in groups]
    microbatches = [np.broadcast_to(group[:, None], shape) for group, shape in zip(groups, shapes, strict=True)]
    numbers, parts = ([np.indices(shape)[axis] for shape in shapes] for axis in (0, 2))
    largest = max(map(len, groups)) * num_slices
    warm_up = (per_rank - 1) * largest + slope * np.arange(num_ranks)[::-1] + num_slices - 1
    joined = [np.concatenate([indices.ravel() for indices in column]) for column in (microbatches, numbers, parts)]
    return joined[0], joined[1], joined[2], warm_up
