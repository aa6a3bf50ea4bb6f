"""Which device each rank takes: the one where the plan puts it.

A plan names devices by the ranks that measured them. On one host rank r measured the r-th CUDA device that is visible:
putting the visible devices in the order of the plan's ranks seats every rank, and no rank needs to know of it. Over
several hosts a process stays where it is, and takes the rank that the plan puts there.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def seated(placement: Sequence[int], visible: str | None) -> str:
    """What `VISIBLE` has to say so that the r-th device is that of rank r; ``visible`` is what it says, if anything.

    Raises `UserError` for a placement on more devices than are visible.
    """
    if visible is None:
        return ",".join(map(str, placement))
    names = visible.split(",")
    missing = [device for device in placement if device >= len(names)]
    if missing:
        raise UserError(
            what=f"puts a rank on device {missing[0]}, and {VISIBLE} names {len(names)}",
            where="plan.placement",
            remedy="plan again on this machine, or make more devices visible",
        )
    return ",".join(names[device] for device in placement)


def ranks_of_devices(placement: Sequence[int], num_devices: int) -> tuple[int, ...]:
    """Per device the rank that runs there; those without work follow the plan's ranks in number.

    An empty placement is in order. Raises `UserError` for one on more devices than there are.
    """
    missing = [device for device in placement if device >= num_devices]
    if missing:
        raise UserError(
            what=f"puts a rank on device {missing[0]}, and here are {num_devices}",
            where="plan.placement",
            remedy="plan again for these devices",
        )
    idle = (device for device in range(num_devices) if device not in set(placement))
    seats = {device: rank for rank, device in enumerate((*placement, *idle))}
    return tuple(seats[device] for device in range(num_devices))
