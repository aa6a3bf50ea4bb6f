"""Seconds for measurements: on CUDA the device is waited for first, since the host only launches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Clock = Callable[[], float]


def device_clock(device: torch.device) -> Clock:
    """A monotonic clock that suits ``device``."""
    if device.type == "cpu":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised
