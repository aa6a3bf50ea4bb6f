"""Seconds for measurements. On CUDA the host only launches, so what the device takes is not what the host does.

A step replays its actions, each a recorded graph (`penstock.trainer.graphs`), so passes are timed inside of one: the
device goes from one kernel to the next, and no pass waits for its launch. What the host takes to replay counts once per
action (`penstock.trainer.profiling.network.measure_replay`). Passes of several shards are launched kernel by kernel, in
a step and here.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from penstock.trainer.graphs import Graphs, can_record
from penstock.trainer.interpreter import Operation

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
    """Seconds that one action took the device, and the host to launch it; the same where no action is launched by
    itself: on the CPU, and in a graph.
    """

    device: float
    host: float


class Timer(Protocol):
    """Takes the times of actions that follow each other."""

    def __call__(self, actions: Sequence[Callable[[], object]]) -> Callable[[], list[Taken]]:
        """What runs all in order, as often as wanted, and gives what each took."""
        ...


def action_timer(device: torch.device, *, is_recorded: bool = True) -> Timer:
    """The timer that suits ``device``, and actions that a step has recorded, if it can record any, or launches."""
    if device.type == "cpu":
        return HostTimer(time.perf_counter)
    return GraphTimer(device) if is_recorded and can_record(device) else CudaTimer(device)


class HostTimer:
    """Every action by a clock of the host."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self, actions: Sequence[Callable[[], object]]) -> Callable[[], list[Taken]]:
        """See `Timer`."""
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
    """The device by events between actions that are queued ahead, the host by its own clock.

    As in a step nothing waits between actions. The device is kept busy first, so that events stand for the device's
    time and not for when the host launched. The device is waited for once, at the end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, actions: Sequence[Callable[[], object]]) -> Callable[[], list[Taken]]:
        """See `Timer`."""
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
    """All actions as one graph, in which events between them are nodes too."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, actions: Sequence[Callable[[], object]]) -> Callable[[], list[Taken]]:
        """See `Timer`."""
        events = [_timing_event(external=True) for _ in range(len(actions) + 1)]
        run, graphs = partial(_run_between, actions, events), Graphs(self._device)
        graphs.warm_up(run)
        torch.cuda.empty_cache()  # the pool takes the place of what the first run kept
        return partial(self._take, graphs.record(run), events)

    def _take(self, replay: Operation, events: Sequence[torch.cuda.Event]) -> list[Taken]:
        replay()
        torch.cuda.synchronize(self._device)
        return [Taken(seconds, seconds) for seconds in _seconds_between(events)]


def _run_between(actions: Sequence[Callable[[], object]], events: Sequence[torch.cuda.Event]) -> None:
    events[0].record()
    for action, event in zip(actions, events[1:], strict=True):
        action()
        event.record()


def _seconds_between(events: Sequence[torch.cuda.Event]) -> list[float]:
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]


def _timing_event(*, external: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, external=external)  # type: ignore[no-untyped-call]
