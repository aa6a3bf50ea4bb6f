"""Steps of small models whose head is in parts: what varies, and the plan of a case.

Parts are alone in the last stages, or wherever equal numbers of units put them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.core.model import Family
from penstock.core.plan import Plan
from tests.support.small_plans import parts_alone, plan_of_case

MOST_RANKS = 16
VIRTUAL = {"zbv": 2, "v-half": 2, "interleaved-zb": 3, "interleaved-1f1b": 2}
"""Stages per rank; one where not named."""

FACTORS: dict[str, tuple[Any, ...]] = {
    "head_parts": (2, 3, 4),
    "alone": (True, False),
    "tp": (1, 2, 4),
    "sequence_parallel": (True, False),
    "family": tuple(Family),
    "slices": ((6,), (3, 1, 2)),
    "schedule": ("gpipe", "1f1b", "zb-h1", "zb", "zbv", "v-half", "interleaved-1f1b", "interleaved-zb"),
    "pp": (1, 2, 3),
    "dp": (1, 2),
    "num_microbatches": (1, 3),
}


def is_allowed(case: dict[str, Any]) -> bool:
    """At most as many ranks as the pool has; loops want a pipeline, and only shards divide tokens."""
    is_loop = case["schedule"].startswith("interleaved")
    fits = case["tp"] * case["pp"] * case["dp"] <= MOST_RANKS
    return fits and (case["pp"] > 1 or not is_loop) and (case["tp"] > 1 or case["sequence_parallel"])


def plan_of(case: dict[str, Any]) -> Plan:
    """The small model's plan for a case."""
    plan = plan_of_case(case, VIRTUAL, head_parts=case["head_parts"])
    stages = parts_alone(plan) if case["alone"] else plan.stages
    return replace(plan, stages=stages, tp=case["tp"], sequence_parallel=case["sequence_parallel"])
