"""Several stages per rank in waves (arXiv 2401.10241, section 6, and 2405.15362), over slices: zbv, v-half and v-min.

With two stages per rank, stages s < K and 2 K - 1 - s are on rank s, so rank 0 has both ends of the model. A stage is
half as long, so the pipeline fills in half the time, a micro-batch turns into its backward on rank 0 without a message,
and all ranks hold equally much. With more stages per rank the wave continues.
"""

from __future__ import annotations

from penstock.planner.order import Order
from penstock.planner.schedules.blocks import Block
from penstock.planner.schedules.generator import in_waves
from penstock.planner.schedules.inputs import ScheduleInputs
from penstock.planner.schedules.variants import Variants

ZBV = Variants(name="zbv", place=in_waves)

HALF = Block(in_slots=True, down=100, up=0, is_fused=False)
MINIMUM = Block(in_slots=True, down=0, up=0, is_fused=False)


def zbv(inputs: ScheduleInputs) -> Order:
    """The order of ``inputs.variant``; by default the fastest order within the caps.

    Raises `UserError` if a cap cannot hold one micro-batch.
    """
    return ZBV.best_order(inputs) if inputs.variant is None else ZBV.order(inputs)


def v_half(inputs: ScheduleInputs) -> Order:
    """V-Half: about half of 1F1B's memory, regardless of caps: its repeated block, refined within that memory."""
    return ZBV.of_block(inputs, HALF)


def v_min(inputs: ScheduleInputs) -> Order:
    """V-Min: about a third of 1F1B's memory, regardless of caps: its repeated block, refined within that memory."""
    return ZBV.of_block(inputs, MINIMUM)
