"""Time and money of all steps by a plan: money if a device's price is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.core.cluster import ClusterSpec, DeviceSpec
from penstock.core.errors import UserError, shown
from penstock.core.job import JobSpec
from penstock.core.plan import Cost, Plan, RunTime
from penstock.planner.interruptions import SECONDS_PER_HOUR, Interruptions

MILLION = 1e6


def price_of_device(device: DeviceSpec, spec: JobSpec) -> float:
    """The price of a device for an hour, as a spot device if the job asks for these; 0 if none is given."""
    if spec.resources.spot:
        return device.spot_price_per_hour
    return device.price_per_hour or spec.price_per_device_hour


def interruptions_of(spec: JobSpec, cluster: ClusterSpec | None) -> Interruptions:
    """What an interruption of the job costs; the last step has a checkpoint, too."""
    steps_between = min(spec.checkpoint.every_steps, spec.training.steps)
    return Interruptions(steps_between=steps_between, restart_seconds=cluster.restart_seconds if cluster else 0.0)


def prices_of_kinds(spec: JobSpec, cluster: ClusterSpec, kinds: Sequence[int]) -> tuple[float, ...]:
    """The price of each device of these ``kinds``; empty if all cost the same, or if that of one is not known.

    Raises:
        UserError: the job asks for spot devices, and a kind has no price for these.
    """
    prices = [price_of_device(device, spec) for device in cluster.device_kinds]
    unpriced = [cluster.device_kinds[kind].name for kind in sorted(set(kinds)) if not prices[kind]]
    if spec.resources.spot and unpriced:
        raise UserError(
            what=f"the job asks for spot devices, and {shown(unpriced[0])} has no spot price",
            where="spec.resources.spot",
            remedy="write spotPricePerHour of this device in the description of the cluster, or spot: false",
        )
    used = {prices[kind] for kind in set(kinds)}
    return tuple(prices[kind] for kind in kinds) if len(used) > 1 and min(used) > 0 else ()


def interruptions_of_kinds(spec: JobSpec, cluster: ClusterSpec, kinds: Sequence[int]) -> tuple[float, ...]:
    """How often each device of these ``kinds`` is taken away in an hour; empty if none is."""
    per_hour = [device.interruptions_per_hour if spec.resources.spot else 0.0 for device in cluster.device_kinds]
    return tuple(per_hour[kind] for kind in kinds) if any(per_hour[kind] for kind in set(kinds)) else ()


def price_per_hour(plan: Plan, spec: JobSpec, cluster: ClusterSpec | None = None) -> float:
    """Price of all the plan's devices: as described, else by the job's price per device; 0 if a device has no price."""
    if cluster is None:
        return spec.price_per_device_hour * plan.num_ranks
    prices = _of_devices(plan, cluster, lambda device: price_of_device(device, spec))
    return sum(prices) if all(prices) else 0.0


def _of_devices(plan: Plan, cluster: ClusterSpec, value: Callable[[DeviceSpec], float]) -> list[float]:
    """The value of every device of the plan."""
    devices = plan.devices or range(plan.num_ranks)
    kinds, values = cluster.kinds_of(1 + max(devices)), [value(device) for device in cluster.device_kinds]
    return [values[kinds[device]] for device in devices]


def run_time_of(plan: Plan, spec: JobSpec, cluster: ClusterSpec | None = None) -> RunTime | None:
    """The predicted time of all steps, with the expected interruptions of described spot devices.

    None without a prediction.
    """
    if plan.prediction is None:
        return None
    per_hour = 0.0
    if cluster is not None and spec.resources.spot:
        per_hour = sum(_of_devices(plan, cluster, lambda device: device.interruptions_per_hour))
    step, steps = plan.prediction.step_seconds, spec.training.steps
    seconds = steps * interruptions_of(spec, cluster).expected_seconds(step, per_hour)
    return RunTime(
        seconds=seconds,
        interruptions=seconds * per_hour / SECONDS_PER_HOUR,
        interruption_seconds=max(seconds - steps * step, 0.0),
    )


def cost_of(plan: Plan, spec: JobSpec, cluster: ClusterSpec | None = None) -> Cost | None:
    """Cost of ``spec`` with ``plan``: the price of its devices for the predicted time of all steps.

    None without a price, or without a prediction.
    """
    per_hour, run_time = price_per_hour(plan, spec, cluster), run_time_of(plan, spec, cluster)
    if run_time is None or per_hour == 0:
        return None
    whole_job = per_hour * run_time.seconds / SECONDS_PER_HOUR
    tokens = plan.global_batch * plan.sequence_length * spec.training.steps
    return Cost(per_hour=per_hour, per_million_tokens=whole_job * MILLION / tokens, whole_job=whole_job)
