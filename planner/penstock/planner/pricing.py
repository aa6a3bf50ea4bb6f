"""Cost of a plan, if a device's price is known."""

from __future__ import annotations

from penstock.core.cluster import ClusterSpec
from penstock.core.job import JobSpec
from penstock.core.plan import Cost, Plan

SECONDS_PER_HOUR = 3600.0
MILLION = 1e6


def price_per_hour(plan: Plan, spec: JobSpec, cluster: ClusterSpec | None = None) -> float:
    """Price of all the plan's devices: as described, else by the job's price per device; 0 if a device has no price."""
    if cluster is None or not cluster.other_devices:
        described = cluster.device.price_per_hour if cluster else 0.0
        return (described or spec.price_per_device_hour) * plan.num_ranks
    devices = plan.devices or range(plan.num_ranks)
    kinds = cluster.kinds_of(1 + max(devices))
    prices = [device.price_per_hour or spec.price_per_device_hour for device in cluster.device_kinds]
    of_devices = [prices[kinds[device]] for device in devices]
    return sum(of_devices) if all(of_devices) else 0.0


def cost_of(plan: Plan, spec: JobSpec, cluster: ClusterSpec | None = None) -> Cost | None:
    """Cost of ``spec`` with ``plan``: the price of its devices for the predicted time of all steps.

    None without a price, or without a prediction.
    """
    per_hour = price_per_hour(plan, spec, cluster)
    if plan.prediction is None or per_hour == 0:
        return None
    per_step = per_hour * plan.prediction.step_seconds / SECONDS_PER_HOUR
    tokens = plan.global_batch * plan.sequence_length
    return Cost(
        per_hour=per_hour,
        per_million_tokens=per_step * MILLION / tokens,
        whole_job=per_step * spec.training.steps,
    )
