"""Device mapping: the device of each rank, as the plan places it.

A plan names devices by the ranks that measured them. On one host rank r measured the r-th CUDA device that is visible:
with the visible devices in the order of the plan's ranks, every rank has its device without further action. Over
several hosts a process stays in place, and takes the rank that the plan puts there.

``devices`` is the device of every global rank, from `penstock.core.plan.Plan.devices`; empty means in order.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(devices: Sequence[int], visible: str | None) -> str:
    """The value of `VISIBLE` with which the r-th device is that of rank r; ``visible`` is its current value, if any.

    Raises `UserError` for a placement on more devices than are visible.
    """
    if visible is None:
        return ",".join(map(str, devices))
    names = visible.split(",")
    missing = [device for device in devices if device >= len(names)]
    if missing:
        raise UserError(
            what=f"puts a rank on device {missing[0]}, but {VISIBLE} names only {len(names)}",
            where="plan.placement",
            remedy="plan again on this machine, or make more devices visible",
        )
    return ",".join(names[device] for device in devices)


def ranks_of_devices(devices: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Per device the rank that runs there; idle devices follow the plan's ranks in number.

    Raises `UserError` for a placement on more devices than exist.
    """
    missing = [device for device in devices if device >= num_devices]
    if missing:
        raise UserError(
            what=f"puts a rank on device {missing[0]}, but there are only {num_devices}",
            where="plan.placement",
            remedy="plan again for these devices",
        )
    taken = set(devices)
    idle = (device for device in range(num_devices) if device not in taken)
    rank_of = {device: rank for rank, device in enumerate((*devices, *idle))}
    return tuple(rank_of[device] for device in range(num_devices))


def require_shards_in_pods(num_ranks: int, tp: int, ranks_per_pod: int) -> None:
    """Raise `UserError` if ranks in order would put the ``tp`` shards of a pipeline rank on several pods.

    Shards exchange hidden states in every unit: a plan does that between hosts only if its placement says so.
    """
    for first in range(0, num_ranks, tp):
        pods = first // ranks_per_pod, (first + tp - 1) // ranks_per_pod
        if pods[0] != pods[1]:
            raise UserError(
                what=f"puts ranks {first} to {first + tp - 1}, the {tp} shards of one pipeline rank, on pods "
                f"{pods[0]} to {pods[1]}, which have {ranks_per_pod} each",
                where="plan.tp",
                remedy=f"make kubernetes.ranksPerPod a multiple of {tp}, or pin parallelism.tp to a divisor of "
                f"{ranks_per_pod}; a plan with a placement may say otherwise",
            )
