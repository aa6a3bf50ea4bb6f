"""Free plans against pinned ones, and against plans with less: what the planner chooses itself must never be beaten.

A free plan may be 1 % slower than one with pins, and 0.5 % slower than that of the same job with less memory. Pins are
neighbours of the free plan, and random ones; a pinned plan is only simulated, not searched.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from tests.support.random_plans import (
    LARGE,
    SMALL,
    beating,
    pins_of,
    planned,
    random_job,
    slower_with_more,
    step_seconds,
)

Report = Callable[[str], None]


def compare(seed: int, *, small: int, large: int, pins: int, report: Report) -> dict[str, Any]:
    """So many problems of at most 16 devices and of more, each against so many pins."""
    violations, num_plans = list[str](), 0
    for number in range(small + large):
        chance = random.Random(f"{seed} {number}")
        sizes = SMALL if number < small else LARGE
        spec, cluster = random_job(chance, sizes)
        free = planned(spec, cluster)
        found = beating(spec, cluster, free, pins_of(chance, spec, free, pins))
        more = dataclasses.replace(spec.resources, memory_per_rank=spec.resources.memory_per_rank * 5 // 4)
        roomy = planned(dataclasses.replace(spec, resources=more), cluster)
        fewer = dataclasses.replace(spec.resources, ranks=spec.resources.ranks + 1, min_ranks=spec.resources.ranks)
        wide = planned(
            dataclasses.replace(spec, resources=fewer), dataclasses.replace(cluster, num_nodes=cluster.num_nodes + 1)
        )
        num_plans += free is not None
        found += slower_with_more(free, roomy, "a quarter more memory")
        found += slower_with_more(free, wide, "a device more")
        violations += [f"problem {number}: {each}" for each in found]
        step = "nothing fits" if free is None else f"{step_seconds(free):.4g} s"
        report(f"problem {number}, {spec.resources.ranks} devices: {step}, {len(found)} violations")
    return {"problems": small + large, "planned": num_plans, "pins": pins, "violations": violations}
