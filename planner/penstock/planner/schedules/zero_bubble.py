"""The split-backward schedule made by simulation: greedy list scheduling under a stash limit, judged against ZB-H1.

Several greedy orders are made, differing in how far forwards run ahead, how far weight gradients lag and how short a
wait is filled; with H1's own order they are compared by the simulator and the best is taken, so it is never behind H1
where H1 fits. Each is a variant by number, so that a search compares them once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.core.errors import UserError
from penstock.planner.order import Order
from penstock.planner.schedules.greedy_order import (
    UNLIMITED,
    Ints,
    Limits,
    Variants,
    greedy_order,
    least_caps,
    peak_stash,
)
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.one_f_one_b import zb_h1


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
"""The number of H1's own order, which minds no cap; the greedy variants follow from 1."""

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
    return zb_order(ZB.best(inputs))


def zb_order(inputs: ScheduleInputs) -> Order:
    """The order of the variant that ``inputs`` names."""
    if inputs.variant == H1:
        return zb_h1(inputs)
    if inputs.variant is None or not 0 < inputs.variant <= len(VARIANTS):
        raise UserError(what=f"{inputs.variant} is not a variant of zb", where="schedule zb")
    owned = np.arange(inputs.num_ranks)[:, None]
    return greedy_order(inputs, "zb", owned, _limits(inputs, VARIANTS[inputs.variant - 1], owned))


ZB = Variants(order=zb_order, count=1 + len(VARIANTS))


def _limits(inputs: ScheduleInputs, variant: Variant, owned: Ints) -> Limits:
    """Without caps, what H1's order needs."""
    rank = np.arange(inputs.num_ranks)
    caps = np.array(inputs.caps, dtype=np.int64)
    if not inputs.caps:
        caps = np.maximum(peak_stash(inputs, zb_h1(inputs)), least_caps(inputs, owned))
    return Limits(
        depth=inputs.num_slices + variant.ahead * rank[::-1] + variant.extra,
        lag=variant.lag * rank,
        caps=caps,
        patience=variant.patience,
    )
