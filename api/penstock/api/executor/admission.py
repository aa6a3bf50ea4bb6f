"""Admission of queued jobs, and assignment of devices: pure functions of their demands, the running jobs, and the
machine's capacity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.core.capacity import Demand


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiting:
    """A job in the queue. Among jobs of equal priority, the one with the smallest ``number`` is the first."""

    uid: str
    number: int
    priority: int
    demand: Demand


def admitted(waiting: Sequence[Waiting], running: Iterable[Demand], capacity: Demand) -> frozenset[str]:
    """Return the uids of the jobs that may start, by priority and then in order of the queue.

    There is no backfill: if a job has to wait, all jobs after it wait too. A job that exceeds the capacity of the whole
    machine is skipped.
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
    """Assign devices to the jobs that start; return each job's devices, by uid.

    Devices in ``held`` are in use. A job is left out if too few devices are free.
    """
    free = [device for device in devices if device not in held]
    devices_by_uid: dict[str, tuple[str, ...]] = {}
    for job in starting:
        num_devices = job.demand.cuda_devices
        if num_devices <= len(free):
            devices_by_uid[job.uid], free = tuple(free[:num_devices]), free[num_devices:]
    return devices_by_uid
