"""The flush schedule over slices (TeraPipe, arXiv 2102.07988): all forwards, then all backwards."""

from __future__ import annotations

import numpy as np

from penstock.planner.order import BACKWARD, FORWARD, Order
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.keyed import Units, keyed_order


def gpipe(inputs: ScheduleInputs) -> Order:
    """All forwards by micro-batch and slice, then all backwards, the oldest micro-batch first, its last slice first.

    Micro-batches cost the same and all their forwards precede the first backward, so every order of them waits equally
    long; the oldest first also frees the longest held activations first. With equal stages and free messages a step
    takes M sum(f + b) + (K - 1) (max f + max b) over the slices' forwards f and backwards b (equation 5).
    """
    return keyed_order(inputs, [(FORWARD, _forward_key), (BACKWARD, _backward_key)])


def _forward_key(units: Units, rank: int) -> Units:
    return np.zeros_like(units)


def _backward_key(units: Units, rank: int) -> Units:
    return np.ones_like(units)
