"""Several stages per rank in a loop and a split backward, over slices: orders from costs, under caps.

Building blocks repeat per micro-batch instead of per group, so they need no whole groups and hold less. With K
ranks, V stages per rank and F = I = W, a block without waits holds K (V + 1) / 3 stages on rank 0: (1 + 1 / V) / 3 of
1F1B's memory. It holds more while W is delayed.
With enough memory the orders of `grouped` are often faster; they are among the seeds.
"""

from __future__ import annotations

from penstock.planner.order import Order
from penstock.planner.schedules.generator import looped
from penstock.planner.schedules.grouped import grouped_words
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.variants import Variants

INTERLEAVED = Variants(name="interleaved-zb", place=looped, more_seeds=grouped_words)


def interleaved_zb(inputs: ScheduleInputs) -> Order:
    """The order of ``inputs.variant``; by default the fastest order within the caps.

    Raises `UserError` if a cap cannot hold one micro-batch.
    """
    return INTERLEAVED.best_order(inputs) if inputs.variant is None else INTERLEAVED.order(inputs)
