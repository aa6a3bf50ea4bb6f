"""One allocation for all slots of a rank, and views of the slots as tensors at the offsets of core's layout."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from penstock.core.errors import RunError
from penstock.core.layout import stage_slot_bytes
from penstock.core.plan import Plan
from penstock.core.program import RankProgram, Slot
from penstock.trainer.units.views import extent_views

SlotTensors = Mapping[int, Mapping[str, Tensor]]
"""The tensors of one slot: unit index, then buffer name."""


class Arena:
    """``program.arena_bytes`` on ``device``, written once at the start, so that no step pays for page faults.

    Raises `RunError` if the size of a slot differs from the ``plan``'s layout: the Program then belongs to another
    plan.
    """

    def __init__(self, program: RankProgram, plan: Plan, device: torch.device) -> None:
        self._memory = torch.empty(program.arena_bytes, dtype=torch.uint8, device=device).fill_(0)
        self._plan, self._remade = plan, plan.remade
        self.slots = program.slots
        self._tensors = [self._carve(slot) for slot in program.slots]

    def _carve(self, slot: Slot) -> SlotTensors:
        plan, slices = self._plan, self._plan.slices_of(slot.microbatch)
        tokens = sum(slices) if slot.slice is None else slices[slot.slice]
        layout = (slot.kind, plan.size_of(slot.microbatch), tokens, plan.sharding, self._remade[slot.stage])
        shape = (*plan.stages[slot.stage], *layout)
        needed_bytes = stage_slot_bytes(plan.model, plan.precision, *shape)
        if slot.num_bytes != needed_bytes:
            raise RunError(f"the Program gives {slot} {slot.num_bytes} bytes, the model's layout needs {needed_bytes}")
        return extent_views(self._extents(slot), plan.model, plan.precision, *shape)

    def _extents(self, slot: Slot) -> list[Tensor]:
        return [self._memory[extent.offset : extent.stop] for extent in slot.extents]

    def tensors(self, index: int) -> SlotTensors:
        """The tensors of the rank's slot ``index``."""
        return self._tensors[index]

    def message(self, index: int) -> Tensor:
        """The content of a slot that is sent or received: its only hidden state [rows, h], or the bytes of all its
        tensors.
        """
        (unit,) = self._tensors[index].values()
        first, *others = unit.values()
        (memory,) = self._extents(self.slots[index])
        return memory if others else first

    def poison(self, indices: Iterable[int]) -> None:
        """Fill slots with NaN, so that a read after the end of a live range shows in the results."""
        for index in indices:
            for unit in self._tensors[index].values():
                for tensor in unit.values():
                    tensor.fill_(math.nan)
