"""Measures typical times on a shared machine, whose speed drifts with the work of others.

A reference kernel, the same matrix products on all ranks at once, measures the speed of the machine. It runs between
steps, and a step counts if the kernel takes equally long before and after it. Blocks of many steps between two kernels
would hardly ever count on a machine whose speed changes within tens of seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from penstock.core.profile import Profile
from penstock.trainer.collectives import gather

MOST_DRIFT = 0.03
KERNEL_SIZE, KERNEL_PRODUCTS, KERNEL_REPEATS = 512, 5, 20


def reference_seconds() -> float:
    """Seconds of the kernel while all ranks run it: for each rank the 10th percentile of `KERNEL_REPEATS` runs, and of
    these the largest. Takes about 0.3 s.
    """
    left, right = torch.ones(KERNEL_SIZE, KERNEL_SIZE), torch.ones(KERNEL_SIZE, KERNEL_SIZE)
    taken = []
    dist.barrier()
    for _ in range(KERNEL_REPEATS):
        begin = time.perf_counter()
        for _ in range(KERNEL_PRODUCTS):
            torch.mm(left, right)
        taken.append(time.perf_counter() - begin)
    return max(gather(statistics.quantiles(taken, n=10)[0]))


def is_drift(before: float, after: float) -> bool:
    """Whether the machine's speed has changed."""
    return abs(after / before - 1) > MOST_DRIFT


def typical_profile(profiles: Sequence[Profile]) -> Profile:
    """Profile with the median of every record and overhead of several profiles."""

    def medians(name: str, *fields: str) -> tuple[Any, ...]:
        records = zip(*(getattr(profile, name) for profile in profiles), strict=True)
        return tuple(
            replace(
                same[0], **{field: statistics.median(getattr(record, field) for record in same) for field in fields}
            )
            for same in records
        )

    speeds = [profile.slowness for profile in profiles if profile.slowness]
    return replace(
        profiles[0],
        slowness=tuple(map(statistics.median, zip(*speeds, strict=True))) if 2 * len(speeds) > len(profiles) else (),
        units=medians("units", "alone_seconds", "together_seconds"),
        collectives=medians("collectives", "seconds"),
        optimizer=medians("optimizer", "seconds"),
        links=medians("links", "latency_seconds"),
        action_overhead_seconds=statistics.median(profile.action_overhead_seconds for profile in profiles),
    )
