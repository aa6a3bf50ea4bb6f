"""Fixed orders by formula: every action has a key, and a rank runs its actions by rising key.

Unit u of a rank's forwards is slice u mod S of micro-batch u div S. Unit u of its backwards is slice S - 1 - (u mod S):
a slice's gradient needs those of all later slices of its micro-batch, which add to the gradients of its keys and
values. Among equal keys, forwards come before backwards before weight gradients, each by rising unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.planner.order import FORWARD, Integers, Order, join_ranks
from penstock.planner.schedules.inputs import ScheduleInputs

Units = npt.NDArray[np.int64]
Key = Callable[[Units, int], Units]
"""(units, rank) to keys."""


def keyed_order(inputs: ScheduleInputs, keys: Sequence[tuple[int, Key]]) -> Order:
    """The order in which rank r runs, for every (kind, key), all units of that kind by rising ``key(units, r)``."""
    units = np.arange(inputs.num_units, dtype=np.int64)
    blocks = np.concatenate([_block(inputs, kind, units) for kind, _ in keys])
    rows = []
    for rank in range(inputs.num_ranks):
        row = blocks[np.argsort(np.concatenate([key(units, rank) for _, key in keys]), kind="stable")]
        row[:, 1] = rank
        rows.append(row)
    return join_ranks(
        rows,
        num_stages=inputs.num_ranks,
        num_microbatches=inputs.num_microbatches,
        num_slices=inputs.num_slices,
    )


def _block(inputs: ScheduleInputs, kind: int, units: Units) -> Integers:
    microbatches, parts = np.divmod(units, inputs.num_slices)
    if kind != FORWARD:
        parts = inputs.num_slices - 1 - parts
    columns = (np.full_like(units, kind), np.zeros_like(units), microbatches, parts)
    return np.stack(columns, axis=1).astype(np.int32)
