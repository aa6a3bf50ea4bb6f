"""Cost of a plan, if a device's price is known."""

from __future__ import annotations

from penstock.core.cluster import ClusterSpec
from penstock.core.job import JobSpec
from penstock.core.plan import Cost, Plan

SECONDS_PER_HOUR = 3600.0
MILLION = 1e6


def price_per_device_hour(spec: JobSpec, cluster: ClusterSpec | None = None) -> float:
    """The described device's price, else the job's; 0 if neither is given."""
    described = cluster.device.price_per_hour if cluster else 0.0
    return described or spec.price_per_device_hour


def cost_of(plan: Plan, spec: JobSpec, cluster: ClusterSpec | None = None) -> Cost | None:
    """Cost of ``spec`` with ``plan``: the price of its devices for the predicted time of all steps.

    None without a price, or without a prediction.
    """
    price = price_per_device_hour(spec, cluster)
    if plan.prediction is None or price == 0:
        return None
    per_hour = price * plan.num_ranks
    per_step = per_hour * plan.prediction.step_seconds / SECONDS_PER_HOUR
    tokens = plan.global_batch * plan.sequence_length
    return Cost(
        per_hour=per_hour,
        per_million_tokens=per_step * MILLION / tokens,
        whole_job=per_step * spec.training.steps,
    )
