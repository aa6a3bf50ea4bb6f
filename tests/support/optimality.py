"""Small pipelines on which orders are compared with the best there is, by number: ranks, costs and caps as measured."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from penstock.planner.schedules.inputs import ScheduleInputs, StageTable
from penstock.planner.schedules.v_shape import ZBV
from penstock.planner.schedules.variants import Variants
from penstock.planner.schedules.zero_bubble import ZB

NUM_INSTANCES = 200
PARTS_OF_1F1B = (1.0, 0.7, 0.5)
"""Caps, in parts of what 1F1B holds on rank 0."""

UNITS = 6
"""Of stash that a slice takes on one stage; W keeps one to three of them."""


def instance(number: int) -> ScheduleInputs:
    """3 or 4 ranks, 4 to 6 micro-batches, 1 to 3 slices, one stage per rank or, in a third of them, two along a V."""
    draw = np.random.default_rng(1000 + number)
    num_ranks, num_microbatches, num_slices = (int(draw.integers(*bounds)) for bounds in ((3, 5), (4, 7), (1, 4)))
    per_rank = 2 if draw.random() < 1 / 3 else 1
    shape = (num_ranks * per_rank, num_slices)
    growth = 1 + draw.uniform(0, 0.25) * np.arange(num_slices)
    forward = draw.uniform(80_000, 120_000) / per_rank * growth * draw.normal(1, 0.04, (shape[0], 1))
    forward = forward * draw.normal(1, 0.01, shape)
    gradient = forward * draw.uniform(1.0, 1.5) * draw.normal(1, 0.02, shape)
    weight = forward * draw.uniform(0.6, 1.0) * draw.normal(1, 0.02, shape)
    head = draw.uniform(1, 1.3)
    for table in (forward, gradient, weight):
        table[-1] *= head
    transfer = np.full(shape, draw.choice([0, 1_600, 8_000]))
    kept = np.full(shape, draw.integers(1, 4))
    inputs = ScheduleInputs(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_slices=num_slices,
        stages_per_rank=per_rank,
        forward_ns=_rows(forward),
        input_ns=_rows(gradient),
        weight_ns=_rows(weight),
        send_forward_ns=_rows(transfer),
        send_backward_ns=_rows(transfer),
        forward_stash=_rows(np.full(shape, UNITS)),
        input_stash=_rows(kept - UNITS),
        weight_stash=_rows(-kept),
        receive_ahead=4,
    )
    of_1f1b = UNITS * per_rank * (num_ranks + num_slices - 1)
    cap = max(int(PARTS_OF_1F1B[number % 3] * of_1f1b), UNITS * per_rank * num_slices)
    return dataclasses.replace(inputs, caps=(cap,) * num_ranks)


def family_of(inputs: ScheduleInputs) -> Variants:
    """The schedule of an instance."""
    return ZB if inputs.stages_per_rank == 1 else ZBV


def _rows(table: npt.NDArray[np.generic]) -> StageTable:
    return tuple(tuple(int(value) for value in row) for row in table)
