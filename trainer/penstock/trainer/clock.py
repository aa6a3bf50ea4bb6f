"""Clocks for measurements. On CUDA the host only launches work, so device time and host time are measured separately.

A training step replays its actions, each a recorded graph (`penstock.trainer.graphs`). Passes are therefore timed
inside one graph: the device runs kernel after kernel, and no pass waits for its launch. The host time of a replay is
counted once per action (`penstock.trainer.profiling.network.measure_replay`). Passes of several shards are launched
kernel by kernel, in training and here. Since an action may remain without a graph, the host's launches of every pass
are timed as well, before it is recorded.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from penstock.trainer.graphs import Graphs, can_record
from penstock.trainer.interpreter import Operation

Clock = Callable[[], float]

LAUNCH_ROUNDS = 3
"""Times that the host launches passes to be timed before they are recorded."""

HEAD_START_CYCLES = 20_000_000
"""Cycles that the device spins before actions are timed, about 10 ms: the host gets ahead, so no launch delays the
device.
"""


def device_clock(device: torch.device) -> Clock:
    """A monotonic clock that first waits for ``device``."""
    if device.type == "cpu":
        return time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


@dataclass(frozen=True, slots=True)
class Taken:
    """Seconds that one action took on the device, and on the host to launch it kernel by kernel. Both are equal on the
    CPU.
    """

    device: float
    host: float

    def divided_by(self, factor: float) -> Taken:
        """The times on a device and a host that are ``factor`` times as fast."""
        return Taken(self.device / factor, self.host / factor)


class Timer(Protocol):
    """Measures the times of consecutive actions."""

    def __call__(self, actions: Sequence[Callable[[], object]]) -> Callable[[], list[Taken]]:
        """Return a function that runs all actions in order and returns their times. It may be called repeatedly."""
        ...


def action_timer(device: torch.device, *, is_recorded: bool = True) -> Timer:
    """The timer for ``device``: recorded graphs if the device has them and ``is_recorded``, else single kernels."""
    if device.type == "cpu":
        return HostTimer(time.perf_counter)
    return GraphTimer(device) if is_recorded and can_record(device) else CudaTimer(device)


class HostTimer:
    """Times every action with a host clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self, actions: Sequence[Callable[[], object]]) -> Callable[[], list[Taken]]:
        return partial(self._take, actions)

    def _take(self, actions: Sequence[Callable[[], object]]) -> list[Taken]:
        taken = []
        for action in actions:
            begin = self._clock()
            action()
            seconds = self._clock() - begin
            taken.append(Taken(seconds, seconds))
        return taken


class CudaTimer:
    """Device time from events between actions that are queued ahead; host time from the host's clock.

    As in training, nothing waits between actions. The device is kept busy first, so that the events measure the device
    and not the host's launches. The host waits for the device once, at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, actions: Sequence[Callable[[], object]]) -> Callable[[], list[Taken]]:
        return partial(self._take, actions)

    def _take(self, actions: Sequence[Callable[[], object]]) -> list[Taken]:
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
        return [Taken(*pair) for pair in zip(_seconds_between(events), host, strict=True)]


class GraphTimer:
    """Records all actions as one graph, with the events between them as nodes. Host times are medians of launches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, actions: Sequence[Callable[[], object]]) -> Callable[[], list[Taken]]:
        events = [_timing_event(external=True) for _ in range(len(actions) + 1)]
        run, graphs = partial(_run_between, actions, events), Graphs(self._device)
        graphs.warm_up(run)
        take_launched = CudaTimer(self._device)(actions)
        rounds = [[taken.host for taken in take_launched()] for _ in range(LAUNCH_ROUNDS)]
        host = [statistics.median(of_action) for of_action in zip(*rounds, strict=True)]
        torch.cuda.empty_cache()  # frees what these runs cached, for the graphs' pool
        return partial(self._take, graphs.record(run), events, host)

    def _take(self, replay: Operation, events: Sequence[torch.cuda.Event], host: Sequence[float]) -> list[Taken]:
        replay()
        torch.cuda.synchronize(self._device)
        return [Taken(*pair) for pair in zip(_seconds_between(events), host, strict=True)]


def _run_between(actions: Sequence[Callable[[], object]], events: Sequence[torch.cuda.Event]) -> None:
    events[0].record()
    for action, event in zip(actions, events[1:], strict=True):
        action()
        event.record()


def _seconds_between(events: Sequence[torch.cuda.Event]) -> list[float]:
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def _timing_event(*, external: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, external=external)  # type: ignore[no-untyped-call]
