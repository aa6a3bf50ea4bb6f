"""Which waiting jobs may start now, and on which devices: pure functions of their demands, the running jobs, and the
machine has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.core.capacity import Demand


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A job in the queue; among equal priorities the smaller ``number`` came first."""

    uid: str
    number: int
    priority: int
    demand: Demand


def admitted(waiting: Sequence[Waiting], running: Iterable[Demand], capacity: Demand) -> frozenset[str]:
    """The jobs that may start: by priority, then in order; none passes one that waits before it.

    A job that would never fit does not hold up the others.
    """
    used = Demand()
    for demand in running:
        used = used.plus(demand)
    uids: set[str] = set()
    for job in sorted(waiting, key=lambda job: (-job.priority, job.number)):
        if not job.demand.fits(capacity):
            continue
        used = used.plus(job.demand)
        if not used.fits(capacity):
            break
        uids.add(job.uid)
    return frozenset(uids)


def assigned(
    starting: Iterable[Waiting], held: Collection[str], devices: Sequence[str]
) -> Mapping[str, tuple[str, ...]]:
    """The devices of every job that starts, by uid: none is ``held`` by another, and none is given twice.

    A job for which too few are free is left out.
    """
    free = [device for device in devices if device not in held]
    devices_by_uid: dict[str, tuple[str, ...]] = {}
    for job in starting:
        wanted = job.demand.cuda_devices
        if wanted <= len(free):
            devices_by_uid[job.uid], free = tuple(free[:wanted]), free[wanted:]
    return devices_by_uid
