"""A lower bound of the step for all orders of a pipeline: warm-up, busiest rank, cool-down.

For every rank, three chains that any legal order contains:

1. the first slice comes down to it, then it does all its work;
2. the first slice comes down, it does all its F and I, then slice 0's gradient goes back up to stage 0, and its W;
3. one micro-batch's slices all come down to the last stage, its last slice's gradient comes back, then the rank does
   all its I and W.

(Slice 0 is always the first forward and the last gradient of a micro-batch. If micro-batches differ, the shortest
chains count.) Contention, cards, posted receives and transport instructions only add to these. Without a barrier at the
end of steps, only a rank's own work is certain to be part of its span.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.program import Reduction
from penstock.planner.order import BACKWARD, FORWARD, INPUT_GRADIENT, RECOMPUTE, WEIGHT_GRADIENT
from penstock.planner.simulate.costs import MILLION, TO_NEXT, TO_PREVIOUS, Costs, Nanoseconds
from penstock.planner.simulate.reductions import least_end_ns


def lower_bound_ns(
    costs: Costs,
    num_microbatches: int,
    *,
    stage_ranks: Sequence[int],
    split: bool,
    recompute: bool = False,
    reductions: Sequence[Reduction] = (),
) -> int:
    """Lower bound of a step in nanoseconds.

    ``split``: I and W run instead of B. ``recompute``: R runs before them, or they recompute inside.
    """
    least_ppm = np.minimum(costs.slowdown_ppm, MILLION)
    alone = costs.compute_ns * least_ppm // MILLION
    forward, remade = alone[FORWARD], alone[RECOMPUTE] if recompute else np.zeros_like(alone[RECOMPUTE])
    if costs.inside_ns is not None:
        inside = costs.inside_ns * least_ppm[[INPUT_GRADIENT, BACKWARD]].min(axis=0) // MILLION
        remade = np.minimum(remade, inside)
    gradient = alone[INPUT_GRADIENT if split else BACKWARD]
    weight = alone[WEIGHT_GRADIENT] if split else np.zeros_like(gradient)
    owners = np.asarray(stage_ranks)
    crosses = (owners[1:] != owners[:-1])[:, None]
    down, up = costs.transfer_ns[TO_NEXT, :-1] * crosses, costs.transfer_ns[TO_PREVIOUS, 1:] * crosses
    counts, sizes = costs.counts(num_microbatches), [slice(costs.num_slices)]
    if costs.num_remainder_slices:
        sizes.append(slice(costs.num_slices, None))
    firsts = [columns.start or 0 for columns in sizes]
    fill = np.minimum.reduce([_before(forward[:-1, column] + down[:, column]) for column in firsts])
    drain = np.minimum.reduce([_before(gradient[:-1, column] + up[:, column]) + weight[0, column] for column in firsts])
    turn = np.minimum.reduce(
        [
            _turned(forward[:, columns], gradient[:, columns], down[:, columns], up[:, columns], fill)
            for columns in sizes
        ]
    )
    busy = _sums(owners, (forward + remade + gradient + weight) @ counts, costs.num_ranks)
    exposed = _sums(owners, (forward + remade + gradient) @ counts, costs.num_ranks)
    remaining = _sums(owners, (gradient + weight) @ counts, costs.num_ranks)
    first, returned, drained = (_least(owners, values, costs.num_ranks) for values in (fill, turn, drain))
    finish = np.maximum(first + busy, returned + remaining)
    finish[owners[0]] = max(finish[owners[0]], (first + exposed + drained).max())
    return least_end_ns(finish if costs.has_barrier else busy, stage_ranks, costs, reductions)


def _sums(owners: Nanoseconds, values: Nanoseconds, num_ranks: int) -> Nanoseconds:
    """[ranks]: the sum over each rank's stages."""
    sums = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(sums, owners, values)
    return sums


def _least(owners: Nanoseconds, values: Nanoseconds, num_ranks: int) -> Nanoseconds:
    """[ranks]: the least over each rank's stages, 0 for a rank without stages."""
    least = np.full(num_ranks, values.max())
    np.minimum.at(least, owners, values)
    least[np.bincount(owners, minlength=num_ranks) == 0] = 0
    return least


def _before(steps: Nanoseconds) -> Nanoseconds:
    """[stages]: the sum of the steps between stage 0 and each stage."""
    sums: Nanoseconds = np.concatenate([[0], np.cumsum(steps)])
    return sums


def _turned(
    forward: Nanoseconds, gradient: Nanoseconds, down: Nanoseconds, up: Nanoseconds, fill: Nanoseconds
) -> Nanoseconds:
    """[stages]: the earliest gradient of the last slice at each stage, after all slices of its micro-batch."""
    last_down = _before(forward[1:, -1] + down[:, -1])
    turned = (fill + forward.sum(axis=1) + last_down[-1] - last_down).max()
    last_up = _before(gradient[1:, -1] + up[:, -1])
    arrivals: Nanoseconds = turned + last_up[-1] - last_up
    return arrivals
