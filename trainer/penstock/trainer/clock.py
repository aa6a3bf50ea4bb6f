"""Seconds for measurements. On CUDA the host only launches, so what the device takes is not what the host does."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

Clock = Callable[[], float]

HEAD_START_CYCLES = 20_000_000
"""That the device spins before actions are timed, about 10 ms: the host gets ahead, so no launch is waited for."""


def device_clock(device: torch.device) -> Clock:
    """A monotonic clock that waits for ``device`` first."""
    if device.type == "cpu":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds that one action took the device, and the host to launch it; the same on the CPU."""

    device: float
    host: float


class Timer(Protocol):
    """Takes the times of actions that follow each other."""

    def __call__(self, actions: Sequence[Callable[[], object]]) -> list[Taken]:
        """Run all in order; what each took."""
        ...


def action_timer(device: torch.device) -> Timer:
    """The timer that suits ``device``."""
    return CudaTimer(device) if device.type == "cuda" else HostTimer(time.perf_counter)


class HostTimer:
    """Every action by a clock of the host."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self, actions: Sequence[Callable[[], object]]) -> list[Taken]:
        """See `Timer`."""
        taken = []
        for action in actions:
            begin = self._clock()
            action()
            seconds = self._clock() - begin
            taken.append(Taken(seconds, seconds))
        return taken


class CudaTimer:
    """The device by events between actions that are queued ahead, the host by its own clock.

    As in a step nothing waits between actions. The device is kept busy first, so that events stand for the device's
    time and not for when the host launched. The device is waited for once, at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, actions: Sequence[Callable[[], object]]) -> list[Taken]:
        """See `Timer`."""
        events = [_timing_event() for _ in range(len(actions) + 1)]
        torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        events[0].record()
        host = []
        for action, event in zip(actions, events[1:], strict=True):
            begin = time.perf_counter()
            action()
            host.append(time.perf_counter() - begin)
            event.record()
        torch.cuda.synchronize(self._device)
        device = [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]
        return [Taken(*pair) for pair in zip(device, host, strict=True)]


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
