"""One stage per rank and a split backward (arXiv 2401.10241), over slices: ZB-H1's own order, or orders from costs.

Variant 0 is ZB-H1's order by formula, without caps and costs. The others are orders at memory targets (`variants`), so
that `zb` is never slower than H1 if H1 fits, and runs under caps that cannot hold H1.
"""

from __future__ import annotations

from penstock.planner.order import Order
from penstock.planner.schedules.generator import looped
from penstock.planner.schedules.grouped import grouped_words
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.one_f_one_b import zb_h1
from penstock.planner.schedules.variants import CAPLESS, Variants

H1 = CAPLESS
"""The variant of H1's own order."""

ZB = Variants(name="zb", place=looped, capless=zb_h1, more_seeds=grouped_words)


def zb(inputs: ScheduleInputs) -> Order:
    """The order of ``inputs.variant``; by default the fastest order within the caps.

    Raises `UserError` if a cap cannot hold one micro-batch.
    """
    return ZB.best_order(inputs) if inputs.variant is None else ZB.order(inputs)
