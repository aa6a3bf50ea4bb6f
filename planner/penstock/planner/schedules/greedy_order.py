"""Conversion from `ScheduleInputs` to the list scheduler's tables, and from its choices to an order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.errors import UserError
from penstock.planner.clock import new_clock
from penstock.planner.order import FORWARD, INPUT_GRADIENT, KINDS, WEIGHT_GRADIENT, Order
from penstock.planner.schedules import greedy
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.pipeline import STASHES, TIMES, Ints, cost_table, pipeline_of
from penstock.planner.simulate.arrays import simulate_arrays
from penstock.planner.simulate.costs import compute_table, uncontended

UNLIMITED = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Limits:
    """Limits of a greedy order: per stage the most units between F and I (``depth``) and between I and W (``lag``), per
    rank the ``caps`` of its stash; waits of at least ``patience`` percent of W's time are filled with W.
    """

    depth: Ints
    lag: Ints
    caps: Ints
    patience: int


def makespan_ns(inputs: ScheduleInputs, order: Order) -> int:
    """The simulated step of ``order`` with the inputs' costs, every rank on its own host."""
    f, i, w, to_next, to_previous = (cost_table(inputs, name) for name in TIMES)
    costs = uncontended(compute_table(f, i, w), np.stack([to_next, to_previous]), num_ranks=inputs.num_ranks)
    return simulate_arrays(
        order, costs, receive_ahead=inputs.receive_ahead, late_receives=inputs.late_receives
    ).makespan_ns


def peak_stash(inputs: ScheduleInputs, order: Order) -> Ints:
    """Per rank, the most stash held at once by an order of F, I and W."""
    changes = np.zeros((len(KINDS), inputs.num_stages, inputs.num_slices), dtype=np.int64)
    for kind, name in zip((FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT), STASHES, strict=True):
        changes[kind] = cost_table(inputs, name)
    steps = changes[order.kinds, order.stages, order.slices]
    bounds = order.offsets
    peaks = [np.cumsum(steps[bounds[r] : bounds[r + 1]]).max(initial=0) for r in range(order.num_ranks)]
    return np.array(peaks, dtype=np.int64)


def greedy_order(inputs: ScheduleInputs, name: str, owned: Ints, limits: Limits) -> Order:
    """The order of stages ``owned`` [rank, place], rising along each row; ``name`` is the schedule's, for errors.

    Raises `UserError` if a cap cannot hold one micro-batch.
    """
    needed = least_caps(inputs, owned)
    for rank in np.flatnonzero(limits.caps < needed).tolist():
        raise UserError(
            what=f"a stash of {limits.caps[rank]} cannot hold one micro-batch, which needs {needed[rank]}",
            where=f"schedule {name}, rank {rank}",
            remedy="give more memory per rank, smaller micro-batches or fewer layers per stage",
        )
    pipeline = pipeline_of(inputs, owned)
    return pipeline.order(greedy_word(inputs, owned, limits))


def greedy_word(inputs: ScheduleInputs, owned: Ints, limits: Limits) -> npt.NDArray[np.int8]:
    """The greedy order as a word (`penstock.planner.schedules.pipeline`); the caps must suffice (`least_caps`)."""
    num_units, num_stages = inputs.num_units, inputs.num_stages
    arrivals = np.full((2, num_stages, num_units), greedy.NEVER, dtype=np.int64)
    arrivals[greedy.F, 0] = arrivals[greedy.I, -1] = 0
    choices = np.zeros((inputs.num_ranks, 3 * num_units * owned.shape[1], 2), dtype=np.int8)
    greedy.run(
        _costs(inputs, owned),
        _stage_table(inputs, owned, limits),
        _rank_table(limits.caps, _reserves(inputs, owned)),
        owned,
        new_clock(inputs.num_ranks, np.ones(inputs.num_ranks, dtype=bool)),
        arrivals,
        np.zeros((3, 2, num_stages, inputs.receive_ahead), dtype=np.int64),
        choices,
        limits.patience,
    )
    word: npt.NDArray[np.int8] = choices[:, :, 0] * np.int8(owned.shape[1]) + choices[:, :, 1]
    return word


def least_caps(inputs: ScheduleInputs, owned: Ints) -> Ints:
    """Per rank, the smallest cap that holds one micro-batch at any time."""
    forward_stash: Ints = cost_table(inputs, "forward_stash").sum(axis=1)[owned].sum(axis=1)
    return forward_stash + _reserves(inputs, owned)


def _costs(inputs: ScheduleInputs, owned: Ints) -> Ints:
    """The tables of costs. A rank's first stage reserves the stash of all its stages, so every started micro-batch can
    end.
    """
    tables = np.stack([cost_table(inputs, name) for name in (*TIMES, *STASHES)], axis=2)
    tables[owned[:, 0], :, greedy.F_STASH] = tables[owned, :, greedy.F_STASH].sum(axis=1)
    tables[owned[:, 1:], :, greedy.F_STASH] = 0
    return tables


def _stage_table(inputs: ScheduleInputs, owned: Ints, limits: Limits) -> Ints:
    table = np.zeros((inputs.num_stages, greedy.FREE_I + 1), dtype=np.int64)
    table[owned, greedy.RANK] = np.arange(inputs.num_ranks)[:, None]
    table[:, greedy.DEPTH], table[:, greedy.LAG] = limits.depth, limits.lag
    return table


def _rank_table(caps: Ints, reserves: Ints) -> Ints:
    table = np.zeros((len(caps), greedy.WAITS + 1), dtype=np.int64)
    table[:, greedy.CAP], table[:, greedy.F_CAP], table[:, greedy.LAST] = caps, caps - reserves, greedy.I
    return table


def _reserves(inputs: ScheduleInputs, owned: Ints) -> Ints:
    """Per rank, the stash that F must leave free: the most that I and W of one micro-batch add.

    With this every started micro-batch can end, oldest first, so no rank deadlocks for lack of stash.
    """
    steps = np.stack([cost_table(inputs, "input_stash"), cost_table(inputs, "weight_stash")], axis=2)
    steps = steps[:, ::-1].reshape(inputs.num_stages, -1)
    sums = np.concatenate([np.zeros((inputs.num_stages, 1), dtype=np.int64), np.cumsum(steps, axis=1)], axis=1)
    rises = (np.maximum.accumulate(sums[:, ::-1], axis=1)[:, ::-1] - sums).max(axis=1)
    reserves: Ints = rises[owned].sum(axis=1)
    return reserves
