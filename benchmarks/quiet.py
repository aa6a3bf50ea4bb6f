"""Measuring on a machine that is shared: what others do on it only ever adds time, so it is waited out or left out.

A reference kernel, the same matrix products on all ranks at once, tells how fast the machine is at a moment. The low
quantile of what it took lately is its undisturbed time: that follows a clock that drifts over minutes, and not the
neighbours that come and go within seconds. A measurement counts if the kernel takes its undisturbed time before and
after it.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from penstock.core.profile import Profile
from penstock.trainer.together import gather

MOST_DRIFT = 0.03
PATIENCE_SECONDS = 20.0
KERNEL_SIZE, KERNEL_PRODUCTS, KERNEL_REPEATS = 512, 5, 9
FIRST_LOOKS, MOST_LOOKS = 30, 120
UNDISTURBED_SHARE = 0.1


def reference_seconds() -> float:
    """The kernel on all ranks at once: the slowest rank's median."""
    left, right = torch.ones(KERNEL_SIZE, KERNEL_SIZE), torch.ones(KERNEL_SIZE, KERNEL_SIZE)
    taken = []
    dist.barrier()
    for _ in range(KERNEL_REPEATS):
        begin = time.perf_counter()
        for _ in range(KERNEL_PRODUCTS):
            torch.mm(left, right)
        taken.append(time.perf_counter() - begin)
    return max(gather(statistics.median(taken)))


class Reference:
    """The kernel's undisturbed time, followed. The same on all ranks, which look together."""

    def __init__(self) -> None:
        self._taken: deque[float] = deque(maxlen=MOST_LOOKS)
        for _ in range(FIRST_LOOKS):
            self._taken.append(reference_seconds())

    @property
    def seconds(self) -> float:
        """What the kernel takes at present when nothing else wants the processors."""
        return sorted(self._taken)[int(UNDISTURBED_SHARE * len(self._taken))]

    def is_undisturbed(self) -> bool:
        """Whether the kernel takes that now."""
        self._taken.append(reference_seconds())
        return abs(self._taken[-1] / self.seconds - 1) <= MOST_DRIFT

    def settled(self) -> bool:
        """Wait until the machine is undisturbed; false if it does not become so in time."""
        end = time.monotonic() + PATIENCE_SECONDS
        while not self.is_undisturbed():
            if min(gather(end - time.monotonic())) < 0:
                return False
        return True


def undisturbed_profile(profiles: Sequence[Profile]) -> Profile:
    """Of every record and overhead the second smallest of several profiles."""

    def each(name: str, *fields: str) -> tuple[Any, ...]:
        records = zip(*(getattr(profile, name) for profile in profiles), strict=True)
        return tuple(
            replace(same[0], **{field: _second(getattr(record, field) for record in same) for field in fields})
            for same in records
        )

    return replace(
        profiles[0],
        units=each("units", "alone_seconds", "together_seconds"),
        collectives=each("collectives", "seconds"),
        optimizer=each("optimizer", "seconds"),
        links=each("links", "latency_seconds"),
        action_overhead_seconds=_second(profile.action_overhead_seconds for profile in profiles),
        step_overhead_seconds=_second(profile.step_overhead_seconds for profile in profiles),
    )


def _second(values: Iterable[float]) -> float:
    return sorted(values)[1]
