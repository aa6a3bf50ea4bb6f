"""The batches of one rank's steps, each read before it is needed where a device works meanwhile.

On CUDA the host has launched a step long before the device ends it. Then it reads the next batch into memory from
which the device copies by itself. There are two places, used by turns: while one is filled for step s + 1, step s may
still be copied from the other one. Step s - 1, which read from the first, has ended by then, since every step ends with
a wait.
On CPU the ranks' cores are busy until the step ends, and a batch is read when it is taken.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.trainer import memory
from penstock.trainer.data.batches import Ids

Read = Callable[[int], tuple[Ids, Ids]]
"""Token ids and labels of this rank's share of a step."""


class BatchFeed:
    """Token ids and labels by step. What ``take`` gives stays as it is until the step after the next is read."""

    def __init__(self, read: Read, shape: tuple[int, int], device: torch.device) -> None:
        """``shape`` is that of the token ids of a step."""
        self._read = read
        self._places = _places(shape, device) if device.type == "cuda" else ()
        self._ready: int | None = None
        """The step that was read ahead."""

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """Token ids and labels of ``step``; raises `UserError` as reading does."""
        if not self._places:
            ids, labels = self._read(step)
            return torch.from_numpy(ids), torch.from_numpy(labels)
        if self._ready != step:
            self._fill(step)
        return self._place(step)

    def read_ahead(self, step: int) -> None:
        """Read ``step`` while the one before is at work; what cannot be read is read again when it is taken."""
        if self._places:
            try:
                self._fill(step)
            except Exception:  # the step at work must not fail for it: `take` raises it
                self._ready = None

    def _fill(self, step: int) -> None:
        for place, values in zip(self._place(step), self._read(step), strict=True):
            place.copy_(torch.from_numpy(values))
        self._ready = step

    def _place(self, step: int) -> tuple[Tensor, Tensor]:
        return self._places[step % 2]


def _places(shape: tuple[int, int], device: torch.device) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def pair() -> tuple[Tensor, Tensor]:
        return memory.staging(shape, torch.int64, device), memory.staging(shape, torch.int64, device)

    return pair(), pair()
