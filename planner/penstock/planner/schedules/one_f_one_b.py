"""One forward, one backward over slices (Seq1F1B, arXiv 2406.03488), and its split form ZB-H1 (arXiv 2401.10241).

Both divide a rank's actions into rounds: round j has the forward of unit w + j, the backward of unit j and, if backward
is split, one weight gradient; w = K - 1 - rank + S - 1 forwards are the rank's warm-up. With one slice these are the
original 1F1B and ZB-H1.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from penstock.planner.order import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Order
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.keyed import Units, keyed_order


def one_f_one_b(inputs: ScheduleInputs) -> Order:
    """Slice-level 1F1B with full backwards.

    With equal slices, equal stages and free messages a rank idles (K - 1)(F + B + W) / S per step, F, B and W being a
    micro-batch's, and holds at most K + S - 1 - rank slices.
    """
    return keyed_order(inputs, [(FORWARD, partial(_forward, inputs)), (BACKWARD, _backward)])


def eager_1f1b(inputs: ScheduleInputs) -> Order:
    """Slice-level 1F1B whose forwards run twice as far ahead (Eager1F1B of JaxPP): transfers of up to half a round
    are hidden, for at most 2 K + S - 2 - 2 rank slices held.
    """
    forward = partial(_eager_forward, inputs)
    return keyed_order(inputs, [(FORWARD, forward), (BACKWARD, _backward)])


def zb_h1(inputs: ScheduleInputs) -> Order:
    """Slice-level ZB-H1: split backward, the weight gradients of rank r run r rounds late.

    Every rank then holds at most K + S - 1 slices (from F to W), as rank 0 does under 1F1B. With equal slices and
    stages, free messages, M >= 2 and M S >= 2 K a rank idles (K - 1)(F + B - W) / S per step if W <= F, B, and
    (K - 1) B / S if F < W <= B. One micro-batch alone has no weight gradient to fill its first wait: there it is
    (K - 1)(F + B) / S.
    """
    return keyed_order(
        inputs,
        [(FORWARD, partial(_forward, inputs)), (INPUT_GRADIENT, _backward), (WEIGHT_GRADIENT, _late)],
    )


def warm_up(inputs: ScheduleInputs, rank: int) -> int:
    """Forwards of ``rank`` before its first round."""
    return inputs.num_ranks - 1 - rank + inputs.num_slices - 1


def _forward(inputs: ScheduleInputs, units: Units, rank: int) -> Units:
    return 3 * np.maximum(units - warm_up(inputs, rank), 0)


def _eager_forward(inputs: ScheduleInputs, units: Units, rank: int) -> Units:
    ahead = warm_up(inputs, rank) + inputs.num_ranks - 1 - rank
    return 3 * np.maximum(units - ahead, 0)


def _backward(units: Units, rank: int) -> Units:
    return 3 * units + 1


def _late(units: Units, rank: int) -> Units:
    return 3 * (units + rank) + 2
