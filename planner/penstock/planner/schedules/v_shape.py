"""Two stages per rank along a V (the placement of ZB-V, arXiv 2401.10241, section 6), over slices.

Stage s < K is on rank s, and the others come back: stage 2 K - 1 - s is there too, so rank 0 has both ends of the
model. A stage is half as long, so the pipeline fills in half the time, and a micro-batch turns into its backward on
rank 0 without a message. The order is made by list scheduling from costs, as zb's is.
"""

from __future__ import annotations

import numpy as np

from penstock.core.errors import UserError
from penstock.planner.order import Order
from penstock.planner.schedules.generator import along_a_v
from penstock.planner.schedules.greedy_order import (
    UNLIMITED,
    Ints,
    Limits,
    Variants,
    cost_table,
    greedy_order,
    least_caps,
)
from penstock.planner.schedules.inputs import ScheduleInputs

PATIENCE = (0, 0, 50)
"""By variant, the percentage of W's time from which a wait is filled with it. Variant 0 minds no cap."""


def zbv(inputs: ScheduleInputs) -> Order:
    """The order of ``inputs.variant``, or without one the order of the variant with the shortest simulated step.

    Raises `UserError` if a cap cannot hold one micro-batch.
    """
    return zbv_order(ZBV.best(inputs))


def zbv_order(inputs: ScheduleInputs) -> Order:
    """The order of the variant that ``inputs`` names."""
    if inputs.variant is None or not 0 <= inputs.variant < len(PATIENCE):
        raise UserError(what=f"{inputs.variant} is not a variant of zbv", where="schedule zbv")
    owned = np.argsort(along_a_v(inputs.num_ranks), kind="stable").reshape(inputs.num_ranks, -1)
    lag = np.full(inputs.num_stages, UNLIMITED)
    depth = lag.copy()
    depth[-1] = inputs.num_slices
    caps = np.array(inputs.caps, dtype=np.int64)
    if not inputs.caps or inputs.variant == 0:
        caps = _usual_caps(inputs, owned)
    limits = Limits(depth=depth, lag=lag, caps=caps, patience=PATIENCE[inputs.variant])
    return greedy_order(inputs, "zbv", owned, limits)


ZBV = Variants(order=zbv_order, count=len(PATIENCE))


def _usual_caps(inputs: ScheduleInputs, owned: Ints) -> Ints:
    """What 1F1B holds on rank 0: a micro-batch, and a slice more for every later rank."""
    largest = cost_table(inputs, "forward_stash")[owned].sum(axis=1).max(axis=1)
    caps: Ints = least_caps(inputs, owned) + (inputs.num_ranks - 1) * largest
    return caps
