"""Braided 1F1B: every steady backward and the forward after it are a pair, which hide each other's collectives.

A pair ends as a whole: both its messages leave when both its actions are done. So a rank's round is a pair, and a slice
needs one round per hop, in both directions. On the last rank the backward of a slice is in the round after its forward.
In round j rank r of K therefore has the backward of unit j and the forward of unit j + S + 2 (K - 1 - r): one more than
under `eager-1f1b`, where half a round per hop is enough. A rank holds at most S + 2 (K - 1 - r) + 1 slices.

With one forward fewer in its warm-up, a pair would wait for a message that leaves after it on another rank, and each
round of a rank would take as long as two.

    K = 2, S = 1, a pair in parentheses
    rank 0   F0   F1   F2   (B0 F3)   (B1 F4) ...
    rank 1   .    F0   (B0 F1)   (B1 F2) ...

On ranks of one shard nothing is hidden, and the two actions run one after the other: then this is `eager-1f1b` with one
more unit. The idea is that of arXiv 2510.27257, which braids forwards and backwards by units of a layer; so do the
passes here (`penstock.trainer.units.collectives.run_pair`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from penstock.planner.order import BACKWARD, FORWARD, Order
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.keyed import Units, keyed_order

BRAIDED = "braided-1f1b"


def braided_1f1b(inputs: ScheduleInputs) -> Order:
    """1F1B with pairs: the backward and the forward of a round, the backward first."""
    order = keyed_order(inputs, [(FORWARD, partial(_forward, inputs)), (BACKWARD, _backward)])
    joined = np.append((order.kinds[:-1] == BACKWARD) & (order.kinds[1:] == FORWARD), [False])
    joined[order.offsets[1:] - 1] = False
    return replace(order, joined=joined) if joined.any() else order


def ahead(inputs: ScheduleInputs, rank: int) -> int:
    """Forwards of ``rank`` before its first round."""
    return inputs.num_slices + 2 * (inputs.num_ranks - 1 - rank)


def _forward(inputs: ScheduleInputs, units: Units, rank: int) -> Units:
    rounds = units - ahead(inputs, rank)
    return np.where(rounds < 0, -1, 2 * rounds + 1)


def _backward(units: Units, rank: int) -> Units:
    return 2 * units
