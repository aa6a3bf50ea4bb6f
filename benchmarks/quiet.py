"""Measuring on a machine that is shared: what others do on it only ever adds time, so it is waited out or left out.

A reference kernel, the same matrix products on all ranks at once, tells how fast the machine is at a moment. What it
takes at best is its undisturbed time; a measurement counts if the kernel takes that before and after it.
"""

from __future__ import annotations

import statistics
import time
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
LOOK_SECONDS = 5.0
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


def undisturbed_seconds() -> float:
    """What the kernel takes when nothing else wants the processors: a low quantile of some seconds' runs."""
    found = []
    end = time.monotonic() + LOOK_SECONDS
    while min(gather(end - time.monotonic())) > 0:
        found.append(reference_seconds())
    return sorted(found)[int(UNDISTURBED_SHARE * len(found))]


def is_undisturbed(seconds: float) -> bool:
    """Whether the kernel takes its undisturbed ``seconds`` now."""
    return abs(reference_seconds() / seconds - 1) <= MOST_DRIFT


def settled(seconds: float) -> bool:
    """Wait until the machine is undisturbed; false if it does not become so in time."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_undisturbed(seconds):
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
