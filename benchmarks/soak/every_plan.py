"""Compares plans for 3 to 6 devices of two kinds with all meshes, placements and cuts into stages, by brute force.

A problem depends only on the seed and its number. The plan may be at most `SLOWER` times as long as the best that brute
force finds (`tests/support/every_plan.py`). Ten problems have only tp 1 pinned, and the next ten also 1F1B, in turn:
free plans often have several stages per rank, which brute force leaves out. Six devices take minutes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from penstock.core.units import to_nanoseconds
from penstock.planner.decide import decide
from tests.support.every_plan import least_step_ns, random_problem

Report = Callable[[str], None]

SLOWER = 1.03

DEVICES = (3, 4, 3, 4, 5, 4, 3, 5, 4, 6)
"""Number of devices, by the last digit of a problem's number."""


def compare_with_all(seed: int, *, first: int, count: int, report: Report) -> dict[str, Any]:
    """Check ``count`` problems from number ``first`` on, one after the other."""
    problems, violations = list[dict[str, Any]](), list[str]()
    for number in range(first, first + count):
        pinned = {"schedule": "1f1b"} if number // len(DEVICES) % 2 else {}
        chance = random.Random(f"every plan {seed} {number}")
        problem = random_problem(chance, DEVICES[number % len(DEVICES)], **pinned)
        began, plan = time.process_time(), decide(problem).plan
        assert plan.prediction is not None, "a plan that was decided is predicted"
        least_ns, best = least_step_ns(problem, plan)
        ratio = to_nanoseconds(plan.prediction.step_seconds) / least_ns
        spent = round(time.process_time() - began, 1)
        problems.append({"problem": number, "ratio": ratio, "best": best, "processorSeconds": spent, **pinned})
        report(f"problem {number}: {ratio:.4f} of brute force, {spent} s")
        if ratio > SLOWER:
            violations.append(
                f"problem {number} ({problem.num_devices} devices): {ratio - 1:.2%} slower than {best}; "
                f"./dev soak every-plan --seed {seed} --first {number} --count 1"
            )
    return {"first": first, "problems": problems, "violations": violations}
