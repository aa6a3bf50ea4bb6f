"""Which CUDA device each rank takes: the one where the plan puts it.

A plan names devices by the ranks that measured them, and rank r measured the r-th device that is visible. Putting the
visible devices in the order of the plan's ranks therefore seats every rank, and no rank needs to know of it.
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
