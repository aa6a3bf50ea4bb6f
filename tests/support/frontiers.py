"""Frontiers of time and money."""

from __future__ import annotations

from penstock.core.explanation import Frontier, FrontierPoint


def frontier(times_and_costs: list[tuple[float, float]]) -> Frontier:
    """Points of these times and costs."""
    points = [
        FrontierPoint(
            devices=f"{number} x H100",
            num_devices=number,
            mesh=f"dp 1 x tp 1 x pp {number}",
            plan="",
            step_seconds=seconds / 1000,
            run_seconds=seconds,
            cost=cost,
            cost_per_million_tokens=cost / 1000,
            tokens_per_second_per_device=100.0,
        )
        for number, (seconds, cost) in enumerate(times_and_costs, 1)
    ]
    return Frontier(points=tuple(points), plans=2 * len(points))
