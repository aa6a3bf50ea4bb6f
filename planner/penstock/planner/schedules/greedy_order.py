"""From `ScheduleInputs` to the list scheduler's tables, and from its choices to an order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.core.errors import UserError
from penstock.planner.clock import new_clock
from penstock.planner.order import FORWARD, INPUT_GRADIENT, KINDS, WEIGHT_GRADIENT, Integers, Order, join_ranks
from penstock.planner.schedules import greedy
from penstock.planner.schedules.inputs import ScheduleInputs, StageTable
from penstock.planner.simulate.arrays import simulate_arrays
from penstock.planner.simulate.costs import compute_table, uncontended

Ints = npt.NDArray[np.int64]

UNLIMITED = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Limits:
    """What a greedy order minds: per stage the most units between F and I (``depth``) and between I and W (``lag``),
    per rank the ``caps`` of its stash; a wait is filled with W from ``patience`` percent of its time on.
    """

    depth: Ints
    lag: Ints
    caps: Ints
    patience: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Variants:
    """The orders that one generator chooses from: ``order`` makes the one that its inputs name, of ``count``.

    Number 0 minds no cap, so it always can be made; the others keep within them, or raise `UserError`.
    """

    order: Callable[[ScheduleInputs], Order]
    count: int

    def best(self, inputs: ScheduleInputs) -> ScheduleInputs:
        """The same inputs with the variant of the shortest simulated step named (of equals the first)."""
        if inputs.variant is not None:
            return inputs
        numbered = [replace(inputs, variant=variant) for variant in range(self.count)]
        if inputs.caps and (peak_stash(inputs, self.order(numbered[0])) > np.array(inputs.caps)).any():
            numbered = numbered[1:]
        return min(numbered, key=lambda each: makespan_ns(each, self.order(each)))


def makespan_ns(inputs: ScheduleInputs, order: Order) -> int:
    """The simulated step of ``order`` at the inputs' costs, every rank on its own host."""
    f, i, w, to_next, to_previous = (cost_table(inputs, name) for name in _TIMES)
    costs = uncontended(compute_table(f, i, w), np.stack([to_next, to_previous]), num_ranks=inputs.num_ranks)
    return simulate_arrays(
        order, costs, receive_ahead=inputs.receive_ahead, late_receives=inputs.late_receives
    ).makespan_ns


_TIMES = {"forward_ns": 1, "input_ns": 1, "weight_ns": 1, "send_forward_ns": 0, "send_backward_ns": 0}
_STASHES = {"forward_stash": 1, "input_stash": 0, "weight_stash": -1}


def cost_table(inputs: ScheduleInputs, name: str) -> Ints:
    """[stage, slice] of the table called ``name``; filled with its default if empty."""
    table: StageTable = getattr(inputs, name)
    shape = (inputs.num_stages, inputs.num_slices)
    return np.array(table, dtype=np.int64) if table else np.full(shape, (_TIMES | _STASHES)[name], dtype=np.int64)


def peak_stash(inputs: ScheduleInputs, order: Order) -> Ints:
    """Per rank, the most stash held at once by an order of F, I and W."""
    changes = np.zeros((len(KINDS), inputs.num_stages, inputs.num_slices), dtype=np.int64)
    for kind, name in zip((FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT), _STASHES, strict=True):
        changes[kind] = cost_table(inputs, name)
    steps = changes[order.kinds, order.stages, order.slices]
    bounds = order.offsets
    peaks = [np.cumsum(steps[bounds[r] : bounds[r + 1]]).max(initial=0) for r in range(order.num_ranks)]
    return np.array(peaks, dtype=np.int64)


def greedy_order(inputs: ScheduleInputs, name: str, owned: Ints, limits: Limits) -> Order:
    """The order of stages ``owned`` [rank, place], rising along each row; ``name`` is the schedule's, for errors.

    Raises `UserError` if a cap cannot hold one micro-batch.
    """
    _check_balance(inputs)
    needed = least_caps(inputs, owned)
    for rank in np.flatnonzero(limits.caps < needed).tolist():
        raise UserError(
            what=f"a stash of {limits.caps[rank]} cannot hold one micro-batch, which needs {needed[rank]}",
            where=f"schedule {name}, rank {rank}",
            remedy="give more memory per rank, smaller micro-batches or fewer layers per stage",
        )
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
    return _to_order(inputs, owned, choices)


def least_caps(inputs: ScheduleInputs, owned: Ints) -> Ints:
    """Per rank, the smallest cap that holds one micro-batch at any time."""
    of_forwards: Ints = cost_table(inputs, "forward_stash").sum(axis=1)[owned].sum(axis=1)
    return of_forwards + _reserves(inputs, owned)


def _costs(inputs: ScheduleInputs, owned: Ints) -> Ints:
    """A rank's first stage takes the room for all of its stages, so no micro-batch is begun that cannot end."""
    tables = np.stack([cost_table(inputs, name) for name in (*_TIMES, *_STASHES)], axis=2)
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
    """Per rank the room that F must leave: the most that I and W of one micro-batch add to what they find.

    With it every micro-batch that was begun can end, oldest first, so no rank is ever stuck for room.
    """
    steps = np.stack([cost_table(inputs, "input_stash"), cost_table(inputs, "weight_stash")], axis=2)
    steps = steps[:, ::-1].reshape(inputs.num_stages, -1)
    sums = np.concatenate([np.zeros((inputs.num_stages, 1), dtype=np.int64), np.cumsum(steps, axis=1)], axis=1)
    rises = (np.maximum.accumulate(sums[:, ::-1], axis=1)[:, ::-1] - sums).max(axis=1)
    reserves: Ints = rises[owned].sum(axis=1)
    return reserves


def _check_balance(inputs: ScheduleInputs) -> None:
    forward, gradient, weight = (cost_table(inputs, name) for name in _STASHES)
    if (forward < 0).any() or (forward + gradient < 0).any() or (forward + gradient + weight != 0).any():
        raise UserError(
            what="gives back more or less than was taken",
            where="stash tables",
            remedy="F, I and W of a slice must sum to 0, and F alone, and F with I, be 0 or more",
        )


def _to_order(inputs: ScheduleInputs, owned: Ints, choices: npt.NDArray[np.int8]) -> Order:
    return join_ranks(
        [_row(inputs, owned[rank], choices[rank]) for rank in range(inputs.num_ranks)],
        num_stages=inputs.num_stages,
        num_microbatches=inputs.num_microbatches,
        num_slices=inputs.num_slices,
    )


_CODES = np.array([FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT], dtype=np.int32)


def _row(inputs: ScheduleInputs, mine: Ints, choices: npt.NDArray[np.int8]) -> Integers:
    kinds, places = choices.T
    units = np.empty(len(kinds), dtype=np.int32)
    for kind in (greedy.F, greedy.I, greedy.W):
        for place in range(len(mine)):
            units[(kinds == kind) & (places == place)] = np.arange(inputs.num_units)
    microbatches, parts = np.divmod(units, np.int32(inputs.num_slices))
    parts = np.where(kinds == greedy.F, parts, inputs.num_slices - 1 - parts).astype(np.int32)
    return np.stack([_CODES[kinds], mine[places].astype(np.int32), microbatches, parts], axis=1)
