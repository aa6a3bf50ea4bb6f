"""Reads the batches of one rank's steps. On CUDA it reads a batch ahead, while the device works.

On CUDA the host has launched a step long before the device completes it. In the meantime the host reads the next batch
into pinned memory, from which the device copies asynchronously. Two buffers alternate: while one is filled for step
s + 1, the device may still copy step s from the other. Step s - 1, which used the first buffer, is complete by then,
since every step ends with a wait. On the CPU the cores are busy until the step ends, so a batch is read when it is
taken.
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
    """Token ids and labels by step. Tensors from ``take`` stay valid until the step after the next one is read."""

    def __init__(self, read: Read, shape: tuple[int, int], device: torch.device) -> None:
        """``shape`` is the shape of a step's token ids."""
        self._read = read
        self._places = _places(shape, device) if device.type == "cuda" else ()
        self._ready: int | None = None
        """The step that was read ahead."""

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """Token ids and labels of ``step``. Raises `UserError` if they cannot be read."""
        if not self._places:
            ids, labels = self._read(step)
            return torch.from_numpy(ids), torch.from_numpy(labels)
        if self._ready != step:
            self._fill(step)
        return self._place(step)

    def read_ahead(self, step: int) -> None:
        """Read ``step`` while the previous one runs. If that fails, `take` retries."""
        if self._places:
            try:
                self._fill(step)
            except Exception:  # the running step must not fail because of the next batch: `take` raises the error
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
