"""The split-backward schedule made by simulation: greedy list scheduling under a stash limit, judged against ZB-H1.

Several greedy orders are made, differing in how far forwards run ahead, how far weight gradients lag and how short a
wait is filled; with H1's own order they are compared by the simulator and the best is taken, so it is never behind H1
where H1 fits. Each is a variant by number, so that a search compares them once.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.errors import UserError
from penstock.planner.clock import new_clock
from penstock.planner.order import FORWARD, INPUT_GRADIENT, KINDS, WEIGHT_GRADIENT, Order, join_ranks
from penstock.planner.schedules import greedy
from penstock.planner.schedules.inputs import ScheduleInputs, StageTable
from penstock.planner.schedules.one_f_one_b import zb_h1
from penstock.planner.simulate.arrays import simulate_arrays
from penstock.planner.simulate.costs import compute_table, uncontended

Ints = npt.NDArray[np.int64]

UNLIMITED = 1 << 40


@dataclass(frozen=True, slots=True)
class Variant:
    """Of rank r of K with S slices: at most S + ``ahead`` (K - 1 - r) + ``extra`` slices between F and I and ``lag`` r
    between I and W; a wait is filled with W from ``patience`` percent of its time on.
    """

    ahead: int
    extra: int
    lag: int
    patience: int


H1 = 0
"""The number of H1's own order; the greedy variants follow from 1."""

VARIANTS = (
    Variant(ahead=UNLIMITED, extra=0, lag=UNLIMITED, patience=0),
    Variant(ahead=2, extra=0, lag=2, patience=50),
    Variant(ahead=UNLIMITED, extra=0, lag=2, patience=75),
    Variant(ahead=1, extra=0, lag=2, patience=75),
    Variant(ahead=1, extra=1, lag=1, patience=50),
)
"""Chosen among 48 by what each added to the best of the others on random pipelines and on published shapes."""


def zb(inputs: ScheduleInputs) -> Order:
    """The order of ``inputs.variant``, or without one the order of the variant with the shortest simulated step.

    Raises `UserError` if a cap cannot hold one micro-batch.
    """
    return zb_order(with_best_variant(inputs))


def with_best_variant(inputs: ScheduleInputs) -> ScheduleInputs:
    """The same inputs with the best variant named (of equals the first)."""
    if inputs.variant is not None:
        return inputs
    numbered = [dataclasses.replace(inputs, variant=variant) for variant in range(1 + len(VARIANTS))]
    if not h1_fits(inputs):
        numbered = numbered[1:]
    return min(numbered, key=lambda each: makespan_ns(each, zb_order(each)))


def zb_order(inputs: ScheduleInputs) -> Order:
    """The order of the variant that ``inputs`` names."""
    if inputs.variant == H1:
        return zb_h1(inputs)
    if inputs.variant is None or not 0 < inputs.variant <= len(VARIANTS):
        raise UserError(what=f"{inputs.variant} is not a variant of zb", where="schedule zb")
    return _greedy_order(inputs, VARIANTS[inputs.variant - 1])


def makespan_ns(inputs: ScheduleInputs, order: Order) -> int:
    """The simulated step of ``order`` at the inputs' costs, every rank on its own host."""
    f, i, w, to_next, to_previous = (cost_table(inputs, name) for name in _TIMES)
    costs = uncontended(compute_table(f, i, w), np.stack([to_next, to_previous]))
    return simulate_arrays(order, costs, receive_ahead=inputs.receive_ahead).makespan_ns


_TIMES = {"forward_ns": 1, "input_ns": 1, "weight_ns": 1, "send_forward_ns": 0, "send_backward_ns": 0}
_STASHES = {"forward_stash": 1, "input_stash": 0, "weight_stash": -1}


def cost_table(inputs: ScheduleInputs, name: str) -> Ints:
    """[stage, slice] of the table called ``name``; filled with its default if empty."""
    table: StageTable = getattr(inputs, name)
    shape = (inputs.num_ranks, inputs.num_slices)
    return np.array(table, dtype=np.int64) if table else np.full(shape, (_TIMES | _STASHES)[name], dtype=np.int64)


def h1_fits(inputs: ScheduleInputs) -> bool:
    """Whether H1's order keeps within the caps."""
    return not inputs.caps or bool((peak_stash(inputs, zb_h1(inputs)) <= np.array(inputs.caps)).all())


def peak_stash(inputs: ScheduleInputs, order: Order) -> Ints:
    """Per rank, the most stash held at once by an order of F, I and W."""
    changes = np.zeros((len(KINDS), inputs.num_ranks, inputs.num_slices), dtype=np.int64)
    for kind, name in zip((FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT), _STASHES, strict=True):
        changes[kind] = cost_table(inputs, name)
    steps = changes[order.kinds, order.stages, order.slices]
    bounds = order.offsets
    peaks = [np.cumsum(steps[bounds[r] : bounds[r + 1]]).max(initial=0) for r in range(order.num_ranks)]
    return np.array(peaks, dtype=np.int64)


def _greedy_order(inputs: ScheduleInputs, variant: Variant) -> Order:
    num_ranks, num_units, ahead = inputs.num_ranks, inputs.num_units, inputs.receive_ahead
    arrivals = np.full((2, num_ranks, num_units), greedy.NEVER, dtype=np.int64)
    arrivals[greedy.F, 0] = arrivals[greedy.I, -1] = 0
    choices = np.zeros((num_ranks, 3 * num_units), dtype=np.int8)
    greedy.run(
        np.stack([cost_table(inputs, name) for name in (*_TIMES, *_STASHES)], axis=2),
        _rank_table(inputs, variant),
        new_clock(num_ranks, np.ones(num_ranks, dtype=bool)),
        arrivals,
        np.zeros((3, 2, num_ranks, ahead), dtype=np.int64),
        choices,
        variant.patience,
    )
    return _to_order(inputs, choices)


def _rank_table(inputs: ScheduleInputs, variant: Variant) -> Ints:
    caps, reserves = _limits(inputs)
    below = np.arange(inputs.num_ranks)
    above = inputs.num_ranks - 1 - below
    table = np.zeros((inputs.num_ranks, greedy.FINISH + 1), dtype=np.int64)
    table[:, greedy.CAP] = caps
    table[:, greedy.F_CAP] = caps - reserves
    table[:, greedy.DEPTH] = inputs.num_slices + variant.ahead * above + variant.extra
    table[:, greedy.LAG] = variant.lag * below
    table[:, greedy.LAST] = greedy.I
    return table


def _limits(inputs: ScheduleInputs) -> tuple[Ints, Ints]:
    """Per rank the cap, and the room that F must leave: the most that I and W of one micro-batch add to what they find.

    With it every micro-batch that was begun can end, oldest first, so no rank is ever stuck for room.
    """
    _check_balance(inputs)
    steps = np.stack([cost_table(inputs, "input_stash"), cost_table(inputs, "weight_stash")], axis=2)
    steps = steps[:, ::-1].reshape(inputs.num_ranks, -1)
    sums = np.concatenate([np.zeros((inputs.num_ranks, 1), dtype=np.int64), np.cumsum(steps, axis=1)], axis=1)
    reserves = (np.maximum.accumulate(sums[:, ::-1], axis=1)[:, ::-1] - sums).max(axis=1)
    needed = cost_table(inputs, "forward_stash").sum(axis=1) + reserves
    caps = np.array(inputs.caps) if inputs.caps else np.maximum(peak_stash(inputs, zb_h1(inputs)), needed)
    for rank in np.flatnonzero(caps < needed).tolist():
        raise UserError(
            what=f"a stash of {caps[rank]} cannot hold one micro-batch, which needs {needed[rank]}",
            where=f"schedule zb, rank {rank}",
            remedy="give more memory per rank, smaller micro-batches or fewer layers per stage",
        )
    return caps, reserves


def _check_balance(inputs: ScheduleInputs) -> None:
    forward, gradient, weight = (cost_table(inputs, name) for name in _STASHES)
    if (forward < 0).any() or (forward + gradient < 0).any() or (forward + gradient + weight != 0).any():
        raise UserError(
            what="gives back more or less than was taken",
            where="stash tables",
            remedy="F, I and W of a slice must sum to 0, and F alone, and F with I, be 0 or more",
        )


def _to_order(inputs: ScheduleInputs, choices: npt.NDArray[np.int8]) -> Order:
    codes = np.array([FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT], dtype=np.int32)
    rows = []
    for rank, row in enumerate(choices):
        units = np.empty(len(row), dtype=np.int32)
        for kind in (greedy.F, greedy.I, greedy.W):
            units[row == kind] = np.arange(inputs.num_units)
        microbatches, parts = np.divmod(units, np.int32(inputs.num_slices))
        parts = np.where(row == greedy.F, parts, inputs.num_slices - 1 - parts).astype(np.int32)
        rows.append(np.stack([codes[row], np.full_like(units, rank), microbatches, parts], axis=1))
    return join_ranks(
        rows,
        num_stages=inputs.num_ranks,
        num_microbatches=inputs.num_microbatches,
        num_slices=inputs.num_slices,
    )
